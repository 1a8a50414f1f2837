"""What the functions that unpack GGUF blocks return: codes, and factors by block or by group."""

from typing import NamedTuple

import torch
from torch import Tensor


class Factor(NamedTuple):
    """A factor for each group of a block: the float `whole`, times an integer of the group's own where there are
    `parts`."""

    whole_N: Tensor
    """One float32 number for each block; or one for each group, [N, groups], where there are no parts."""
    parts_NG: Tensor | None = None
    """One int8, or uint8 below 128, for each group of each block."""

    @property
    def value_NG(self) -> Tensor:
        if self.whole_N.ndim == 2:
            return self.whole_N
        return self.whole_N[:, None] if self.parts_NG is None else self.whole_N[:, None] * self.parts_NG


Unpacked = tuple[Tensor, Factor, Factor | None]


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, as float32 [N]."""
    return blocks.view(torch.float16)[:, at // 2].float()
