# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
"""Kernels of the DeltaNet core, in float32: what tokens bring, the delta rule, then the norm and what is kept.

A row's tokens run one after the other, whether replayed, certain or drafted, by the same instructions in the same
order, which give the same bits however a row was cut into steps. What tokens bring may be found by a kernel of its own
or within the delta rule's: its sums are written out pair by pair, and how the rule's own are made depends on the
reading of S alone. What a program overwrites, no other program of its launch reads; but programs on the same head's
columns may all write what its tokens bring, which is the same.

Legend. H value heads of KEY_HEADS key heads, D key columns, E value columns, C convolution channels, X = D + E + 2
numbers of a draft: k, v, decay and β. Names end in _ptr (where something begins) or are offsets and tiles.
  projected_ptr [tokens, WIDTH], WIDTH = C + 2·H: what is convolved, then β and decay of each head before their
  activations.
  windows_ptr [slots, WINDOW, C]: inputs of the convolution before a row's tokens, then of its drafts; conv_ptr [TAPS,
  C].
  state_ptr [slots, H, D, E]: S as committed; drafts_ptr [slots, MAX_DRAFTS, H, X]: what the last step's drafts
  brought.
  keys_ptr [tokens, KEY_HEADS, 2·D] and values_ptr [tokens, H, V]: what the step's tokens bring, q and k of key heads,
  and of value heads v, decay and β, which are aligned to 16 bytes where E is a multiple of four; found_ptr [tokens, H,
  E]: what the rule answers.
  rows_ptr [rows, 6]: a step's table of rows (triton_step.py); token_rows_ptr [tokens].
  gates_ptr: the output gates' partial sums, found by the arguments of triton_split_k.py.
TILED: whether value heads take their key heads in turn; POW_D and the like are the powers of two that hold a D.
A tile of S is [POW_D / LANES, LANES, COLUMNS]: LANES lanes of a warp hold a column between them.
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
def _units(x, eps, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Returns each row of [ROWS, SIZE] over its length, with the same bits in any kernel."""
    squares = pairwise_sum_of_squares(tl.reshape(x, (ROWS * SIZE,)), ROWS * SIZE, ROWS)
    return x * tl.rsqrt(squares + eps)[:, None]


@triton.jit
def _decay_and_beta(a, b, rate, a_bias):
    return tl.exp(rate * _softplus(a + a_bias)), 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def _key_head(head, KEY_HEADS: tl.constexpr, H: tl.constexpr, TILED: tl.constexpr):
    """Returns the key head that a value head takes."""
    return head % KEY_HEADS if TILED else head // (H // KEY_HEADS)


@triton.jit
def _load_head_weights(
    conv_ptr, rate_ptr, dt_bias_ptr, head, key_head, d, e, mask_d, mask_e,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Loads the channels of a value head's q, k and v, their weights, and those of its gates."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    q_channel, k_channel = key_head * D + d, (KEY_HEADS + key_head) * D + d
    v_channel = 2 * KEY_HEADS * D + head * E + e
    q_taps = _load_taps(conv_ptr, q_channel, mask_d, C, TAPS)
    k_taps = _load_taps(conv_ptr, k_channel, mask_d, C, TAPS)
    a_bias, rate = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(rate_ptr + head).to(tl.float32)
    v_taps = _load_taps(conv_ptr, v_channel, mask_e, C, TAPS)
    return q_channel, k_channel, v_channel, q_taps, k_taps, v_taps, rate, a_bias


@triton.jit
def _token_inputs(
    token_ptr, weights, seen, key_ptr, value_ptr, head, d, e, mask_d, mask_e,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    TAPS: tl.constexpr, POW_D: tl.constexpr,
):  # fmt: skip
    """Computes what a token brings for a value head, k, v, decay, β and q; also stores it. `seen` are the windows of
    its channels; those after this token are returned second."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    q_channel, k_channel, v_channel, q_taps, k_taps, v_taps, rate, a_bias = weights
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
    decay, beta = _decay_and_beta(a, b, rate, a_bias)
    q, k = _units(q, QK_EPS, POW_D, 1), _units(k, QK_EPS, POW_D, 1)
    tl.store(key_ptr + d, q, mask=mask_d)
    tl.store(key_ptr + D + d, k, mask=mask_d)
    tl.store(value_ptr + e, v, mask=mask_e)
    tl.store(value_ptr + E, decay)
    tl.store(value_ptr + E + 1, beta)
    return (k, v, decay, beta, q), (q_seen, k_seen, v_seen)


@triton.jit
def _convolved_of_tokens(past_ptr, new_ptr, t, channel, mask, weights, C, WIDTH, TAPS: tl.constexpr):
    """Returns silu of the convolution of some tokens of any rows. [tokens, channels]"""
    seen = ()
    for tap in tl.static_range(TAPS - 1):
        seen += (_load_conv_input(past_ptr, new_ptr, t + tap, channel, mask, C, WIDTH, TAPS - 1),)
    x, _ = _convolved(seen, tl.load(new_ptr + t * WIDTH + channel, mask=mask, other=0.0), weights, TAPS)
    return x


@triton.jit
def token_inputs_kernel(
    projected_ptr, windows_ptr, conv_ptr, rate_ptr, dt_bias_ptr, rows_ptr, token_rows_ptr, keys_ptr, values_ptr,
    num_tokens,
    QK_EPS: tl.constexpr, KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    V: tl.constexpr, TAPS: tl.constexpr, WINDOW: tl.constexpr, POW_D: tl.constexpr, POW_E: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes what TOKENS tokens bring: a program those of a key head, or those of a value head."""
    launch_dependents()
    part = tl.program_id(1)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    slot, _, _, replay, first = _load_row(rows_ptr, tl.load(token_rows_ptr + token, mask=is_token, other=0))
    past_ptr = (windows_ptr + (slot * WINDOW + replay) * C)[:, None]
    new_ptr, t = (projected_ptr + first * WIDTH)[:, None], (token - first)[:, None]
    if part < KEY_HEADS:
        d = tl.arange(0, POW_D)[None, :]
        mask = is_token[:, None] & (d < D)
        q_channel, k_channel = part * D + d, (KEY_HEADS + part) * D + d
        q_taps = _load_taps(conv_ptr, q_channel, d < D, C, TAPS)
        k_taps = _load_taps(conv_ptr, k_channel, d < D, C, TAPS)
        wait_for_previous_kernel()
        q = _convolved_of_tokens(past_ptr, new_ptr, t, q_channel, mask, q_taps, C, WIDTH, TAPS)
        k = _convolved_of_tokens(past_ptr, new_ptr, t, k_channel, mask, k_taps, C, WIDTH, TAPS)
        key_ptrs = keys_ptr + ((token * KEY_HEADS + part) * (2 * D))[:, None] + d
        tl.store(key_ptrs, _units(q, QK_EPS, POW_D, TOKENS), mask=mask)
        tl.store(key_ptrs + D, _units(k, QK_EPS, POW_D, TOKENS), mask=mask)
    else:
        head, e = part - KEY_HEADS, tl.arange(0, POW_E)[None, :]
        mask = is_token[:, None] & (e < E)
        channel = 2 * KEY_HEADS * D + head * E + e
        taps = _load_taps(conv_ptr, channel, e < E, C, TAPS)
        a_bias, rate = tl.load(dt_bias_ptr + head).to(tl.float32), tl.load(rate_ptr + head).to(tl.float32)
        wait_for_previous_kernel()
        gates_ptr = projected_ptr + token * WIDTH + C + head
        b, a = tl.load(gates_ptr, mask=is_token, other=0.0), tl.load(gates_ptr + H, mask=is_token, other=0.0)
        v = _convolved_of_tokens(past_ptr, new_ptr, t, channel, mask, taps, C, WIDTH, TAPS)
        decay, beta = _decay_and_beta(a, b, rate, a_bias)
        value_ptr = values_ptr + (token * H + head) * V
        tl.store(value_ptr[:, None] + e, v, mask=mask)
        tl.store(value_ptr + E, decay, mask=is_token)
        tl.store(value_ptr + E + 1, beta, mask=is_token)


@triton.jit
def _over_lanes(x, POW_D: tl.constexpr, LANES: tl.constexpr):
    """Gives a key or a query the shape of S. Four neighbours at a time go to one lane after the other, so that lanes
    read side by side. [POW_D / LANES, LANES, 1]"""
    ROWS: tl.constexpr = POW_D // LANES
    NEAR: tl.constexpr = 4 if ROWS >= 4 else ROWS
    x = tl.permute(tl.reshape(x, (ROWS // NEAR, LANES, NEAR)), (0, 2, 1))
    return tl.reshape(x, (ROWS, LANES))[:, :, None]


@triton.jit
def _places_in_S(POW_D: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the key column and the value column of a tile's elements, in two dimensions: so
    loaded, a warp's lanes lie along the second in every version of Triton."""
    ROWS: tl.constexpr = POW_D // LANES
    NEAR: tl.constexpr = 4 if ROWS >= 4 else ROWS
    row, lane = tl.arange(0, ROWS)[:, None], (tl.arange(0, LANES * COLUMNS) // COLUMNS)[None, :]
    d = row // NEAR * (LANES * NEAR) + lane * NEAR + row % NEAR
    return d, (tl.arange(0, LANES * COLUMNS) % COLUMNS)[None, :]


@triton.jit
def _product(k, S):
    """Returns Sᵀk."""
    return tl.sum(tl.sum(k * S, 0), 0)


@triton.jit
def _delta_rule(S, k, held, v, decay, beta):
    """Returns S after a token. `held` is Sᵀk, read before S decays, so that neither waits for the other."""
    change = tl.fma(-decay, held, v) * beta
    return tl.fma(k, change[None, None, :], S * decay)


@triton.jit
def _replay(
    S, drafts_ptr, replay, d, e, mask_d, mask_e,
    H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, POW_D: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns S after drafts of the last step that stand."""
    X: tl.constexpr = D + E + 2
    for i in tl.range(0, replay, num_stages=STAGES):
        draft_ptr = drafts_ptr + i * (H * X)
        k = tl.load(draft_ptr + d, mask=mask_d, other=0.0)
        v = tl.load(draft_ptr + D + e, mask=mask_e, other=0.0)
        decay, beta = tl.load(draft_ptr + D + E), tl.load(draft_ptr + D + E + 1)
        k = _over_lanes(k, POW_D, LANES)
        S = _delta_rule(S, k, _product(k, S), v, decay, beta)
    return S


@triton.jit
def _run_tokens(
    S, S_ptrs, mask_S, key_ptr, value_ptr, found_ptr, certain, total, d, e, mask_d, mask_e,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
    POW_D: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Runs the delta rule over a row's certain tokens, stores S, and goes on with its drafts. What a token finds is
    read together with what S holds for the next one's key, since neither waits for the other. What tokens bring is
    loaded while those some turns before them are computed."""
    STAGES: tl.constexpr = 4 if AT_ONCE == 1 else 3
    for phase in range(2):
        begin, end = tl.where(phase == 0, 0, certain), tl.where(phase == 0, certain, total)
        for t in tl.range(begin, end, num_stages=STAGES, loop_unroll_factor=AT_ONCE):
            before = tl.maximum(t - 1, 0)
            k = tl.load(key_ptr + t * (KEY_HEADS * 2 * D) + D + d, mask=mask_d, other=0.0)
            q = tl.load(key_ptr + before * (KEY_HEADS * 2 * D) + d, mask=mask_d, other=0.0)
            this_ptr = value_ptr + t * (H * V)
            v = tl.load(this_ptr + e, mask=mask_e, other=0.0)
            decay, beta = tl.load(this_ptr + E), tl.load(this_ptr + E + 1)
            k = _over_lanes(k, POW_D, LANES)
            held = _product(k, S)
            found = _product(_over_lanes(q, POW_D, LANES), S)
            S = _delta_rule(S, k, held, v, decay, beta)
            found_ptrs = found_ptr + before * (H * E) + e
            tl.store(found_ptrs, found, mask=mask_e & (t > 0))
        if phase == 0:
            tl.store(S_ptrs, tl.reshape(S, (POW_D // LANES, LANES * COLUMNS)), mask=mask_S)
    last = total - 1
    q = tl.load(key_ptr + last * (KEY_HEADS * 2 * D) + d, mask=mask_d, other=0.0)
    tl.store(found_ptr + last * (H * E) + e, _product(_over_lanes(q, POW_D, LANES), S), mask=mask_e)


@triton.jit(do_not_specialize_on_alignment=["projected_ptr"])
def delta_rule_kernel(
    projected_ptr, windows_ptr, conv_ptr, rate_ptr, dt_bias_ptr, keys_ptr, values_ptr, state_ptr, drafts_ptr, rows_ptr,
    found_ptr,
    FIND_INPUTS: tl.constexpr, QK_EPS: tl.constexpr,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr,
    WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, TILED: tl.constexpr, POW_D: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, NEIGHBOURS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Runs a row's tokens on COLUMNS columns of a value head's S, of which a lane holds NEIGHBOURS. With FIND_INPUTS it
    computes what the tokens bring one by one; else `token_inputs_kernel` has done so, and a turn takes AT_ONCE."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = _load_row(rows_ptr, row)
    key_head = _key_head(head, KEY_HEADS, H, TILED)
    d = tl.arange(0, POW_D)
    e = block * COLUMNS + tl.arange(0, COLUMNS)
    mask_d, mask_e = d < D, e < E
    d_of_S, e_of_S = _places_in_S(POW_D, LANES, COLUMNS)
    mask_S = (d_of_S < D) & (block * COLUMNS + e_of_S < E)
    offsets = d_of_S * E + block * COLUMNS + e_of_S
    if E % NEIGHBOURS == 0:
        offsets = tl.max_contiguous(tl.multiple_of(offsets, [1, NEIGHBOURS]), [1, NEIGHBOURS])
    S_ptrs = state_ptr + (slot * H + head) * (D * E) + offsets
    S = tl.reshape(tl.load(S_ptrs, mask=mask_S, other=0.0), (POW_D // LANES, LANES, COLUMNS))
    drafts_ptr += (slot * MAX_DRAFTS * H + head) * X
    keys_ptr += (first * KEY_HEADS + key_head) * (2 * D)
    values_ptr += (first * H + head) * V
    found_ptr += (first * H + head) * E
    if FIND_INPUTS:
        projected_ptr += first * WIDTH
        past_ptr = windows_ptr + (slot * WINDOW + replay) * C
        d_of_one, mask_of_one = d[None, :], mask_d[None, :]
        weights = _load_head_weights(
            conv_ptr, rate_ptr, dt_bias_ptr, head, key_head, d_of_one, e, mask_of_one, mask_e,
            KEY_HEADS, H, D, E, TAPS,
        )  # fmt: skip
        seen = (
            _load_window(past_ptr, weights[0], mask_of_one, C, TAPS),
            _load_window(past_ptr, weights[1], mask_of_one, C, TAPS),
            _load_window(past_ptr, weights[2], mask_e, C, TAPS),
        )
    # As they were kept by an earlier pass. Few tokens follow few drafts.
    S = _replay(S, drafts_ptr, replay, d, e, mask_d, mask_e, H, D, E, POW_D, LANES, 1 if FIND_INPUTS else 3)
    wait_for_previous_kernel()
    launch_dependents()
    if FIND_INPUTS:
        for t in range(certain + num_drafts):
            token, seen = _token_inputs(
                projected_ptr, weights, seen, keys_ptr, values_ptr, head, d_of_one, e, mask_of_one, mask_e,
                QK_EPS, KEY_HEADS, H, D, E, TAPS, POW_D,
            )  # fmt: skip
            k, v, decay, beta, q = token
            k = _over_lanes(k, POW_D, LANES)
            S = _delta_rule(S, k, _product(k, S), v, decay, beta)
            tl.store(found_ptr + e, _product(_over_lanes(q, POW_D, LANES), S), mask=mask_e)
            if t + 1 == certain:
                tl.store(S_ptrs, tl.reshape(S, (POW_D // LANES, LANES * COLUMNS)), mask=mask_S)
            projected_ptr += WIDTH
            keys_ptr += KEY_HEADS * 2 * D
            values_ptr += H * V
            found_ptr += H * E
    else:
        _run_tokens(
            S, S_ptrs, mask_S, keys_ptr, values_ptr, found_ptr, certain, certain + num_drafts,
            d, e, mask_d, mask_e, KEY_HEADS, H, D, E, V, POW_D, LANES, COLUMNS, AT_ONCE,
        )  # fmt: skip


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
def _store_rows(
    projected_ptr, windows_ptr, keys_ptr, values_ptr, drafts_ptr, row, part, group,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, TILED: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, POW_X: tl.constexpr, POW_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Stores what the next step needs of a row: for HEADS value heads the draft number `part`, and a part of the
    window."""
    C: tl.constexpr = 2 * KEY_HEADS * D + H * E
    WIDTH: tl.constexpr = C + 2 * H
    X: tl.constexpr = D + E + 2
    slot, certain, num_drafts, replay, first = row
    x, head = tl.arange(0, POW_X)[None, :], group * HEADS + tl.arange(0, HEADS)[:, None]
    mask = (x < tl.where(part < num_drafts, X, 0)) & (head < H)
    token = first + certain + part
    k_ptrs = keys_ptr + (token * KEY_HEADS + _key_head(head, KEY_HEADS, H, TILED)) * (2 * D) + D + x
    draft = tl.load(
        tl.where(x < D, k_ptrs, values_ptr + (token * H + head) * V + x - D), mask=mask, other=0.0
    )
    window_ptr, new_ptr = windows_ptr + slot * WINDOW * C, projected_ptr + first * WIDTH
    channel = (group * PARTS + part) * BLOCK_C + tl.arange(0, BLOCK_C)
    _store_window(window_ptr, new_ptr, certain, num_drafts, replay, channel, C, WIDTH, TAPS - 1, POW_W)
    tl.store(drafts_ptr + ((slot * MAX_DRAFTS + part) * H + head) * X + x, draft, mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=["projected_ptr"])
def gated_norm_kernel(
    projected_ptr, windows_ptr, keys_ptr, values_ptr, drafts_ptr, norm_weight_ptr, rows_ptr, found_ptr, gates_ptr,
    out_ptr, eps,
    num_tokens, num_outs, steps_per_tile, steps_per_split, squares_ptr, norm_eps, num_squares,
    BLOCK_N: tl.constexpr, NUM_PARTIALS: tl.constexpr, EVEN_SPLITS: tl.constexpr, BLOCK_SQUARES: tl.constexpr,
    KEY_HEADS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, V: tl.constexpr,
    TAPS: tl.constexpr, WINDOW: tl.constexpr, MAX_DRAFTS: tl.constexpr, TILED: tl.constexpr, PARTS: tl.constexpr,
    HEADS: tl.constexpr, POW_E: tl.constexpr, POW_X: tl.constexpr, POW_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes the gated norm of HEADS value heads of a token, whose gates come as partial sums. Further programs store
    what the next step needs of the rows, now that no program reads the old values any more."""
    index, group = tl.program_id(0), tl.program_id(1)
    launch_dependents()
    if index < num_tokens:
        SIZE: tl.constexpr = HEADS * POW_E
        head, e = group * HEADS + tl.arange(0, SIZE) // POW_E, tl.arange(0, SIZE) % POW_E
        mask = (e < E) & (head < H)
        weight = tl.load(norm_weight_ptr + e, mask=mask, other=0.0).to(tl.float32)
        outs = head * E + e
        offsets = index.to(tl.int64) * (H * E) + outs
        wait_for_previous_kernel()
        x = tl.load(found_ptr + offsets, mask=mask, other=0.0)
        cut = (num_tokens, num_outs, steps_per_tile, steps_per_split)
        gate = sum_partials(gates_ptr, outs, mask, index, cut, BLOCK_N, NUM_PARTIALS, EVEN_SPLITS, SIZE)
        squares_S = load_squares(squares_ptr, index, num_squares, BLOCK_SQUARES)
        gate *= inverse_norm(squares_ptr, squares_S, norm_eps, BLOCK_SQUARES)
        x_HE = tl.reshape(x, (HEADS, POW_E))
        normed = tl.reshape(x_HE * tl.rsqrt(tl.sum(x_HE * x_HE, 1) + eps)[:, None], (SIZE,))
        tl.store(out_ptr + offsets, normed * weight * _silu(gate), mask=mask)
    else:
        row, part = _load_row(rows_ptr, (index - num_tokens) // PARTS), (index - num_tokens) % PARTS
        wait_for_previous_kernel()
        _store_rows(
            projected_ptr, windows_ptr, keys_ptr, values_ptr, drafts_ptr, row, part, group, KEY_HEADS, H, D, E, V,
            TAPS, WINDOW, MAX_DRAFTS, TILED, PARTS, HEADS, POW_X, POW_W, BLOCK_C,
        )  # fmt: skip
