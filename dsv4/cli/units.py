"""Bytes and counts as people write them."""

from __future__ import annotations

import re

from dsv4.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)} | {
    unit.lower(): 1000**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB"))
}
_BYTES |= {letter: 1024**power for power, letter in enumerate("kmgt", start=1)}
_COUNTS = {"": 1, "k": 1024, "m": 1024**2}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """`80GiB`, `1.5 GB`, `4096B`: binary and decimal units; `80G` is binary, a number alone is bytes.

    Raises ConfigError.
    """
    return _parse(
        text,
        {"": 1, **_BYTES},
        "bytes",
        "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or, binary too, K, M, G, T",
    )


def parse_count(text: str) -> int:
    """A count of tokens or requests; `4K` is 4096, as context lengths are written. Raises ConfigError."""
    return _parse(text, _COUNTS, "a count", "K (1024) or M (1024 K)")


def _parse(text: str, units: dict[str, int], what: str, names: str) -> int:
    match = _NUMBER.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        raise ConfigError(f"{text!r} is not {what}; give a number, with or without {names}")
    value = float(match[1]) * units[unit] if "." in match[1] else int(match[1]) * units[unit]
    if value < 1 or value != int(value):
        raise ConfigError(f"{text!r} is {value} in units; give a whole number of at least 1")
    return int(value)


def format_bytes(nbytes: float) -> str:
    """Three significant digits in a binary unit."""
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.3g} {_BINARY[unit]}"


def format_count(count: int) -> str:
    """`4K` for 4096: exact powers of 1024 short, the rest with separators."""
    for unit, step in (("M", 1024**2), ("K", 1024)):
        if count >= step and count % step == 0:
            return f"{count // step}{unit}"
    return f"{count:,}"
