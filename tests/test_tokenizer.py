"""Byte-level and file tokenizers: text comes back whole, also when it is streamed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.errors import CheckpointError, ConfigError, RequestError
from dsv4.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer


def config(**changes: object) -> SimpleNamespace:
    values = {"tokenizer": None, "vocab_size": 300, "bos_token_id": None, "eos_token_id": None}
    return SimpleNamespace(**(values | changes))


def write_tokenizer_file(folder: Path) -> Path:
    """A byte-level BPE without merges: each byte is a token, so characters of several bytes are split."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(["<end>"])
    built.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(params=["byte", "file"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    found = load_tokenizer(write_tokenizer_file(tmp_path), config())
    assert found is not None
    return found


TEXTS = ["", "plain", "für 7 €", "漢字と🎉 end", "a\n\tb\x00c", "\ufffd as typed"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_streamed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    assert "".join([*(stream.push(i) for i in ids), stream.flush()]) == text


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode("é🎉!")]
    assert pieces == ["", "é", "", "", "", "🎉", "!"]
    assert stream.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("x🎉")[:-1]
    assert [stream.push(i) for i in ids] == ["x", "", "", ""]
    assert stream.flush() == tokenizer.decode(ids)[1:]
    assert stream.push(tokenizer.encode("y")[0]) == "y"


def test_special_tokens_decode_to_nothing(tokenizer: Tokenizer) -> None:
    special = tokenizer.vocab_size - 1
    ids = [special, *tokenizer.encode("ab"), special]
    assert tokenizer.decode(ids) == "ab"
    stream = tokenizer.stream()
    assert "".join([*(stream.push(i) for i in ids), stream.flush()]) == "ab"


@given(st.lists(st.integers(0, 259), max_size=12))
def test_streaming_any_bytes_equals_decoding_them_at_once(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    stream = tokenizer.stream()
    joined = "".join([*(stream.push(i) for i in ids), stream.flush()])
    assert joined == tokenizer.decode(ids)
    assert joined == bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def test_byte_ids_are_the_bytes_and_specials_lie_above() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("Aé") == [0x41, 0xC3, 0xA9]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.vocab_size == 259
    with pytest.raises(ConfigError, match="eos_token_id 1"):
        ByteTokenizer(eos_token_id=1)


def test_undecodable_bytes_of_a_command_line_are_kept_and_half_surrogates_refused() -> None:
    assert ByteTokenizer().encode("a\udcff") == [0x61, 0xFF]
    with pytest.raises(RequestError, match="character 1"):
        ByteTokenizer().encode("a\ud800")


def test_the_config_chooses_the_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, config()) is None
    byte = load_tokenizer(tmp_path, config(tokenizer="byte", eos_token_id=270))
    assert byte == ByteTokenizer(eos_token_id=270)
    with pytest.raises(ConfigError, match="vocab_size 96"):
        load_tokenizer(tmp_path, config(tokenizer="byte", vocab_size=96))


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    write_tokenizer_file(tmp_path)
    assert load_tokenizer(tmp_path, config(vocab_size=257)) is not None
    with pytest.raises(ConfigError, match="ids up to 256"):
        load_tokenizer(tmp_path, config(vocab_size=256))


def test_a_corrupt_tokenizer_file_is_one_clear_line(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer") as caught:
        load_tokenizer(tmp_path, config())
    assert "\n" not in str(caught.value)


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"dsv4\[hf\]"):
        load_tokenizer(tmp_path, config())
