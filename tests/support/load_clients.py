"""Streaming clients in a process of their own, so that they do not share the server's interpreter.

    python -m support.load_clients URL NUM_CLIENTS SECONDS SEED

Each client sends one request after the other, leaves one in four in the middle, and keeps what the others gave.
Prints one JSON object: finished texts by request, counts, and the gaps between chunks.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx

TOPICS = (
    "a shy dragon",
    "a brave mouse",
    "rain",
    "a lost kite",
    "two friends",
    "the moon",
    "a slow train",
    "bread",
)
PATTERN = {"type": "regex", "pattern": "[A-Z][a-z]{2,9}( [a-z]{2,9}){2,6}\\."}


def bodies() -> list[dict[str, Any]]:
    """Requests of many kinds, each with one answer: greedy, or seeded."""
    made = []
    for number in range(24):
        topic = TOPICS[number % len(TOPICS)]
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Write a short story about {topic}."}],
            "max_tokens": 16 + 7 * (number % 9),
            "temperature": (0, 0.7, 1.0)[number % 3],
            "seed": number,
            "speculative": {"mtp": ("auto", "off", 1, 4, 8)[number % 5]},
        }
        if number % 4 == 1:
            body["frequency_penalty"] = 0.5
        if number % 6 == 2:
            body["response_format"] = PATTERN
        if number % 8 == 3:
            body["stop"] = ["."]
        made.append(body)
    return made


async def stream(
    http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None, gaps: list[float]
) -> str | None:
    """The text, or None if it left."""
    text, last, seen = "", None, 0
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            delta = chunk["choices"][0]["delta"].get("content")
            if not delta:
                continue
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last, text, seen = now, text + delta, seen + 1
            if leave_after is not None and seen >= leave_after:
                return None
    return text


async def client(url: str, until: float, seed: int, report: dict[str, Any]) -> None:
    rng, requests = random.Random(seed), bodies()
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        while time.monotonic() < until:
            number = rng.randrange(len(requests))
            leave = rng.randint(1, 6) if rng.random() < 0.25 else None
            try:
                text = await stream(http, requests[number], leave, report["gaps"])
            except (RuntimeError, httpx.HTTPError) as error:
                report["errors"].append(f"{type(error).__name__}: {error}")
                continue
            if text is None:
                report["cancelled"] += 1
            else:
                report["finished"].append([number, text])


async def main(url: str, num_clients: int, seconds: float, seed: int) -> dict[str, Any]:
    report: dict[str, Any] = {"finished": [], "cancelled": 0, "errors": [], "gaps": []}
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(url, until, seed + number, report) for number in range(num_clients)))
    return report


if __name__ == "__main__":
    address, clients, duration, first_seed = sys.argv[1:]
    print(json.dumps(asyncio.run(main(address, int(clients), float(duration), int(first_seed)))))
