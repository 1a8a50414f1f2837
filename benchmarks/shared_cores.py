"""How several servers share this machine's cores where torch multiplies: tokens per second of each, alone and together.

    python benchmarks/shared_cores.py [--servers 3] [--seconds 5] [--turns 2]

Runs `headlong serve` with the embedded model and without native kernels, in turns with threads that wait asleep, as the
server has it, and with threads that spin, as OpenMP has it. Prints one JSON line.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

BODY = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12, "ignore_eos": True}
POLICIES = {"asleep": {}, "spinning": {"OMP_WAIT_POLICY": "ACTIVE"}}


@contextlib.contextmanager
def server(**environment: str) -> Iterator[str]:
    """The address of a server that lives until the block ends."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "HEADLONG_"))
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "headlong.cli.main", "serve", "--port", "0", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | {"HEADLONG_NATIVE": "0"} | environment,
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


def together(count: int, seconds: float, policy: str) -> list[float]:
    """The speeds of so many servers, each asked by one client at the same time."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(server(**POLICIES[policy])) for _ in range(count)]
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
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    results = [
        {
            "turn": turn,
            "servers": count,
            "policy": policy,
            "tokens_per_second": together(count, args.seconds, policy),
        }
        for turn in range(args.turns)
        for count in (1, args.servers)
        for policy in POLICIES
    ]
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()
