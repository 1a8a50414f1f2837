"""What a request cost and what drafting did for it, in the three vocabularies that tools read.

OpenAI's `usage`, llama.cpp's `timings`, vLLM's `metrics.speculative_decoding`. Reads finished completions alone.
"""

from collections.abc import Sequence
from typing import Any

from headlong.completion import Completion, Stats
from headlong.server.generation import Result
from headlong.server.model import Model
from headlong.text.tokenizer import Tokenizer


def usage(result: Result, reasoning_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage` object. Each prompt counts once, however many choices it had."""
    completions = result.completions
    per_prompt = len(completions) // result.num_prompts
    prompt = sum(completion.stats.prompt_tokens for completion in completions[::per_prompt])
    cached = sum(completion.stats.cached_tokens for completion in completions[::per_prompt])
    generated = sum(len(completion.token_ids) for completion in completions)
    accepted = sum(completion.stats.accepted for completion in completions)
    drafted = sum(completion.stats.drafted for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def figures(result: Result) -> dict[str, Any]:
    """What every answer carries besides its usage."""
    stats = [completion.stats for completion in result.completions]
    return {"timings": timings(result), "metrics": speculative(stats)}


def timings(result: Result) -> dict[str, Any]:
    """llama.cpp's `timings` object. Choices run side by side, so their times are the longest one's."""
    stats = [completion.stats for completion in result.completions]
    firsts = stats[:: len(stats) // result.num_prompts]
    cache_n = sum(one.cached_tokens for one in firsts)
    prompt_n = sum(one.prompt_tokens for one in firsts) - cache_n
    predicted_n = sum(len(completion.token_ids) for completion in result.completions)
    prompt_s = max(one.prompt_seconds for one in stats)
    predicted_s = max(one.decode_seconds for one in stats)
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_s * 1000,
        "prompt_per_token_ms": _ratio(prompt_s * 1000, prompt_n),
        "prompt_per_second": _ratio(prompt_n, prompt_s),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_s * 1000,
        "predicted_per_token_ms": _ratio(predicted_s * 1000, predicted_n),
        "predicted_per_second": _ratio(sum(one.steps * one.tokens_per_step for one in stats), predicted_s),
        "draft_n": sum(one.drafted for one in stats),
        "draft_n_accepted": sum(one.accepted for one in stats),
    }


def speculative(stats: Sequence[Stats]) -> dict[str, Any]:
    """vLLM's `metrics` object of drafting. If nothing was drafted it holds the reason instead."""
    runs = sum(one.tried_per_position[0] if one.tried_per_position else 0 for one in stats)
    if not runs:
        return {"speculative_decoding": None, "reason": stats[0].mtp.reason}
    drafted = sum(one.drafted for one in stats)
    accepted = sum(one.accepted for one in stats)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / runs,
            "draft_acceptance_rate": accepted / drafted,
            "acceptance_histogram": histogram(stats, runs),
            "num_spec_steps": runs,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }
    }


def histogram(stats: Sequence[Stats], runs: int) -> list[int]:
    """Counts steps by the number of drafts accepted in them; the first count is of steps with none."""
    depth = max(len(one.accepted_per_position) for one in stats)
    at_least = [runs]
    for place in range(depth):
        counts = [one.accepted_per_position for one in stats]
        at_least.append(sum(count[place] if place < len(count) else 0 for count in counts))
    return [some - more for some, more in zip(at_least, [*at_least[1:], 0], strict=True)]


def reasoning_tokens(result: Result, model: Model) -> int:
    """Counts, over all choices, the tokens up to the one that ends the reasoning, where there was any."""
    tokenizer, reasoning = model.client.text.tokenizer, model.format.reasoning
    if tokenizer is None or reasoning is None:
        return 0
    thinking = [choice.done for choice in result.choices if choice.reasoning]
    return sum(_tokens_until(reasoning.end, completion, tokenizer) for completion in thinking)


def _tokens_until(end: str, completion: Completion, tokenizer: Tokenizer) -> int:
    """Counts a completion's tokens up to the one that completes the text `end`: all of them if it never came."""
    tail, marker = b"", end.encode()
    for count, token in enumerate(completion.token_ids, 1):
        text = tail + tokenizer.token_bytes(token)
        if marker in text:
            return count
        tail = text[-len(marker) + 1 :]
    return len(completion.token_ids)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
