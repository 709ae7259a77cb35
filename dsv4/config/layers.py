"""The per-layer table: what one decoder layer is, decided once from the checkpoint's config."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import field, frozen

from dsv4.config.checks import as_float, boolean, integer, number
from dsv4.errors import ConfigError


class LayerKind(enum.Enum):
    """How a layer attends (spec/architecture.md, layer schedule)."""

    SLIDING = "sliding"
    """The window alone."""
    CSA = "csa"
    """Window, and the entries that an indexer selects; compression windows overlap."""
    HCA = "hca"
    """Window, and every visible entry; compression windows are disjoint."""


@frozen(kw_only=True)
class YarnConfig:
    """YaRN scaling of the compressing layers' rotary frequencies (spec/architecture.md 3.1)."""

    factor: float = field(converter=as_float, validator=number(least=1.0))
    beta_fast: float = field(converter=as_float, validator=number(above=0.0))
    beta_slow: float = field(converter=as_float, validator=number(above=0.0))
    original_max_position_embeddings: int = field(validator=integer(least=1))
    """Tokens of context before the extension."""


@frozen(kw_only=True)
class LayerConfig:
    """One row of the table."""

    kind: LayerKind
    ratio: int = field(validator=integer(least=0))
    """Tokens per compressed entry; 0 for a sliding layer."""
    rope_theta: float = field(converter=as_float, validator=number(above=0.0))
    """Rotary base of everything in the layer: q, window KV, entries, indexer."""
    yarn: YarnConfig | None
    """None for a sliding layer."""
    index_topk: int = field(validator=integer(least=0))
    """Entries that a query reads; 0 unless CSA."""
    hash_routing: bool = field(validator=boolean())
    """Experts looked up by token id instead of scored."""
    is_draft: bool = field(validator=boolean())
    entry_source: int = field(validator=integer(least=0))
    """Layer whose entries this one reads; by default its own index."""
    index_source: int = field(validator=integer(least=0))
    """Layer whose selection this one reads; by default its own index."""

    def __attrs_post_init__(self) -> None:
        sliding, csa = self.kind is LayerKind.SLIDING, self.kind is LayerKind.CSA
        if sliding != (self.ratio == 0):
            limit = "0" if sliding else "at least 1"
            raise ConfigError(
                f"ratio {self.ratio}: a {self.kind.value} layer needs {limit}; change ratio or kind"
            )
        if sliding and self.yarn is not None:
            raise ConfigError(f"yarn {self.yarn}: a sliding layer has none; give yarn=None")
        if self.yarn is not None and self.rope_theta <= 1:
            raise ConfigError(
                f"compress_rope_theta {self.rope_theta}: YaRN needs a base above 1; raise it"
            )
        if csa != (self.index_topk > 0):
            limit = "at least 1" if csa else "0"
            raise ConfigError(
                f"index_topk {self.index_topk}: a {self.kind.value} layer needs {limit}; change it"
            )


def kind_of_ratio(ratio: int) -> LayerKind:
    """The rule of the published ratio lists: exactly 4 is CSA, any other nonzero ratio HCA."""
    if ratio == 0:
        return LayerKind.SLIDING
    return LayerKind.CSA if ratio == 4 else LayerKind.HCA


def layer_table(
    kinds: Sequence[LayerKind],
    ratios: Sequence[int],
    *,
    hash_routing: Sequence[bool],
    num_drafts: int,
    rope_theta: float,
    compress_rope_theta: float,
    yarn: YarnConfig | None,
    index_topk: int,
) -> tuple[LayerConfig, ...]:
    """One LayerConfig per kind, the last `num_drafts` of them draft layers. `hash_routing` covers the
    main layers; draft layers never route by hash."""
    num_main = len(kinds) - num_drafts
    return tuple(
        LayerConfig(
            kind=kind,
            ratio=ratio,
            rope_theta=rope_theta if kind is LayerKind.SLIDING else compress_rope_theta,
            yarn=None if kind is LayerKind.SLIDING else yarn,
            index_topk=index_topk if kind is LayerKind.CSA else 0,
            hash_routing=layer < num_main and hash_routing[layer],
            is_draft=layer >= num_main,
            entry_source=layer,
            index_source=layer,
        )
        for layer, (kind, ratio) in enumerate(zip(kinds, ratios, strict=True))
    )
