"""Whether a device gives tokens the same bits when they walk their context as when they attend to splits of it.

Tiles of different sizes are multiplied by different instructions (mma.sync and wgmma), and nothing promises that these
add in the same order and precision. So it is tried once for each kind of layer, when a prompt is first long enough.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from headlong.ops.gated_attention.reference import GatedAttentionWeights
from headlong.ops.linear.triton_split_k import PartialSums
from headlong.ops.triton_step import TritonStep
from headlong.types import Rows

log = logging.getLogger(__name__)
KNOWN, TOKENS = 100, 300
"""The positions before the tokens that are tried, and how many these are: they end within the fourth split."""
_alike: dict[object, bool] = {}


class WalksOrSplits(Protocol):
    """A layer's core: both of its ways take queries, keys, values, gates, the result and the step."""

    weights: GatedAttentionWeights
    dtype: torch.dtype

    def walk(
        self, queries: Tensor, keys: Tensor, values: Tensor, gates: PartialSums | None, out: Tensor, step: TritonStep
    ) -> None: ...  # fmt: skip

    def split(
        self, queries: Tensor, keys: Tensor, values: Tensor, gates: PartialSums | None, out: Tensor, step: TritonStep
    ) -> None: ...  # fmt: skip


def walks_alike(net: WalksOrSplits, keys: Tensor, gates: PartialSums | None) -> bool:
    """Returns whether they have the same bits, which is tried once. `gates` are such as the layer has, of any
    numbers."""
    w = net.weights
    key = (
        w.num_heads, w.num_kv_heads, w.head_dim, w.window, w.sinks_H is None, gates is None, net.dtype, keys.dtype,
        keys.shape[1:], keys.device,
    )  # fmt: skip
    if key not in _alike:
        _alike[key] = _try(net, keys, gates)
        if not _alike[key]:
            log.info("attention of %d queries to heads of %d differs in its bits", TOKENS, w.head_dim)
    return _alike[key]


def _try(net: WalksOrSplits, keys: Tensor, gates: PartialSums | None) -> bool:
    w, page_size, device = net.weights, keys.shape[2], keys.device
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    num_pages = -(-(KNOWN + TOKENS) // page_size)
    step = TritonStep.of(
        Rows((0,), (KNOWN,), (TOKENS,), (0,), (0,)), torch.arange(num_pages, device=device)[None], page_size
    )
    queries = (2.0 * w.head_dim**-0.5 * drawn(TOKENS, w.num_heads, w.head_dim)).to(keys.dtype)
    keys, values = (drawn(num_pages, *keys.shape[1:]).to(keys.dtype) for _ in range(2))
    if gates is not None:
        partials = drawn(*gates.partials_PNO.shape[:-2], TOKENS, gates.partials_PNO.shape[-1])
        squares = gates.args["squares_ptr"]
        if isinstance(squares, Tensor):
            squares = drawn(TOKENS, squares.shape[1]).square()
        gates = PartialSums(partials, {**gates.args, "num_tokens": TOKENS, "squares_ptr": squares})
    walked, split = (queries.new_empty(TOKENS, w.num_heads * w.head_dim, dtype=net.dtype) for _ in range(2))
    net.walk(queries, keys, values, gates, walked, step)
    net.split(queries, keys, values, gates, split, step)
    return torch.equal(walked, split)
