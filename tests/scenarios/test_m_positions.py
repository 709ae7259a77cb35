"""Class M: one rotary base per layer, applied at the right positions."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import ModelConfig, PoolConfig
from dsv4.errors import ConfigError
from dsv4.pool.base import Region
from tests.scenarios.catalogue import scenario
from tests.scenarios.harness import Session, assert_same, truth
from tests.scenarios.weights import tiny_document


@scenario("M", 47)
def test_every_rotated_vector_of_a_layer_uses_the_base_of_that_layer(
    family: type[PoolConfig],
) -> None:
    """Just behind the window (17) and far behind it (80): logits, window keys, entries and index keys."""
    sequence = truth(96)
    session = Session(family)
    slot = session.open()
    for start, end in ((0, 17), (17, 18), (18, 80), (80, 81)):
        logits = session.feed_one(slot, sequence.ids[start:end])
        assert_same(logits[-1], sequence.logits[end - 1])
    run = sequence.run
    for layer in range(3):
        rows = session.window_rows(slot, layer, range(65, 81))
        assert_same(rows, run.window_kv[layer][65:81])
    assert_same(session.entry_rows(slot, 1, Region.ENTRIES, 20), run.entries[1][:20])
    assert_same(session.entry_rows(slot, 1, Region.INDEX, 20), run.index_keys[1][:20])
    assert_same(session.entry_rows(slot, 2, Region.ENTRIES, 5), run.entries[2][:5])


@scenario("M", 47)
def test_the_bases_of_the_layers_differ_in_the_model_under_test() -> None:
    """Otherwise the test above could not see a mixed-up one."""
    layers = ModelConfig.from_json(tiny_document()).layers
    assert [layer.rope_theta for layer in layers] == [10_000.0, 160_000.0, 160_000.0]
    assert [layer.yarn is None for layer in layers] == [True, False, False]


@scenario("M", 48)
@pytest.mark.parametrize("start", [13, 14, 15, 16, 40])
def test_four_tokens_in_one_forward_have_the_bits_of_four_steps(
    family: type[PoolConfig], start: int
) -> None:
    sequence = truth(64)
    session = Session(family, depth=4, deterministic=True)
    together, stepped, chunked = session.open_all(3)
    session.feed([(s, sequence.ids[:start]) for s in (together, stepped)])
    logits = session.feed_one(together, sequence.ids[start : start + 4])
    for i in range(4):
        step = session.feed_one(stepped, [sequence.ids[start + i]])
        assert torch.equal(step[0], logits[i])
    assert torch.equal(session.feed_one(chunked, sequence.ids[: start + 4])[start:], logits)
    assert_same(logits, sequence.logits[start : start + 4])


@scenario("M", 49)
def test_the_compress_base_of_the_top_level_reaches_the_compressing_layers() -> None:
    document = tiny_document()
    document["rope_parameters"] = {
        "main": {"rope_type": "default"},
        "compress": {
            k: v for k, v in document["rope_parameters"]["compress"].items() if k != "rope_theta"
        },
    }
    layers = ModelConfig.from_json(document).layers
    assert [layer.rope_theta for layer in layers] == [10_000.0, 160_000.0, 160_000.0]


@scenario("M", 49)
def test_two_bases_that_disagree_are_refused() -> None:
    document = tiny_document()
    document["rope_parameters"]["compress"] = {
        **document["rope_parameters"]["compress"],
        "rope_theta": 10000.0,
    }
    with pytest.raises(
        ConfigError, match=r"compress_rope_theta 160000.0 conflicts with .* 10000.0"
    ):
        ModelConfig.from_json(document)
