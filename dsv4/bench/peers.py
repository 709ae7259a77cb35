"""Recorded microseconds of public kernels on one NVIDIA H200, by op, case and size: data, and nothing else.

Method as in this package (graph replay, own inputs, emptied L2, median of 15). Ratios mean something on that GPU
model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SOURCE = (
    "recorded 2026-11-30 on an NVIDIA H200: torch 2.11.0+cu130, triton 3.6.0, FlashMLA 9241ae3, DeepGEMM 54e2261, "
    "SGLang 0.5.23, ROCm ATOM's Triton kernels"
)
GPU_NAME = "H200"

FLASHMLA_FP8 = "FlashMLA fp8"
FLASHMLA_BF16 = "FlashMLA bf16 prefill kernel"
ATOM, ATOM_TUNED = "ATOM Triton", "ATOM Triton, tuned"
DEEPGEMM, PLAIN_FP8, PLAIN_BF16 = "DeepGEMM fp8", "plain Triton fp8", "plain Triton bf16"
SGLANG, FLASHINFER, TORCH = "SGLang", "FlashInfer", "torch"

Peers = Mapping[str, float]

BATCHES = (1, 8, 32, 64, 128, 256, 512)

_DECODE_FP8 = {
    "flash-swa": (11.6, 12.3, 13.3, 14.3, 16.6, 30.6, 58.3),
    "flash-csa": (13.4, 15.4, 25.9, 44.6, 47.4, 90.3, 175.3),
    "flash-hca8k": (12.0, 12.5, 17.3, 18.0, 20.6, 38.8, 73.8),
    "flash-hca128k": (15.2, 18.8, 35.2, 61.8, 75.9, 146.0, 286.0),
    "pro-swa": (10.5, 11.6, 11.8, 14.1, 24.9, 46.7, 90.0),
    "pro-csa": (14.8, 20.1, 45.5, 54.0, 103.8, 203.1, 402.3),
    "pro-hca8k": (11.0, 12.5, 14.6, 16.9, 30.3, 57.4, 111.2),
    "pro-hca128k": (15.0, 20.3, 45.6, 54.2, 104.1, 203.8, 403.7),
}
_MARKS = {"P": FLASHMLA_BF16, "A": ATOM, "A*": ATOM_TUNED}
_DECODE_BF16 = {
    "flash-swa": "7.7P 8.1P 9.1P 10.8P 14.3P 25.3P 43.1P",
    "flash-csa": "12.5A 17.2A* 22.3P 24.9P 31.9P 60.4P 115.0P",
    "flash-hca8k": "10.8P 11.3P 12.2P 13.9P 17.6P 32.3P 59.3P",
    "flash-hca128k": "13.3A* 21.4A* 35.2P 38.7P 48.3P 92.8P 179.0P",
    "pro-swa": "7.7P 8.1P 9.8P 12.4P 22.5P 40.2P 71.3P",
    "pro-csa": "14.8A* 26.2A* 35.8P 40.6P 78.6P 151.0P 292.9P",
    "pro-hca8k": "10.8P 11.3P 12.9P 15.5P 28.7P 53.4P 99.7P",
    "pro-hca128k": "16.4A 33.1P 35.8P 40.6P 78.6P 150.6P 292.9P",
}
"""The fastest bf16 kernel of each batch; the mark says which: P FlashMLA's prefill kernel, A ATOM's as shipped, A* the
best of a sweep over its tile shapes."""

_PREFILL = {
    ("flash-context", "4,096 tokens"): {FLASHMLA_BF16: 629, ATOM: 4737, ATOM_TUNED: 1535, SGLANG: 7001, TORCH: 6347},
    ("flash-scattered", "4,096 tokens"): {FLASHMLA_BF16: 753, ATOM: 5752, SGLANG: 7156, TORCH: 6348},
    ("pro-context", "4,096 tokens"): {FLASHMLA_BF16: 2081, ATOM: 16734, ATOM_TUNED: 5070, SGLANG: 24719, TORCH: 16218},
    ("pro-scattered", "4,096 tokens"): {FLASHMLA_BF16: 2240, ATOM: 20920, SGLANG: 25032, TORCH: 16221},
}  # fmt: skip

_SCORE_NAMES = (DEEPGEMM, PLAIN_FP8, PLAIN_BF16)
_SCORE: Mapping[str, Sequence[float | None]] = {
    "1 x 2,048": (3.4, 3.4, 3.7),
    "64 x 2,048": (8.2, 8.8, 12.8),
    "1 x 32,768": (4.4, 4.9, 6.2),
    "64 x 32,768": (75.3, 77.5, 139),
    "256 x 32,768": (281, 292, 542),
    "1 x 262,144": (12.9, 13.3, 21.3),
    "8 x 262,144": (75.0, 77.0, 139),
    "64 x ragged to 65,536": (75.7, 84.9, None),
    "prefill 4,096 x 32,768": (1933, 2333, 3358),
    "causal prefill 4,096 x 32,768": (991, 1241, 1846),
}

_SELECT_NAMES = (SGLANG, FLASHINFER, TORCH)
_SELECT: Mapping[str, Sequence[float | None]] = {
    "1 x 32,768": (9.1, 17.2, 46.8),
    "64 x 32,768": (10, 17, None),
    "8 x 262,144": (12, None, None),
    "64 x 262,144": (51, 94, 248),
    "256 x 32,768": (17.9, 37.2, 160),
    "4,096 x 32,768": (212, 578, 1616),
}


def batch_size(batch: int) -> str:
    """How a decode batch is named here."""
    return f"b={batch}"


def peers_of(op: str, case: str, size: str) -> Peers:
    """Peer -> microseconds; empty where nothing was recorded."""
    return _TABLES.get(op, {}).get((case, size), {})


def _decode() -> dict[tuple[str, str], Peers]:
    table: dict[tuple[str, str], Peers] = {}
    for case, times in _DECODE_FP8.items():
        for batch, fp8_us, marked in zip(BATCHES, times, _DECODE_BF16[case].split(), strict=True):
            bf16_us = marked.rstrip("PA*")
            best = {_MARKS[marked[len(bf16_us) :]]: float(bf16_us)}
            table[case, batch_size(batch)] = {FLASHMLA_FP8: fp8_us} | best
    return table


def _indexer(
    table: Mapping[str, Sequence[float | None]], names: Sequence[str]
) -> dict[tuple[str, str], Peers]:
    """The indexer is the same in both models but for K: Flash's 512 here."""
    return {
        ("flash", size): {n: us for n, us in zip(names, times, strict=True) if us is not None}
        for size, times in table.items()
    }


_TABLES: Mapping[str, Mapping[tuple[str, str], Peers]] = {
    "attend": _decode(),
    "prefill": _PREFILL,
    "score": _indexer(_SCORE, _SCORE_NAMES),
    "select": _indexer(_SELECT, _SELECT_NAMES),
}
