"""Row-invariant GEMM: y = x W^T, one tile shape and one order of sums per weight shape for any number of rows.

The inputs are cut into chunks, fixed by the weight's shape. A chunk is summed from zero, and chunks are added in order:
by one program if there are rows enough to fill the GPU, else each by its own program and then by `sum_kernel`. Both are
the same additions of the same numbers.
Legend: T tokens, K inputs, O outputs, G groups.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.base import LinearKernel
from dsv4.kernels.tile_triton import cast, to_fp32
from dsv4.triton_launch import KernelVariant, Tiling, dot_dtype

BF16 = Tiling(64, 128, 64, 4, 3)
"""64 rows: the smallest wgmma, multiplied in the time that their weights take to arrive. Fits AMD's 64 KiB."""
FP32 = Tiling(32, 64, 32, 4, 3)
"""No tensor cores: products of registers, so that rows that are not there cost most."""
PROGRAMS = 128
"""About one a multiprocessor: what the chunks of one row tile should make."""
SERIAL_PROGRAMS = 128
"""Where whole sums are that many, a program makes one alone."""
MOST_CHUNKS = 16
LEAST_STEPS = 4
"""Steps of block_k in a chunk: shorter ones are all prologue."""
GROUP_M = 8
"""Row tiles that run through the columns together: their rows and weights stay in the L2."""
SUM_BLOCK = 512
SUM_WARPS = 4


@triton.jit
def operand(x, DOT: tl.constexpr):
    """A loaded tile as operand of a dot; not through fp32 and back, which would keep it from the asynchronous copy."""
    if x.dtype == DOT:
        return x
    else:
        return to_fp32(x).to(DOT)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: groups of GROUP row tiles go through the columns together."""
    per_group = GROUP * tiles_n
    first = tile // per_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + tile % per_group % height, tile % per_group // height


@triton.jit(do_not_specialize=["num_tokens", "chunks_each"])
def linear_kernel(
    x_ptr, weight_ptr, out_ptr,
    x_stride, x_group_stride, weight_stride, weight_group_stride, out_stride,
    inputs, outputs, chunk, num_tokens, chunks_each,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out[part, t, g, o] = sum over the part's `chunks_each` chunks; grid (tiles, parts, groups). EVEN: BLOCK_K divides
    inputs."""
    tile_m, tile_n = _place(
        tl.program_id(0), tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP
    )
    part, group = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    ok = (token < num_tokens)[:, None]
    # Outputs behind the last repeat it: they are not stored, and a load without a mask is cheaper.
    column = tl.minimum(output, outputs - 1).to(tl.int64)
    x_ptrs = x_ptr + group * x_group_stride + token.to(tl.int64)[:, None] * x_stride + lane[None, :]
    weight_ptrs = (
        weight_ptr + group * weight_group_stride + column[None, :] * weight_stride + lane[:, None]
    )
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in range(part * chunks_each, (part + 1) * chunks_each):
        summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        start = index * chunk
        for k in range(start, tl.minimum(start + chunk, inputs), BLOCK_K):
            if EVEN:
                x = tl.load(x_ptrs + k, mask=ok, other=0.0)
                weight = tl.load(weight_ptrs + k)
            else:
                real = k + lane < inputs
                x = tl.load(x_ptrs + k, mask=ok & real[None, :], other=0.0)
                weight = tl.load(weight_ptrs + k, mask=real[:, None], other=0.0)
            summed = tl.dot(
                operand(x, DOT), operand(weight, DOT), summed, input_precision="ieee"
            )  # fmt: skip
        total += summed
    out_ptrs = (
        out_ptr
        + (part * num_tokens + token).to(tl.int64)[:, None] * out_stride
        + group * outputs
        + output[None, :]
    )
    mask = ok & (output < outputs)[None, :]
    tl.store(out_ptrs, cast(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_parts"])
def sum_kernel(
    part_ptr, out_ptr, size, num_parts, MOST_PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[i] = sum of part[p, i] in order of p."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that all loads are under way before the first addition; adding the 0 of a part that is none to a
    # sum that began with 0 changes nothing.
    for part in tl.static_range(MOST_PARTS):
        end = tl.where(num_parts > part, size, 0)
        total += tl.load(part_ptr + lane, mask=lane < end, other=0.0)
        part_ptr += size
    tl.store(out_ptr + lane, cast(total, out_ptr.dtype.element_ty), mask=lane < size)


def tiling(dtype: torch.dtype) -> Tiling:
    return FP32 if dtype == torch.float32 else BF16


def chunks(inputs: int, column_tiles: int, block_k: int) -> tuple[int, int]:
    """(inputs of a chunk, number of chunks), from the weight's shape alone."""
    steps = -(-inputs // block_k)
    wanted = min(max(PROGRAMS // column_tiles, 1), MOST_CHUNKS)
    steps_each = max(-(-steps // wanted), LEAST_STEPS)
    return steps_each * block_k, max(-(-steps // steps_each), 1)


def multiply(x_TGK: Tensor, weight_GOK: Tensor) -> Tensor:
    """[T, G, O]; the last dimension of both is dense."""
    (num_tokens, groups, inputs), outputs = x_TGK.shape, weight_GOK.shape[1]
    out_TGO = x_TGK.new_empty(num_tokens, groups, outputs)
    if not out_TGO.numel():
        return out_TGO
    tile = tiling(x_TGK.dtype)
    column_tiles = groups * -(-outputs // tile.block_n)
    chunk, num_chunks = chunks(inputs, column_tiles, tile.block_k)
    tiles = -(-num_tokens // tile.block_m) * -(-outputs // tile.block_n)
    num_parts = 1 if tiles * groups >= SERIAL_PROGRAMS else num_chunks
    result = out_TGO
    if num_parts > 1:
        result = out_TGO.new_empty((num_parts, *out_TGO.shape), dtype=torch.float32)
    linear_kernel[(tiles, num_parts, groups)](
        x_TGK, weight_GOK, result,
        x_TGK.stride(0), x_TGK.stride(1), weight_GOK.stride(1), weight_GOK.stride(0),
        groups * outputs, inputs, outputs, chunk, num_tokens, num_chunks // num_parts,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=GROUP_M,
        EVEN=inputs % tile.block_k == 0, DOT=dot_dtype(x_TGK),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_parts > 1:
        size = out_TGO.numel()
        sum_kernel[(-(-size // SUM_BLOCK),)](
            result, out_TGO, size, num_parts, MOST_PARTS=MOST_CHUNKS, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS
        )  # fmt: skip
    return out_TGO


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class TritonLinear(LinearKernel):
    row_invariant: ClassVar[bool] = True

    def linear(self, x_TK: Tensor, weight_OK: Tensor) -> Tensor:
        return multiply(_dense(x_TK).unsqueeze(1), _dense(weight_OK).unsqueeze(0)).squeeze(1)

    def grouped(self, x_TGK: Tensor, weight_GOK: Tensor) -> Tensor:
        return multiply(_dense(x_TGK), _dense(weight_GOK))


def variants() -> tuple[KernelVariant, ...]:
    """What `multiply` launches for the published models, whose inputs are all multiples of both block_k."""
    return (
        _variant("linear_bf16", "*bf16", "*bf16", BF16, tl.bfloat16),
        _variant("linear_bf16_parts", "*bf16", "*fp32", BF16, tl.bfloat16),
        _variant("linear_fp32", "*fp32", "*fp32", FP32, tl.float32),
        _sum_variant("linear_sum_bf16", "*bf16"),
        _sum_variant("linear_sum_fp32", "*fp32"),
    )


_STRIDES = ("x_stride", "x_group_stride", "weight_stride", "weight_group_stride", "out_stride")


def _variant(name: str, values: str, result: str, tile: Tiling, dot: tl.dtype) -> KernelVariant:
    pointers = {"x_ptr": values, "weight_ptr": values, "out_ptr": result}
    sizes = (*_STRIDES, "inputs", "outputs", "chunk")
    return KernelVariant(
        name=name,
        fn=linear_kernel,
        signature={
            **pointers,
            **dict.fromkeys((*sizes, "num_tokens", "chunks_each"), "i32"),
        },
        constexprs={
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "GROUP": GROUP_M, "EVEN": True, "DOT": dot,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*pointers, *sizes),
    )  # fmt: skip


def _sum_variant(name: str, result: str) -> KernelVariant:
    return KernelVariant(
        name=name,
        fn=sum_kernel,
        signature={"part_ptr": "*fp32", "out_ptr": result, "size": "i32", "num_parts": "i32"},
        constexprs={"MOST_PARTS": MOST_CHUNKS, "BLOCK": SUM_BLOCK},
        num_warps=SUM_WARPS,
        aligned=("part_ptr", "out_ptr", "size"),
    )
