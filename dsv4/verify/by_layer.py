"""One golden prompt in bf16: each layer by itself, from the inputs that the golden stores.

Errors of rounded layers add up and move routers and selections, so the logits at the end say little and are reported
only; a layer's own output, from the exact input of that layer, has a limit. One entry for another of nearly the same
score changes a token's whole attention output, so there the stored selection is attended; how many picks the rounded
scores would have moved is reported.
Legend: T tokens, D hidden, K picks.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from dsv4.kernels.base import SelectKernel
from dsv4.metadata.batch import ForwardBatch
from dsv4.metadata.forward import LayerMetadata
from dsv4.metadata.plans import ScoreInputs, SelectOutput
from dsv4.model.block import Block
from dsv4.verify.golden import StoredTensors
from dsv4.verify.report import MOSTLY, REPORTED, Check, compare
from dsv4.verify.session import Session

PARTS = ("attn", "ffn")


class StoredSelect(SelectKernel):
    """Writes a stored selection, after it has let a set's own select run and counted the picks that differ."""

    def __init__(self, own: SelectKernel) -> None:
        self._own = own
        self.entries_TK: Tensor | None = None
        self.moved = 0

    def select(
        self, scores_TN: Tensor, inputs: ScoreInputs, output: SelectOutput, *, first_token: int
    ) -> None:
        self._own.select(scores_TN, inputs, output, first_token=first_token)
        if self.entries_TK is None:
            return
        tokens = slice(first_token, first_token + scores_TN.shape[0])
        lane_TK = output.lane_TK[tokens].long()
        stored_TK = torch.full_like(output.lane_TK[tokens], -1)
        width = min(stored_TK.shape[1], self.entries_TK.shape[1])
        stored_TK[:, :width] = self.entries_TK[tokens].sort(-1, descending=True).values[:, :width]
        # a stream holds a token's entries in ascending order, in front of what is none
        last = torch.iinfo(torch.int32).max
        ordered_TK = torch.where(stored_TK < 0, last, stored_TK).sort(-1).values
        rows_TK = output.rows.rows(inputs.slot_T[tokens].unsqueeze(1), ordered_TK)
        rows_TK = rows_TK.masked_fill(ordered_TK == last, -1)
        self.moved += int((output.stream.indices_N[lane_TK] != rows_TK).sum())
        output.stream.indices_N[lane_TK] = rows_TK


class LayerCheck:
    """Compares attention and FFN outputs of a prompt's prefill, and reports the logits."""

    def __init__(self, session: Session, stored: StoredTensors) -> None:
        self.session, self.stored = session, stored
        self.token_ids: list[int] = stored.take("input_ids")[0].tolist()
        self.select = StoredSelect(session.backend.kernels.select)
        self.kernels = attrs.evolve(session.backend.kernels, select=self.select)

    def checks(self) -> Iterator[Check]:
        num_tokens = len(self.token_ids)
        with self.session.slot(num_tokens) as slot:
            yield from self._layers(slot)
        with self.session.slot(num_tokens) as slot:
            logits_TV = self.session.forward(slot, self.token_ids)
        want_TV = self.stored.take("prefill.logits")[0]
        yield compare(self.stored.subject, "prefill.logits", logits_TV, want_TV, REPORTED)

    def _layers(self, slot: int) -> Iterator[Check]:
        builder = self.session.backend.builder
        builder.prepare(ForwardBatch.of([(slot, self.token_ids)]))
        epoch = builder.fill()
        for layer, block in enumerate(self.session.decoder.layers):
            assert isinstance(block, Block)
            meta = builder.metadata.for_layer(layer, epoch)
            for part in PARTS:
                name = f"prefill.{part}_in.{layer}"
                if name in self.stored:
                    self._use_selection(layer)
                    got_TD = self._run(part, block, self.stored.take(name)[0], meta)
                    out = f"prefill.{part}_out.{layer}"
                    want_TD = self.stored.take(out)[0]
                    check = compare(self.stored.subject, out, got_TD.float(), want_TD, MOSTLY)
                    moved = f"{self.select.moved} picks moved" if self.select.moved else ""
                    yield attrs.evolve(check, note=check.note or moved)

    def _use_selection(self, layer: int) -> None:
        name = f"prefill.index_topk.{layer}"
        self.select.moved, self.select.entries_TK = 0, None
        if name in self.stored:
            device = self.session.backend.pool.device
            self.select.entries_TK = self.stored.take(name)[0].to(device, torch.int32)

    def _run(self, part: str, block: Block, stored_TD: Tensor, meta: LayerMetadata) -> Tensor:
        x_TD = stored_TD.to(meta.positions_T.device, self.session.decoder.dtype)
        if part == "attn":
            out_TD: Tensor = block.attn(x_TD, meta, self.kernels)
            return out_TD
        ids_T = self.session.backend.builder.metadata.token_ids_T
        out_TD = block.ffn(x_TD, ids_T, self.kernels)
        return out_TD
