"""Bytes and counts as people write them."""

from __future__ import annotations

import pytest

from dsv4.cli.units import format_bytes, format_count, parse_bytes, parse_count
from dsv4.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 85_899_345_920),
        ("80 GB", 80_000_000_000),
        ("1.5kib", 1536),
        ("2MB", 2_000_000),
        ("3MiB", 3_145_728),
        ("1TiB", 1_099_511_627_776),
        ("4096", 4096),
        ("80K", 81_920),
        ("80m", 83_886_080),
        ("80G", 85_899_345_920),
        ("80 T", 87_960_930_222_080),
        ("7B", 7),
    ],
)
def test_bytes_have_decimal_and_binary_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("4K", 4096), ("32k", 32_768), ("1M", 1_048_576), ("0.5K", 512)]
)
def test_counts_have_binary_units(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80 gigs", "-1GiB", "0", "1.5", "nan", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
    with pytest.raises(ConfigError):
        parse_count(text)


def test_sizes_are_printed_short() -> None:
    assert format_bytes(999) == "999 B"
    assert format_bytes(1024) == "1 KiB"
    assert format_bytes(85_899_345_920) == "80 GiB"
    assert format_count(4096) == "4K"
    assert format_count(1_048_576) == "1M"
    assert format_count(1000) == "1,000"
