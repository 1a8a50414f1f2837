# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false
"""Kernels of the DeltaNet core, in float32: what tokens bring, the delta rule, then the norm and what is kept.

A row's tokens run one after the other in a single loop, whether replayed, certain or drafted: the same
instructions give the same bits however a row was cut into steps. What tokens bring may be found by a kernel of its own
or within the delta rule's: its sums are written out pair by pair, and how the rule's own are made depends on
the reading of S alone. What a program overwrites, no other program of its launch reads; but programs on the same head's
columns may all write what its tokens bring, which is the same.
"""

import triton
import triton.language as tl

from headlong.ops.linear.triton_split_k import CUT, sum_pieces
from headlong.ops.norm.triton import inverse_length, squares_added, squares_of
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log1p from log: what 1 + u rounds away is put back by the quotient."""
    u = tl.exp(x)
    sum_ = 1.0 + u
    log1p = tl.where(sum_ == 1.0, u, tl.log(sum_) * (u / (sum_ - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _row(table, row):
    """slot, certain tokens, drafts, drafts to replay, first token"""
    at = table + row * 6
    drafts = tl.load(at + 3)
    first = tl.load(at + 5).to(tl.int64)
    return tl.load(at).to(tl.int64), tl.load(at + 2) - drafts, drafts, tl.load(at + 4), first


@triton.jit
def _line(past, new, place, channel, mask, C, WIDTH, PAST):
    """What the convolution sees at a place of a row: its window first, then the tokens of this step."""
    is_past = place < PAST
    old = tl.load(past + place * C + channel, mask=mask & is_past, other=0.0)
    fed = tl.load(new + (place - PAST) * WIDTH + channel, mask=mask & (place >= PAST), other=0.0)
    return tl.where(is_past, old, fed)


@triton.jit
def _taps(conv, channel, mask, C, TAPS: tl.constexpr):
    """The convolution's weights of some channels, by tap."""
    weights = ()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(conv + tap * C + channel, mask=mask, other=0.0).to(tl.float32),)
    return weights


@triton.jit
def _before(past, channel, mask, C, TAPS: tl.constexpr):
    """Channels of the window before a row's first token."""
    seen = ()
    for tap in tl.static_range(TAPS - 1):
        seen += (tl.load(past + tap * C + channel, mask=mask, other=0.0),)
    return seen


@triton.jit
def _before_token(past, new, t, channel, mask, C, WIDTH, TAPS: tl.constexpr):
    """The same before its token t."""
    seen = ()
    place = t + tl.zeros(channel.shape, tl.int64)
    for tap in tl.static_range(TAPS - 1):
        seen += (_line(past, new, place + tap, channel, mask, C, WIDTH, TAPS - 1),)
    return seen


@triton.jit
def _convolved(seen, x, weights, TAPS: tl.constexpr):
    """What the convolution makes of what was seen and a token, and what will have been seen then."""
    total = tl.zeros(x.shape, tl.float32)
    window = seen + (x,)  # noqa: RUF005 - Triton's compiler reads this
    later = ()
    for tap in tl.static_range(TAPS):
        total = tl.fma(window[tap], weights[tap], total)
        if tap > 0:
            later += (window[tap],)
    return _silu(total), later


@triton.jit
def _normalised(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def _unit(x, eps, SIZE: tl.constexpr):
    """x over its length, with the same bits in any kernel."""
    return x * tl.rsqrt(squares_added(x, SIZE, 1) + eps)


@triton.jit
def _head_weights(
    conv, rate, dt_bias, head, e, in_e,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr,
):  # fmt: skip
    """Channels of a value head's q, k and v, their weights, and those of its gates."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    key_head = head % KEY_HEADS if TILED else head // (H // KEY_HEADS)
    d = tl.arange(0, POW_D)
    q_at, k_at, v_at = key_head * D + d, (KEY_HEADS + key_head) * D + d, 2 * KEY_HEADS * D + head * E + e
    q_taps, k_taps = _taps(conv, q_at, d < D, C, TAPS), _taps(conv, k_at, d < D, C, TAPS)
    a_bias, a_rate = tl.load(dt_bias + head).to(tl.float32), tl.load(rate + head).to(tl.float32)
    return q_at, k_at, v_at, q_taps, k_taps, _taps(conv, v_at, in_e, C, TAPS), a_bias, a_rate


@triton.jit
def _bring_token(
    token, weights, seen, to, head, e, in_e,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, POW_D: tl.constexpr,
):  # fmt: skip
    """Of what is projected of a token, for a value head: k, v, decay, β as drafts are kept, then q; and they are left
    at `to`. `seen` are its channels of the tokens before; what the next one will have seen comes second."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    d = tl.arange(0, POW_D)
    in_d = d < D
    q_at, k_at, v_at, q_taps, k_taps, v_taps, a_bias, a_rate = weights
    q_seen, k_seen, v_seen = seen
    gates = token + C + head
    # All on their way before the first is looked at.
    q, k = tl.load(token + q_at, mask=in_d, other=0.0), tl.load(token + k_at, mask=in_d, other=0.0)
    v, b, a = tl.load(token + v_at, mask=in_e, other=0.0), tl.load(gates), tl.load(gates + H)
    q, q_seen = _convolved(q_seen, q, q_taps, TAPS)
    k, k_seen = _convolved(k_seen, k, k_taps, TAPS)
    v, v_seen = _convolved(v_seen, v, v_taps, TAPS)
    beta = 1.0 / (1.0 + tl.exp(-b))
    decay = tl.exp(a_rate * _softplus(a + a_bias))
    k, q = _unit(k, QK_EPS, POW_D), _unit(q, QK_EPS, POW_D)
    tl.store(to + d, k, mask=in_d)
    tl.store(to + D + e, v, mask=in_e)
    tl.store(to + D + E, decay)
    tl.store(to + D + E + 1, beta)
    tl.store(to + D + E + 2 + d, q, mask=in_d)
    return (k, v, decay, beta, q), (q_seen, k_seen, v_seen)


@triton.jit(do_not_specialize_on_alignment=["projected"])
def bring(
    projected, windows, conv, rate, dt_bias, table, row_of, inputs,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr, POW_E: tl.constexpr,
):  # fmt: skip
    """What a token brings for a value head."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    slot, _, _, replay, first = _row(table, tl.load(row_of + token))
    past, new = windows + (slot * WINDOW + replay) * C, projected + first * (C + 2 * H)
    e = tl.arange(0, POW_E)
    weights = _head_weights(conv, rate, dt_bias, head, e, e < E, KEY_HEADS, H, D, E, TAPS, TILED, POW_D)
    wait_for_previous_kernel()
    WIDTH: tl.constexpr = C + 2 * H
    t, in_d = token - first, tl.arange(0, POW_D) < D
    seen = (
        _before_token(past, new, t, weights[0], in_d, C, WIDTH, TAPS),
        _before_token(past, new, t, weights[1], in_d, C, WIDTH, TAPS),
        _before_token(past, new, t, weights[2], e < E, C, WIDTH, TAPS),
    )
    _bring_token(
        new + t * WIDTH, weights, seen, inputs + (token * H + head) * (2 * D + E + 2),
        head, e, e < E, QK_EPS, KEY_HEADS, H, D, E, TAPS, POW_D,
    )  # fmt: skip


@triton.jit
def _brought(drafts, inputs, i, replay, d, e, in_e, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """k, v, decay, β, q of the i-th that runs: drafts to replay first, which have no q."""
    X: tl.constexpr = D + E + 2
    replays = i < replay
    x = tl.where(replays, drafts + i.to(tl.int64) * H * X, inputs + (i - replay).to(tl.int64) * H * (X + D))
    k = tl.load(x + d, mask=d < D, other=0.0)
    v = tl.load(x + D + e, mask=in_e, other=0.0)
    q = tl.load(x + X + d, mask=d < tl.where(replays, 0, D), other=0.0)
    return k, v, tl.load(x + D + E), tl.load(x + D + E + 1), q


@triton.jit
def _rule(S, token):
    """S after a token, and what that asks it for. Of a draft that is replayed nothing is asked."""
    k, v, decay, beta, q = token
    S = S * decay
    change = (v - tl.sum(k[:, None] * S, 0)) * beta
    S = tl.fma(k[:, None], change[None, :], S)
    return S, tl.sum(q[:, None] * S, 0)


@triton.jit
def _run_tokens(
    S, S_at, in_S, drafts, inputs, out, replay, certain, num_drafts, d, e, in_e,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The delta rule over all of a row's tokens; each is read while the two before it run."""
    total = replay + certain + num_drafts
    # The last is read more than once, so that no load needs a condition.
    this = _brought(drafts, inputs, total * 0, replay, d, e, in_e, H, D, E)
    then = _brought(drafts, inputs, tl.minimum(1, total - 1), replay, d, e, in_e, H, D, E)
    for i in range(total):
        after = _brought(drafts, inputs, tl.minimum(i + 2, total - 1), replay, d, e, in_e, H, D, E)
        S, found = _rule(S, this)
        to = out + (i - replay).to(tl.int64) * H * E + e
        tl.store(to, found, mask=e < tl.where(i < replay, 0, E))
        if i + 1 == replay + certain:
            tl.store(S_at, S, mask=in_S)
        this, then = then, after


@triton.jit(do_not_specialize_on_alignment=["projected"])
def delta_rule(
    projected, windows, conv, rate, dt_bias, inputs, memory, drafts, table, out,
    BRINGS: tl.constexpr, QK_EPS: tl.constexpr,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A row's tokens on a few columns of a value head's S. What few of them bring is found one by one, else it was
    before."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = _row(table, row)
    d, e = tl.arange(0, POW_D), block * BLOCK_E + tl.arange(0, BLOCK_E)
    in_e = e < E
    in_S = (d < D)[:, None] & in_e[None, :]
    S_at = memory + ((slot * H + head) * D + d[:, None]) * E + e[None, :]
    S = tl.load(S_at, mask=in_S, other=0.0)
    drafts += (slot * MAX_DRAFTS * H + head) * X
    inputs += (first * H + head) * (X + D)
    out += (first * H + head) * E
    projected += first * WIDTH
    if BRINGS:
        past = windows + (slot * WINDOW + replay) * C
        weights = _head_weights(conv, rate, dt_bias, head, e, in_e, KEY_HEADS, H, D, E, TAPS, TILED, POW_D)
        seen = (
            _before(past, weights[0], d < D, C, TAPS),
            _before(past, weights[1], d < D, C, TAPS),
            _before(past, weights[2], in_e, C, TAPS),
        )
        for i in range(replay):  # as they were kept by an earlier pass
            S, _ = _rule(S, _brought(drafts, inputs, replay * 0 + i, replay, d, e, in_e, H, D, E))
    wait_for_previous_kernel()
    launch_dependents()
    if BRINGS:
        for t in range(certain + num_drafts):
            token, seen = _bring_token(
                projected, weights, seen, inputs, head, e, in_e, QK_EPS, KEY_HEADS, H, D, E, TAPS, POW_D
            )
            S, found = _rule(S, token)
            tl.store(out + e, found, mask=in_e)
            if t + 1 == certain:
                tl.store(S_at, S, mask=in_S)
            projected += WIDTH
            inputs += H * (X + D)
            out += H * E
    else:
        _run_tokens(S, S_at, in_S, drafts, inputs, out, replay, certain, num_drafts, d, e, in_e, H, D, E)


@triton.jit
def _keep_window(window, new, certain, drafts, replay, channel, C, WIDTH, PAST, POW_W: tl.constexpr):
    """The inputs before the drafts, and theirs. It moves onto itself, so all is read before any is kept."""
    place = tl.arange(0, POW_W)[:, None].to(tl.int64)
    channel = channel[None, :]
    mask = (place < PAST + drafts) & (channel < C)
    kept = _line(window + replay * C, new, certain + place, channel, mask, C, WIDTH, PAST)
    tl.debug_barrier()
    tl.store(window + place * C + channel, kept, mask=mask)


@triton.jit
def _keep(
    projected, windows, inputs, drafts, row, part, head,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, PARTS: tl.constexpr,
    POW_X: tl.constexpr, POW_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Of a row, a value head's draft of this number, and a part of the window."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = row
    x = tl.arange(0, POW_X)
    keeps = x < tl.where(part < num_drafts, X, 0)
    draft = tl.load(inputs + ((first + certain + part) * H + head) * (X + D) + x, mask=keeps, other=0.0)
    window, new = windows + slot * WINDOW * C, projected + first * WIDTH
    channel = (head * PARTS + part) * BLOCK_C + tl.arange(0, BLOCK_C)
    _keep_window(window, new, certain, num_drafts, replay, channel, C, WIDTH, TAPS - 1, POW_W)
    tl.store(drafts + ((slot * MAX_DRAFTS + part) * H + head) * X + x, draft, mask=keeps)


@triton.jit(do_not_specialize=CUT, do_not_specialize_on_alignment=["projected"])
def finish(
    projected, windows, inputs, drafts, norm, table, found, gates, out, eps,
    num_tokens, num_outs, num_steps, steps_each, squares, length_eps, length_parts,
    B: tl.constexpr, PIECES: tl.constexpr, EVENLY: tl.constexpr, LENGTH: tl.constexpr,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, PARTS: tl.constexpr,
    POW_E: tl.constexpr, POW_X: tl.constexpr, POW_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gated norm of a token's value head, its gates in pieces; or what is kept of a row, now that nothing of before
    is read."""
    one, head = tl.program_id(0), tl.program_id(1)
    launch_dependents()
    e = tl.arange(0, POW_E)
    in_e = e < E
    if one < num_tokens:
        weight = tl.load(norm + e, mask=in_e, other=0.0).to(tl.float32)
        at = (one.to(tl.int64) * H + head) * E + e
        wait_for_previous_kernel()
        x = tl.load(found + at, mask=in_e, other=0.0)
        cut = (num_tokens, num_outs, num_steps, steps_each)
        gate = sum_pieces(gates, head * E + e, in_e, one, cut, B, PIECES, EVENLY, POW_E)
        squares_P = squares_of(squares, one, length_parts, LENGTH)
        gate *= inverse_length(squares, squares_P, length_eps, LENGTH)
        normed = _normalised(x, eps)
        tl.store(out + at, normed * weight * _silu(gate), mask=in_e)
    else:
        row, part = _row(table, (one - num_tokens) // PARTS), (one - num_tokens) % PARTS
        wait_for_previous_kernel()
        _keep(
            projected, windows, inputs, drafts, row, part, head, KEY_HEADS, H, D, E, TAPS,
            WINDOW, MAX_DRAFTS, PARTS, POW_X, POW_W, BLOCK_C,
        )  # fmt: skip
