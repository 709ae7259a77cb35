"""Validators for config fields: a failure is a ConfigError with name, value, limit and remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from dsv4.errors import ConfigError

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


MOST = 2**63 - 1
"""What torch takes as a size."""


def integer(*, least: int, optional: bool = False) -> Validator:
    """An int from `least` to MOST (a bool is none); None too if `optional`."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(
                f"{attribute.name} {value!r}: must be an integer; give a whole number >= {least}"
            )
        if value < least:
            raise ConfigError(f"{attribute.name} {value}: must be at least {least}; raise it")
        if value > MOST:
            raise ConfigError(f"{attribute.name} {value}: must be at most {MOST}; lower it")

    return check


def number(*, above: float | None = None, least: float | None = None) -> Validator:
    """A finite float within a lower limit; ints have been converted before."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, float) or not math.isfinite(value):
            raise ConfigError(f"{attribute.name} {value!r}: must be a finite number; give a float")
        if above is not None and not value > above:
            raise ConfigError(f"{attribute.name} {value}: must be greater than {above}; raise it")
        if least is not None and not value >= least:
            raise ConfigError(f"{attribute.name} {value}: must be at least {least}; raise it")

    return check


def as_float(value: object) -> object:
    """Converter: JSON writes 10000 for a base of 10000.0; both must compare and hash alike."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf  # which the validator refuses


def one_of(*allowed: str | None) -> Validator:
    """One of a few names."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in allowed:
            names = ", ".join(repr(name) for name in allowed)
            raise ConfigError(
                f"{attribute.name} {value!r}: must be one of {names}; choose one of them"
            )

    return check


def boolean() -> Validator:
    """True or False, not a number or a string that looks like one."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError(f"{attribute.name} {value!r}: must be true or false; give a boolean")

    return check


def instance(wanted: type) -> Validator:
    """An object of a class or of a subclass."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, wanted):
            raise ConfigError(f"{attribute.name} {value!r}: must be a {wanted.__name__}; give one")

    return check


def names() -> Validator:
    """A mapping from names to names."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, Mapping) or not all(
            isinstance(name, str) for pair in value.items() for name in pair
        ):
            raise ConfigError(f"{attribute.name} {value!r}: must map names to names; give a table")

    return check


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'` for the closest known name, or nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" (nearest known name: {close[0]!r})" if close else ""


def refuse_unknown(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise one ConfigError that lists every key outside `known`, each with the nearest name."""
    names = set(known)
    unknown = [f"{key!r}{nearest(key, names)}" for key in keys if key not in names]
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {', '.join(unknown)}; correct the name or remove the key"
        )
