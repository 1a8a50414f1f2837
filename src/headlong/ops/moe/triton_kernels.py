"""The kernels of experts: routing, grouping, products of routed experts alone, and a token's sum.

A pair is a token and one of its experts; pair p belongs to token p // A. Pairs are sorted by expert on the device, and
up to sixteen of one expert are a place: a program multiplies a tile of that expert's weights with the place's pairs,
M columns wide, which are as many, or fewer where no expert can have more. How many places there are only the device
knows, so there are programs for as many as there can be, and those of empty places end at once. Tiles are cut by the
weights' shape alone and each sum has one order, so a token's bits do not depend on its company.

N tokens, P pairs, E experts, A experts a token, D inputs, O outputs; a tile has B outputs, a step C columns.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from headlong.ops.linear.triton_gemm import add_step, at_rows
from headlong.ops.norm.triton import inverse_lengths, put_half_normed, squares_of_tokens
from headlong.ops.triton_launch import (
    launch_dependents,
    launch_dependents_and_wait,
    wait_for_previous_kernel,
    zero_after_previous_kernel,
)

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def settle(pairs, places, own, expert, before, rank, count, there, SPARSE: tl.constexpr, M: tl.constexpr):
    """Puts pairs where they belong: `before` have a lower expert, and of `count` with the same one `rank` come first.
    What begins a place says its expert, its first pair among the sorted and their number. Place numbers have gaps:
    SPARSE, a place for each pair, of which some are empty; else `places` must come as zeros."""
    tl.store(pairs + before + rank, own, mask=there)
    begins = rank % M == 0
    if SPARSE:
        place = before + rank
    else:
        place = before // M + rank // M + expert
        there = there & begins
    tl.store(places + 3 * place, expert, mask=there)
    tl.store(places + 3 * place + 1, before + rank, mask=there)
    tl.store(places + 3 * place + 2, tl.where(begins, tl.minimum(count - rank, M), 0), mask=there)


@triton.jit(do_not_specialize=["num_tokens"])
def route(
    logits, experts, shares, pairs, places, num_tokens,
    E: tl.constexpr, A: tl.constexpr, RANKS: tl.constexpr, NORMALISE: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The A likeliest experts of T tokens, of equal ones the first, and their shares of the sum. Logit E is the shared
    expert's gate: its share comes last, and, where RANKS is A + 1, it is a routed expert with the number E. Where these
    are all tokens and there are `places`, they are grouped as well."""
    launch_dependents_and_wait()
    token_T = tl.program_id(0) * T + tl.arange(0, T)
    there_T = token_T < num_tokens
    logits_T = logits + token_T.to(tl.int64) * (E + 1)
    expert = tl.arange(0, BLOCK)[None, :]
    inside = (expert < E) & there_T[:, None]
    logit = tl.load(logits_T[:, None] + expert, mask=inside, other=-1e30)
    weight = tl.exp(logit - tl.max(logit, 1)[:, None])
    weight = weight / tl.sum(tl.where(expert < E, weight, 0.0), 1)[:, None]
    # A weight is not negative: its bits are a number that orders them, and of such a warp finds the largest at once.
    key = tl.where(expert < E, weight.to(tl.int32, bitcast=True), LOWEST)
    rank = tl.arange(0, R)[None, :]
    chosen = tl.full((T, R), E, tl.int32)
    share = tl.zeros((T, R), tl.float32)
    for place in range(A):
        best = tl.max(key, 1)[:, None]
        which = tl.min(tl.where(key == best, expert, BLOCK), 1)[:, None]
        chosen = tl.where(rank == place, which, chosen)
        share = tl.where(rank == place, best.to(tl.float32, bitcast=True), share)
        key = tl.where(expert == which, LOWEST, key)
    if NORMALISE:
        share = share / tl.sum(share, 1)[:, None]
    gate_T = tl.load(logits_T + E, mask=there_T, other=0.0)
    share = tl.where(rank == A, (1.0 / (1.0 + tl.exp(-gate_T)))[:, None], share)
    pair = token_T[:, None] * RANKS + rank
    valid = there_T[:, None] & (rank < RANKS)
    tl.store(experts + pair, chosen, mask=valid)
    at = token_T.to(tl.int64)[:, None] * (A + 1) + rank
    tl.store(shares + at, share, mask=there_T[:, None] & (rank <= A))
    if places is not None:
        own = pair.reshape(T * R)
        mine = tl.where(valid, chosen, 2147483647).reshape(T * R)
        same = mine[None, :] == mine[:, None]
        tl.static_assert(T * R < 256)
        # Three sums in one, a byte each: pairs of lower experts, earlier ones of the same, all of the same.
        earlier, lower = same & (own[None, :] < own[:, None]), mine[None, :] < mine[:, None]
        sums = tl.sum(lower.to(tl.int32) + (earlier.to(tl.int32) << 8) + (same.to(tl.int32) << 16), 1)
        settle(pairs, places, own, mine, sums & 255, sums >> 8 & 255, sums >> 16, mine <= E, True, M)


@triton.jit(do_not_specialize=["num_pairs"])
def group(
    experts, pairs, places, num_pairs,
    SPARSE: tl.constexpr, M: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorts pairs by expert."""
    launch_dependents_and_wait()
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    there = own < num_pairs
    expert = tl.load(experts + own, mask=there, other=0)
    before = tl.zeros((OWN,), tl.int32)
    rank = tl.zeros((OWN,), tl.int32)
    count = tl.zeros((OWN,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        other = first + tl.arange(0, BLOCK)
        of_other = tl.load(experts + other, mask=other < num_pairs, other=2147483647)
        same = of_other[None, :] == expert[:, None]
        before += tl.sum((of_other[None, :] < expert[:, None]).to(tl.int32), 1)
        rank += tl.sum((same & (other[None, :] < own[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    settle(pairs, places, own, expert, before, rank, count, there, SPARSE, M)


# One step is a loop like any other: unrolled, Triton 3.6 computes it wrongly for bfloat16 with offsets.
@triton.jit(do_not_specialize=["num_steps", "length_parts"])
def multiply(
    x, codes, scales, offsets, row_scales, places, pairs, out, squares, length_eps, length_parts,
    num_outs, num_ins, row_stride, expert_stride, expert_scales, scale_stride, num_steps,
    DTYPE: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    TOGETHER: tl.constexpr, SHARING: tl.constexpr, PARTS: tl.constexpr, KNOWN: tl.constexpr,
    ONE: tl.constexpr, LENGTH: tl.constexpr, B: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's outputs for the pairs of a place. SHARING pairs, one after the other, have one input, by
    whose length sums are divided where there are `squares`; all pairs have it where there is but ONE.
    Two PARTS are gates, then as many ups, and what is stored is silu(gate) · up. KNOWN places were there before the
    kernel before began, and it waited before it let this one start: only the inputs have to be waited for."""
    if not KNOWN:
        wait_for_previous_kernel()
    launch_dependents()
    place = places + 3 * tl.program_id(1)
    expert, first, count = tl.load(place).to(tl.int64), tl.load(place + 1), tl.load(place + 2)
    # No expert is below 0; but asked like this, all three are on their way before the first is looked at.
    if (count == 0) | (expert < 0) | (first < 0):
        wait_for_previous_kernel()
        return
    there_M = tl.arange(0, M) < count
    pairs_M = tl.load(pairs + first + tl.arange(0, M), mask=there_M, other=0).to(tl.int64)
    # Gate and up of one place lie side by side. Outputs past the last are computed from the last one's weights and not
    # stored.
    size = num_outs // PARTS
    row_B = tl.arange(0, B)
    outs_B = tl.minimum(tl.program_id(0) * (B // PARTS) + row_B // PARTS, size - 1) + row_B % PARTS * size
    columns_C = tl.arange(0, C)
    codes_at = codes + expert * expert_stride
    codes_at = codes_at + (at_rows(outs_B, row_stride, TOGETHER, C)[:, None] + columns_C[None, :])
    # Which is known without a look at the pairs if there is but one.
    token_M = tl.zeros((M,), tl.int64) if ONE else pairs_M // SHARING
    x_CM_at = x + token_M[None, :] * num_ins + columns_C[:, None]
    if scales is not None:
        scales += expert * expert_scales
    if offsets is not None:
        offsets += expert * expert_scales
    tl.static_assert(squares is None or not KNOWN)  # since they are read before the second wait
    squares_PM = squares_of_tokens(squares, token_M, there_M, length_parts, LENGTH, M)
    acc_BM = tl.zeros((B, M), tl.float32)
    for step in range(num_steps):
        if EVEN or HALVES == 2:
            codes_BC = tl.load(codes_at + step * (TOGETHER * C))
        else:
            codes_BC = tl.load(codes_at + step * C, mask=(step * C + columns_C < num_ins)[None, :], other=0.0)
        acc_BM = add_step(
            acc_BM, x_CM_at + (zero_after_previous_kernel(step) if KNOWN else 0), codes_BC, scales, offsets,
            outs_B, there_M, step, num_outs, num_ins, scale_stride,
            DTYPE, CODE, ZERO, HALVES, GROUP, ROWS, EVEN, B, C, M,
        )  # fmt: skip
    wait_for_previous_kernel()
    if row_scales is not None:
        acc_BM *= tl.load(row_scales + expert * num_outs + outs_B)[:, None]
    if squares is not None:
        acc_BM *= inverse_lengths(squares_PM, length_eps, LENGTH, M)
    if PARTS == 2:
        gate_BM, up_BM = tl.split(acc_BM.reshape(B // 2, 2, M).permute(0, 2, 1))
        acc_BM = gate_BM / (1.0 + tl.exp(-gate_BM)) * up_BM
    places_B = tl.program_id(0) * (B // PARTS) + tl.arange(0, B // PARTS)
    at = out + pairs_M[None, :] * size + places_B[:, None]
    tl.store(at, acc_BM, mask=(places_B < size)[:, None] & there_M[None, :])


@triton.jit
def combine(
    y, shares, shared, residual, out, norm_weight, normed, normed_squares, normed_parts, size,
    A: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A token's experts by rank, each times its share, the shared one last; then what it is added to, and the first
    half of its norm."""
    launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    outs = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = outs < size
    weight_W = tl.zeros((WIDTH,), tl.float32)
    if norm_weight is not None:
        weight_W = tl.load(norm_weight + outs, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous_kernel()
    total = tl.zeros((WIDTH,), tl.float32)
    for rank in tl.static_range(RANKS):
        share = tl.load(shares + token * (A + 1) + rank)
        total += share * tl.load(y + (token * RANKS + rank) * size + outs, mask=inside, other=0.0)
    at = token * size + outs
    if shared is not None:
        total += tl.load(shares + token * (A + 1) + A) * tl.load(shared + at, mask=inside, other=0.0)
    total += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, total, mask=inside)
    if norm_weight is not None:
        put_half_normed(
            total,
            outs,
            inside,
            token,
            tl.program_id(0),
            weight_W,
            normed,
            normed_squares,
            size,
            normed_parts,
            WIDTH,
        )
