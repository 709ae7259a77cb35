"""The golden draft block: weights of `mtp.safetensors` on the main model, in one shot and token by token.

Legend: T tokens, N streams, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from dsv4.config import LayerConfig, LayerKind, ModelConfig
from dsv4.verify.golden import StoredTensors
from dsv4.verify.report import PLAIN, STORED, Check, compare, failed
from dsv4.verify.session import Session, Trace, VerifyOptions

DRAFT_WEIGHTS = "mtp.0."
PROMPT = "prompt1_"
"""The prompt whose streams the block was run on."""


def check_drafts(
    folder_model: ModelConfig,
    weights: Mapping[str, Tensor],
    path: Path,
    prompt: StoredTensors,
    pool: str,
    options: VerifyOptions,
) -> Iterator[Check]:
    """Block input, block output and logits of the draft block on the streams of one prompt."""
    stored = StoredTensors(path)
    model = with_draft(folder_model)
    draft_weights = {name: stored.take(name) for name in stored.named(DRAFT_WEIGHTS)}
    token_ids = prompt.take("input_ids")[0].tolist()
    next_ids_T = stored.take("mtp.ids_next")[0]
    session = Session(model, {**weights, **draft_weights}, pool, options, len(token_ids))
    want = {name: stored.take(f"mtp.{name}")[0] for name in ("block_in", "block_out", "logits")}
    golden_TND = prompt.take(f"prefill.streams.{model.num_hidden_layers}")[0]
    runs = {
        "mtp": _draft(session, token_ids, next_ids_T, [len(token_ids)], golden_TND),
        "mtp.incremental": _draft(session, token_ids, next_ids_T, [1] * len(token_ids)),
    }
    for run, got in runs.items():
        for name, value in want.items():
            tolerance = PLAIN if name == "logits" else STORED
            yield compare(stored.subject, f"{run}.{name}", got[name], value, tolerance)
    for name in stored.untaken:
        yield failed(stored.subject, name, "unknown tensor, not checked")


def with_draft(model: ModelConfig) -> ModelConfig:
    """The model with one draft layer behind its main ones: sliding, routed by score."""
    index = model.num_hidden_layers
    draft = LayerConfig(
        kind=LayerKind.SLIDING,
        ratio=0,
        rope_theta=model.rope_theta,
        yarn=None,
        index_topk=0,
        hash_routing=False,
        is_draft=True,
        entry_source=index,
        index_source=index,
    )
    layers = (*model.main_layers, draft)
    return attrs.evolve(model, num_nextn_predict_layers=1, layers=layers)


def _draft(
    session: Session,
    token_ids: Sequence[int],
    next_ids_T: Tensor,
    sizes: Sequence[int],
    streams_TND: Tensor | None = None,
) -> dict[str, Tensor]:
    """The block's tensors over all tokens, in forwards of these sizes; streams default to the main model's own."""
    parts: dict[str, list[Tensor]] = {"block_in": [], "block_out": [], "logits": []}
    backend, device = session.backend, session.backend.pool.device
    with session.slot(len(token_ids)) as slot:
        start = 0
        for num_tokens in sizes:
            tokens = slice(start, start + num_tokens)
            own_TND, epoch = session.streams(slot, token_ids[tokens])
            given = own_TND if streams_TND is None else streams_TND[tokens].to(own_TND)
            trace = Trace()
            logits_TV = session.decoder.draft_logits(
                given,
                next_ids_T[tokens].to(device),
                backend.builder.metadata,
                epoch,
                backend.kernels,
                probe=trace,
            )
            backend.pool.commit(slot, num_tokens)
            layer = session.model.num_hidden_layers
            parts["block_in"].append(trace.values[f"mtp.block_in.{layer}"])
            parts["block_out"].append(trace.values[f"mtp.block_out.{layer}"])
            parts["logits"].append(logits_TV)
            start += num_tokens
    return {name: torch.cat(values) for name, values in parts.items()}
