"""The best token of each row of logits; what is no number wins, so that the choice tells of it."""

from torch import Tensor


def argmax(logits_LV: Tensor) -> Tensor:
    return logits_LV.argmax(-1)
