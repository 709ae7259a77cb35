"""A loaded model: decoder weights, a backend, and a tokenizer. `load` makes one from a checkpoint folder.

Legend: R rows of logits asked for, N streams, D hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs
import torch
from attrs import frozen
from torch import Tensor

from dsv4.backend import Backend, torch_device
from dsv4.config import BackendConfig, ModelConfig, UnifiedPoolConfig
from dsv4.errors import CheckpointError, ConfigError
from dsv4.metadata.batch import ForwardBatch
from dsv4.model.checkpoint import has_drafts, load_weights
from dsv4.model.decoder import Decoder
from dsv4.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_CONTEXT = 65_536
DEFAULT_REQUESTS = 8


@frozen(kw_only=True, eq=False)
class Model:
    """Decoder, backend and tokenizer of one checkpoint."""

    config: ModelConfig
    decoder: Decoder
    backend: Backend
    tokenizer: Tokenizer | None = None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, *, rows: Literal["last", "all"] = "last") -> Tensor:
        """prepare, fill, decode: one forward of `batch`. The caller commits or rolls back the lengths.

        Logits, fp32 on the model's device: [requests, vocab] of each request's newest token, or [tokens, vocab].
        Idle requests and padding: zeros. Raises BatchError or SlotError before anything has run.
        """
        builder, kernels = self.backend.builder, self.backend.kernels
        builder.prepare(batch)
        epoch = builder.fill()
        streams_RND = self.decoder(builder.metadata, epoch, kernels)
        shared = builder.metadata.shared
        dead_R = shared.slot_T < 0
        if rows == "last" and batch.num_tokens == 0:
            vocab_size = self.config.vocab_size
            return torch.zeros(len(batch.slots), vocab_size, device=streams_RND.device)
        if rows == "last":
            row_R = shared.last_row_B.clamp(min=0)
            streams_RND = streams_RND.index_select(0, row_R)
            dead_R = dead_R.index_select(0, row_R) | (shared.last_row_B < 0)
        logits_RV = self.decoder.logits(streams_RND, kernels)
        return logits_RV.masked_fill_(dead_R.unsqueeze(1), 0.0)


def dtype_of(
    name: str | torch.dtype | None, config: ModelConfig, device: torch.device
) -> torch.dtype:
    """The activations' dtype: as asked, else fp32 on a CPU (bf16 GEMMs are slow there), else the checkpoint's."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if name in (None, "auto"):
        name = "float32" if device.type == "cpu" else config.torch_dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load(
    path: str | Path,
    *,
    backend: BackendConfig | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> Model:
    """Load a checkpoint folder (official or transformers names; F32, BF16, F8_E4M3 or packed FP4).

    `path`: a folder with config.json and *.safetensors, or the word `tiny` for the shipped checkpoint.
    `backend`: default a unified pool of 8 requests. Raises CheckpointError or ConfigError, one line each.
    """
    folder = resolve(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(
            f"{folder}: no config.json there; name a checkpoint folder, or `tiny`"
        )
    device = torch_device(device)
    config = ModelConfig.from_json(config_file)
    chosen = dtype_of(dtype, config, device)
    config = attrs.evolve(config, torch_dtype=str(chosen).removeprefix("torch."))
    if not has_drafts(folder):
        config = config.without_drafts()
    backend = backend or BackendConfig(pool=default_pool(config))
    decoder = _decoder(config, chosen, folder)
    load_weights(decoder, folder)
    check_hash_tables(decoder, folder)
    return Model(
        config=config,
        decoder=decoder.to(device).eval(),
        backend=Backend.from_config(config, backend, device),
        tokenizer=load_tokenizer(folder, config),
    )


def _decoder(config: ModelConfig, dtype: torch.dtype, folder: Path) -> Decoder:
    try:
        return Decoder(config, dtype)
    except (RuntimeError, TypeError, MemoryError) as error:
        # A size that no memory or no integer of torch's holds; it has a class for neither.
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{folder}: no room for the weights that its config.json describes ({reason}); "
            "correct config.json, or use a machine with more memory"
        ) from error


def check_hash_tables(decoder: Decoder, folder: Path) -> None:
    """Hash routing looks experts up unchecked, so a table that names none must not get past loading."""
    for name, tensor in decoder.official_tensors().items():
        if not name.endswith("tid2eid"):
            continue
        low, high = int(tensor.view.min()), int(tensor.view.max())
        limit = decoder.config.n_routed_experts
        if low < 0 or high >= limit:
            raise CheckpointError(
                f"{folder}: {name} names experts {low}..{high}, the model has {limit}; the file is corrupt"
            )


def default_pool(config: ModelConfig) -> UnifiedPoolConfig:
    context = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    return UnifiedPoolConfig(max_requests=DEFAULT_REQUESTS, max_context=context)


def resolve(path: str | Path) -> Path:
    """A checkpoint folder; `tiny` names the one shipped as package data."""
    if str(path) == "tiny":
        return Path(__file__).parent.parent / "data" / "tiny"
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name a checkpoint folder, or `tiny`")
    return folder
