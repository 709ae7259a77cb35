"""ModelConfig: everything the library knows about a checkpoint's architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
from attrs import field, frozen

from dsv4.config.checks import as_float, integer, number, one_of
from dsv4.config.layers import LayerConfig, LayerKind, YarnConfig
from dsv4.config.parse import model_fields
from dsv4.config.presets import preset_fields
from dsv4.config.render import model_document
from dsv4.errors import ConfigError


def _count() -> int:
    count: int = field(validator=integer(least=1))
    return count


def _as_tuple(layers: Iterable[LayerConfig]) -> tuple[LayerConfig, ...]:
    return tuple(layers)


@frozen(kw_only=True)
class ModelConfig:
    """A DeepSeek-V4 text model (spec/architecture.md 0). Field names are the keys of the published
    config.json; `layers` is the one per-layer table. Conflicts raise ConfigError."""

    vocab_size: int = _count()
    hidden_size: int = _count()
    num_hidden_layers: int = _count()
    num_attention_heads: int = _count()
    head_dim: int = _count()
    qk_rope_head_dim: int = _count()
    """Rotated channels, the last ones of a head."""
    q_lora_rank: int = _count()
    o_groups: int = _count()
    o_lora_rank: int = _count()
    sliding_window: int = _count()
    """Tokens that every layer reads raw, the token itself included."""
    index_n_heads: int = _count()
    index_head_dim: int = _count()
    index_topk: int = _count()
    n_routed_experts: int = _count()
    num_experts_per_tok: int = _count()
    moe_intermediate_size: int = _count()
    routed_scaling_factor: float = field(converter=as_float, validator=number(above=0.0))
    swiglu_limit: float = field(converter=as_float, validator=number(least=0.0))
    """Clamp of the experts' gate and up values; 0 = off."""
    hc_mult: int = _count()
    """Residual streams."""
    hc_sinkhorn_iters: int = _count()
    hc_eps: float = field(converter=as_float, validator=number(least=0.0))
    rms_norm_eps: float = field(converter=as_float, validator=number(least=0.0))
    rope_theta: float = field(converter=as_float, validator=number(above=0.0))
    """Rotary base of the sliding layers."""
    compress_rope_theta: float = field(converter=as_float, validator=number(above=0.0))
    """Rotary base of the CSA and HCA layers."""
    yarn: YarnConfig | None
    """YaRN of the CSA and HCA layers; None = plain frequencies."""
    max_position_embeddings: int = _count()
    num_nextn_predict_layers: int = field(validator=integer(least=0))
    """Draft (MTP) layers."""
    bos_token_id: int | None = field(validator=integer(least=0, optional=True))
    eos_token_id: int | None = field(validator=integer(least=0, optional=True))
    torch_dtype: str = field(validator=one_of("float32", "bfloat16"))
    """Activation dtype."""
    expert_dtype: str | None = field(default=None, validator=one_of(None, "fp4", "fp8"))
    """How the checkpoint stores the routed experts; None = decided by the stored dtype."""
    kv_quant: str = field(default="none", validator=one_of("official", "none"))
    """Whether KV, entries and indexer vectors are rounded as released (spec/architecture.md 7)."""
    tokenizer: str | None = field(default=None, validator=one_of(None, "byte"))
    """`byte` = the built-in byte-level tokenizer (key `dsv4_tokenizer`); None = tokenizer.json."""
    layers: tuple[LayerConfig, ...] = field(converter=_as_tuple)
    """`num_hidden_layers` main layers, then `num_nextn_predict_layers` draft layers."""

    def __attrs_post_init__(self) -> None:
        self._check_layers()
        self._check_widths()
        if self.kv_quant == "official" and LayerKind.CSA in {layer.kind for layer in self.layers}:
            dim = self.index_head_dim
            if dim % 32 or dim & (dim - 1):
                raise ConfigError(
                    f"index_head_dim {dim}: kv_quant 'official' (Hadamard, fp4 per 32) needs a power "
                    "of two and a multiple of 32; change index_head_dim or set kv_quant to 'none'"
                )

    def _check_layers(self) -> None:
        num_layers = self.num_hidden_layers + self.num_nextn_predict_layers
        if len(self.layers) != num_layers:
            raise ConfigError(
                f"layers has {len(self.layers)} entries: num_hidden_layers {self.num_hidden_layers} "
                f"and num_nextn_predict_layers {self.num_nextn_predict_layers} need {num_layers}; "
                "complete the table or change the numbers"
            )
        for index, layer in enumerate(self.layers):
            if layer.is_draft != (index >= self.num_hidden_layers):
                raise ConfigError(
                    f"layers[{index}].is_draft {layer.is_draft}: the main layers come first, "
                    f"{self.num_hidden_layers} of them; reorder the table"
                )
            source = max(layer.entry_source, layer.index_source)
            if source > index:
                raise ConfigError(
                    f"layers[{index}] reads layer {source}: must be itself or an earlier layer; "
                    "change entry_source or index_source"
                )

    def _check_widths(self) -> None:
        rope = self.qk_rope_head_dim
        if rope % 2 or rope > self.head_dim:
            raise ConfigError(
                f"qk_rope_head_dim {rope}: must be even and at most head_dim {self.head_dim}; "
                "change one of them"
            )
        if any(layer.kind is LayerKind.CSA for layer in self.layers) and rope > self.index_head_dim:
            raise ConfigError(
                f"index_head_dim {self.index_head_dim}: must be at least qk_rope_head_dim {rope}, the "
                "channels that the indexer rotates; raise index_head_dim"
            )
        if self.num_attention_heads % self.o_groups:
            raise ConfigError(
                f"o_groups {self.o_groups}: must divide num_attention_heads "
                f"{self.num_attention_heads}; change one of them"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok}: there are n_routed_experts "
                f"{self.n_routed_experts}; lower it"
            )

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, object]) -> ModelConfig:
        """Parse a config.json: a file, a folder that holds one, or its parsed object.

        Any style: published, transformers (`layer_types`) or official argument names (`dim`).
        Unknown keys, conflicts and values that ask for another computation raise ConfigError.
        """
        return cls(**model_fields(source))

    def to_json(self) -> dict[str, object]:
        """The config.json object, published style where that can express the layer table, else with
        `layer_types`. `from_json` of it gives an equal config."""
        return model_document(self)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """`tiny` (the shipped checkpoint), `flash` or `pro`."""
        return cls(**preset_fields(name))

    @property
    def nope_head_dim(self) -> int:
        """Channels of a head that are not rotated."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def main_layers(self) -> tuple[LayerConfig, ...]:
        return self.layers[: self.num_hidden_layers]

    @property
    def draft_layers(self) -> tuple[LayerConfig, ...]:
        return self.layers[self.num_hidden_layers :]

    @property
    def ratios(self) -> tuple[int, ...]:
        """The distinct nonzero ratios of all layers, ascending."""
        return tuple(sorted({layer.ratio for layer in self.layers} - {0}))

    def without_drafts(self) -> ModelConfig:
        """The same model without its draft layers."""
        return attrs.evolve(self, num_nextn_predict_layers=0, layers=self.main_layers)
