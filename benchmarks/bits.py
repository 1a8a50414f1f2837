"""Did a change to the code change a bit? Tokens and log-probabilities of many requests as digests, to compare commits.

    python benchmarks/bits.py [--device cpu] [--cases native,packed,reference,interpreter,cuda] [--json FILE]
                              [--against FILE]

Run it at one commit with `--json`, and at another one with `--against` that file, on the same machine: bits differ from
processor to processor. Every request asks for the twenty best log-probabilities of each token, which depend on all
logits of its position; one digest covers tokens and the exact bits of those numbers. Models: the embedded one in
bfloat16, float32 and packed (on a GPU in bfloat16 alone), and tiny random ones of every family, alone and in batches,
greedy, sampled, penalised and held by a grammar, plain and with drafts. Backends are chosen by the variables that users
have (HEADLONG_NATIVE, HEADLONG_TRITON), each in a process of its own. Ends in one JSON line; exits with 1 if a digest
differs or is missing.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

BACKENDS: dict[str, dict[str, str]] = {
    "native": {},
    "packed": {},
    "reference": {"HEADLONG_NATIVE": "0"},
    "interpreter": {"HEADLONG_TRITON": "interpret", "TRITON_INTERPRET": "1"},
    "cuda": {},
}
PACKED = ("int4", "fp8", "q8_0", "q4_0")
FAMILIES = ("dense", "moe", "next")
STORY = "Once upon a time there was a little fox who lived at the edge of a big forest. " * 12
PROMPTS = (
    "Write a short story about a shy dragon.",
    "Explain rain to a child.",
    "red, blue, green, red, blue,",
)


def digest(completions: list) -> str:
    """One digest of all completions: tokens, and log-probabilities to the last bit."""
    answers = [
        [
            list(done.token_ids),
            [
                [entry.token_id, entry.logprob.hex(), [[token, value.hex()] for token, value in entry.top]]
                for entry in done.logprobs or ()
            ],
        ]
        for done in completions
    ]
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:24]


def digests_of_model(
    name: str, folder: str | None, device: str, dtype: str, length: int, *, brief: bool = False
) -> Iterator[tuple[str, str]]:
    """Digests of one model's base, for each kind of request and depth. `brief`: shorter prompts, fewer depths."""
    from headlong import LLM, SamplingParams
    from headlong.params import Grammar

    quiet = {"progress": lambda *_: None, "device": device, "dtype": dtype, "mtp": "on"}
    llm = LLM(folder, max_rows=8, page_size=16, chunk_tokens=96, **quiet)
    base = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=20)
    requests = {
        "greedy": base,
        "sampled": replace(base, temperature=0.8, seed=7, top_p=0.9, top_k=50),
        "penalised": replace(base, presence_penalty=1.5, repetition_penalty=1.2, logit_bias={40: 2.0}),
        "silent": replace(base, logprobs=None, temperature=0.7, seed=3, min_p=0.05),
    }
    if folder is None or Path(folder, "tokenizer.json").exists():
        prompts: list = [*PROMPTS, STORY]
        held = Grammar("regex", "([A-Z][a-z ,]+[.] )+[a-z]+")
        requests["held"] = replace(base, ignore_eos=False, grammar=held)
    else:
        sizes = (3, 19) if brief else (5, 22, 39, 56)
        prompts = [[(7 * i * (n + 1) + n) % 97 for i in range(size)] for n, size in enumerate(sizes)]
    for depth in (0, 2) if brief else (0, 1, 3):
        for kind, params in requests.items():
            found = llm.generate(prompts, [replace(params, draft_tokens=depth)] * len(prompts))
            yield f"{name} {kind} K={depth}", digest(found)
        mixed = [replace(params, draft_tokens=depth) for params in list(requests.values())[: len(prompts)]]
        yield f"{name} mixed K={depth}", digest(llm.generate(prompts, mixed))
    yield f"{name} alone", digest([llm.generate(prompts[-1], replace(base, draft_tokens=3))])


def tiny_models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Random models of every family that the tests make, written to `folder`."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support import tiny

    for family in FAMILIES:
        tiny.make(folder / family, family)
        yield family, folder / family


def run_case(case: str, device: str) -> dict[str, str]:
    """All digests of one backend, in this process."""
    from headlong.checkpoint.checkpoint import Checkpoint
    from headlong.checkpoint.source import EMBEDDED
    from headlong.convert.quantize import quantize

    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if case == "packed":
            for format in PACKED:
                out = folder / (f"{format}.gguf" if format.startswith("q") else format)
                quantize(Checkpoint.open(EMBEDDED), out, format=format, head=format)
                found |= digests_of_model(f"embedded {format}", str(out), device, "auto", 24)
            return found
        brief = case == "interpreter"
        for family, path in () if case == "cuda" else tiny_models(folder):
            if not brief:
                found |= digests_of_model(family, str(path), device, "float32", 24)
            if case != "reference":
                found |= digests_of_model(
                    f"{family} bf16", str(path), device, "bfloat16", 4 if brief else 24, brief=brief
                )
        if not brief:
            for dtype in ("bfloat16",) if case == "cuda" else ("bfloat16", "float32"):
                found |= digests_of_model(f"embedded {dtype}", None, device, dtype, 48)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default="native,packed,reference,interpreter")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--against", type=Path, default=None)
    parser.add_argument(
        "--in-process", action="store_true", help="one case, its digests as JSON; used by itself"
    )
    args = parser.parse_args()
    cases = args.cases.split(",")
    if args.in_process:
        print(json.dumps(run_case(cases[0], args.device)))
        return
    digests: dict[str, dict[str, str]] = {}
    for case in cases:
        command = [sys.executable, __file__, "--in-process", "--cases", case, "--device", args.device]
        done = subprocess.run(
            command, env=os.environ | BACKENDS[case], stdout=subprocess.PIPE, text=True, check=True
        )
        digests[case] = json.loads(done.stdout.splitlines()[-1])
    if args.json:
        args.json.write_text(json.dumps(digests, indent=1))
    truth = json.loads(args.against.read_text()) if args.against else {}
    table, differing = Table("backend", "digests", "differing"), []
    for case, found in digests.items():
        own = [
            f"{case}: {name}"
            for name, value in found.items()
            if truth and truth.get(case, {}).get(name) != value
        ]
        table.add_row(case, str(len(found)), str(len(own)) if truth else "not compared")
        differing += own
    Console().print(table)
    for name in differing:
        print("differs:", name)
    counts = {case: len(found) for case, found in digests.items()}
    print(
        json.dumps({"benchmark": "bits", "digests": counts, "differing": len(differing) if truth else None})
    )
    if differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
