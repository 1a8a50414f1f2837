"""Many clients at once: how long answers take, how many tokens come a second, and that no text depends on company.

`headlong bench serve` measures more; this is the shape of a test of your own.
"""

import argparse
import asyncio
import os
import statistics
import time

import openai

URL = os.environ.get("HEADLONG_URL", "http://127.0.0.1:8000")
TOPICS = ("rain", "tides", "bread", "sleep", "the moon", "snow", "trees", "bees")


async def ask(client: openai.AsyncOpenAI, model: str, topic: str, seed: int) -> tuple[str, int, float, float]:
    """The text, its tokens, seconds to the first one, and to the last."""
    started, first, text, tokens = time.perf_counter(), 0.0, "", 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Explain {topic} to a child."}],
        seed=seed,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            text += chunk.choices[0].delta.content
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, tokens, first, time.perf_counter() - started


async def run(num_clients: int) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{URL}/v1", api_key=os.environ.get("HEADLONG_KEY", "none")
    ) as client:
        model = (await client.models.list()).data[0].id
        alone = [await ask(client, model, topic, seed) for seed, topic in enumerate(TOPICS)]
        asked = [(TOPICS[n % len(TOPICS)], n % len(TOPICS)) for n in range(num_clients)]
        started = time.perf_counter()
        together = await asyncio.gather(*(ask(client, model, topic, seed) for topic, seed in asked))
        seconds = time.perf_counter() - started
    same = sum(alone[seed][0] == answer[0] for (_, seed), answer in zip(asked, together, strict=True))
    print(f"{num_clients} clients: {sum(answer[1] for answer in together) / seconds:.0f} tokens/s")
    print(f"first token after {statistics.median(answer[2] for answer in together) * 1000:.0f} ms (median)")
    print(f"{same} of {num_clients} texts are those of the request alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16, choices=range(1, 257), metavar="N")
    asyncio.run(run(parser.parse_args().clients))


if __name__ == "__main__":
    main()
