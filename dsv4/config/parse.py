"""From a config file of any of the three styles to the fields of a ModelConfig.

published       config.json of the release: `compress_ratios`, `rope_scaling`
transformers    `layer_types`, `compress_rates`, `mlp_layer_types`, `rope_parameters`
official        the argument names of the official inference code: `dim`, `n_layers`, ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4.config.checks import MOST
from dsv4.config.facts import MISSING, Facts
from dsv4.config.keys import DTYPES, FIXED, IGNORED, REQUIRED, YARN_PLACES
from dsv4.config.layers import YarnConfig
from dsv4.config.schedule import Schedule
from dsv4.errors import ConfigError

_ROPE_DIM = ("qk_rope_head_dim", "rope_head_dim")
_ROPE_FACTOR = (
    "partial_rotary_factor",
    "rope_parameters.main.partial_rotary_factor",
    "rope_parameters.compress.partial_rotary_factor",
    "rope_parameters.partial_rotary_factor",
)


def read_document(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The JSON object of a file, a folder's config.json or a mapping, and its name for messages."""
    if isinstance(source, Mapping):
        return source, "config"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give a config.json or a folder with one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); give a complete config.json") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds a {type(document).__name__}; give a JSON object")
    return document, str(path)


def model_fields(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Field values of the ModelConfig that a config file describes; every key is accounted for."""
    facts = Facts(*read_document(source))
    facts.stated(*IGNORED, *FIXED)
    fields = {name: facts.get(name, *aliases) for name, aliases in REQUIRED.items()}
    fields |= _rope(facts) | _formats(facts)
    fields["bos_token_id"] = _token(facts, "bos_token_id", default=0)
    fields["eos_token_id"] = _token(facts, "eos_token_id", default=1)
    schedule = Schedule.read(facts)
    # Unknown before missing or unsupported: a misspelt key is the likely reason of both.
    facts.refuse_unknown()
    facts.refuse_missing()
    for place, (allowed, reason) in FIXED.items():
        facts.require(place, allowed, reason)
    for name in ("num_hidden_layers", "head_dim"):
        # The other fields wait for ModelConfig's validators; these two are computed with first.
        if not isinstance(fields[name], int) or fields[name] > MOST:
            raise ConfigError(
                f"{facts.where}: {name} {fields[name]!r}: must be an integer up to {MOST}; correct it"
            )
    fields["qk_rope_head_dim"] = _rope_dim(facts, fields["head_dim"])
    fields["layers"] = schedule.table(fields)
    fields["num_nextn_predict_layers"] = sum(layer.is_draft for layer in fields["layers"])
    return fields


def _rope(facts: Facts) -> dict[str, Any]:
    """Bases, YaRN and context. A nested base that differs from the top-level one is refused."""
    facts.stated(*_ROPE_DIM, *_ROPE_FACTOR)
    yarn = _yarn(facts)
    # The official arguments do not state the context: it is what YaRN extends to.
    context = yarn.factor * yarn.original_max_position_embeddings if yarn else math.inf
    extended = int(context) if math.isfinite(context) else MISSING
    return {
        "rope_theta": facts.get(
            "rope_theta", "rope_parameters.main.rope_theta", "rope_parameters.rope_theta"
        ),
        "compress_rope_theta": facts.get(
            "compress_rope_theta", "rope_parameters.compress.rope_theta"
        ),
        "yarn": yarn,
        "max_position_embeddings": facts.get("max_position_embeddings", default=extended),
    }


def _yarn(facts: Facts) -> YarnConfig | None:
    """YaRN of the compressing layers, or None. Official files switch it off by a length of 0."""
    places: dict[str, tuple[str, ...]] = {
        name: (*others, f"rope_parameters.compress.{name}", f"rope_parameters.{name}")
        for name, others in YARN_PLACES.items()
    }
    places["rope_type"] += ("rope_parameters.compress.type", "rope_parameters.type")
    values = {name: facts.get(*where, default=None) for name, where in places.items()}
    kind = values.pop("rope_type")
    if kind is None and facts.stated("rope_factor", "original_seq_len"):
        kind = "yarn" if values["original_max_position_embeddings"] else "default"
    elif kind in (None, "default") and any(value is not None for value in values.values()):
        raise ConfigError(
            f"{facts.where}: rope type {kind!r} conflicts with the YaRN values {values}; "
            "set rope_scaling.type to 'yarn' or remove them"
        )
    if kind not in (None, "default", "yarn"):
        raise ConfigError(
            f"{facts.where}: rope type {kind!r}: must be 'yarn' or 'default'; correct it"
        )
    if kind != "yarn":
        return None
    absent = [places[name][0] for name, value in values.items() if value is None]
    if absent:
        raise ConfigError(f"{facts.where}: YaRN needs {', '.join(absent)}; add it")
    return YarnConfig(**values)


def _rope_dim(facts: Facts, head_dim: int) -> Any:
    """Rotated channels: stated, or the stated fraction of head_dim; both must say the same."""
    fraction = facts.get(*_ROPE_FACTOR, default=None)
    dim = facts.get(*_ROPE_DIM, default=None)
    if fraction is None and dim is None:
        raise ConfigError(f"{facts.where}: missing key {_ROPE_DIM[0]!r}; add it")
    if fraction is not None and not (isinstance(fraction, float | int) and 0 < fraction <= 1):
        raise ConfigError(
            f"{facts.where}: {_ROPE_FACTOR[0]} {fraction!r}: must be a number in (0, 1]; correct it"
        )
    rounded = dim if fraction is None else round(head_dim * fraction)
    if dim is not None and dim != rounded:
        raise ConfigError(
            f"{facts.where}: qk_rope_head_dim {dim} conflicts with partial_rotary_factor "
            f"{fraction} of head_dim {head_dim}, which is {rounded}; make them equal or remove one"
        )
    return rounded


def _formats(facts: Facts) -> dict[str, Any]:
    """Dtypes, KV quantisation and tokenizer."""
    dtype = facts.get("torch_dtype", "dtype", default="float32")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        names = ", ".join(DTYPES)
        raise ConfigError(
            f"{facts.where}: torch_dtype {dtype!r}: must be one of {names}; correct it"
        )
    quantised = bool(facts.stated("quantization_config")) or dtype == "fp8"
    return {
        "torch_dtype": DTYPES[dtype],
        "expert_dtype": facts.get("expert_dtype", "quantization_config.expert_dtype", default=None),
        "kv_quant": facts.get("kv_quant", default="official" if quantised else "none"),
        "tokenizer": facts.get("dsv4_tokenizer", default=None),
    }


def _token(facts: Facts, place: str, *, default: int) -> Any:
    """A token id; absent = the published one, null = none, a list of one = its element."""
    if place in facts.document and facts.document[place] is None:
        facts.stated(place)
        return None
    value = facts.get(place, default=default)
    if isinstance(value, list) and len(value) != 1:
        raise ConfigError(
            f"{facts.where}: {place} {value}: must be one id; "
            "keep one and pass the others as stop tokens"
        )
    return value[0] if isinstance(value, list) else value
