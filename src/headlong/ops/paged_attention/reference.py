"""Causal attention of ragged rows over paged keys and values, in plain torch, batch-invariant.

A query token's bits depend on its own past alone: queries go through matmuls of one fixed shape (blocks of
`BLOCK` tokens against one page), and the pages' parts are added in page order. Padding adds exact zeros.
Derivation and layout: README.md beside this file.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 4
HEAD_ALIGN = 16
MAX_GATHER = 1 << 24
"""Elements of keys gathered at a time; bounds the memory of long prompts."""


@dataclass(frozen=True)
class AttentionPlan:
    """Where a step's tokens lie. B blocks of up to `BLOCK` query tokens; one row may own several."""

    token_BQ: Tensor
    """Flat index of each query; padding repeats a token of the block."""
    position_BQ: Tensor
    """-1 for padding."""
    pages_BP: Tensor
    place_N: Tensor
    """Where flat token n stands in the flattened [B, Q]."""
    write_page_N: Tensor
    write_offset_N: Tensor
    num_pages: tuple[int, ...]
    """Pages each block must look at."""

    def shifted(self, by: int, pages_NP: Tensor, page_size: int) -> "AttentionPlan":
        """The same rows `by` positions further on; for plans of one token a row."""
        position_N = self.position_BQ[:, 0] + by
        page_N = pages_NP.gather(1, (position_N // page_size)[:, None])[:, 0]
        moved = torch.where(self.position_BQ < 0, self.position_BQ, self.position_BQ + by)
        last = pages_NP.shape[1]
        return replace(
            self,
            position_BQ=moved,
            write_page_N=page_N,
            write_offset_N=position_N % page_size,
            num_pages=(last,) * len(self.num_pages),
        )


def plan(
    starts: tuple[int, ...], query_lens: tuple[int, ...], pages_RP: Tensor, page_size: int
) -> AttentionPlan:
    tokens, positions, rows, num_pages, places = [], [], [], [], []
    flat = 0
    for row, (start, query_len) in enumerate(zip(starts, query_lens, strict=True)):
        for first in range(0, query_len, BLOCK):
            count = min(BLOCK, query_len - first)
            pad = BLOCK - count
            places.extend(range(len(tokens), len(tokens) + count))
            tokens.extend([*range(flat + first, flat + first + count), *([flat + first] * pad)])
            positions.extend([*range(start + first, start + first + count), *([-1] * pad)])
            rows.append(row)
            num_pages.append((start + first + count - 1) // page_size + 1)
        flat += query_len
    device = pages_RP.device
    place_N = torch.tensor(places, device=device)
    position_M = torch.tensor(positions, device=device)
    pages_BP = pages_RP[torch.tensor(rows, device=device)]
    position_N = position_M[place_N]
    block_N = place_N // BLOCK
    return AttentionPlan(
        token_BQ=torch.tensor(tokens, device=device).view(-1, BLOCK),
        position_BQ=position_M.view(-1, BLOCK),
        pages_BP=pages_BP,
        place_N=place_N,
        write_page_N=pages_BP[block_N, position_N // page_size],
        write_offset_N=position_N % page_size,
        num_pages=tuple(num_pages),
    )


def write(cache: Tensor, x_NHD: Tensor, plan: AttentionPlan) -> None:
    """Stores one vector per token and head. `cache` is [pages, heads, page_size, D padded]."""
    missing = cache.shape[-1] - x_NHD.shape[-1]
    if missing:
        x_NHD = F.pad(x_NHD, (0, missing))
    cache[plan.write_page_N, :, plan.write_offset_N] = x_NHD.to(cache.dtype)


def attend(q_NHD: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v over each token's own positions 0…its own."""
    num_tokens, num_heads, head_dim = q_NHD.shape
    missing = keys.shape[-1] - head_dim
    if missing:
        q_NHD = F.pad(q_NHD, (0, missing))
    q_BQHD = (q_NHD * scale)[plan.token_BQ]
    parts, first = [], 0
    while first < len(plan.num_pages):
        first, last, pages = _next_group(plan.num_pages, first, keys[0].numel())
        group = slice(first, last)
        parts.append(
            _attend_blocks(q_BQHD[group], keys, values, plan.pages_BP[group, :pages], plan.position_BQ[group])
        )
        first = last
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.flatten(0, 1)[plan.place_N][..., :head_dim].reshape(num_tokens, num_heads, head_dim)


def _next_group(num_pages: tuple[int, ...], first: int, page_elements: int) -> tuple[int, int, int]:
    """As many blocks from `first` as may gather their pages at once, and the most pages among them."""
    last, pages = first, 0
    while last < len(num_pages):
        wider = max(pages, num_pages[last])
        if last > first and wider * (last + 1 - first) * page_elements > MAX_GATHER:
            break
        last, pages = last + 1, wider
    return first, last, pages


def _attend_blocks(
    q_BQHD: Tensor, keys: Tensor, values: Tensor, pages_BP: Tensor, position_BQ: Tensor
) -> Tensor:
    num_blocks, block, num_heads, head_dim = q_BQHD.shape
    num_kv, page_size = keys.shape[1:3]
    dtype = q_BQHD.dtype
    q = q_BQHD.view(num_blocks, block, num_kv, -1, head_dim).transpose(1, 2)
    q = q.reshape(num_blocks, 1, num_kv, -1, head_dim)  # [B, 1, Hkv, Q·G, D]
    k, v = keys[pages_BP].to(dtype), values[pages_BP].to(dtype)  # [B, P, Hkv, page, D]

    position_PS = torch.arange(pages_BP.shape[1] * page_size, device=q.device).view(-1, 1, 1, page_size)
    group = num_heads // num_kv
    query_position = position_BQ.repeat_interleave(group, dim=1)[:, None, None, :, None]
    hidden = position_PS > query_position  # [B, P, 1, Q·G, page]
    written = position_PS.view(1, -1, 1, page_size, 1) <= position_BQ.amax(1).view(-1, 1, 1, 1, 1)
    v = v.masked_fill(~written, 0.0)  # 0 · NaN from a page's former owner would be NaN

    scores = (q @ k.transpose(-1, -2)).masked_fill_(hidden, -torch.inf)
    top = scores.amax(dim=(1, 4), keepdim=True).clamp_(min=torch.finfo(dtype).min)
    weights = torch.exp(scores.sub_(top))
    total = _sum_pages(weights.sum(-1, keepdim=True))
    out = _sum_pages(weights @ v) / total  # [B, Hkv, Q·G, D]
    return out.view(num_blocks, num_kv, block, group, head_dim).transpose(1, 2).flatten(2, 3)


def _sum_pages(parts_BP: Tensor) -> Tensor:
    """Adds dimension 1 in order: trailing zeros then leave the sum as it is, which `sum` does not promise."""
    total = parts_BP[:, 0]
    for page in range(1, parts_BP.shape[1]):
        total = total + parts_BP[:, page]
    return total
