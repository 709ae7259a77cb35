"""Hyper-connections in two launches before and one behind a sub-block (spec/architecture.md section 2).

Before it, `dots_kernel` multiplies the streams with `fn` in chunks of channels, then `finish_kernel` sums the chunks.
Chunks are grouped, and a group is the sum of its chunks in order, whether one program makes it or `finish_kernel`: so a
token's bits do not depend on how many tokens there are.
Legend: T tokens, N streams, D hidden, R rows of fn, C chunks or groups of chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4.kernels.base import MixKernel, MixWeights
from dsv4.kernels.mix_finish_triton import finish_kernel
from dsv4.kernels.tile_triton import cast, to_fp32
from dsv4.triton_launch import KernelVariant, dot_dtype, next_pow2

BLOCK_T = 64
"""Tokens that share a loaded tile of fn: with fewer, fn's bytes from the L2 outweigh the streams'."""
BLOCK_K = 64
DOTS_WARPS = 4
STAGES = 3
CHUNKS_A_STREAM = 16
LEAST_STEPS = 2
"""Steps of BLOCK_K in a chunk."""
GROUP = 4
"""Chunks that one program sums where there are tokens enough."""
SERIAL_PROGRAMS = 264
"""Two a multiprocessor: with so many, a program makes a group."""
GATE_TOKENS = 8
"""Tokens of a program that makes post and comb: as many parts as arrive during a Sinkhorn."""
HELD = 32768
"""Values of a token that a program holds: 64 a thread of 16 warps."""
POST_BLOCK, POST_WARPS = 1024, 4
"""16 bytes of bf16 a thread and stream."""


@triton.jit
def thirds(x):
    """fp32 as three bf16 tiles whose sum it is: 3 x 8 bits of mantissa."""
    high = cast(x, tl.bfloat16)
    rest = x - to_fp32(high)
    middle = cast(rest, tl.bfloat16)
    return high, middle, cast(rest - to_fp32(middle), tl.bfloat16)


@triton.jit
def _operand(x, DOT: tl.constexpr):
    if x.dtype == DOT:
        return x
    else:
        return to_fp32(x).to(DOT)


@triton.jit(do_not_specialize=["num_tokens", "chunks_each"])
def dots_kernel(
    x_ptr, fn_ptr, part_ptr,
    x_stride, stream_stride, fn_stride, hidden, rows, chunk, stream_chunks,
    num_tokens, chunks_each,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """part[t, c, r] = fn[r] . streams[t], part[t, c, R] = sum of the streams' squares, of the `chunks_each` chunks of
    group c, which lie in one stream; grid (token tiles, groups). EXACT: the streams are bf16, so that three bf16 dots
    give the fp32 products. EVEN: BLOCK_K divides hidden."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1)
    first = group * chunks_each
    stream = first // stream_chunks
    row = tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_K)
    ok = (token < num_tokens)[:, None]
    is_row = (row < rows)[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * x_stride + stream * stream_stride + lane[None, :]
    fn_ptrs = fn_ptr + row[None, :] * fn_stride + stream * hidden + lane[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    total_squares = tl.zeros([BLOCK_T], tl.float32)
    begin = (first - stream * stream_chunks) * chunk
    for index in range(chunks_each):
        dots = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        start = begin + index * chunk
        for k in range(start, tl.minimum(start + chunk, hidden), BLOCK_K):
            if EVEN:
                x = tl.load(x_ptrs + k, mask=ok, other=0.0)
                fn = tl.load(fn_ptrs + k, mask=is_row, other=0.0)
            else:
                real = k + lane < hidden
                x = tl.load(x_ptrs + k, mask=ok & real[None, :], other=0.0)
                fn = tl.load(fn_ptrs + k, mask=is_row & real[:, None], other=0.0)
            x32 = to_fp32(x)
            squares += x32 * x32
            if EXACT:
                high, middle, low = thirds(fn)
                values = _operand(x, DOT)
                # Small products first.
                dots = tl.dot(values, _operand(low, DOT), dots, input_precision="ieee")
                dots = tl.dot(values, _operand(middle, DOT), dots, input_precision="ieee")
                dots = tl.dot(values, _operand(high, DOT), dots, input_precision="ieee")
            else:
                dots = tl.dot(x32, fn, dots, input_precision="ieee")
        total += dots
        total_squares += tl.sum(squares, 1)
    total = tl.where(row[None, :] == rows, total_squares[:, None], total)
    place = (token.to(tl.int64) * tl.num_programs(1) + group) * BLOCK_R
    tl.store(part_ptr + place[:, None] + row[None, :], total, mask=ok & (row <= rows)[None, :])


@triton.jit
def post_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, y_stride, x_stride, stream_stride, hidden,
    STREAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[k] = post[k] y + sum_j comb[j, k] x[j] of one token's BLOCK_D channels."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    inside = channel < hidden
    n = tl.arange(0, BLOCK_N)
    is_stream = n < STREAMS
    y = tl.load(y_ptr + token * y_stride + channel, mask=inside, other=0.0)
    out = tl.load(post_ptr + token * STREAMS + n, mask=is_stream, other=0.0)[:, None] * to_fp32(y)
    for j in tl.static_range(STREAMS):
        comb_ptrs = comb_ptr + (token * STREAMS + j) * STREAMS + n
        comb = tl.load(comb_ptrs, mask=is_stream, other=0.0)
        x = tl.load(
            x_ptr + token * x_stride + j * stream_stride + channel, mask=inside, other=0.0
        )  # fmt: skip
        out += comb[:, None] * to_fp32(x)
    out_ptrs = out_ptr + (token * STREAMS + n)[:, None] * hidden + channel
    tl.store(out_ptrs, cast(out, out_ptr.dtype.element_ty), mask=is_stream[:, None] & inside)


@frozen
class Shape:
    """What the kernels of one (streams, hidden) are launched with; the number of tokens has no part in it."""

    streams: int
    hidden: int

    @property
    def rows(self) -> int:
        """Rows of fn."""
        return (2 + self.streams) * self.streams

    @property
    def block_r(self) -> int:
        """Those, and one place for the sum of squares; 16 is the narrowest dot."""
        return max(next_pow2(self.rows + 1), 16)

    @property
    def chunk(self) -> int:
        """Channels of a chunk."""
        steps = -(-self.hidden // BLOCK_K)
        return max(-(-steps // CHUNKS_A_STREAM), LEAST_STEPS) * BLOCK_K

    @property
    def stream_chunks(self) -> int:
        return -(-self.hidden // self.chunk)

    @property
    def group(self) -> int:
        """Chunks of a group."""
        return GROUP if self.stream_chunks % GROUP == 0 else 1

    @property
    def groups(self) -> int:
        return self.streams * self.stream_chunks // self.group

    @property
    def block_d(self) -> int:
        """Channels that a program of `finish_kernel` has in registers."""
        return min(next_pow2(self.hidden), max(HELD // next_pow2(self.streams), 1))

    def dots(self, dtype: torch.dtype, dot: Any) -> dict[str, Any]:
        return {
            "BLOCK_T": BLOCK_T, "BLOCK_R": self.block_r, "BLOCK_K": BLOCK_K,
            "EVEN": self.hidden % BLOCK_K == 0, "EXACT": dtype == torch.bfloat16, "DOT": dot,
        }  # fmt: skip

    def finish(self) -> dict[str, Any]:
        return {
            "STREAMS": self.streams, "BLOCK_N": next_pow2(self.streams), "BLOCK_R": self.block_r,
            "GROUPS": self.groups, "BLOCK_G": next_pow2(self.groups), "GROUP": self.group,
            "TOKENS": GATE_TOKENS, "BLOCK_D": self.block_d, "HOLD": self.block_d >= self.hidden,
        }  # fmt: skip

    def finish_warps(self) -> int:
        values = next_pow2(self.streams) * self.block_d
        return 4 if values <= 4096 else 8 if values <= 16384 else 16

    def post(self) -> dict[str, Any]:
        block_d = min(next_pow2(self.hidden), POST_BLOCK)
        return {
            "STREAMS": self.streams,
            "BLOCK_N": next_pow2(self.streams),
            "BLOCK_D": block_d,
        }


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(streams_TND: Tensor) -> tuple[int, int]:
    """Of tokens and streams. The stride of a single token has no meaning; it must not choose another compilation, which
    could sum in another order."""
    num_tokens, num_streams, hidden = streams_TND.shape
    return (
        streams_TND.stride(0) if num_tokens > 1 else num_streams * hidden,
        streams_TND.stride(1) if num_streams > 1 else hidden,
    )


def _mix(
    streams_TND: Tensor, weights: MixWeights, norm: Tensor, gates: tuple[Tensor, Tensor] | None,
    *, eps: float, hc_eps: float, iterations: int,
) -> Tensor:  # fmt: skip
    """The sub-block's input [T, D]; `gates` (post, comb) are written if they are wanted."""
    num_tokens, num_streams, hidden = streams_TND.shape
    out_TD = streams_TND.new_empty(num_tokens, hidden)
    if num_tokens == 0:
        return out_TD
    shape = Shape(num_streams, hidden)
    tiles = -(-num_tokens // BLOCK_T)
    group_chunks = 1 if tiles * shape.groups >= SERIAL_PROGRAMS else shape.group
    num_parts, chunks_each = shape.groups * group_chunks, shape.group // group_chunks
    streams_TND, fn = _dense(streams_TND), _dense(weights.fn)
    parts_TCR = torch.empty(
        num_tokens, num_parts, shape.block_r, dtype=torch.float32, device=out_TD.device
    )
    dots_kernel[(tiles, num_parts)](
        streams_TND, fn, parts_TCR, *_strides(streams_TND), fn.stride(0),
        hidden, fn.shape[0], shape.chunk, shape.stream_chunks, num_tokens, chunks_each,
        **shape.dots(streams_TND.dtype, dot_dtype(streams_TND)),
        num_warps=DOTS_WARPS, num_stages=STAGES,
    )  # fmt: skip
    gate_programs = 0 if gates is None else -(-num_tokens // GATE_TOKENS)
    post_TN, comb_TNN = gates or (parts_TCR, parts_TCR)
    finish_kernel[(gate_programs + num_tokens,)](
        streams_TND, parts_TCR, weights.base, weights.scale, norm, out_TD, post_TN, comb_TNN,
        *_strides(streams_TND), hidden, fn.shape[0], iterations, eps, hc_eps,
        num_tokens, gate_programs, group_chunks,
        **shape.finish(), num_warps=shape.finish_warps(), num_stages=STAGES,
    )  # fmt: skip
    return out_TD


class TritonMix(MixKernel):
    def pre(
        self,
        streams_TND: Tensor,
        weights: MixWeights,
        *,
        norm: Tensor,
        eps: float,
        hc_eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, n, _ = streams_TND.shape
        post_TN = weights.base.new_empty(num_tokens, n)
        comb_TNN = weights.base.new_empty(num_tokens, n, n)
        gates = (post_TN, comb_TNN)
        x_TD = _mix(
            streams_TND, weights, norm, gates, eps=eps, hc_eps=hc_eps, iterations=iterations
        )  # fmt: skip
        return x_TD, post_TN, comb_TNN

    def post(self, y_TD: Tensor, streams_TND: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
        # A new tensor: in place, threads that hold copies of one value would have to wait for each other.
        out_TND = torch.empty_like(streams_TND, memory_format=torch.contiguous_format)
        num_tokens, num_streams, hidden = streams_TND.shape
        if num_tokens == 0:
            return out_TND
        streams_TND, y_TD = _dense(streams_TND), _dense(y_TD)
        launch = Shape(num_streams, hidden).post()
        post_kernel[(num_tokens, -(-hidden // launch["BLOCK_D"]))](
            y_TD, streams_TND, post_TN.contiguous(), comb_TNN.contiguous(), out_TND,
            y_TD.stride(0), *_strides(streams_TND), hidden,
            **launch, num_warps=POST_WARPS, num_stages=STAGES,
        )  # fmt: skip
        return out_TND

    def head(
        self, streams_TND: Tensor, weights: MixWeights, *, norm: Tensor, eps: float, hc_eps: float
    ) -> Tensor:
        return _mix(streams_TND, weights, norm, None, eps=eps, hc_eps=hc_eps, iterations=0)


def variants() -> tuple[KernelVariant, ...]:
    """What is launched for the published models, Flash and Pro."""
    flash, pro = Shape(4, 4096), Shape(4, 7168)
    return (
        _variant("mix_dots", dots_kernel, flash.dots(torch.bfloat16, tl.bfloat16), DOTS_WARPS),
        _variant("mix_finish_flash", finish_kernel, flash.finish(), flash.finish_warps()),
        _variant("mix_finish_pro", finish_kernel, pro.finish(), pro.finish_warps()),
        _variant("mix_post", post_kernel, flash.post(), POST_WARPS),
    )


_BF16_ARGUMENTS = ("x_ptr", "y_ptr", "out_ptr")
_UNALIGNED = (
    "rows", "iterations", "num_tokens", "gate_programs", "group_chunks", "chunks_each",
    "rms_eps", "hc_eps",
)  # fmt: skip


def _variant(name: str, fn: Any, constexprs: dict[str, Any], warps: int) -> KernelVariant:
    def kind(argument: str) -> str:
        if argument.endswith("_ptr"):
            return "*bf16" if argument in _BF16_ARGUMENTS else "*fp32"
        return "fp32" if argument.endswith("_eps") else "i32"

    arguments = [argument for argument in fn.arg_names if argument not in constexprs]
    return KernelVariant(
        name=name,
        fn=fn,
        signature={argument: kind(argument) for argument in arguments},
        constexprs=constexprs,
        num_warps=warps,
        num_stages=STAGES,
        aligned=tuple(name for name in arguments if name not in _UNALIGNED),
    )
