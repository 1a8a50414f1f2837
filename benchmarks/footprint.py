"""Load time and peak memory of one engine, in a process that does nothing else.

    python benchmarks/footprint.py headlong|llama.cpp MODEL [--threads 2]

Imports the engine, loads the model without its MTP head for one sequence of 1024 tokens, reads a prompt of 512 and
writes 16 more. Ends in one JSON line. Memory is the kernel's high-water mark of this process (Linux): getrusage would
tell the one of the process that started it, where that was larger. Pages of a mapped file count.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

CONTEXT = 1024
PROMPT = tuple(100 + 7 * place % 4000 for place in range(512))
MAX_TOKENS = 16
Run = Callable[[], object]
Load = Callable[[str, int], Run]
MIB = 1024


def import_headlong() -> Load:
    import torch

    from headlong import LLM, SamplingParams
    from headlong.progress import silent

    def load(model: str, threads: int) -> Run:
        torch.set_num_threads(threads)
        llm = LLM(
            model,
            mtp="off",
            max_rows=1,
            max_context=CONTEXT,
            prefix_cache=False,
            device="cpu",
            progress=silent,
        )
        return lambda: llm.generate(PROMPT, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))

    return load


def import_llama_cpp() -> Load:
    from llama_cpp import LlamaCpp

    def load(model: str, threads: int) -> Run:
        opened = LlamaCpp(Path(model), threads=threads, context=CONTEXT)
        return lambda: opened.decode([PROMPT], MAX_TOKENS)

    return load


ENGINES = {"headlong": import_headlong, "llama.cpp": import_llama_cpp}


def memory(field: str) -> float:
    """MiB: VmHWM is the most there ever was, VmRSS what there is."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / MIB


def measure(engine: str, model: str, threads: int) -> dict[str, float]:
    started = perf_counter()
    load = ENGINES[engine]()
    imported, before = perf_counter(), memory("VmRSS")
    run = load(model, threads)
    loaded = perf_counter()
    run()
    peak = memory("VmHWM")
    return {
        "import seconds": imported - started,
        "load seconds": loaded - imported,
        "imports MiB": before,
        "peak MiB": peak,
        "peak MiB less imports": peak - before,
    }


def in_process(engine: str, model: Path, threads: int) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, engine, str(model), "--threads", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(json.dumps(measure(args.engine, args.model, args.threads)))


if __name__ == "__main__":
    main()
