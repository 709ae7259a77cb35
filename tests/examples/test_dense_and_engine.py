"""The trained checkpoint computes the same in training (dense, differentiable) and in the engine (paged).

Both round cached values to fp8 or fp4 codes. They add in different orders, so values that stand at the edge between
two codes can fall to either side, and from there on the two see different numbers. The comparison therefore goes code
by code: each dense value must be the engine's up to fp32 noise before it is rounded, and with the engine's codes in
place of its own the dense forward must give the engine's logits.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.config import BackendConfig, UnifiedPoolConfig
from dsv4.engine import Engine
from dsv4.kernels import compress_ref, score_ref, store_ref
from dsv4.kernels.base import Rounding
from dsv4.model.decoder import Decoder
from dsv4.quant import hadamard, round_fp4, round_fp8

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from tiny_training import attention
from tiny_training.dense import DenseForward, DenseMode
from tiny_training.regions import Regions

FOLDER = Path(dsv4.__file__).parent / "data" / "tiny"
TOKENS = 512
NOISE = 1e-5
"""Of a row's largest magnitude: fp32 sums over a few hundred terms in another order, a few layers deep."""


def prompt() -> list[int]:
    """Text that never changes, long enough that the indexer must choose: 128 entries, 64 read."""
    return list((FOLDER / "config.json").read_bytes()[:TOKENS])


def engine_logits(folder: Path) -> tuple[Tensor, Decoder]:
    backend = BackendConfig(pool=UnifiedPoolConfig(max_requests=1, max_context=TOKENS))
    model = dsv4.load(folder, backend=backend)
    engine = Engine(model)
    return engine.prefill(engine.pool.acquire(), prompt(), rows="all"), model.decoder


@torch.no_grad()
def dense_logits(decoder: Decoder) -> Tensor:
    dense = DenseForward(decoder, TOKENS, DenseMode(drafts=False), Regions())
    return dense(torch.tensor([prompt()])).logits_BSV[0]


class Tape:
    """What the engine rounded, in order: values before and after."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.num_values = self.num_flips = 0

    def record(
        self, x: Tensor, rounding: Rounding, *, rope_dim: int, value_dtype: torch.dtype
    ) -> Tensor:
        out = ROUNDED(x, rounding, rope_dim=rope_dim, value_dtype=value_dtype)
        nope = x.shape[-1] - rope_dim if rounding is Rounding.FP8 else x.shape[-1]
        before = x[..., :nope] if rounding is Rounding.FP8 else hadamard(x)
        self.rows.append((before.clone(), out[..., :nope].clone()))
        return out

    def replay(self, mine: Tensor, own: Tensor) -> Tensor:
        """The engine's codes for values [1, ...] whose own codes would be `own`."""
        # of one layer's roundings each has another shape, and both sides go layer by layer
        at = next(i for i, (row, _) in enumerate(self.rows) if row.shape == mine.shape[1:])
        before, after = self.rows.pop(at)
        scale = before.abs().amax(-1, keepdim=True)
        assert ((mine[0] - before).abs() <= NOISE * scale).all()
        self.num_values += after.numel()
        self.num_flips += int((own[0] != after).sum())
        return after.unsqueeze(0)


ROUNDED = store_ref.rounded


def test_with_the_engines_codes_the_dense_forward_gives_the_engines_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tape = Tape()
    for module in (store_ref, compress_ref, score_ref):
        monkeypatch.setattr(module, "rounded", tape.record)
    monkeypatch.setattr(attention, "round_fp8", lambda x: tape.replay(x, round_fp8(x)))
    monkeypatch.setattr(attention, "round_fp4", lambda x: tape.replay(x, round_fp4(x)))
    wanted, decoder = engine_logits(FOLDER)
    assert len(tape.rows) == 13  # rows of 5 layers, entries of 4, keys and queries of 2 indexers
    dense = dense_logits(decoder)
    assert tape.rows == []
    assert tape.num_flips <= 1e-4 * tape.num_values
    assert wanted.std() > 1
    assert (dense - wanted).abs().max() <= 1e-4


def test_without_rounding_the_dense_forward_gives_the_engines_logits(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "tiny"))
    document = json.loads((folder / "config.json").read_text()) | {"kv_quant": "none"}
    (folder / "config.json").write_text(json.dumps(document))
    wanted, decoder = engine_logits(folder)
    assert (dense_logits(decoder) - wanted).abs().max() <= 1e-4


def test_with_rounding_both_choose_the_same_bytes() -> None:
    wanted, decoder = engine_logits(FOLDER)
    same = dense_logits(decoder).argmax(-1) == wanted.argmax(-1)
    assert same.float().mean() >= 0.99
