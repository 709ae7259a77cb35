"""What the engine needs of a model: the narrow interface between the two."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from dsv4.config import BackendConfig, ModelConfig
from dsv4.engine.text import TextDecoder
from dsv4.metadata.batch import ForwardBatch
from dsv4.pool.base import KVPool

Rows = Literal["last", "all"]


class Tokenizer(Protocol):
    """Text to token ids, and a decoder for each completion."""

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> TextDecoder: ...


class RunnerBackend(Protocol):
    """The part of a backend that scheduling looks at."""

    @property
    def pool(self) -> KVPool: ...

    @property
    def config(self) -> BackendConfig: ...


class ModelRunner(Protocol):
    """A model on a backend. `forward` writes provisional state and commits no length."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def backend(self) -> RunnerBackend: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def forward(self, batch: ForwardBatch, *, rows: Rows = "last") -> Tensor:
        """Logits fp32 on the model's device: [requests, vocab] of each newest token, or [tokens, vocab]."""
        ...
