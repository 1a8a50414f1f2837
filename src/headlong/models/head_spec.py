"""What the MTP head of a family is, as data: its maths, its layers and what it shares with its target.

All heads have in common: a layer is given the pair of a hidden state and the embedding of the token that comes after
it, both normed, and what it says goes through a norm to an lm_head.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MAX_LAYERS = 16
MTP_LAYERS = "mtp_num_hidden_layers"


@dataclass(frozen=True)
class HeadSpec:
    """The defaults are the head of Qwen3.5. What is said here and cannot be computed yet, `refusal` names."""

    tap: Literal["post_norm", "pre_norm", "streams"] = "post_norm"
    """Which of the target's hidden states is read: after its final norm, before it, or all its residual streams."""
    join: Literal["concat", "sum"] = "concat"
    """The pair side by side through one matrix, or the sum of two, one for each of it."""
    order: Literal["embedding_first", "hidden_first"] = "embedding_first"
    """Which of the pair comes first where they stand side by side."""
    recycle: Literal["post_norm", "pre_norm", "streams"] = "post_norm"
    """What of a layer's output the next draft reads in place of a hidden state."""
    chained: bool = True
    """Whether a further draft reads the output of the layer before; else always the target's last hidden state."""
    joins_in_layers: bool = False
    """Whether each layer has norms and a join of its own; else they are there once, for all layers."""
    kv: Literal["own", "target"] = "own"
    """The owner of the keys and values that the layers attend to."""
    shares: tuple[str, ...] = ("embedding", "lm_head")
    """What the head takes from its target instead of having its own."""
    layers_field: str = MTP_LAYERS
    """Where config.json says how many layers the head has. It is only written: the tensors decide."""

    def config_fields(self, num_layers: int) -> dict[str, int]:
        """What config.json says of a head of so many layers."""
        shared = {"mtp_use_dedicated_embeddings": False} if self.layers_field == MTP_LAYERS else {}
        return {self.layers_field: num_layers} | shared

    @property
    def refusal(self) -> str | None:
        """Why no such head can be computed here; None if it can."""
        if self.tap == "pre_norm":
            return f"it reads the target's hidden states {_AT[self.tap]}, which is not supported"
        if self.tap == "streams" and self.join != "sum":
            return "it joins several residual streams side by side with the embedding, which is not supported"
        if self.recycle != self.tap or not self.chained:
            what = f"its output {_AT[self.recycle]}" if self.chained else "the target's hidden state"
            return f"its further drafts read {what}, which is not supported"
        if self.kv != "own":
            return "it attends to the target's keys and values, which is not supported"
        if missing := {"embedding", "lm_head"} - set(self.shares):
            return f"it has {' and '.join(sorted(missing))} of its own, which is not supported"
        return None


_DSPARK = ("main_proj", "markov_head", "confidence_head")
"""The modules that blocks of DSpark have, in the layers of a head or in none."""


def other_drafter(names: Iterable[str]) -> str | None:
    """What the head's tensors are where they are no MTP head's, by their canonical names; None if they may be one's."""
    parts = {part for name in names for part in name.split(".")[1:]}
    found = [module for module in _DSPARK if module in parts]
    if len(found) < 2 or parts & {"fc", "fc_embedding", "fc_hidden"}:
        return None
    return (
        f"the blocks named mtp.* are DSpark's: there are {', '.join(found)} and no join of embedding and hidden state; "
        "such a drafter is no MTP head and not supported"
    )


_AT = {
    "post_norm": "after the final norm",
    "pre_norm": "before the final norm",
    "streams": "in several residual streams",
}
