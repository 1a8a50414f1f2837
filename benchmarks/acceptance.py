"""Tokens per step of the embedded model over thirty prompts of the kind it knows, greedy, for several K.

    python benchmarks/acceptance.py [--draft-tokens 1,2,3,4,6,8] [--max-tokens 160] [--dtype auto]

Every K must give the tokens of plain decoding, or nothing is reported. Counts, not times: it needs no quiet
machine. Ends in one JSON line.
"""

import argparse
import json
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from headlong import LLM, Completion, SamplingParams

TOPICS = {
    "Write a short story about {}.": (
        "a shy dragon who learns to share",
        "a lighthouse keeper and a lost whale",
        "two friends who build a kite",
        "a clock that runs backwards",
        "a mouse who wants to see the sea",
        "a baker who finds a magic spoon",
    ),
    "Explain {} to a child.": (
        "rain",
        "why the sky is blue",
        "how bees make honey",
        "gravity",
        "sleep",
        "the moon",
    ),
    "Give me three tips for {}.": (
        "sleeping better",
        "learning a language",
        "saving money",
        "growing tomatoes",
        "staying calm",
        "cooking rice",
    ),
    "Write a short poem about {}.": ("autumn", "a quiet river", "my cat", "the first snow"),
    "Write a letter to {}.": (
        "a friend about a new puppy",
        "a teacher to say thank you",
        "my future self",
        "the mayor",
    ),
    "Write a dialogue between {}.": (
        "a cat and a dog",
        "the sun and the moon",
        "a boy and a robot",
        "two old trees",
    ),
}
PROMPTS = [template.format(topic) for template, topics in TOPICS.items() for topic in topics]


def complete(llm: LLM, max_tokens: int, draft_tokens: int) -> list[Completion]:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return llm.chat(chats, SamplingParams(max_tokens=max_tokens, draft_tokens=draft_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft-tokens", default="1,2,3,4,6,8")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    llm = LLM(dtype=args.dtype, mtp="on")
    plain = [completion.token_ids for completion in complete(llm, args.max_tokens, 0)]
    table = Table("K", "tokens/step", "accepted", "per position", title=f"{len(PROMPTS)} prompts, greedy")
    results = {}
    for draft_tokens in map(int, args.draft_tokens.split(",")):
        done = complete(llm, args.max_tokens, draft_tokens)
        if [completion.token_ids for completion in done] != plain:
            raise SystemExit(f"K={draft_tokens}: tokens differ from plain decoding; nothing is reported")
        stats = [completion.stats for completion in done]
        steps = sum(s.steps for s in stats)
        per_step = sum(s.steps * s.tokens_per_step for s in stats) / steps
        share = sum(s.accepted for s in stats) / sum(s.drafted for s in stats)
        tried = zip_longest(*(s.tried_per_position for s in stats), fillvalue=0)
        accepted = zip_longest(*(s.accepted_per_position for s in stats), fillvalue=0)
        places = [sum(a) / sum(t) for a, t in zip(accepted, tried, strict=True)]
        text = " ".join(f"{place:.2f}" for place in places)
        table.add_row(str(draft_tokens), f"{per_step:.2f}", f"{share:.0%}", text)
        results[draft_tokens] = {
            "tokens_per_step": round(per_step, 3),
            "per_position": [round(p, 3) for p in places],
        }
    Console().print(table)
    print(json.dumps({"benchmark": "acceptance", "tokens": sum(map(len, plain)), "k": results}))


if __name__ == "__main__":
    main()
