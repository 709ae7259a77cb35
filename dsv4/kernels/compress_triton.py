"""Compress on GPUs: one launch where every request's tokens are stored in place, at most two where there are chunks.

Legend: T tokens, B requests, E closing windows, S fold segments, J fold steps, M pooled tokens, C projected channels,
D channels of an entry.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor

from dsv4.kernels.base import CompressKernel, Rounding
from dsv4.kernels.fold_triton import finish_kernel, fold_in_place_kernel, fold_kernel
from dsv4.kernels.overlap_triton import overlap_kernel, state_kernel
from dsv4.kernels.rows_triton import (
    BF16,
    FP8_ROUNDING,
    HADAMARD_FP4_ROUNDING,
    INDEX_FP4,
    INDEX_FP8,
    PACKED_FP8,
    rounding_code,
    row_args,
)
from dsv4.metadata.plans import CompressorTarget, FoldPlan, OverlapPlan
from dsv4.triton_launch import TARGETS, KernelVariant, interpreting, next_pow2, overlaps_launches

OPTIONS: Mapping[str, Any] = {"enable_fp_fusion": False}
"""Torch folds too, when a pool exports its state, and it fuses no multiplication with an addition."""


@frozen(kw_only=True)
class Config:
    """Sizes of programs. None of them changes a bit of a result."""

    width: int
    """Lanes of a tile that holds a whole entry."""
    num_warps: int
    """Of programs that hold a whole entry: 4 channels, 16 bytes, a thread."""
    rows: int
    """Tokens whose raw rows one program writes at a time."""
    span: int
    """Tokens of a chunk among which one program looks for those that have a state row: few have."""
    columns: int
    """Channels that it moves at a time."""
    ahead: int
    """Tokens that a fold loads before it folds the first, where each needs an index."""
    channels: int
    """Channels of a program that folds for a chunk: one warp of one thread a channel, because a fold is serial and
    the number of programs is what keeps memory busy."""
    run: int
    """As `ahead`, of neighbouring tokens of a chunk. The compiler's time grows with its third power."""
    requests: int = 128
    """Accumulators whose counts one program writes."""


def config_of(dim: int, *, hip: bool, interpreted: bool) -> Config:
    """The configuration of a compressor of `dim` channels."""
    width = next_pow2(dim)
    return Config(
        width=width,
        num_warps=min(max(width // 128, 1), 8),
        rows=4,
        span=32,
        columns=min(width, 512),
        ahead=3,
        channels=min(width, 64 if hip else 32),
        run=4 if interpreted else 16,
    )


def _config(dim: int) -> Config:
    return config_of(dim, hip=torch.version.hip is not None, interpreted=interpreting())


class TritonCompress(CompressKernel):
    def overlap(
        self,
        projected_TC: Tensor,
        *,
        ape_MC: Tensor,
        norm: Tensor,
        eps: float,
        plan: OverlapPlan,
        target: CompressorTarget,
        rounding: Rounding,
    ) -> None:
        num_tokens, num_closing = projected_TC.shape[0], target.entry_loc_E.shape[0]
        if num_tokens == 0:
            return
        config = _config(norm.shape[0])
        arguments = _arguments(projected_TC, ape_MC, norm, eps, plan, target, rounding, config)
        if plan.in_place:
            # no row that is read for an entry is written: neither has to come first
            programs = num_closing + triton.cdiv(num_tokens, config.rows)
            _launch(overlap_kernel, (programs,), arguments, config.num_warps)
            return
        if num_closing:
            _launch(overlap_kernel, (num_closing,), arguments, config.num_warps)
        arguments["ROWS"] = 2 * config.rows
        programs = triton.cdiv(num_tokens, config.span)
        _launch(state_kernel, (programs,), arguments, 2 * config.num_warps)

    def fold(
        self,
        projected_TC: Tensor,
        *,
        ape_MC: Tensor,
        norm: Tensor,
        eps: float,
        plan: FoldPlan,
        target: CompressorTarget,
        rounding: Rounding,
    ) -> None:
        num_tokens, num_requests = projected_TC.shape[0], plan.accumulator_loc_B.shape[0]
        if num_tokens == 0 or num_requests == 0:
            return
        config = _config(norm.shape[0])
        arguments = _arguments(projected_TC, ape_MC, norm, eps, plan, target, rounding, config)
        arguments |= _fold_arguments(plan, target, config)
        if plan.in_place:
            _launch(fold_in_place_kernel, (num_requests,), arguments, config.num_warps)
            return
        parts = triton.cdiv(norm.shape[0], config.channels)
        narrow = arguments | {"D": config.channels}
        _launch(fold_kernel, (plan.source_SJ.shape[0], parts), narrow, 1)
        programs = target.entry_loc_E.shape[0] + triton.cdiv(num_tokens, config.span)
        programs += triton.cdiv(num_requests, config.requests)
        _launch(finish_kernel, (programs,), arguments, config.num_warps)


def _launch(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], num_warps: int
) -> None:
    """Launch a kernel with those of the arguments that it names."""
    named = {name: arguments[name] for name in kernel.arg_names}
    early = {"launch_pdl": True} if arguments["PDL"] else {}
    kernel[grid](**named, num_warps=num_warps, **early, **OPTIONS)


def _arguments(
    projected_TC: Tensor,
    ape_MC: Tensor,
    norm: Tensor,
    eps: float,
    plan: OverlapPlan | FoldPlan,
    target: CompressorTarget,
    rounding: Rounding,
    config: Config,
) -> dict[str, Any]:
    """Arguments of every kernel, by name."""
    table, state, rope = row_args(target.entry_view), target.state_view, plan.entry_rope
    return {
        "projected_ptr": projected_TC,
        "projected_stride": projected_TC.stride(0),
        "num_tokens": projected_TC.shape[0],
        "ape_ptr": ape_MC,
        "ape_stride": ape_MC.stride(0),
        "ape_row_ptr": plan.ape_row_T,
        "source_ptr": plan.source_EM if isinstance(plan, OverlapPlan) else plan.source_SJ,
        "STEPS": next_pow2(2 * plan.ratio),
        "state_loc_ptr": plan.state_loc_T,
        "state_ptr": state.storage,
        "state_stride": state.storage.stride(0),
        "num_state_rows": state.num_rows,
        "norm_ptr": norm,
        "eps": eps,
        "cos_ptr": rope.cos_TP,
        "sin_ptr": rope.sin_TP,
        "entry_loc_ptr": target.entry_loc_E,
        "num_closing": target.entry_loc_E.shape[0],
        "table_ptr": table.storage,
        "table_stride": table.stride,
        "num_entry_rows": table.num_rows,
        "RATIO": plan.ratio,
        "DIM": norm.shape[0],
        "ROPE": 2 * rope.cos_TP.shape[1],
        "ROUNDING": rounding_code(rounding),
        "KIND": table.kind,
        "PLANE_ROWS": table.plane_rows,
        "D": config.width,
        "SPAN": config.span,
        "ROWS": config.rows,
        "COLS": config.columns,
        "PDL": overlaps_launches(norm.device),
    }


def _fold_arguments(plan: FoldPlan, target: CompressorTarget, config: Config) -> dict[str, Any]:
    """What the kernels of `fold` take besides."""
    accumulators = target.accumulator_view
    assert accumulators is not None
    return {
        "starts_ptr": plan.starts_B1,
        "closing_indptr_ptr": plan.closing_indptr_B1,
        "position_ptr": plan.position_SJ,
        "start_ptr": plan.start_S,
        "num_steps": plan.source_SJ.shape[1],
        "accumulator_row_ptr": plan.accumulator_row_S,
        "accumulator_loc_ptr": plan.accumulator_loc_B,
        "folded_ptr": plan.folded_B,
        "num_requests": plan.folded_B.shape[0],
        "accumulator_ptr": accumulators.storage,
        "accumulator_stride": accumulators.storage.stride(0),
        "num_accumulators": accumulators.num_rows,
        "pooled_ptr": target.pooled_EC,
        "pooled_stride": target.pooled_EC.stride(0),
        "STEPS": next_pow2(max(plan.ratio, plan.source_SJ.shape[1])),
        "RUN": config.run,
        "AHEAD": config.ahead,
        "REQUESTS": config.requests,
    }


def variants() -> tuple[KernelVariant, ...]:
    """Ratios 4 and 128, entries of 512 channels and keys of 128, 64 of them rotated, official rounding."""
    entries = (("bf16", BF16, "*bf16"), ("packed fp8", PACKED_FP8, "*u8"))
    keys = (("bf16", BF16, "*bf16"), ("fp8", INDEX_FP8, "*u8"), ("fp4", INDEX_FP4, "*u8"))
    found = []
    for backend in ("cuda", "hip"):
        variant = functools.partial(_variant, backend)
        for name, kind, table in entries:
            official = {"ROUNDING": FP8_ROUNDING.value, "KIND": kind.value}
            found += [
                variant(overlap_kernel, f"compress csa {name}", 4, 512, official, table),
                variant(fold_in_place_kernel, f"compress hca {name}", 128, 512, official, table),
                variant(finish_kernel, f"compress hca finish {name}", 128, 512, official, table),
            ]
        for name, kind, table in keys:
            official = {"ROUNDING": HADAMARD_FP4_ROUNDING.value, "KIND": kind.value}
            found.append(
                variant(overlap_kernel, f"compress indexer {name}", 4, 128, official, table)
            )
        for name, dim in (("csa", 512), ("indexer", 128)):
            state = variant(state_kernel, f"compress {name} state", 4, dim, {})
            found.append(evolve(state, num_warps=2 * state.num_warps))
        strides = {"projected_stride": 1024, "ape_stride": 512}
        fold = variant(fold_kernel, "compress hca fold", 128, 512, strides)
        width = config_of(512, hip=backend == "hip", interpreted=False).channels
        fold = evolve(fold, num_warps=1, constexprs={**fold.constexprs, "D": width})
        found.append(fold)
    return tuple(found)


def _variant(
    backend: str,
    fn: Any,
    name: str,
    ratio: int,
    dim: int,
    constants: Mapping[str, int],
    table: str = "",
) -> KernelVariant:
    """A kernel for `dim` channels; `table` is the type of the entries' memory."""
    config = config_of(dim, hip=backend == "hip", interpreted=False)
    constants = {
        "RATIO": ratio, "DIM": dim, "ROPE": 64, "PLANE_ROWS": 64 if table == "*u8" else 1, "D": config.width,
        "SPAN": config.span,
        "ROWS": config.rows * (2 if fn is state_kernel else 1), "COLS": config.columns,
        "AHEAD": config.ahead, "REQUESTS": config.requests,
        "STEPS": 8 if ratio == 4 else 128, "RUN": config.run, "PDL": backend == "cuda", **constants,
    }  # fmt: skip
    ints = (
        "starts_ptr", "closing_indptr_ptr", "source_ptr", "position_ptr", "start_ptr", "ape_row_ptr", "state_loc_ptr",
        "entry_loc_ptr", "accumulator_row_ptr", "accumulator_loc_ptr", "folded_ptr",
    )  # fmt: skip
    types = dict.fromkeys(ints, "*i32") | {"table_ptr": table, "eps": "fp32"}
    signature = {
        arg: types.get(arg, "*fp32" if arg.endswith("_ptr") else "i32")
        for arg in fn.arg_names
        if arg not in constants
    }
    return KernelVariant(
        name=name,
        fn=fn,
        signature=signature,
        constexprs={arg: value for arg, value in constants.items() if arg in fn.arg_names},
        num_warps=config.num_warps,
        # an accumulator's row is one longer than a multiple of the channels
        aligned=tuple(
            arg
            for arg in signature
            if arg.endswith(("_ptr", "_stride")) and arg != "accumulator_stride"
        ),
        targets=tuple(name for name, target in TARGETS.items() if target.backend == backend),
    )
