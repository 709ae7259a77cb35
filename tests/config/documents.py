"""Config documents that the tests start from, and small edits of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
GOLDENS = ("tiny", "pubrates", "quant/qat")


def published(name: str = "flash") -> dict[str, Any]:
    """The published config.json of a release."""
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def golden(name: str, style: str = "config.json") -> dict[str, Any]:
    """A golden folder's config: transformers style, or `config_official_style.json`."""
    return json.loads((DATA / "golden" / name / style).read_text())


def official(name: str) -> dict[str, Any]:
    """A golden folder's config in official argument names."""
    return golden(name, "config_official_style.json")


def changed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with top-level keys replaced."""
    return copy.deepcopy(document) | changes


def without(document: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A copy without some top-level keys."""
    return {key: value for key, value in document.items() if key not in keys}


def nested(document: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    """A copy with one inner key replaced."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return document
