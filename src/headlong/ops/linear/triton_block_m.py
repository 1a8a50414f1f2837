"""BLOCK_M, how many tokens a program multiplies at once: few for few tokens, many for prompts, whose weights are then
read less often. Only a device that gives a token the same bits at both sizes lets them depend on the number of
tokens. Nothing promises that it does, so it is tried once, for each weight layout and size, when that is first
wanted.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from headlong.ops.linear.triton_split_k import gemm
from headlong.ops.linear.triton_unpack import FLOAT, INTERPRETED
from headlong.ops.linear.triton_weight import COLUMNS, GemmWeight, WeightLayout, interleaved

log = logging.getLogger(__name__)
BLOCK_MS = (8, 16, 64, 128, 256)
LEAST = 16
BYTES_LEAST = 8
"""The smallest BLOCK_M of 8-bit weights. So few tokens are multiplied by other instructions, which are slower for
weights of other widths."""
PACKED_MOST = 128
"""The largest BLOCK_M of weights that are not 16 bits wide."""
REFERENCE_BLOCK_M = 64
"""The BLOCK_M that all others are compared with, and that serves where they differ."""
NUM_OUTS, NUM_INS = 1024, 64 * COLUMNS
"""The shape of the GEMM that is tried."""
WITHOUT_NAN = ~0x0101
"""A mask that keeps random codes from being the NaN of e4m3, which has all mantissa bits set."""


def block_m_for(num_tokens: int, weight: GemmWeight) -> int:
    """Returns the BLOCK_M for so many tokens: the smallest that holds them, of those that give this weight the same
    bits."""
    # Unpacking takes registers that so many sums would need.
    most = BLOCK_MS[-1] if weight.layout.bits == 16 else PACKED_MOST
    least = BYTES_LEAST if weight.layout.bits == 8 else LEAST
    wanted = min(next((block_m for block_m in BLOCK_MS if block_m >= max(num_tokens, least)), most), most)
    if wanted == REFERENCE_BLOCK_M or _interpreted():
        return REFERENCE_BLOCK_M
    same = _gives_same_bits(weight.layout, weight.dtype, weight.codes.device, wanted)
    return wanted if same else REFERENCE_BLOCK_M


def _interpreted() -> bool:
    """Whether Triton's interpreter runs. Its products are numpy's, which promise nothing about their bits."""
    return bool(INTERPRETED.value)


@cache
def _gives_same_bits(layout: WeightLayout, dtype: torch.dtype, device: torch.device, block_m: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    weight = random_weight(layout, dtype, generator)
    x_ND = torch.randn(block_m, NUM_INS, generator=generator, device=device).to(dtype)
    same = torch.equal(product(weight, x_ND, block_m), product(weight, x_ND, REFERENCE_BLOCK_M))
    if not same:
        log.info(
            "products of %d and %d tokens differ in their bits on %s", block_m, REFERENCE_BLOCK_M, device
        )
    return same


def random_weight(layout: WeightLayout, dtype: torch.dtype, generator: torch.Generator) -> GemmWeight:
    """Makes a weight of random numbers in this layout."""
    device = generator.device
    if layout.encoding == FLOAT:
        codes = torch.randn(NUM_OUTS, NUM_INS, generator=generator, device=device).to(layout.storage)
    else:
        size = (NUM_OUTS, NUM_INS // 2)
        words = torch.randint(-(1 << 15), 1 << 15, size, generator=generator, device=device)
        codes = interleaved((words & WITHOUT_NAN).to(layout.storage))
    groups = -(-NUM_INS // layout.group_size) if layout.group_size else 0

    def factors(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device) + 0.5

    blocks = -(-NUM_OUTS // layout.scale_rows)
    scaled = (blocks, groups) if layout.scale_rows > 1 else (groups, NUM_OUTS)
    return GemmWeight(
        layout, dtype, NUM_OUTS, NUM_INS, codes,
        scales=factors(*scaled) if groups else None,
        offsets_GO=factors(groups, NUM_OUTS) if layout.has_offsets else None,
        row_scales_O=factors(NUM_OUTS) if layout.has_row_scales else None,
        columns_O=None,
    )  # fmt: skip


def product(weight: GemmWeight, x_ND: Tensor, block_m: int) -> Tensor:
    """Computes x Wᵀ, with `block_m` tokens at once."""
    out_NO = x_ND.new_empty((len(x_ND), weight.num_outs), dtype=torch.float32)
    gemm(weight, x_ND, block_m, None, None, out_NO)
    return out_NO
