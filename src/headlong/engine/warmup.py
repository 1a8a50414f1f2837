"""Runs a fresh engine once before it serves: the first request finds it warm, and the page gets its reference."""

import statistics

from headlong.engine.service import Service
from headlong.params import SamplingParams

WARM_TOKENS, PLAIN_TOKENS = 8, 32


def plain_tokens_per_second(service: Service) -> float:
    """The speed of plain decoding with one row: one over the median step. Nothing else may step the engine
    meanwhile."""
    _step_seconds(service, WARM_TOKENS, draft_tokens=None)
    return 1.0 / statistics.median(_step_seconds(service, PLAIN_TOKENS, draft_tokens=0))


def _step_seconds(service: Service, num_tokens: int, draft_tokens: int | None) -> list[float]:
    """The engine's steps on a made-up prompt; the last is always a decoding one."""
    most = max(2, min(num_tokens, service.engine.max_len - 2))
    params = SamplingParams(max_tokens=most, ignore_eos=True, draft_tokens=draft_tokens)
    (request,) = service.requests((0,), params, "warm-up")
    service.engine.add(request)
    seconds = []
    while service.engine.has_work:
        seconds.append(service.engine.step().seconds)
    return seconds[1:] or seconds
