"""The second turn of a chat over a long shared beginning, with the prefix cache and without, MTP on and off.

    python benchmarks/prefix.py [--prefix-tokens 3000] [--max-tokens 32] [--rounds 5] [--dtype auto]

Four engines on the embedded model. Every round asks each of them both turns, beginning with another engine each time,
with nothing in the cache before the first turn. The second turn is the first with its answer and a new question, as
a chat template writes them. Reported are the seconds from the question to the first token of the second turn, medians
over rounds, and how much of its prompt was there already. Tokens must be the same everywhere, and the share that was
there the same with MTP on and off; otherwise nothing is reported and the exit code is 1. Ends in one JSON line.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headlong import LLM, SamplingParams
from headlong.progress import silent

STORY = (
    "Once upon a time there was a little fox who lived at the edge of a big forest. One day she saw a red boat with "
    "a small bear in it. The bear was sad, because he had lost his hat in the wind. They walked until the sun went "
    "down, and at last they saw something blue on top of a tall tree. "
)
QUESTIONS = ("What did the bear lose?", "And who helped him to find it?")


@dataclass(frozen=True)
class Turn:
    """What one question gave."""

    seconds: float
    """To the first token."""
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Result:
    """The second turn with and without the cache; seconds are medians over the rounds."""

    mtp: str
    prompt_tokens: int
    cached_tokens: int
    seconds_without: float
    seconds_with: float
    times_faster: float
    """The median of the rounds' own ratios."""


def ask(llm: LLM, messages: list[dict[str, str]], max_tokens: int) -> Turn:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    started, seconds, tokens, text = time.perf_counter(), 0.0, [], ""
    for chunk in llm.stream(messages, params):
        seconds = seconds or time.perf_counter() - started
        tokens.extend(chunk.token_ids)
        text += chunk.text
        if chunk.completion is not None:
            stats = chunk.completion.stats
            return Turn(seconds, text, tuple(tokens), stats.prompt_tokens, stats.cached_tokens)
    raise AssertionError("every stream ends with its completion")


def chat(llm: LLM, shared: str, max_tokens: int) -> list[Turn]:
    """Both turns, the first on an empty cache."""
    llm.engine.state.drop_cache()
    messages, turns = [{"role": "user", "content": f"{shared}\n{QUESTIONS[0]}"}], []
    for question in QUESTIONS:
        if turns:
            messages += [
                {"role": "assistant", "content": turns[-1].text},
                {"role": "user", "content": question},
            ]
        turns.append(ask(llm, messages, max_tokens))
    return turns


def measure(llms: dict[tuple[str, bool], LLM], shared: str, max_tokens: int, rounds: int) -> list[Result]:
    seen: dict[tuple[str, bool], list[list[Turn]]] = {name: [] for name in llms}
    order = list(llms)
    for turn in range(rounds + 1):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            seen[name].append(chat(llms[name], shared, max_tokens))
    answers = {tuple(turn.tokens for turn in turns) for rows in seen.values() for turns in rows}
    if len(answers) != 1:
        raise SystemExit("tokens differ; no speed is reported")
    results = [result(mtp, seen[mtp, False][1:], seen[mtp, True][1:]) for mtp in ("on", "off")]
    if len({(one.prompt_tokens, one.cached_tokens) for one in results}) != 1:
        raise SystemExit(f"MTP changes what is found in the cache: {results}; no speed is reported")
    return results


def result(mtp: str, without: list[list[Turn]], cached: list[list[Turn]]) -> Result:
    """The first round, which warms up, is not among them."""
    slow, quick = ([turns[1] for turns in rows] for rows in (without, cached))
    ratios = [one.seconds / other.seconds for one, other in zip(slow, quick, strict=True)]
    return Result(
        mtp,
        quick[0].prompt_tokens,
        min(turn.cached_tokens for turn in quick),
        round(statistics.median(turn.seconds for turn in slow), 4),
        round(statistics.median(turn.seconds for turn in quick), 4),
        round(statistics.median(ratios), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix-tokens", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    context = args.prefix_tokens + 4 * args.max_tokens + 512
    options: dict[str, Any] = {"dtype": args.dtype, "max_context": context, "max_rows": 1, "progress": silent}
    llms = {
        (mtp, cache): LLM(mtp=mtp, prefix_cache=cache, cache_tokens=2 * context, **options)
        for mtp in ("on", "off")
        for cache in (False, True)
    }
    length = len(llms["off", False].service.text.encode(STORY))
    results = measure(llms, STORY * -(-args.prefix_tokens // length), args.max_tokens, args.rounds)
    title = f"second turn, {torch.get_num_threads()} threads"
    table = Table("MTP", "prompt", "cached", "without, s", "with cache, s", "times faster", title=title)
    for one in results:
        table.add_row(*(str(value) for value in asdict(one).values()))
    Console().print(table)
    conditions = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "prefix"} | conditions | {"results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    main()
