"""Statistics in words. Knows `Completion`s, no engine."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headlong.completion import Completion, MtpStatus

SEPARATOR = " · "


def describe(done: "Completion") -> list[str]:
    """The parts of a statistics line."""
    stats = done.stats
    parts = [counted(len(done.token_ids), "token"), f"{stats.tokens_per_second:.1f} tokens/s"]
    parts.append(f"{stats.tokens_per_step:.2f} tokens/step")
    if stats.acceptance_per_position:
        parts.append(f"accepted {percentages(stats.acceptance_per_position)}")
    parts.append(mtp(stats.mtp))
    return parts


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def mtp(status: "MtpStatus") -> str:
    return "MTP on" if status.ran else f"MTP off: {status.reason}"


def percentages(shares: tuple[float, ...] | list[float]) -> str:
    """Acceptance at each depth."""
    return " ".join(f"{share:.0%}" for share in shares)
