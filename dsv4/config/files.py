"""Saving and loading configs as TOML or JSON; the suffix of the path chooses."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from dsv4.config.checks import refuse_unknown
from dsv4.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

NESTED = "nested"
"""Field metadata key: the config class that a field's table is read with."""


class FileConfig:
    """Base of the configs that can be saved. A None is left out: such fields default to it."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a `.toml` or `.json` file. Raises ConfigError for an unreadable file, unknown or missing
        keys and bad values."""
        return cls.from_document(read_document(Path(path)), str(path))

    def dump(self, path: str | Path) -> None:
        """Write a `.toml` or `.json` file that `load` reads back to an equal config."""
        path = Path(path)
        text = render_document(self.to_document(), path)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; give a path that can be written"
            ) from None

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> Self:
        """Build from a parsed table; `where` names it in messages."""
        fields = {field.name: field for field in fields_of(cls)}
        refuse_unknown(where, document, fields)
        missing = [
            name
            for name, field in fields.items()
            if field.default is attrs.NOTHING and name not in document
        ]
        if missing:
            raise ConfigError(f"{where}: missing key {', '.join(map(repr, missing))}; add it")
        values = dict(document)
        for name, value in document.items():
            nested: type[FileConfig] | None = fields[name].metadata.get(NESTED)
            if nested is not None:
                values[name] = nested.from_document(
                    as_table(value, f"{where}: {name}"), f"{where}: {name}"
                )
        return cls(**values)

    def to_document(self) -> dict[str, Any]:
        """The table that `from_document` reads: plain values and nested tables, without the Nones."""
        document: dict[str, Any] = {}
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, FileConfig):
                value = value.to_document()
            if value is not None:
                document[field.name] = dict(value) if isinstance(value, Mapping) else value
        return document


def fields_of(config_type: type) -> tuple[attrs.Attribute[Any], ...]:
    """The attrs fields of a config class."""
    if not attrs.has(config_type):
        raise ConfigError(
            f"config class {config_type.__name__}: is no attrs class; decorate it with attrs.frozen"
        )
    return tuple(attrs.fields(config_type))


def as_table(value: object, where: str) -> Mapping[str, Any]:
    """`value` if it is a table, else ConfigError."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} {value!r}: must be a table; give its keys")
    return value


def read_document(path: Path) -> Mapping[str, Any]:
    """The top-level table of a TOML or JSON file."""
    read = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix)
    if read is None:
        raise _unknown_suffix(path)
    try:
        document = read(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file that can be read") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not {path.suffix[1:].upper()} ({error}); correct it") from None
    return as_table(document, str(path))


def render_document(document: Mapping[str, Any], path: Path) -> str:
    """The text of a TOML or JSON file, by the suffix of `path`."""
    if path.suffix == ".json":
        return json.dumps(document, indent=2) + "\n"
    if path.suffix == ".toml":
        return "\n".join(_toml_lines(document, ())) + "\n"
    raise _unknown_suffix(path)


def _unknown_suffix(path: Path) -> ConfigError:
    return ConfigError(f"{path}: suffix {path.suffix!r}: must be .toml or .json; rename the file")


def _toml_lines(table: Mapping[str, Any], prefix: tuple[str, ...]) -> list[str]:
    """TOML of strings, numbers, booleans, lists of these, and tables; scalars come before tables."""
    lines = [
        f"{_toml_key(key)} = {_toml_value(value)}"
        for key, value in table.items()
        if not isinstance(value, Mapping)
    ]
    for key, value in table.items():
        if isinstance(value, Mapping):
            path = (*prefix, _toml_key(key))
            lines += ["", f"[{'.'.join(path)}]", *_toml_lines(value, path)]
    return lines


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    raise ConfigError(
        f"value {value!r}: a {type(value).__name__} cannot be written as TOML; "
        "use strings, numbers, booleans, lists or tables"
    )
