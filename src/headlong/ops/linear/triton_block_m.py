"""How many tokens a program multiplies at once: few for few tokens, many for prompts, whose weights are then read less
often. Only a device that gives a token the same bits at both widths lets them depend on the number of tokens; nothing
promises that it does, so it is tried once, for each kind of weights and width, when that is first wanted.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from headlong.ops.linear.triton_split_k import add
from headlong.ops.linear.triton_unpack import FLOAT, INTERPRETED
from headlong.ops.linear.triton_weight import COLUMNS, Kind, Matrix, tiled

log = logging.getLogger(__name__)
WIDTHS = (8, 16, 64, 128, 256)
LEAST = 16
BYTES_LEAST = 8
"""Of weights of 8 bits. So few are multiplied by other instructions, which are slower for the others."""
PACKED_MOST = 128
"""Of weights that are not 16 bits wide."""
SURE = 64
"""What all others are measured by, and what serves where they differ."""
OUTS, INS = 1024, 64 * COLUMNS
"""Of the product that is tried."""
WITHOUT_NAN = ~0x0101
"""Bits of two codes that are e4m3 whatever they are: those that are no numbers have all mantissa bits."""


def width_for(num_tokens: int, matrix: Matrix) -> int:
    # Unpacking takes registers that so many sums would need.
    most = WIDTHS[-1] if matrix.kind.bits == 16 else PACKED_MOST
    least = BYTES_LEAST if matrix.kind.bits == 8 else LEAST
    wanted = min(next((width for width in WIDTHS if width >= max(num_tokens, least)), most), most)
    if wanted == SURE or _interpreted():
        return SURE
    return wanted if _agrees(matrix.kind, matrix.dtype, matrix.codes.device, wanted) else SURE


def _interpreted() -> bool:
    """Whose products are numpy's, of which nothing is known."""
    return bool(INTERPRETED.value)


@cache
def _agrees(kind: Kind, dtype: torch.dtype, device: torch.device, width: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    matrix = some_matrix(kind, dtype, generator)
    x_ND = torch.randn(width, INS, generator=generator, device=device).to(dtype)
    same = torch.equal(product(matrix, x_ND, width), product(matrix, x_ND, SURE))
    if not same:
        log.info("products of %d and %d tokens differ in their bits on %s", width, SURE, device)
    return same


def some_matrix(kind: Kind, dtype: torch.dtype, generator: torch.Generator) -> Matrix:
    """Of random numbers."""
    device = generator.device
    if kind.code == FLOAT:
        codes = torch.randn(OUTS, INS, generator=generator, device=device).to(kind.stored)
    else:
        words = torch.randint(-(1 << 15), 1 << 15, (OUTS, INS // 2), generator=generator, device=device)
        codes = tiled((words & WITHOUT_NAN).to(kind.stored))
    groups = -(-INS // kind.group) if kind.group else 0

    def factors(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) + 0.5

    scaled = (-(-OUTS // kind.rows), groups) if kind.rows > 1 else (groups, OUTS)
    return Matrix(
        kind, dtype, OUTS, INS, codes,
        scales=factors(*scaled) if groups else None,
        offsets_GO=factors(groups, OUTS) if kind.has_offsets else None,
        row_scales_O=factors(OUTS) if kind.row_scaled else None,
        columns_O=None,
    )  # fmt: skip


def product(matrix: Matrix, x_ND: Tensor, width: int) -> Tensor:
    out_NO = x_ND.new_empty((len(x_ND), matrix.outs), dtype=torch.float32)
    add(matrix, x_ND, width, None, None, out_NO)
    return out_NO
