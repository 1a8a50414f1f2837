"""Draws a token for each row as one native call: of scores, the best after adding the noise of sampling/noise.py; of
logits, after the filters of sampling/processors.py."""

import torch
from torch import Tensor

from headlong.ops import native


def draw(scores_MV: Tensor, keys_M4: Tensor) -> Tensor:
    """Draws from `scores_MV`, float64, -inf for tokens that must not be drawn; `keys_M4` are seed, choice, position and
    stream of each row."""
    assert scores_MV.dtype == torch.float64 and keys_M4.dtype == torch.long
    scores_MV, keys_M4 = scores_MV.contiguous(), keys_M4.contiguous()
    rows, size = scores_MV.shape
    tokens_M = torch.empty(rows, dtype=torch.long)
    native.kernel("headlong_draw")(
        scores_MV.data_ptr(), keys_M4.data_ptr(), rows, size, tokens_M.data_ptr(), native.num_threads()
    )
    return tokens_M


def sample(logits_MV: Tensor, filters_M4: Tensor, keys_M4: Tensor) -> Tensor:
    """Filters and draws. `filters_M4` are temperature, top-k, top-p and min-p of each row, float64; 0, 1 and 0 filter
    nothing."""
    assert filters_M4.dtype == torch.float64 and keys_M4.dtype == torch.long
    logits_MV, filters_M4, keys_M4 = logits_MV.contiguous(), filters_M4.contiguous(), keys_M4.contiguous()
    rows, size = logits_MV.shape
    tokens_M = torch.empty(rows, dtype=torch.long)
    native.kernel("headlong_sample")(
        native.address(logits_MV),
        filters_M4.data_ptr(),
        keys_M4.data_ptr(),
        rows,
        size,
        tokens_M.data_ptr(),
        native.num_threads(),
    )
    return tokens_M
