"""How several servers share this machine's cores: tokens per second of each, alone and together.

    python benchmarks/shared_cores.py [--servers 1,3] [--seconds 5] [--turns 2] [--formats fp8_e5m2,gptq_actorder]
        [--policies asleep,spinning]

Runs `headlong serve` with the embedded model, in turns with threads that wait asleep, as the server has it, and with
threads that spin, as OpenMP has it: without native kernels, where torch multiplies, or with them and its projections
packed in each of the formats, as tests/support/packing.py names them. Prints a line of JSON for each result.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from headlong.checkpoint.source import EMBEDDED

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.packed_models import quant_config
from support.packing import pack

BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12, "ignore_eos": True}
POLICIES = {"asleep": {}, "spinning": {"OMP_WAIT_POLICY": "ACTIVE"}}


def packed(folder: Path, how: str) -> Path:
    """Writes the embedded model with its projections packed."""
    source, to = EMBEDDED, folder / how
    to.mkdir()
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            is_packed = name.endswith(("_proj.weight", "_proj_qkv.weight", "_proj_z.weight"))
            parts = pack(tensor, how) if is_packed else {"weight": tensor}
            stem = name.removesuffix("weight")
            tensors |= {stem + part if is_packed else name: each.contiguous() for part, each in parts.items()}
    save_file(tensors, to / "model.safetensors")
    for file in source.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            (to / file.name).write_bytes(file.read_bytes())
    if section := quant_config(how):
        config = json.loads((to / "config.json").read_text())
        config["quantization_config"] = section
        (to / "config.json").write_text(json.dumps(config))
    return to


@contextlib.contextmanager
def server(model: Path | None, **environment: str) -> Iterator[str]:
    """The address of a server that lives until the block ends; without a model, one without native kernels."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "HEADLONG_"))
    }
    given, native = ([], "0") if model is None else ([str(model)], "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "headlong.cli.main", "serve", *given, "--port", "0", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | {"HEADLONG_NATIVE": native} | environment,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, "the server did not start"
        yield found.group()
    finally:
        process.terminate()
        process.wait()


def speed(url: str, seconds: float) -> float:
    """Tokens per second of one client that asks again and again; requests that are cut off do not count."""
    started, tokens = time.monotonic(), 0
    while (left := started + seconds - time.monotonic()) > 0:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=max(left, 0.1)) as answer:
                tokens += json.load(answer)["usage"]["completion_tokens"]
        except (TimeoutError, OSError):
            break
    return tokens / (time.monotonic() - started)


def together(count: int, seconds: float, policy: str, model: Path | None = None) -> list[float]:
    """The speeds of so many servers, each asked by one client at the same time."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(server(model, **POLICIES[policy])) for _ in range(count)]
        for url in urls:
            speed(url, 1.0)
        found = [0.0] * count

        def ask(number: int) -> None:
            found[number] = speed(urls[number], seconds)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--servers", type=lambda counts: [int(one) for one in counts.split(",")], default=[1, 3]
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--formats", type=lambda names: names.split(","), default=[])
    parser.add_argument("--policies", type=lambda names: names.split(","), default=list(POLICIES))
    args = parser.parse_args()
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {how: packed(Path(folder), how) for how in args.formats} or {"without native kernels": None}
        for turn in range(args.turns):
            for name, model in models.items():
                for count in args.servers:
                    for policy in args.policies:
                        found = together(count, args.seconds, policy, model)
                        said = {"turn": turn, "model": name, "servers": count, "policy": policy}
                        speeds = [round(each, 1) for each in found]
                        print(json.dumps(said | {"tokens_per_second": speeds}), flush=True)


if __name__ == "__main__":
    main()
