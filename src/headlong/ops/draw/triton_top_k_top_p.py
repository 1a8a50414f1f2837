# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Where a row's filters end: top-k and top-p keep the best tokens, down to some logit and, of equal ones, some index.

To find these without sorting a vocabulary, tokens are counted, and their weights summed, in bins by how far they are
below the best; only tokens of the bins that a filter may end in are compared. Their order is a whole number.

Noise spans 26: what is further below the best is never drawn, whatever a filter says of it. Bins reach to 32, and
what is beyond is left out. All of it weighs less than 1e-8 of the best token, and so much may be wrong with the
weights of a large vocabulary: they are whole numbers, so that it does not matter who adds first.

Legend. counts_ptr, weights_ptr [rows, BINS]: how many tokens a bin has, and what they weigh; orders_ptr: a list of
tokens by their order; tokens_ptr: such a list where LISTED, else a row of logits. by_count and by_weight: whether
top-k and top-p cut anything. BITS hold a token's index, SCALE is the best token's weight.
"""

import triton
import triton.language as tl

BINS, FINENESS = tl.constexpr(2048), tl.constexpr(64)
"""The number of bins, and how many of them go to a factor of e. The last one is for all tokens that are too far below
the best."""
ALL, NOTHING = tl.constexpr(-(1 << 62)), tl.constexpr(1 << 62)
"""Cuts that keep every token, and none."""


@triton.jit
def order_of(x, index, BITS: tl.constexpr):
    """A whole number that orders tokens: larger for larger logits, and for equal logits larger for the first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (signed << BITS) + ((1 << BITS) - 1 - index)


@triton.jit
def _logit(order, BITS: tl.constexpr):
    """The logit of a token of this order."""
    signed = (order >> BITS).to(tl.int32)
    return tl.where(signed < 0, signed ^ 0x7FFFFFFF, signed).to(tl.float32, bitcast=True)


@triton.jit
def below_top(x, top, temperature):
    """How far a logit is below the best one, after temperature."""
    return (top.to(tl.float64) - x.to(tl.float64)) / temperature


@triton.jit
def bin_of(below):
    """The bin of a token that is so far below the best."""
    return tl.minimum(below * FINENESS, BINS - 1.0).to(tl.int32)


@triton.jit
def weight_of(below, SCALE: tl.constexpr):
    """A token's share of softmax, up to a factor, as a whole number."""
    return (tl.exp(-below) * SCALE + 0.5).to(tl.int64)


@triton.jit
def _wanted_weight(top_p, weight):
    """The weight that the best tokens must hold for top-p; the very best stays in any case."""
    return tl.maximum(top_p * weight.to(tl.float64), 0.5)


@triton.jit
def bins_to_compare(counts_ptr, weights_ptr, row, top_k, top_p, by_count, by_weight):
    """Returns the bins whose tokens are compared, from the first to the last, and how many tokens these have; how many
    tokens there are before them, and with what weight; the weight of all; and whether top-k cuts anything. The last bin
    is behind all others where nothing is cut."""
    bin = tl.arange(0, BINS)
    count_B, weight_B = tl.load(counts_ptr + row * BINS + bin), tl.load(weights_ptr + row * BINS + bin)
    weight = tl.sum(weight_B, 0)
    last_k = tl.sum((tl.cumsum(count_B, 0) < top_k).to(tl.int32), 0)
    last_p = tl.sum((tl.cumsum(weight_B, 0).to(tl.float64) < _wanted_weight(top_p, weight)).to(tl.int32), 0)
    by_count = by_count & (last_k < BINS)
    last = tl.where(by_count, last_k, tl.where(by_weight, last_p, BINS))
    # What top-p keeps is a share of what top-k left, so where there are both all of that is compared.
    first = tl.where(by_count & by_weight, 0, last)
    before = bin < first
    number = tl.sum(tl.where(before | (bin > last), 0, count_B), 0)
    num_before = tl.sum(tl.where(before, count_B, 0), 0)
    weight_before = tl.sum(tl.where(before, weight_B, 0), 0)
    return first, last, number, num_before, weight_before, weight, by_count


@triton.jit
def cut_by_ranks(
    orders_ptr, number, num_before, weight_before, weight, top, temperature, top_k, top_p, by_count, by_weight,
    SCALE: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the order of the last token that stays, where at most SIZE are listed: each is compared with each."""
    place = tl.arange(0, SIZE)
    listed = place < number
    order = tl.load(orders_ptr + place, mask=listed, other=ALL)
    below = tl.where(listed, below_top(_logit(order, BITS), top, temperature), float("inf"))
    weight_T = weight_of(below, SCALE)
    # The same orders along the other dimension.
    other = tl.load(orders_ptr + place, mask=listed, other=ALL)
    better = other[None, :] > order[:, None]
    # The last that top-k asks for; those equal to it stay too.
    rank = num_before + tl.sum(better.to(tl.int32), 1)
    worst = tl.min(tl.where(listed & (rank < top_k), order, NOTHING), 0)
    kept = listed & (order >= tl.where(by_count, worst >> BITS << BITS, ALL))
    weight = tl.where(by_count, tl.sum(tl.where(kept, weight_T, 0), 0), weight)
    held = weight_before + tl.sum(tl.where(better, weight_T[None, :], 0), 1)
    kept = kept & (held.to(tl.float64) < tl.where(by_weight, _wanted_weight(top_p, weight), float("inf")))
    return tl.min(tl.where(kept, order, NOTHING), 0)


@triton.jit
def _count_or_weigh(
    tokens_ptr, number, least, top, temperature, by_count,
    SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Counts the tokens, given as orders or logits, that are not below `least`, or adds up their weights."""
    measured = tl.zeros([BLOCK], tl.int64)
    for first in range(0, number, BLOCK):
        index = first + tl.arange(0, BLOCK)
        if LISTED:
            order = tl.load(tokens_ptr + index, mask=index < number, other=ALL)
            x = tl.where(index < number, _logit(order, BITS), float("-inf"))
        else:
            x = tl.load(tokens_ptr + index, mask=index < number, other=float("-inf"))
            order = order_of(x, index, BITS)
        below = below_top(x, top, temperature)
        kept = (bin_of(below) < BINS - 1) & (order >= least)
        measured += tl.where(kept, tl.where(by_count, 1, weight_of(below, SCALE)), 0)
    return tl.sum(measured, 0)


@triton.jit
def _search(
    tokens_ptr, number, wanted, top, temperature, by_count,
    SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Finds the order of the token at which the best ones reach the wanted number, or the wanted weight."""
    half = tl.full([], 1 << (31 + BITS), tl.int64)
    least = -half
    for _ in range(32 + BITS):
        more = least + half
        measured = _count_or_weigh(
            tokens_ptr, number, more, top, temperature, by_count, SCALE, BITS, BLOCK, LISTED
        )
        least = tl.where(measured.to(tl.float64) >= wanted, more, least)
        half = half >> 1
    return least


@triton.jit
def cut_by_search(
    tokens_ptr, number, num_before, weight_before, weight, top, temperature, top_k, top_p, by_count, by_weight,
    SCALE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Finds the order of the last token that stays, among any number of tokens, bit by bit: the tokens are gone through
    dozens of times."""
    cut = tl.full([], ALL, tl.int64)
    if by_count:
        wanted = top_k - num_before
        cut = _search(tokens_ptr, number, wanted, top, temperature, True, SCALE, BITS, BLOCK, LISTED)
        cut = cut >> BITS << BITS
        weight = _count_or_weigh(tokens_ptr, number, cut, top, temperature, False, SCALE, BITS, BLOCK, LISTED)
    if by_weight:
        wanted = _wanted_weight(top_p, weight) - weight_before
        cut = _search(tokens_ptr, number, wanted, top, temperature, False, SCALE, BITS, BLOCK, LISTED)
    return cut
