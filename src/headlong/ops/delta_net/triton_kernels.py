# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false
"""Kernels of the DeltaNet core, in float32: what tokens bring, the delta rule, then the norm and what is kept.

A row's tokens run one after the other in a single loop, whether replayed, certain or drafted: the same instructions
give the same bits however a row was cut into steps. What tokens bring may be found by a kernel of its own or within
the delta rule's: its sums are written out pair by pair, and how the rule's own are made depends on the reading of S
alone. What a program overwrites, no other program of its launch reads; but programs on the same head's columns may
all write what its tokens bring, which is the same.

Legend. H value heads of KEY_HEADS key heads, D key columns, E value columns, C convolution channels, X = D + E + 2
numbers of a draft: k, v, decay and β. Names end in _ptr (where something begins) or are offsets and tiles.
  projected_ptr [tokens, WIDTH], WIDTH = C + 2·H: what is convolved, then β and decay of each head before their
  activations.
  windows_ptr [slots, WINDOW, C]: inputs of the convolution before a row's tokens, then of its drafts; conv_ptr [TAPS,
  C].
  state_ptr [slots, H, D, E]: S as committed; drafts_ptr [slots, MAX_DRAFTS, H, X]: what the last step's drafts
  brought.
  inputs_ptr [tokens, H, X + D]: what the step's tokens bring, as drafts are kept, then q; found_ptr [tokens, H, E]:
  what the rule answers.
  rows_ptr [rows, 6]: a step's table of rows (triton_step.py); token_rows_ptr [tokens].
  gates_ptr: the output gates' partial sums, found by the arguments of triton_split_k.py.
TILED: whether value heads take their key heads in turn; POW_D and the like are the powers of two that hold a D.
"""

import triton
import triton.language as tl

from headlong.ops.linear.triton_split_k import UNSPECIALIZED, sum_partials
from headlong.ops.norm.triton import inverse_norm, load_squares, pairwise_sum_of_squares
from headlong.ops.triton_launch import launch_dependents, wait_for_previous_kernel


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """softplus with log1p made of log: the quotient restores what 1 + u rounds away."""
    u = tl.exp(x)
    sum_ = 1.0 + u
    log1p = tl.where(sum_ == 1.0, u, tl.log(sum_) * (u / (sum_ - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _load_row(rows_ptr, row):
    """Loads a row's slot, certain tokens, drafts, drafts to replay and first token."""
    row_ptr = rows_ptr + row * 6
    drafts = tl.load(row_ptr + 3)
    first = tl.load(row_ptr + 5).to(tl.int64)
    return tl.load(row_ptr).to(tl.int64), tl.load(row_ptr + 2) - drafts, drafts, tl.load(row_ptr + 4), first


@triton.jit
def _load_conv_input(past_ptr, new_ptr, position, channel, mask, C, WIDTH, PAST):
    """Loads the convolution's input at a position of a row: its window first, then the tokens of this step."""
    is_past = position < PAST
    old = tl.load(past_ptr + position * C + channel, mask=mask & is_past, other=0.0)
    fed = tl.load(new_ptr + (position - PAST) * WIDTH + channel, mask=mask & (position >= PAST), other=0.0)
    return tl.where(is_past, old, fed)


@triton.jit
def _load_taps(conv_ptr, channel, mask, C, TAPS: tl.constexpr):
    """Loads the convolution's weights of some channels, by tap."""
    weights = ()
    for tap in tl.static_range(TAPS):
        weights += (tl.load(conv_ptr + tap * C + channel, mask=mask, other=0.0).to(tl.float32),)
    return weights


@triton.jit
def _load_window(past_ptr, channel, mask, C, TAPS: tl.constexpr):
    """Loads channels of the window before a row's first token."""
    seen = ()
    for tap in tl.static_range(TAPS - 1):
        seen += (tl.load(past_ptr + tap * C + channel, mask=mask, other=0.0),)
    return seen


@triton.jit
def _load_window_of_token(past_ptr, new_ptr, t, channel, mask, C, WIDTH, TAPS: tl.constexpr):
    """Loads channels of the window before a row's token t."""
    seen = ()
    position = t + tl.zeros(channel.shape, tl.int64)
    for tap in tl.static_range(TAPS - 1):
        seen += (_load_conv_input(past_ptr, new_ptr, position + tap, channel, mask, C, WIDTH, TAPS - 1),)
    return seen


@triton.jit
def _convolved(seen, x, weights, TAPS: tl.constexpr):
    """Returns silu of the convolution of a window and a token, and the window after that token."""
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
    """Returns x over its length, with the same bits in any kernel."""
    return x * tl.rsqrt(pairwise_sum_of_squares(x, SIZE, 1) + eps)


@triton.jit
def _load_head_weights(
    conv_ptr, rate_ptr, dt_bias_ptr, head, e, mask_e,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr,
):  # fmt: skip
    """Loads the channels of a value head's q, k and v, their weights, and those of its gates."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    key_head = head % KEY_HEADS if TILED else head // (H // KEY_HEADS)
    d = tl.arange(0, POW_D)
    q_channel, k_channel = key_head * D + d, (KEY_HEADS + key_head) * D + d
    v_channel = 2 * KEY_HEADS * D + head * E + e
    q_taps = _load_taps(conv_ptr, q_channel, d < D, C, TAPS)
    k_taps = _load_taps(conv_ptr, k_channel, d < D, C, TAPS)
    a_bias, a_rate = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(rate_ptr + head).to(tl.float32)
    v_taps = _load_taps(conv_ptr, v_channel, mask_e, C, TAPS)
    return q_channel, k_channel, v_channel, q_taps, k_taps, v_taps, a_bias, a_rate


@triton.jit
def _token_inputs(
    token_ptr, weights, seen, input_ptr, head, e, mask_e,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, POW_D: tl.constexpr,
):  # fmt: skip
    """Computes what a token brings for a value head: k, v, decay and β as drafts are kept, then q; also stores it at
    `input_ptr`. `seen` are the windows of its channels; those after this token are returned second."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    d = tl.arange(0, POW_D)
    mask_d = d < D
    q_channel, k_channel, v_channel, q_taps, k_taps, v_taps, a_bias, a_rate = weights
    q_seen, k_seen, v_seen = seen
    gates_ptr = token_ptr + C + head
    # All on their way before the first is looked at.
    q = tl.load(token_ptr + q_channel, mask=mask_d, other=0.0)
    k = tl.load(token_ptr + k_channel, mask=mask_d, other=0.0)
    v = tl.load(token_ptr + v_channel, mask=mask_e, other=0.0)
    b, a = tl.load(gates_ptr), tl.load(gates_ptr + H)
    q, q_seen = _convolved(q_seen, q, q_taps, TAPS)
    k, k_seen = _convolved(k_seen, k, k_taps, TAPS)
    v, v_seen = _convolved(v_seen, v, v_taps, TAPS)
    beta = 1.0 / (1.0 + tl.exp(-b))
    decay = tl.exp(a_rate * _softplus(a + a_bias))
    k, q = _unit(k, QK_EPS, POW_D), _unit(q, QK_EPS, POW_D)
    tl.store(input_ptr + d, k, mask=mask_d)
    tl.store(input_ptr + D + e, v, mask=mask_e)
    tl.store(input_ptr + D + E, decay)
    tl.store(input_ptr + D + E + 1, beta)
    tl.store(input_ptr + D + E + 2 + d, q, mask=mask_d)
    return (k, v, decay, beta, q), (q_seen, k_seen, v_seen)


@triton.jit(do_not_specialize_on_alignment=["projected_ptr"])
def token_inputs_kernel(
    projected_ptr, windows_ptr, conv_ptr, rate_ptr, dt_bias_ptr, rows_ptr, token_rows_ptr, inputs_ptr,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr, POW_E: tl.constexpr,
):  # fmt: skip
    """Computes what a token brings for a value head."""
    launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    slot, _, _, replay, first = _load_row(rows_ptr, tl.load(token_rows_ptr + token))
    past_ptr, new_ptr = windows_ptr + (slot * WINDOW + replay) * C, projected_ptr + first * (C + 2 * H)
    e = tl.arange(0, POW_E)
    weights = _load_head_weights(
        conv_ptr, rate_ptr, dt_bias_ptr, head, e, e < E, KEY_HEADS, H, D, E, TAPS, TILED, POW_D
    )
    wait_for_previous_kernel()
    WIDTH: tl.constexpr = C + 2 * H
    t, mask_d = token - first, tl.arange(0, POW_D) < D
    seen = (
        _load_window_of_token(past_ptr, new_ptr, t, weights[0], mask_d, C, WIDTH, TAPS),
        _load_window_of_token(past_ptr, new_ptr, t, weights[1], mask_d, C, WIDTH, TAPS),
        _load_window_of_token(past_ptr, new_ptr, t, weights[2], e < E, C, WIDTH, TAPS),
    )
    _token_inputs(
        new_ptr + t * WIDTH, weights, seen, inputs_ptr + (token * H + head) * (2 * D + E + 2),
        head, e, e < E, QK_EPS, KEY_HEADS, H, D, E, TAPS, POW_D,
    )  # fmt: skip


@triton.jit
def _load_inputs(
    drafts_ptr, inputs_ptr, i, replay, d, e, mask_e, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr
):
    """Loads k, v, decay, β, q of the i-th token that runs: drafts to replay come first, which have no q."""
    X: tl.constexpr = D + E + 2
    replays = i < replay
    draft_ptr = drafts_ptr + i.to(tl.int64) * H * X
    x_ptr = tl.where(replays, draft_ptr, inputs_ptr + (i - replay).to(tl.int64) * H * (X + D))
    k = tl.load(x_ptr + d, mask=d < D, other=0.0)
    v = tl.load(x_ptr + D + e, mask=mask_e, other=0.0)
    q = tl.load(x_ptr + X + d, mask=d < tl.where(replays, 0, D), other=0.0)
    return k, v, tl.load(x_ptr + D + E), tl.load(x_ptr + D + E + 1), q


@triton.jit
def _delta_rule(S, token):
    """Returns S after a token, and Sᵀ q. A draft that is replayed has no q, and its second result means nothing."""
    k, v, decay, beta, q = token
    S = S * decay
    change = (v - tl.sum(k[:, None] * S, 0)) * beta
    S = tl.fma(k[:, None], change[None, :], S)
    return S, tl.sum(q[:, None] * S, 0)


@triton.jit
def _run_tokens(
    S, S_ptrs, mask_S, drafts_ptr, inputs_ptr, found_ptr, replay, certain, num_drafts, d, e, mask_e,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Runs the delta rule over all of a row's tokens; each token is loaded while the two before it are computed."""
    total = replay + certain + num_drafts
    # The last is read more than once, so that no load needs a condition.
    this = _load_inputs(drafts_ptr, inputs_ptr, total * 0, replay, d, e, mask_e, H, D, E)
    then = _load_inputs(drafts_ptr, inputs_ptr, tl.minimum(1, total - 1), replay, d, e, mask_e, H, D, E)
    for i in range(total):
        after = _load_inputs(
            drafts_ptr, inputs_ptr, tl.minimum(i + 2, total - 1), replay, d, e, mask_e, H, D, E
        )
        S, found = _delta_rule(S, this)
        ptrs = found_ptr + (i - replay).to(tl.int64) * H * E + e
        tl.store(ptrs, found, mask=e < tl.where(i < replay, 0, E))
        if i + 1 == replay + certain:
            tl.store(S_ptrs, S, mask=mask_S)
        this, then = then, after


@triton.jit(do_not_specialize_on_alignment=["projected_ptr"])
def delta_rule_kernel(
    projected_ptr, windows_ptr, conv_ptr, rate_ptr, dt_bias_ptr, inputs_ptr, state_ptr, drafts_ptr, rows_ptr, found_ptr,
    FIND_INPUTS: tl.constexpr, QK_EPS: tl.constexpr,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Runs a row's tokens on BLOCK_E columns of a value head's S. With FIND_INPUTS it computes what the tokens bring
    one by one; else `token_inputs_kernel` has done so."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = _load_row(rows_ptr, row)
    d, e = tl.arange(0, POW_D), block * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = e < E
    mask_S = (d < D)[:, None] & mask_e[None, :]
    S_ptrs = state_ptr + ((slot * H + head) * D + d[:, None]) * E + e[None, :]
    S = tl.load(S_ptrs, mask=mask_S, other=0.0)
    drafts_ptr += (slot * MAX_DRAFTS * H + head) * X
    inputs_ptr += (first * H + head) * (X + D)
    found_ptr += (first * H + head) * E
    projected_ptr += first * WIDTH
    if FIND_INPUTS:
        past_ptr = windows_ptr + (slot * WINDOW + replay) * C
        weights = _load_head_weights(
            conv_ptr, rate_ptr, dt_bias_ptr, head, e, mask_e, KEY_HEADS, H, D, E, TAPS, TILED, POW_D
        )
        seen = (
            _load_window(past_ptr, weights[0], d < D, C, TAPS),
            _load_window(past_ptr, weights[1], d < D, C, TAPS),
            _load_window(past_ptr, weights[2], mask_e, C, TAPS),
        )
        for i in range(replay):  # as they were kept by an earlier pass
            S, _ = _delta_rule(
                S, _load_inputs(drafts_ptr, inputs_ptr, replay * 0 + i, replay, d, e, mask_e, H, D, E)
            )
    wait_for_previous_kernel()
    launch_dependents()
    if FIND_INPUTS:
        for t in range(certain + num_drafts):
            token, seen = _token_inputs(
                projected_ptr,
                weights,
                seen,
                inputs_ptr,
                head,
                e,
                mask_e,
                QK_EPS,
                KEY_HEADS,
                H,
                D,
                E,
                TAPS,
                POW_D,
            )
            S, found = _delta_rule(S, token)
            tl.store(found_ptr + e, found, mask=mask_e)
            if t + 1 == certain:
                tl.store(S_ptrs, S, mask=mask_S)
            projected_ptr += WIDTH
            inputs_ptr += H * (X + D)
            found_ptr += H * E
    else:
        _run_tokens(
            S,
            S_ptrs,
            mask_S,
            drafts_ptr,
            inputs_ptr,
            found_ptr,
            replay,
            certain,
            num_drafts,
            d,
            e,
            mask_e,
            H,
            D,
            E,
        )


@triton.jit
def _store_window(window_ptr, new_ptr, certain, drafts, replay, channel, C, WIDTH, PAST, POW_W: tl.constexpr):
    """Stores the convolution's inputs before the drafts, and those of the drafts. The window moves onto itself, so
    all of it is read before any is stored."""
    position = tl.arange(0, POW_W)[:, None].to(tl.int64)
    channel = channel[None, :]
    mask = (position < PAST + drafts) & (channel < C)
    past_ptr = window_ptr + replay * C
    kept = _load_conv_input(past_ptr, new_ptr, certain + position, channel, mask, C, WIDTH, PAST)
    tl.debug_barrier()
    tl.store(window_ptr + position * C + channel, kept, mask=mask)


@triton.jit
def _store_row(
    projected_ptr, windows_ptr, inputs_ptr, drafts_ptr, row, part, head,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, PARTS: tl.constexpr,
    POW_X: tl.constexpr, POW_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores what the next step needs of a row: for a value head the draft number `part`, and a part of the window."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = row
    x = tl.arange(0, POW_X)
    mask = x < tl.where(part < num_drafts, X, 0)
    input_ptrs = inputs_ptr + ((first + certain + part) * H + head) * (X + D) + x
    draft = tl.load(input_ptrs, mask=mask, other=0.0)
    window_ptr, new_ptr = windows_ptr + slot * WINDOW * C, projected_ptr + first * WIDTH
    channel = (head * PARTS + part) * BLOCK_C + tl.arange(0, BLOCK_C)
    _store_window(window_ptr, new_ptr, certain, num_drafts, replay, channel, C, WIDTH, TAPS - 1, POW_W)
    tl.store(drafts_ptr + ((slot * MAX_DRAFTS + part) * H + head) * X + x, draft, mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["projected_ptr"])
def gated_norm_kernel(
    projected_ptr, windows_ptr, inputs_ptr, drafts_ptr, norm_weight_ptr, rows_ptr, found_ptr, gates_ptr, out_ptr, eps,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, PARTS: tl.constexpr,
    POW_E: tl.constexpr, POW_X: tl.constexpr, POW_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes the gated norm of a token's value head, whose gates come as partial sums. Further programs store what
    the next step needs of the rows, now that no program reads the old values any more."""
    index, head = tl.program_id(0), tl.program_id(1)
    launch_dependents()
    e = tl.arange(0, POW_E)
    mask_e = e < E
    if index < num_tokens:
        weight = tl.load(norm_weight_ptr + e, mask=mask_e, other=0.0).to(tl.float32)
        offsets = (index.to(tl.int64) * H + head) * E + e
        wait_for_previous_kernel()
        x = tl.load(found_ptr + offsets, mask=mask_e, other=0.0)
        cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
        gate = sum_partials(
            gates_ptr, head * E + e, mask_e, index, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, POW_E
        )
        squares_S = load_squares(squares_ptr, index, num_squares, BLOCK_SQUARES)
        gate *= inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
        normed = _normalised(x, eps)
        tl.store(out_ptr + offsets, normed * weight * _silu(gate), mask=mask_e)
    else:
        row, part = _load_row(rows_ptr, (index - num_tokens) // PARTS), (index - num_tokens) % PARTS
        wait_for_previous_kernel()
        _store_row(
            projected_ptr, windows_ptr, inputs_ptr, drafts_ptr, row, part, head, KEY_HEADS, H, D, E, TAPS,
            WINDOW, MAX_DRAFTS, PARTS, POW_X, POW_W, BLOCK_C,
        )  # fmt: skip
