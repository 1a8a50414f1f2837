"""Where a server says how many drafts were accepted: each dialect's field, and the Prometheus counters.

Knows names and numbers; who asked for the drafts, and when, is the caller's business.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

METRICS, TIMINGS, PREDICTION = "metrics.speculative_decoding", "timings", "accepted_prediction_tokens"
COUNTERS = "/metrics counters"

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)
_COUNTER = re.compile(r"(?:.*[:_])?spec_decode_num_(?P<kind>draft|accepted)_tokens_total")


class Drafts(NamedTuple):
    """Tokens drafted and accepted, and the field that said so."""

    source: str
    drafted: int
    accepted: int


def count(value: object) -> int | None:
    """A number of tokens, or None for anything else a server may send in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 2**53 and value == int(value) else None


def reported(body: Mapping[str, Any]) -> Drafts | None:
    """The drafts that a response, or the last chunks of a streamed one, tells of. The most detailed field wins."""
    metrics, timings = _part(body, "metrics"), _part(body, "timings")
    details = _part(_part(body, "usage"), "completion_tokens_details")
    spec = _part(metrics, "speculative_decoding")
    accepted, rejected = (
        count(details.get(f"{fate}_prediction_tokens")) for fate in ("accepted", "rejected")
    )
    candidates = [
        (METRICS, count(spec.get("num_draft_tokens")), count(spec.get("num_accepted_draft_tokens"))),
        (TIMINGS, count(timings.get("draft_n")), count(timings.get("draft_n_accepted"))),
    ]
    if accepted or rejected:
        # Both 0 says nothing: servers without any drafting send that as well.
        candidates.append((PREDICTION, (accepted or 0) + (rejected or 0), accepted or 0))
    for source, drafted, agreed in candidates:
        if drafted is not None and agreed is not None and agreed <= drafted:
            return Drafts(source, drafted, agreed)
    return None


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = of.get(name)
    return part if isinstance(part, dict) else {}


def counters(exposition: str) -> Drafts | None:
    """The totals in a Prometheus page, whatever the prefix (vllm:, headlong:, llamacpp:), over all labels."""
    totals: dict[str, float] = {}
    for sample in _SAMPLE.finditer(exposition):
        named = _COUNTER.fullmatch(sample["name"])
        if named is not None:
            try:
                value = float(sample["value"])
            except ValueError:
                continue
            totals[named["kind"]] = totals.get(named["kind"], 0.0) + value
    drafted, accepted = count(totals.get("draft")), count(totals.get("accepted"))
    return None if drafted is None or accepted is None else Drafts(COUNTERS, drafted, accepted)


def since(before: Drafts | None, after: Drafts | None) -> Drafts | None:
    """What the counters gained. None where they are not there, or went back because the server was restarted."""
    if before is None or after is None:
        return None
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    return Drafts(COUNTERS, drafted, accepted) if 0 <= accepted <= drafted else None
