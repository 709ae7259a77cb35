"""What the numbers must be, in float64 and plain loops: nothing here calls the code under test.

Sources: spec/architecture.md 3.1 (RoPE, YaRN), 3.5 (pooling), 7.2 and 7.3 (rounding). Vectors are lists of floats.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import torch

from dsv4.config import YarnConfig
from dsv4.kernels.base import Rounding

Vector = list[float]


def rms_normed(x: Sequence[float], eps: float, weight: Sequence[float] | None = None) -> Vector:
    """x over the root of its mean square, times the weight."""
    scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v * scale * (1.0 if weight is None else weight[i]) for i, v in enumerate(x)]


def frequencies(theta: float, rope_dim: int, yarn: YarnConfig | None) -> Vector:
    """One angle per position for each rotated pair."""
    plain = [theta ** (-2 * i / rope_dim) for i in range(rope_dim // 2)]
    if yarn is None:
        return plain

    def correction_dim(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return rope_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(correction_dim(yarn.beta_fast)), 0)
    high: float = min(math.ceil(correction_dim(yarn.beta_slow)), rope_dim - 1)
    high += 0.001 if low == high else 0
    ramps = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(rope_dim // 2)]
    return [f / yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramps, strict=True)]


def rotated(x: Sequence[float], angles: Sequence[float]) -> Vector:
    """The last 2 * len(angles) channels as interleaved pairs (a, b), each turned by its angle."""
    out, first = list(x), len(x) - 2 * len(angles)
    for pair, angle in enumerate(angles):
        at = first + 2 * pair
        a, b = x[at], x[at + 1]
        out[at] = a * math.cos(angle) - b * math.sin(angle)
        out[at + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def pooled(gates: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> Vector:
    """Softmax over the tokens, channel by channel; gates and values are [tokens][channels]."""
    out = []
    for channel in range(len(values[0])):
        top = max(g[channel] for g in gates)
        weights = [math.exp(g[channel] - top) for g in gates]
        total = sum(w * v[channel] for w, v in zip(weights, values, strict=True))
        out.append(total / sum(weights))
    return out


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _e4m3_values() -> Vector:
    subnormal = [i * 2.0**-9 for i in range(8)]
    normal = [2.0 ** (e - 7) * (1 + f / 8) for e in range(1, 16) for f in range(8)]
    return subnormal + normal[:-1]  # the last code is NaN


E4M3 = _e4m3_values()
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x: float, codes: Sequence[float]) -> float:
    """Nearest value of an ascending code table, ties to the even code, saturating, sign kept."""
    size = min(abs(x), codes[-1])
    above = bisect.bisect_left(codes, size)
    if codes[above] != size:
        low, high = codes[above - 1], codes[above]
        to_low = size - low < high - size or (size - low == high - size and (above - 1) % 2 == 0)
        above -= 1 if to_low else 0
    return math.copysign(codes[above], x)


def block_rounded(
    x: Sequence[float], *, block: int, codes: Sequence[float], floor: float
) -> Vector:
    """x in blocks with one power-of-two scale each, the smallest that saturates nothing."""
    out: Vector = []
    for start in range(0, len(x), block):
        part = x[start : start + block]
        scale = 2.0 ** math.ceil(math.log2(max(*map(abs, part), floor) / codes[-1]))
        out += [nearest(v / scale, codes) * scale for v in part]
    return out


def hadamard(x: Sequence[float]) -> Vector:
    """Walsh-Hadamard transform, Sylvester order, orthonormal."""
    scale = len(x) ** -0.5
    return [
        scale * sum(-v if (i & j).bit_count() % 2 else v for j, v in enumerate(x))
        for i in range(len(x))
    ]


def rounded(x: Sequence[float], rounding: Rounding, *, rope_dim: int) -> Vector:
    """The official rounding of a vector before it is stored."""
    if rounding is Rounding.FP8:
        nope = len(x) - rope_dim
        return block_rounded(x[:nope], block=64, codes=E4M3, floor=1e-4) + list(x[nope:])
    if rounding is Rounding.HADAMARD_FP4:
        return block_rounded(hadamard(x), block=32, codes=E2M1, floor=6 * 2.0**-126)
    return list(x)


def as_dtype(x: Sequence[float], dtype: torch.dtype) -> Vector:
    """Each value as the dtype keeps it."""
    kept: Vector = torch.tensor(list(x), dtype=torch.float64).to(dtype).double().tolist()
    return kept
