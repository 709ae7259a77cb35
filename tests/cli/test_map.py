"""dsv4 map: the picture covers every row of every table once."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dsv4 import ModelConfig
from dsv4.cli.pool_map import layer_ranges, pool_map
from dsv4.registry import pool_class, pool_config_class
from tests.cli.conftest import Run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("pool", ["unified", "three-pool"])
@pytest.mark.parametrize("model", ["flash", "pro", "tiny"])
def test_regions_tile_their_tables_and_bytes_add_up(model: str, pool: str) -> None:
    config = ModelConfig.preset(model)
    chosen = pool_config_class(pool)(max_requests=3, max_context=1000).resolved(config)
    drawn = pool_map("title", chosen, config)
    assert drawn.nbytes == pool_class(chosen).estimate(chosen, config).total
    for table in drawn.tables:
        end = 0
        for region in table.regions:
            assert region.first_row == end
            end = region.last_row + 1


def test_the_unified_table_shows_rings_then_entries(run: Run) -> None:
    text = run("map", "--model", "flash", "--max-requests", 2, "--max-context", "1K").out
    assert "kv: layers 2-42 by 2 (csa, ratio 4); 21 x 768 rows bf16" in text
    assert "window: 2 slots x 128 rows, rows 0..255" in text
    assert "entries: 8 pages x 64 rows, rows 256..767" in text


def test_the_svg_is_xml_with_a_cell_per_slot_and_page(
    run: Run, golden: Path, tmp_path: Path
) -> None:
    file = tmp_path / "map.svg"
    config = golden / "pubrates" / "config.json"
    outcome = run("map", "--model", config, "--out", file, "--max-requests", 2)
    assert outcome.status == 0
    assert re.fullmatch(rf"wrote {re.escape(str(file))} \(\d+ tables\)\n", outcome.out)
    root = ElementTree.parse(file).getroot()
    regions = {
        str(group.findtext(f"{SVG}title")).partition(":")[0]: len(group.findall(f"{SVG}rect"))
        for group in root.iter(f"{SVG}g")
    }
    # 1024 tokens each, pages of 256
    assert (regions["window"], regions["entries"]) == (2, 8)


def test_a_checkpoint_folder_is_a_model(run: Run, checkpoint: Path) -> None:
    assert "csa, ratio 4" in run("map", checkpoint).out


def test_bad_input_is_one_line_that_names_it(run: Run, tmp_path: Path) -> None:
    assert "CKPT or --model" in run("map", "tiny", "--model", "flash").error
    assert ".svg" in run("map", "--model", "flash", "--out", tmp_path / "map.png").error
    assert "nowhere" in run("map", "--model", "flash", "--out", tmp_path / "nowhere/a.svg").error


def test_layers_are_listed_as_ranges() -> None:
    assert layer_ranges(()) == ""
    assert layer_ranges((7,)) == "7"
    assert layer_ranges((1, 2)) == "1, 2"
    assert layer_ranges((1, 2, 3)) == "1-3"
    assert layer_ranges((2, 4, 6)) == "2-6 by 2"
    assert layer_ranges((0, 1, 5)) == "0, 1, 5"
