"""Engines over tiny models with and without the prefix cache, and conversations to put to them."""

import random
from dataclasses import dataclass, field

from engine_cases import Trace, drive

from headlong import SamplingParams
from headlong.config import EngineConfig
from headlong.engine.assemble import assemble
from headlong.engine.build import Built
from headlong.engine.engine import Engine
from headlong.types import Request

VOCAB = 97
PARAMS = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4},
}


@dataclass
class Served:
    """What `drive` wants of an LLM."""

    engine: Engine
    admitted: list[tuple[str, int]] = field(default_factory=list)
    """Row and cached tokens of each admission."""

    @classmethod
    def of(cls, built: Built, **options) -> "Served":
        """Small pages, a few rows."""
        served = cls(assemble(built, EngineConfig(**({"page_size": 16, "max_rows": 4} | options))))
        state = served.engine.state
        admit = state.admit

        def spy(row_id, *args, **kwargs):
            row = admit(row_id, *args, **kwargs)
            if row is not None:
                served.admitted.append((row_id, row.num_cached))
            return row

        state.admit = spy  # type: ignore[method-assign]
        return served

    def run(self, *requests: Request, **options) -> Trace:
        return drive(self, list(requests), **options)  # type: ignore[arg-type]


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def ask(name: str, prompt: tuple[int, ...], drafts: int = 0, max_tokens: int = 12, **params) -> Request:
    return Request(
        name, prompt, SamplingParams(max_tokens=max_tokens, **params), seed=sum(prompt), draft_tokens=drafts
    )


def cached_of(trace: Trace) -> dict[str, int]:
    """What each row told with its first tokens."""
    first = {}
    for output in trace.outputs:
        if output.is_first:
            first[output.request.id] = output.num_cached
        else:
            assert not output.num_cached
    return first


def drafts_of(trace: Trace, row_id: str) -> list[tuple[int, int]]:
    return [(o.num_drafted, o.num_accepted) for o in trace.outputs if o.request.id == row_id]
