"""Whether what a head has copied from its target is still the same: told where it is not, since the target's serves.

Stretches of both are compared, spread over the whole tensor, so that little is read. Knows names and bytes.
"""

from headlong.checkpoint.names import NameMap
from headlong.checkpoint.tensor_info import TensorInfo

STRETCHES, STRETCH = 64, 4096
LENT = {"lm_head.weight": "embed_tokens.weight"}
"""What serves in the place of a tensor that a tied model has not."""


def disagreements(names: NameMap) -> list[str]:
    """One sentence for each copy that is not what the target has, or that cannot be compared with it."""
    found = []
    for name, copy in names.copies:
        if not name.endswith(".weight"):
            continue  # scales of codes that are no copy anyway
        own = names.sources.get(name) or names.sources.get(LENT.get(name, name))
        if own is None or (own.dtype, own.shape) != (copy.dtype, copy.shape):
            found.append(
                f"{copy.name} is stored otherwise than the target's {name} and was not compared; "
                "drafts use the target's"
            )
        elif _differ(own, copy):
            found.append(
                f"{copy.name} differs from the target's {name}; drafts use the target's, so fewer may be accepted"
            )
    return found


def _differ(one: TensorInfo, other: TensorInfo) -> bool:
    last = max(one.nbytes - STRETCH, 0)
    places = sorted({last * number // (STRETCHES - 1) for number in range(STRETCHES)})
    with one.file.open("rb") as ours, other.file.open("rb") as theirs:
        for place in places:
            size = min(STRETCH, one.nbytes - place)
            ours.seek(one.start + place)
            theirs.seek(other.start + place)
            if ours.read(size) != theirs.read(size):
                return True
    return False
