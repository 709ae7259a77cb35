"""The layer schedule of a config file: kinds, ratios, hash routing and draft layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attrs import frozen

from dsv4.config.checks import nearest
from dsv4.config.facts import Facts
from dsv4.config.keys import LAYER_TYPES, MLP_TYPES
from dsv4.config.layers import LayerConfig, LayerKind, kind_of_ratio, layer_table
from dsv4.errors import ConfigError

T = TypeVar("T")


@frozen(kw_only=True)
class Schedule:
    """What a file says about its layers, as it says it."""

    compress_ratios: Sequence[int] | None
    layer_types: Sequence[str] | None
    compress_rates: Mapping[str, int]
    mlp_layer_types: Sequence[str] | None
    num_hash_layers: int | None
    num_drafts: int | None

    @classmethod
    def read(cls, facts: Facts) -> Schedule:
        """Look everything up; missing: both forms of the layer list, or both of the hash layers."""
        ratios, types = _list(facts, "compress_ratios"), _list(facts, "layer_types")
        mlp_types = _list(facts, "mlp_layer_types")
        num_hash = facts.get("num_hash_layers", "n_hash_layers", default=None)
        if ratios is None and types is None:
            facts.missing.append("compress_ratios")
        if mlp_types is None and num_hash is None:
            facts.missing.append("num_hash_layers")
        rates = {name: facts.get(f"compress_rates.{name}", default=None) for name in LAYER_TYPES}
        return cls(
            compress_ratios=ratios,
            layer_types=types,
            compress_rates={name: rate for name, rate in rates.items() if rate is not None},
            mlp_layer_types=mlp_types,
            num_hash_layers=num_hash,
            num_drafts=facts.get("num_nextn_predict_layers", "n_mtp_layers", default=None),
        )

    def table(self, fields: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
        """The per-layer table. `fields` has num_hidden_layers, both bases, yarn and index_topk."""
        num_main = fields["num_hidden_layers"]
        if self.num_drafts is not None and not _is_count(self.num_drafts):
            raise ConfigError(
                f"num_nextn_predict_layers {self.num_drafts!r}: must be an integer >= 0; correct it"
            )
        kinds, ratios = (
            self._typed(num_main) if self.layer_types is not None else self._listed(num_main)
        )
        return layer_table(
            kinds,
            ratios,
            hash_routing=self._hash_routing(num_main),
            num_drafts=len(kinds) - num_main,
            rope_theta=fields["rope_theta"],
            compress_rope_theta=fields["compress_rope_theta"],
            yarn=fields["yarn"],
            index_topk=fields["index_topk"],
        )

    def _listed(self, num_main: int) -> tuple[list[LayerKind], list[int]]:
        """Published and official files: the ratio decides the kind, the surplus is draft layers.

        A stated number of drafts may be smaller than the surplus (a re-release lists three);
        0 drops it.
        """
        stated = self.num_drafts
        ratios = list(self.compress_ratios or ())
        if stated == 0:
            ratios = ratios[:num_main]
        need = num_main + (stated or 0)
        if len(ratios) < need:
            raise ConfigError(
                f"compress_ratios has {len(ratios)} entries: num_hidden_layers {num_main} and "
                f"num_nextn_predict_layers {stated or 0} need {need}; "
                "complete the table or lower the number of layers"
            )
        for layer, ratio in enumerate(ratios):
            if not _is_count(ratio):
                raise ConfigError(
                    f"compress_ratios[{layer}] {ratio!r}: must be an integer >= 0; correct it"
                )
        return [kind_of_ratio(ratio) for ratio in ratios], ratios

    def _typed(self, num_main: int) -> tuple[list[LayerKind], list[int]]:
        """transformers files: the type decides the kind; drafts, not listed there, are sliding."""
        types = list(self.layer_types or ())
        _same_length("layer_types", types, num_main)
        kinds = [LayerKind(_named("layer_types", name, LAYER_TYPES)) for name in types]
        ratios = [self._rate(name) for name in types]
        listed = self.compress_ratios
        if listed is None:
            drafts = self.num_drafts or 0
            return kinds + [LayerKind.SLIDING] * drafts, ratios + [0] * drafts
        if list(listed[:num_main]) != ratios:
            raise ConfigError(
                f"compress_ratios {list(listed[:num_main])} conflicts with layer_types and "
                f"compress_rates, which say {ratios}; make them equal or remove one"
            )
        all_kinds, all_ratios = self._listed(num_main)
        return kinds + all_kinds[num_main:], all_ratios

    def _rate(self, name: str) -> int:
        if LAYER_TYPES[name] == LayerKind.SLIDING.value:
            return 0
        if name not in self.compress_rates:
            raise ConfigError(
                f"compress_rates has no {name!r}, which layer_types uses; add its ratio"
            )
        return self.compress_rates[name]

    def _hash_routing(self, num_main: int) -> list[bool]:
        count = self.num_hash_layers
        if count is not None and not (_is_count(count) and count <= num_main):
            raise ConfigError(
                f"num_hash_layers {count!r}: must be 0 to num_hidden_layers {num_main}; correct it"
            )
        if self.mlp_layer_types is None:
            return [layer < (count or 0) for layer in range(num_main)]
        _same_length("mlp_layer_types", self.mlp_layer_types, num_main)
        hashed = [_named("mlp_layer_types", name, MLP_TYPES) for name in self.mlp_layer_types]
        if count is not None and hashed != [layer < count for layer in range(num_main)]:
            raise ConfigError(
                f"num_hash_layers {count} conflicts with mlp_layer_types, which has hash layers "
                f"{[layer for layer, routing in enumerate(hashed) if routing]}; "
                "make them equal or remove one"
            )
        return hashed


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list(facts: Facts, place: str) -> list[Any] | None:
    value = facts.get(place, default=None)
    if value is not None and not isinstance(value, list | tuple):
        raise ConfigError(
            f"{facts.where}: {place} {value!r}: must be a list; give one value per layer"
        )
    return None if value is None else list(value)


def _same_length(name: str, values: Sequence[object], num_main: int) -> None:
    if len(values) != num_main:
        raise ConfigError(
            f"{name} has {len(values)} entries: num_hidden_layers {num_main} needs as many; "
            "complete the table or change num_hidden_layers"
        )


def _named(place: str, name: str, table: Mapping[str, T]) -> T:
    if not isinstance(name, str) or name not in table:
        hint = nearest(str(name), table)
        raise ConfigError(f"{place} {name!r}: must be one of {', '.join(table)}{hint}; correct it")
    return table[name]
