"""What follows the dots of `mix_triton`: gates, Sinkhorn, and the sub-block's normed input, in one launch.

Sinkhorn is a long chain of short steps that the input does not wait for, so it has programs of its own.
Legend: T tokens, N streams, D hidden, R rows of fn, J and K streams mixed from and to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.tile_triton import cast, to_fp32


@triton.jit
def _group_sums(part_ptrs, ok, group_chunks, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sum of the chunks of each group, in order; where a group is one part already, adding 0 leaves it as it is."""
    total = tl.zeros(part_ptrs.shape, tl.float32)
    for chunk in tl.static_range(GROUP):
        there = ok & (tl.zeros(ok.shape, tl.int32) + group_chunks > chunk)
        total += tl.load(part_ptrs + chunk * BLOCK_R, mask=there, other=0.0)
    return total


@triton.jit
def _inverse_rms(squares, count, eps):
    return tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(squares / count + eps))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _divide_by_sums(comb, AXIS: tl.constexpr, eps, real, PADDED: tl.constexpr):
    sums = tl.sum(comb, AXIS, keep_dims=True) + eps
    if PADDED:
        # Where there is no stream: 0 over 1.
        sums = tl.where(real, sums, 1.0)
    return tl.div_rn(comb, tl.broadcast_to(sums, comb.shape))


@triton.jit
def _sinkhorn(logits_TJK, real, eps, iterations, PADDED: tl.constexpr):
    """comb [T, N, N]; `real` [1, N, N]: entries between streams, the others become 0."""
    if PADDED:
        # Entries of no stream: any finite value that is no maximum.
        logits_TJK = tl.where(real, logits_TJK, -float("inf"))
        any_real = tl.max(real.to(tl.int32), 2, keep_dims=True) > 0
        logits_TJK = tl.where(any_real, logits_TJK, 0.0)
    powers = tl.exp(logits_TJK - tl.max(logits_TJK, 2, keep_dims=True))
    comb = tl.div_rn(powers, tl.broadcast_to(tl.sum(powers, 2, keep_dims=True), powers.shape)) + eps
    if PADDED:
        comb = tl.where(real, comb, 0.0)
    comb = _divide_by_sums(comb, 1, eps, real, PADDED)
    for _ in range(iterations - 1):
        comb = _divide_by_sums(comb, 2, eps, real, PADDED)
        comb = _divide_by_sums(comb, 1, eps, real, PADDED)
    return comb


@triton.jit
def _gates(
    part_ptr, base_ptr, scale_ptr, post_ptr, comb_ptr, tile, num_tokens, group_chunks,
    hidden, rms_eps, hc_eps, iterations, rows,
    STREAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """post and comb of TOKENS tokens."""
    SQUARE: tl.constexpr = BLOCK_N * BLOCK_N
    token = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    row = tl.arange(0, BLOCK_R)
    live = is_token[:, None] & (row <= rows)[None, :]
    place = token.to(tl.int64)[:, None] * (GROUPS * group_chunks * BLOCK_R) + row[None, :]
    # One group at a time: of a tile no larger than the program every thread holds one value, and Sinkhorn then has one
    # entry a thread. Of a larger one it would hold several, and divide them in turn.
    sums = tl.zeros([TOKENS, BLOCK_R], tl.float32)
    for group in tl.static_range(GROUPS):
        parts = part_ptr + place + group * group_chunks * BLOCK_R
        sums += _group_sums(parts, live, group_chunks, GROUP, BLOCK_R)
    squares = tl.sum(tl.where(row[None, :] == rows, sums, 0.0), 1)
    inverse = _inverse_rms(squares, STREAMS * hidden, rms_eps)[:, None]
    first = token.to(tl.int64)[:, None] * STREAMS

    n = tl.arange(0, BLOCK_N)
    is_stream = n < STREAMS
    base = tl.load(base_ptr + STREAMS + n, mask=is_stream, other=0.0)[None, :]
    post = 2 * _sigmoid(base + _columns(sums, STREAMS + n) * inverse * tl.load(scale_ptr + 1))
    tl.store(post_ptr + first + n[None, :], post, mask=is_token[:, None] & is_stream[None, :])

    entry = tl.arange(0, SQUARE)
    j, k = entry // BLOCK_N, entry % BLOCK_N
    is_entry = (j < STREAMS) & (k < STREAMS)
    at = tl.where(is_entry, j * STREAMS + k, 0)
    base = tl.load(base_ptr + 2 * STREAMS + at, mask=is_entry, other=0.0)[None, :]
    logits = base + _columns(sums, 2 * STREAMS + at) * inverse * tl.load(scale_ptr + 2)
    comb = _sinkhorn(
        tl.reshape(logits, [TOKENS, BLOCK_N, BLOCK_N]), tl.reshape(is_entry, [1, BLOCK_N, BLOCK_N]),
        hc_eps, iterations, BLOCK_N != STREAMS,
    )  # fmt: skip
    comb_ptrs = comb_ptr + first * STREAMS + at[None, :]
    written = is_token[:, None] & is_entry[None, :]
    tl.store(comb_ptrs, tl.reshape(comb, [TOKENS, SQUARE]), mask=written)


@triton.jit
def _columns(x, column):
    """x[:, column]."""
    index = tl.broadcast_to(column[None, :], [x.shape[0], column.shape[0]])
    return tl.gather(x, index, 1)


@triton.jit
def _load_streams(
    x_ptr, token, x_stride, stream_stride, hidden, channel,
    STREAMS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token's channels of all streams, [N, channels] as stored."""
    n = tl.arange(0, BLOCK_N)
    ok = (n < STREAMS)[:, None] & (channel < hidden)[None, :]
    x_ptrs = x_ptr + token * x_stride + n[:, None] * stream_stride + channel[None, :]
    return tl.load(x_ptrs, mask=ok, other=0.0)


@triton.jit
def _mixed(x, weights, DTYPE: tl.constexpr):
    """The weighted sum of the streams, as DTYPE rounds it, in fp32."""
    return to_fp32(cast(tl.sum(to_fp32(x) * weights[:, None], 0), DTYPE))


@triton.jit
def _input(
    x_ptr, part_ptr, base_ptr, scale_ptr, norm_ptr, out_ptr, token, group_chunks,
    x_stride, stream_stride, hidden, rms_eps, hc_eps, rows,
    STREAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    """One token's weighted sum of the streams, normed. HOLD: BLOCK_D covers hidden, so that it is read once."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    token = token.to(tl.int64)
    lane = tl.arange(0, BLOCK_D)
    if HOLD:
        # Before the sums of the parts, so that both are under way together.
        x = _load_streams(
            x_ptr, token, x_stride, stream_stride, hidden, lane, STREAMS, BLOCK_N
        )  # fmt: skip
    group = tl.arange(0, BLOCK_G)
    live = group < GROUPS
    parts = part_ptr + (token * GROUPS + group) * (group_chunks * BLOCK_R)
    n = tl.arange(0, BLOCK_N)
    is_stream = n < STREAMS
    ok = live[:, None] & is_stream[None, :]
    squares = _group_sums(parts + rows, live, group_chunks, GROUP, BLOCK_R)
    z = _group_sums(parts[:, None] + n[None, :], ok, group_chunks, GROUP, BLOCK_R)
    base = tl.load(base_ptr + n, mask=is_stream, other=0.0)
    scale = tl.load(scale_ptr)
    squares = tl.sum(squares, 0) + tl.zeros([BLOCK_N], tl.float32)
    inverse = _inverse_rms(squares, STREAMS * hidden, rms_eps)
    weights = _sigmoid(base + tl.sum(z, 0) * inverse * scale) + hc_eps
    if HOLD:
        y = _mixed(x, weights, DTYPE)
        squares = y * y
    else:
        squares = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, hidden, BLOCK_D):
            x = _load_streams(
                x_ptr, token, x_stride, stream_stride, hidden, start + lane, STREAMS, BLOCK_N
            )  # fmt: skip
            y = _mixed(x, weights, DTYPE)
            squares += y * y
    norm_scale = _inverse_rms(tl.sum(squares, 0) + tl.zeros([1], tl.float32), hidden, rms_eps)
    out_ptrs = out_ptr + token * hidden + lane
    if HOLD:
        norm = tl.load(norm_ptr + lane, mask=lane < hidden, other=0.0)
        tl.store(out_ptrs, cast(y * norm_scale * norm, DTYPE), mask=lane < hidden)
    else:
        for start in range(0, hidden, BLOCK_D):
            x = _load_streams(
                x_ptr, token, x_stride, stream_stride, hidden, start + lane, STREAMS, BLOCK_N
            )  # fmt: skip
            inside = start + lane < hidden
            norm = tl.load(norm_ptr + start + lane, mask=inside, other=0.0)
            y = _mixed(x, weights, DTYPE)
            tl.store(out_ptrs + start, cast(y * norm_scale * norm, DTYPE), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "gate_programs", "group_chunks"])
def finish_kernel(
    x_ptr, part_ptr, base_ptr, scale_ptr, norm_ptr, out_ptr, post_ptr, comb_ptr,
    x_stride, stream_stride, hidden, rows, iterations, rms_eps, hc_eps,
    num_tokens, gate_programs, group_chunks,
    STREAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    """Programs [0, gate_programs): post and comb of TOKENS tokens each. The others: one token's input each."""
    program = tl.program_id(0)
    if program < gate_programs:
        _gates(
            part_ptr, base_ptr, scale_ptr, post_ptr, comb_ptr, program, num_tokens,
            group_chunks, hidden, rms_eps, hc_eps, iterations, rows,
            STREAMS, BLOCK_N, BLOCK_R, GROUPS, GROUP, TOKENS,
        )  # fmt: skip
    else:
        _input(
            x_ptr, part_ptr, base_ptr, scale_ptr, norm_ptr, out_ptr, program - gate_programs,
            group_chunks, x_stride, stream_stride, hidden, rms_eps, hc_eps, rows,
            STREAMS, BLOCK_N, BLOCK_R, GROUPS, BLOCK_G, GROUP, BLOCK_D, HOLD,
        )  # fmt: skip
