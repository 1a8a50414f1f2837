"""Causal attention of ragged rows over paged keys and values, in plain torch, batch-invariant.

A query token's bits depend on its own past alone: queries go through matmuls of one fixed shape (blocks of
`BLOCK` tokens against one page), and the pages' parts are added in page order. Padding adds exact zeros.
Derivation and layout: README.md beside this file.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headlong.ops.batched_matmul import matmul
from headlong.ops.places import Places
from headlong.ops.prepared import PreparedStep
from headlong.types import Rows

BLOCK = 4
HEAD_ALIGN = 16
"""The multiple to which heads are padded: matmuls treat rows alike only where they fill whole vectors."""
MAX_GATHER = 1 << 20
"""The number of key positions gathered at a time, which bounds the memory of long prompts."""


@dataclass(frozen=True)
class BlockGroup:
    """Blocks that are attended to together: B blocks, up to P pages each, pages of S positions."""

    blocks: slice
    pages_BP: Tensor
    hidden: Tensor
    """The mask [B, P, 1, Q, 1, S] of positions that a query must not see."""
    unwritten: Tensor
    """The mask [B, P, 1, S, 1] of positions that no query of the block sees; whatever is stored there, 0 times it must
    be 0."""


class Block(NamedTuple):
    """The positions of a block of queries."""

    first: int
    last: int

    def pages(self, window: int | None, page_size: int) -> range:
        """Returns the pages of the row that they see."""
        begin = 0 if window is None else max(self.first - window + 1, 0)
        return range(begin // page_size, self.last // page_size + 1)


@dataclass(frozen=True)
class PreparedAttention(PreparedStep):
    """The places of a step's tokens. Each row's queries are cut into blocks of up to `BLOCK`."""

    token_BQ: Tensor
    """Flat index of each query; padding repeats a token of the block."""
    place_N: Tensor
    """The place of each flat token in the flattened [B, Q]."""
    write_page_N: Tensor
    write_offset_N: Tensor
    blocks: tuple[Block, ...]
    position_BQ: Tensor
    """The position of each query; padding has one that sees nothing."""
    pages_BP: Tensor
    page_size: int
    groups: dict[int | None, tuple[BlockGroup, ...]]
    """What was made so far of the blocks, by the window of the layers that attend."""
    rows: Rows
    pages_RP: Tensor

    @cached_property
    def places(self) -> Places:
        return Places.of(self.rows, self.pages_RP, self.page_size)

    def windowed(self, window: int | None) -> tuple[BlockGroup, ...]:
        """Returns the blocks with the pages that they see through a window, made at the first call for it."""
        if window not in self.groups:
            self.groups[window] = tuple(self._group(span, window) for span in self._spans(window))
        return self.groups[window]

    def _spans(self, window: int | None) -> list[slice]:
        """Returns blocks that follow each other, in groups that stay within `MAX_GATHER`."""
        spans, first, width = [], 0, 0
        for last, block in enumerate(self.blocks):
            pages = block.pages(window, self.page_size)
            wider = max(width, len(pages))
            if last > first and wider * (last + 1 - first) * self.page_size > MAX_GATHER:
                spans.append(slice(first, last))
                first, wider = last, len(pages)
            width = wider
        return [*spans, slice(first, len(self.blocks))]

    def _group(self, blocks: slice, window: int | None) -> BlockGroup:
        size, device = self.page_size, self.pages_BP.device
        seen = [block.pages(window, size) for block in self.blocks[blocks]]
        first_B = torch.tensor([pages.start for pages in seen], device=device)
        page_BP = first_B[:, None] + torch.arange(max(map(len, seen)), device=device)
        pages_BP = self.pages_BP[blocks].gather(1, page_BP.clamp(max=self.pages_BP.shape[1] - 1))
        place_BPS = page_BP[:, :, None] * size + torch.arange(size, device=device)
        place, position_BQ = place_BPS[:, :, None, None, None], self.position_BQ[blocks]
        position = position_BQ.view(-1, 1, 1, BLOCK, 1, 1)
        hidden = place > position
        unwritten = place_BPS > position_BQ.amax(1)[:, None, None]
        if window is not None:
            hidden |= place <= position - window
            begin_B = torch.tensor([block.first - window for block in self.blocks[blocks]], device=device)
            unwritten |= place_BPS <= begin_B[:, None, None]
        return BlockGroup(blocks, pages_BP, hidden, unwritten[:, :, None, :, None])


def prepare(step: Rows, pages_RP: Tensor, page_size: int) -> PreparedAttention:
    tokens, positions, rows, blocks, places = [], [], [], [], []
    flat = 0
    for row, (start, query_len) in enumerate(zip(step.starts, step.query_lens, strict=True)):
        for first in range(0, query_len, BLOCK):
            count = min(BLOCK, query_len - first)
            pad = BLOCK - count
            places.extend(range(len(tokens), len(tokens) + count))
            tokens.extend([*range(flat + first, flat + first + count), *([flat + first] * pad)])
            positions.extend([*range(start + first, start + first + count), *([-1] * pad)])
            rows.append(row)
            blocks.append(Block(start + first, start + first + count - 1))
        flat += query_len
    device = pages_RP.device
    place_N = torch.tensor(places, device=device)
    position_BQ = torch.tensor(positions, device=device).view(-1, BLOCK)
    pages_BP = pages_RP.index_select(0, torch.tensor(rows, device=device))
    position_N = position_BQ.view(-1).index_select(0, place_N)
    return PreparedAttention(
        token_BQ=torch.tensor(tokens, device=device).view(-1, BLOCK),
        place_N=place_N,
        write_page_N=pages_BP[place_N // BLOCK, position_N // page_size],
        write_offset_N=position_N % page_size,
        blocks=tuple(blocks),
        position_BQ=position_BQ,
        pages_BP=pages_BP,
        page_size=page_size,
        groups={},
        rows=step,
        pages_RP=pages_RP,
    )


def write(cache: Tensor, x_NHD: Tensor, prepared: PreparedAttention) -> None:
    """Stores one vector per token and head. `cache` is [pages, heads, page_size, D padded]."""
    missing = cache.shape[-1] - x_NHD.shape[-1]
    if missing:
        x_NHD = F.pad(x_NHD, (0, missing))
    cache[prepared.write_page_N, :, prepared.write_offset_N] = x_NHD.to(cache.dtype)


def attend(
    q_NHD: Tensor,
    keys: Tensor,
    values: Tensor,
    prepared: PreparedAttention,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes softmax(q kᵀ) v over each token's own positions 0…its own, or the last `window` of them; queries come
    scaled. A head's sink is one more score, of a key that has no value."""
    num_tokens, num_heads, head_dim = q_NHD.shape
    missing = keys.shape[-1] - head_dim
    if missing:
        q_NHD = F.pad(q_NHD, (0, missing))
    q_BQHD = q_NHD[prepared.token_BQ]
    groups = prepared.windowed(window)
    parts = [_attend_group(q_BQHD[group.blocks], keys, values, group, sinks_H) for group in groups]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    out = out.flatten(0, 1).index_select(0, prepared.place_N)
    return out[..., :head_dim].reshape(num_tokens, num_heads, head_dim)


def _attend_group(
    q_BQHD: Tensor, keys: Tensor, values: Tensor, group: BlockGroup, sinks_H: Tensor | None
) -> Tensor:
    num_blocks, _, num_heads, head_dim = q_BQHD.shape
    num_kv, page_size = keys.shape[1:3]
    per_kv = num_heads // num_kv
    q = q_BQHD.view(num_blocks, BLOCK, num_kv, per_kv, head_dim).transpose(1, 2)
    q = q.reshape(num_blocks, 1, num_kv, BLOCK * per_kv, head_dim)
    k = keys[group.pages_BP].to(q.dtype)  # [B, P, Hkv, S, D]
    v = values[group.pages_BP].to(q.dtype).masked_fill_(group.unwritten, 0.0)

    scores = matmul(q, k.transpose(-1, -2))  # [B, P, Hkv, Q·G, S]
    scores.view(*scores.shape[:3], BLOCK, per_kv, page_size).masked_fill_(group.hidden, -torch.inf)
    top = scores.amax(dim=(1, 4), keepdim=True).clamp_(min=torch.finfo(q.dtype).min)
    sinks = None
    if sinks_H is not None:
        sinks = sinks_H.to(q.dtype).view(num_kv, 1, per_kv, 1).expand(-1, BLOCK, -1, -1).flatten(1, 2)
        top = top.maximum(sinks)
    weights = scores.sub_(top).exp_()
    total = _sum_pages(weights.sum(-1, keepdim=True))
    if sinks is not None:
        total += (sinks - top[:, 0]).exp_()
    out = _sum_pages(matmul(weights, v)) / total
    return out.view(num_blocks, num_kv, BLOCK, per_kv, head_dim).transpose(1, 2).flatten(2, 3)


def _sum_pages(parts_BP: Tensor) -> Tensor:
    """Adds dimension 1 in order: trailing zeros then leave the sum as it is, which `sum` does not promise."""
    total = parts_BP[:, 0]
    for page in range(1, parts_BP.shape[1]):
        total = total + parts_BP[:, page]
    return total
