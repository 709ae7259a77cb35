"""The golden models, their weights copied into dsv4.model's parameters by official names."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.decoder import Decoder


def golden_decoder(folder: Path) -> Decoder:
    """The model of a golden folder; its draft block too if the folder has one, else none."""
    config = ModelConfig.from_json(folder / "config_official_style.json")
    names = json.loads((folder / "name_map.json").read_text())
    stored = load_file(folder / "weights.safetensors")
    drafts = folder / "mtp.safetensors"
    if drafts.exists():
        stored |= {k: v for k, v in load_file(drafts).items() if k.startswith("mtp.0.")}
    else:
        config = config.without_drafts()
    official: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        official |= _official(name, tensor, names)
    decoder = Decoder(config)
    wanted = decoder.official_tensors()
    assert official.keys() == wanted.keys()
    for name, target in wanted.items():
        target.view.copy_(official[name].to(target.view.dtype))
    return decoder


def _official(name: str, tensor: Tensor, names: dict[str, str | list[str]]) -> dict[str, Tensor]:
    prefix = re.match(r"mtp\.0\.", name)
    if prefix:
        # inner names follow the mapping of a layer; the block's own tensors keep theirs
        known = names.get("model.layers.3." + name[6:], names.get("model.layers.2." + name[6:]))
        if known is None:
            return {name.replace("hc_head.hc_", "hc_head_"): tensor}
        flat = [known] if isinstance(known, str) else known
        known = [re.sub(r"^layers\.\d+\.", "mtp.0.", entry) for entry in flat]
    else:
        entry = names[name]
        known = [entry] if isinstance(entry, str) else entry
    if "{e}" not in known[0]:
        return {known[0]: tensor}
    found = {}
    for e, expert in enumerate(tensor):
        for target, part in zip(known, expert.chunk(len(known)), strict=True):
            found[target.split(" ")[0].replace("{e}", str(e))] = part
    return found
