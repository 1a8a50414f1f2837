"""What drafting among fewer tokens costs in acceptance: the first N of the vocabulary, and the N most frequent.

    python benchmarks/draft_vocab.py [--sizes 250,500,1000,2000] [--answers 10] [--draft-tokens 3]

Tokens are counted in several answers of the embedded model, sampled, to half of the prompts of acceptance.py; drafts
are counted in its greedy answers to the other half. Every text must be that of plain decoding, or nothing is reported.
Counts, not times. Ends in one JSON line.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from acceptance import PROMPTS
from headlong import LLM, Completion, SamplingParams
from headlong.speculate.frequencies import most_frequent


def answers(llm: LLM, prompts: list[str], **params: Any) -> list[Completion]:
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], SamplingParams(**params))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="250,500,1000,2000")
    parser.add_argument("--answers", type=int, default=10)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    counted, answered = PROMPTS[0::2], PROMPTS[1::2]
    whole = LLM(mtp="on")
    vocab = whole.engine.model.config.vocab_size
    counts: Counter[int] = Counter()
    for seed in range(args.answers):
        for completion in answers(whole, counted, max_tokens=args.max_tokens, temperature=1.0, seed=seed):
            counts.update(completion.token_ids)
    plain = [c.token_ids for c in answers(whole, answered, max_tokens=args.max_tokens, draft_tokens=0)]

    def accepted(llm: LLM) -> float:
        done = answers(llm, answered, max_tokens=args.max_tokens, draft_tokens=args.draft_tokens)
        if [completion.token_ids for completion in done] != plain:
            raise SystemExit("tokens differ from plain decoding; nothing is reported")
        return sum(c.stats.accepted for c in done) / sum(c.stats.drafted for c in done)

    table = Table(
        "tokens",
        "first",
        "most frequent",
        title=f"accepted of {args.draft_tokens} drafts, {len(answered)} prompts",
    )
    results = {str(vocab): {"all": round(accepted(whole), 3)}}
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, args.sizes.split(",")):
            shares = []
            for known in ({}, counts):
                file = Path(folder) / "tokens.json"
                file.write_text(json.dumps(most_frequent(known, size, vocab).tolist()))
                shares.append(accepted(LLM(mtp="on", draft_vocab=file)))
            table.add_row(str(size), *(f"{share:.1%}" for share in shares))
            results[str(size)] = {"first": round(shares[0], 3), "most_frequent": round(shares[1], 3)}
    table.add_row(f"{vocab} (all)", f"{results[str(vocab)]['all']:.1%}", "")
    Console().print(table)
    line = {
        "benchmark": "draft_vocab",
        "counted": counts.total(),
        "different": len(counts),
        "accepted": results,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
