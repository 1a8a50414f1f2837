"""A token for each row of scores, as one native call: the best of scores plus the noise of sampling/noise.py."""

import torch
from torch import Tensor

from headlong.ops import native


def draw(scores_MV: Tensor, keys_M4: Tensor) -> Tensor:
    """`scores_MV` float64, -inf for what must not be; `keys_M4` seed, choice, position and stream of each row."""
    assert scores_MV.dtype == torch.float64 and keys_M4.dtype == torch.long
    scores_MV, keys_M4 = scores_MV.contiguous(), keys_M4.contiguous()
    rows, size = scores_MV.shape
    tokens_M = torch.empty(rows, dtype=torch.long)
    native.kernel("headlong_draw")(
        scores_MV.data_ptr(), keys_M4.data_ptr(), rows, size, tokens_M.data_ptr(), native.num_threads()
    )
    return tokens_M
