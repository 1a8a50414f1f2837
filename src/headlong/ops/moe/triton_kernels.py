"""The kernels of a mixture of experts: routing, grouping, the grouped GEMM of routed experts alone, and a token's
sum.

A pair is a token and one of its experts. Pairs are sorted by expert on the device, and up to BLOCK_M of one expert
are a block: a program of the grouped GEMM multiplies a tile of that expert's weight with the block's pairs, which are
as many, or fewer where no expert can have more. How many blocks there are only the device knows, so there are
programs for as many as there can be, and those of empty blocks end at once. Tiles are cut by the weights' shape alone
and each sum has one order, so a token's bits do not depend on its company.

Legend. E experts, A active experts of a token, RANKS of its pairs: A, or A + 1 where the shared expert is among them.
  logits_ptr [tokens, E], or E + 1 where GATED: the router's, then the shared expert's gate; bias_ptr [E]: what is
  added to scores before experts are chosen; experts_ptr [pairs]: the expert of each pair;
  probs_ptr [tokens, A + 1]: by what a token's experts are multiplied, the shared one's last.
  sorted_pairs_ptr [pairs]: pairs by expert; blocks_ptr [blocks, 3]: expert, first of its sorted pairs, and their
  number.
  GEMM arguments as in triton_gemm.py, of which the weight's have the experts as their first dimension:
  stride_expert_codes and stride_expert_scales lead from one to the next; bias_ptr [E, outputs] is added to sums.
  y_ptr [pairs, size]: what each pair's expert gives; shared_ptr, residual_ptr, out_ptr [tokens, size].
Tiles' names end in the letters of their dimensions: N outputs, K inputs, M pairs; T tokens, R ranks.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from headlong.ops.linear.triton_gemm import code_offsets, gemm_step, load_codes
from headlong.ops.norm.triton import inverse_norms, load_squares_of_tokens, store_partial_norm
from headlong.ops.silu_mul.triton import activated
from headlong.ops.triton_launch import (
    launch_dependents,
    launch_dependents_and_wait,
    wait_for_previous_kernel,
    zero_after_previous_kernel,
)

LOWEST = tl.constexpr(-(2**31))
SOFTMAX, SIGMOID, SQRT_SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How logits become scores."""


@triton.jit
def store_sorted_pairs(
    sorted_pairs_ptr,
    blocks_ptr,
    pair,
    expert,
    before,
    rank,
    count,
    mask,
    SPARSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Stores pairs where they belong in the order of experts: `before` pairs have a lower expert, and of `count` with
    the same one `rank` come first. Where a block begins, its entry says its expert, its first sorted pair and their
    number. Block numbers have gaps: SPARSE, a block for each pair, of which some are empty; else `blocks` must come
    as zeros."""
    tl.store(sorted_pairs_ptr + before + rank, pair, mask=mask)
    begins = rank % BLOCK_M == 0
    if SPARSE:
        block = before + rank
    else:
        block = before // BLOCK_M + rank // BLOCK_M + expert
        mask = mask & begins
    tl.store(blocks_ptr + 3 * block, expert, mask=mask)
    tl.store(blocks_ptr + 3 * block + 1, before + rank, mask=mask)
    tl.store(blocks_ptr + 3 * block + 2, tl.where(begins, tl.minimum(count - rank, BLOCK_M), 0), mask=mask)


@triton.jit
def ordered(bits):
    """Turns the bits of a float into a number that orders them, and back. No float's is LOWEST."""
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def first_largest(key, number, END: tl.constexpr):
    """The largest key of each row, and the first number that has it."""
    largest = tl.max(key, 1)[:, None]
    return largest, tl.min(tl.where(key == largest, number, END), 1)[:, None]


@triton.jit
def keep_groups(
    key, expert, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The ordered choices, without those of groups that are left out: a group counts as much as its two best."""
    group, own_group = tl.arange(0, BLOCK_E)[None, :], expert // (E // GROUPS)
    sums = tl.full(key.shape, LOWEST, tl.int32)
    for g in range(GROUPS):
        inside = tl.where(own_group == g, key, LOWEST)
        best, which = first_largest(inside, expert, BLOCK_E)
        second = tl.max(tl.where(expert == which, LOWEST, inside), 1)[:, None]
        total = ordered(best).to(tl.float32, bitcast=True) + ordered(second).to(tl.float32, bitcast=True)
        sums = tl.where(group == g, ordered((total + 0.0).to(tl.int32, bitcast=True)), sums)
    kept = expert < 0
    for _ in range(KEPT):
        _, which = first_largest(sums, group, BLOCK_E)
        kept = kept | (own_group == which)
        sums = tl.where(group == which, LOWEST, sums)
    return tl.where(kept, key, LOWEST)


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr, bias_ptr, given_ptr, experts_ptr, probs_ptr, sorted_pairs_ptr, blocks_ptr, num_tokens,
    E: tl.constexpr, A: tl.constexpr, RANKS: tl.constexpr, NORMALISE: tl.constexpr, SCORES: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Routing of BLOCK_T tokens as routing.py defines it: A experts of each, and what they count. Logit E is the shared
    expert's gate, if it is GATED: its probability comes last, and, where RANKS is A + 1, it is a routed expert with the
    number E. Where these are all tokens and there are `blocks`, pairs are grouped as well. Experts that are `given`
    [num_tokens, A] are not looked for."""
    launch_dependents_and_wait()
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < num_tokens
    logits_ptrs_T = logits_ptr + token_T.to(tl.int64) * (E + GATED)
    expert = tl.arange(0, BLOCK_E)[None, :]
    mask = (expert < E) & is_token_T[:, None]
    logit = tl.load(logits_ptrs_T[:, None] + expert, mask=mask, other=-1e30 if SCORES == SOFTMAX else 0.0)
    if SCORES == SIGMOID:
        prob = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORES == SQRT_SOFTPLUS:
        small = tl.exp(-tl.abs(logit))
        one_more = 1.0 + small  # what it is rounded by, the quotient makes good
        rounded = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
        log = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / rounded))
        prob = tl.sqrt(tl.maximum(logit, 0.0) + log)
    else:
        prob = tl.exp(logit - tl.max(logit, 1)[:, None])
        prob = prob / tl.sum(tl.where(expert < E, prob, 0.0), 1)[:, None]
    # A probability is not negative: its bits are a number that orders them, and of such a warp finds the largest at
    # once. With a bias it may be, and -0 is to be 0.
    key = prob.to(tl.int32, bitcast=True)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=expert < E, other=0.0)
        key = ordered((prob + bias + 0.0).to(tl.int32, bitcast=True))
    key = tl.where(expert < E, key, LOWEST)
    if KEPT < GROUPS:
        key = keep_groups(key, expert, E, GROUPS, KEPT, BLOCK_E)
    rank = tl.arange(0, BLOCK_R)[None, :]
    chosen = tl.full((BLOCK_T, BLOCK_R), E, tl.int32)
    chosen_prob = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for nth in range(A):
        if given_ptr is None:
            largest, which = first_largest(key, expert, BLOCK_E)
        else:
            given_ptrs_T = given_ptr + token_T.to(tl.int64) * A + nth
            which = tl.load(given_ptrs_T, mask=is_token_T, other=0).to(tl.int32)[:, None]
            largest = which  # nobody reads it
        if (bias_ptr is None) & (given_ptr is None):
            of_largest = largest.to(tl.float32, bitcast=True)
        else:
            of_largest = tl.sum(tl.where(expert == which, prob, 0.0), 1)[:, None]
        chosen = tl.where(rank == nth, which, chosen)
        chosen_prob = tl.where(rank == nth, of_largest, chosen_prob)
        key = tl.where(expert == which, LOWEST, key)
    if NORMALISE:
        total_T = tl.sum(chosen_prob, 1)
        chosen_prob = chosen_prob / (total_T if SCORES == SOFTMAX else total_T + 1e-20)[:, None]
    if SCALE != 1.0:
        chosen_prob = chosen_prob * SCALE
    if GATED:
        gate_T = tl.load(logits_ptrs_T + E, mask=is_token_T, other=0.0)
        chosen_prob = tl.where(rank == A, (1.0 / (1.0 + tl.exp(-gate_T)))[:, None], chosen_prob)
    else:
        chosen_prob = tl.where(rank == A, 1.0, chosen_prob)
    pair = token_T[:, None] * RANKS + rank
    valid = is_token_T[:, None] & (rank < RANKS)
    tl.store(experts_ptr + pair, chosen, mask=valid)
    probs_ptrs = probs_ptr + token_T.to(tl.int64)[:, None] * (A + 1) + rank
    tl.store(probs_ptrs, chosen_prob, mask=is_token_T[:, None] & (rank <= A))
    if blocks_ptr is not None:
        pair = pair.reshape(BLOCK_T * BLOCK_R)
        own_expert = tl.where(valid, chosen, 2147483647).reshape(BLOCK_T * BLOCK_R)
        same = own_expert[None, :] == own_expert[:, None]
        tl.static_assert(BLOCK_T * BLOCK_R < 256)
        # Three sums in one, a byte each: pairs of lower experts, earlier ones of the same, all of the same.
        earlier, lower = same & (pair[None, :] < pair[:, None]), own_expert[None, :] < own_expert[:, None]
        sums = tl.sum(lower.to(tl.int32) + (earlier.to(tl.int32) << 8) + (same.to(tl.int32) << 16), 1)
        store_sorted_pairs(
            sorted_pairs_ptr, blocks_ptr, pair, own_expert, sums & 255, sums >> 8 & 255, sums >> 16, own_expert <= E,
            True, BLOCK_M,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(
    experts_ptr, sorted_pairs_ptr, blocks_ptr, num_pairs,
    SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorts BLOCK_P pairs by expert: each is compared with all pairs, BLOCK of these at a time."""
    launch_dependents_and_wait()
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    mask = pair < num_pairs
    expert = tl.load(experts_ptr + pair, mask=mask, other=0)
    before = tl.zeros((BLOCK_P,), tl.int32)
    rank = tl.zeros((BLOCK_P,), tl.int32)
    count = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        other = first + tl.arange(0, BLOCK)
        of_other = tl.load(experts_ptr + other, mask=other < num_pairs, other=2147483647)
        same = of_other[None, :] == expert[:, None]
        before += tl.sum((of_other[None, :] < expert[:, None]).to(tl.int32), 1)
        rank += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
        count += tl.sum(same.to(tl.int32), 1)
    store_sorted_pairs(sorted_pairs_ptr, blocks_ptr, pair, expert, before, rank, count, mask, SPARSE, BLOCK_M)


# One step is a loop like any other: unrolled, Triton 3.6 computes it wrongly for bfloat16 with offsets.
@triton.jit(do_not_specialize=["num_steps", "num_squares"])
def grouped_gemm_kernel(
    x_ptr, codes_ptr, scales_ptr, offsets_ptr, row_scales_ptr, bias_ptr, blocks_ptr, sorted_pairs_ptr, out_ptr,
    squares_ptr, norm_eps, num_squares,
    num_outs, num_ins, stride_codes, stride_expert_codes, stride_expert_scales, stride_scales, num_steps,
    DTYPE: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr, PAIRS_PER_INPUT: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCKS_READY: tl.constexpr, ONE_INPUT: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Multiplies a tile of an expert's outputs for the pairs of a block. PAIRS_PER_INPUT pairs, one after the other,
    have one input, by whose norm sums are divided where there are `squares`; with ONE_INPUT all pairs have the same.
    Two PARTS are gates, then as many ups, and what ACTIVATION makes of them is stored. BLOCKS_READY promises that the
    blocks were there before the kernel before this one began, and that it waited before it launched its dependents:
    only the inputs have to be waited for."""
    INTERLEAVE: tl.constexpr = LAYOUT.interleave
    if not BLOCKS_READY:
        wait_for_previous_kernel()
    launch_dependents()
    block_ptr = blocks_ptr + 3 * tl.program_id(1)
    expert, first, count = tl.load(block_ptr).to(tl.int64), tl.load(block_ptr + 1), tl.load(block_ptr + 2)
    # No expert is below 0; but asked like this, all three are on their way before the first is looked at.
    if (count == 0) | (expert < 0) | (first < 0):
        wait_for_previous_kernel()
        return
    is_pair_M = tl.arange(0, BLOCK_M) < count
    pair_M = tl.load(sorted_pairs_ptr + first + tl.arange(0, BLOCK_M), mask=is_pair_M, other=0).to(tl.int64)
    # A gate and the up it belongs to lie side by side. Outputs past the last are computed from the last one's weights
    # and not stored.
    part_outs = num_outs // PARTS
    first_out, row_N = tl.program_id(0) * (BLOCK_N // PARTS), tl.arange(0, BLOCK_N)
    outs_N = tl.minimum(first_out + row_N // PARTS, part_outs - 1) + row_N % PARTS * part_outs
    column_K = tl.arange(0, BLOCK_K)
    code_ptrs_NK = codes_ptr + expert * stride_expert_codes
    code_ptrs_NK = code_ptrs_NK + (
        code_offsets(outs_N, stride_codes, INTERLEAVE, BLOCK_K)[:, None] + column_K[None, :]
    )
    # Which is known without a look at the pairs if there is but one.
    token_M = tl.zeros((BLOCK_M,), tl.int64) if ONE_INPUT else pair_M // PAIRS_PER_INPUT
    x_ptrs_KM = x_ptr + token_M[None, :] * num_ins + column_K[:, None]
    if scales_ptr is not None:
        scales_ptr += expert * stride_expert_scales
    if offsets_ptr is not None:
        offsets_ptr += expert * stride_expert_scales
    tl.static_assert(squares_ptr is None or not BLOCKS_READY)  # since they are read before the second wait
    squares_SM = load_squares_of_tokens(squares_ptr, token_M, is_pair_M, num_squares, BLOCK_SQUARES, BLOCK_M)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(num_steps):
        codes_NK = load_codes(code_ptrs_NK, step, column_K, num_ins, LAYOUT, EVEN_K, BLOCK_K)
        acc_NM = gemm_step(
            acc_NM, x_ptrs_KM + (zero_after_previous_kernel(step) if BLOCKS_READY else 0), codes_NK,
            scales_ptr, offsets_ptr, outs_N, is_pair_M, step, num_outs, num_ins, stride_scales,
            DTYPE, LAYOUT, EVEN_K, BLOCK_N, BLOCK_K, BLOCK_M,
        )  # fmt: skip
    wait_for_previous_kernel()
    if row_scales_ptr is not None:
        acc_NM *= tl.load(row_scales_ptr + expert * num_outs + outs_N)[:, None]
    if squares_ptr is not None:
        acc_NM *= inverse_norms(squares_SM, norm_eps, BLOCK_SQUARES, BLOCK_M)
    if bias_ptr is not None:
        acc_NM += tl.load(bias_ptr + expert * num_outs + outs_N)[:, None]
    if PARTS == 2:
        gate_NM, up_NM = tl.split(acc_NM.reshape(BLOCK_N // 2, 2, BLOCK_M).permute(0, 2, 1))
        acc_NM = activated(gate_NM, up_NM, ACTIVATION)
    out_N = tl.program_id(0) * (BLOCK_N // PARTS) + tl.arange(0, BLOCK_N // PARTS)
    out_ptrs = out_ptr + pair_M[None, :] * part_outs + out_N[:, None]
    tl.store(out_ptrs, acc_NM, mask=(out_N < part_outs)[:, None] & is_pair_M[None, :])


@triton.jit
def combine_experts_kernel(
    y_ptr, probs_ptr, shared_ptr, residual_ptr, out_ptr,
    norm_weight_ptr, normed_ptr, normed_squares_ptr, num_normed_squares, size,
    A: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines BLOCK outputs of a token: its experts' by rank, each times its probability, the shared one's last, plus
    the residual; and the partial norm of that where there is a norm's weight."""
    launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    outs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = outs < size
    norm_weight = tl.zeros((BLOCK,), tl.float32)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + outs, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous_kernel()
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        prob = tl.load(probs_ptr + token * (A + 1) + rank)
        total += prob * tl.load(y_ptr + (token * RANKS + rank) * size + outs, mask=mask, other=0.0)
    offsets = token * size + outs
    if shared_ptr is not None:
        prob = tl.load(probs_ptr + token * (A + 1) + A)
        total += prob * tl.load(shared_ptr + offsets, mask=mask, other=0.0)
    total += tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total, mask=mask)
    if norm_weight_ptr is not None:
        store_partial_norm(
            total, outs, mask, token, tl.program_id(0), norm_weight, normed_ptr, normed_squares_ptr,
            size, num_normed_squares, BLOCK,
        )  # fmt: skip
