"""Pool configs: sizes and row formats of a KV pool. The config's type chooses the pool class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs
from attrs import field, frozen

from dsv4 import registry
from dsv4.config.checks import integer, one_of
from dsv4.config.files import FileConfig
from dsv4.config.model import ModelConfig
from dsv4.errors import ConfigError

if TYPE_CHECKING:
    from dsv4.pool.base import KVPool

MIN_PAGE_TOKENS = 256
"""Least default page: two HCA entries of the released ratios, so that block tables stay short."""


@frozen(kw_only=True)
class PoolConfig(FileConfig):
    """What every pool family needs to know; build a subclass.

    A third party's subclass sets `pool_class`; registered under the entry point group `dsv4.pools` it
    can be named in files too.
    """

    pool_class: ClassVar[type[KVPool] | str | None] = None
    """The KVPool class that this config builds, or its `module:name`."""

    max_requests: int = field(validator=integer(least=1))
    """Slots: requests that are live together."""
    max_context: int = field(validator=integer(least=1))
    """Tokens one request may reach; sizes the compressed regions (rounded up to pages inside)."""
    num_pages: int | None = field(default=None, validator=integer(least=1, optional=True))
    """Entry pages of the whole pool; None = every slot can reach max_context."""
    page_tokens: int | None = field(default=None, validator=integer(least=1, optional=True))
    """Tokens one page covers, a multiple of every ratio; None = the smallest such number >= 256."""
    row_format: str = field(default="auto", validator=one_of("auto", "fp32", "bf16", "fp8"))
    """Storage of window rows and entries; auto = fp32 for a float32 model, else bf16."""
    index_format: str = field(
        default="auto", validator=one_of("auto", "fp32", "bf16", "fp8", "fp4")
    )
    """Storage of the indexer keys; auto as for row_format."""
    in_place_tokens: int = field(default=1, validator=integer(least=1))
    """D: most tokens of a slot that one forward stores in place (1 + the deepest draft); also the
    rollback margin."""

    def resolved(self, model: ModelConfig) -> Self:
        """The same config with every default filled in for `model`.

        Raises ConfigError if page_tokens is no multiple of every ratio of the model.
        """
        page_tokens = self._page_tokens(model)
        pages_per_slot = -(-self.max_context // page_tokens)
        automatic = "fp32" if model.torch_dtype == "float32" else "bf16"
        return attrs.evolve(
            self,
            page_tokens=page_tokens,
            num_pages=self.num_pages or self.max_requests * pages_per_slot,
            row_format=automatic if self.row_format == "auto" else self.row_format,
            index_format=automatic if self.index_format == "auto" else self.index_format,
        )

    def _page_tokens(self, model: ModelConfig) -> int:
        unit = math.lcm(*model.ratios)
        if self.page_tokens is None:
            return -(-MIN_PAGE_TOKENS // unit) * unit
        if self.page_tokens % unit:
            raise ConfigError(
                f"page_tokens {self.page_tokens}: must be a multiple of every ratio "
                f"{', '.join(map(str, model.ratios))}; use {-(-self.page_tokens // unit) * unit}"
            )
        return self.page_tokens

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> Self:
        """Build from a parsed table, whose `type` names the pool family: `unified`, `three-pool` or a
        registered one. Through PoolConfig any family loads, through a subclass only its own."""
        if "type" not in document:
            known = ", ".join(registry.pool_names())
            raise ConfigError(f"{where}: missing key 'type'; add it, one of {known}")
        config_type = registry.pool_config_class(document["type"])
        if not issubclass(config_type, cls):
            raise ConfigError(
                f"{where}: type {document['type']!r} is a {config_type.__name__}, wanted {cls.__name__}; "
                "change the type or load it as a PoolConfig"
            )
        rest = {key: value for key, value in document.items() if key != "type"}
        return super(PoolConfig, config_type).from_document(rest, where)

    def to_document(self) -> dict[str, Any]:
        """The table that `from_document` reads; raises ConfigError if the class has no registered name."""
        return {"type": registry.pool_name(type(self))} | super().to_document()


@frozen(kw_only=True)
class UnifiedPoolConfig(PoolConfig):
    """One table per layer: window rings of all slots, then entries."""

    pool_class = "dsv4.pool.unified:UnifiedPool"


@frozen(kw_only=True)
class ThreePoolConfig(PoolConfig):
    """Window rows, CSA entries and HCA entries in tables of their own."""

    pool_class = "dsv4.pool.three_pool:ThreePool"
