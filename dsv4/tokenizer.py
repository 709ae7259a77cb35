"""Tokenizers: text to token ids and back, whole or streamed."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from dsv4.errors import CheckpointError, ConfigError, RequestError

if TYPE_CHECKING:
    from dsv4.config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
NUM_BYTES = 256
REPLACEMENT = "\ufffd"
"""What decoding puts in place of bytes that are no UTF-8."""


class StreamDecoder(ABC):
    """Turns token ids into text as they come, never in the middle of a character.

    1. The pieces of `push` and the final `flush` joined are what `Tokenizer.decode` gives for all ids.
    2. No piece holds a replacement character for a character that later tokens complete.
    """

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Text that this token completes; empty inside a character."""

    @abstractmethod
    def flush(self) -> str:
        """The rest, once no more tokens come; unfinished characters as replacement characters."""


class Tokenizer(ABC):
    """Text to ids and back. Special tokens decode to nothing."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids are below this."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without a beginning-of-sequence token unless the tokenizer file adds one."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str: ...

    @abstractmethod
    def stream(self) -> StreamDecoder:
        """A decoder for one completion."""


@frozen(kw_only=True)
class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8: ids 0..255 are the bytes, special tokens lie above.

    Any text can be encoded, and no file is needed. A config asks for it with `"dsv4_tokenizer": "byte"`.
    """

    bos_token_id: int = 256
    eos_token_id: int = 257
    pad_token_id: int = 258

    def __attrs_post_init__(self) -> None:
        for name, token_id in attrs.asdict(self).items():
            if token_id < NUM_BYTES:
                raise ConfigError(
                    f"{name} {token_id}: ids below {NUM_BYTES} are bytes in the byte tokenizer; "
                    f"use {NUM_BYTES} or more"
                )

    @property
    def vocab_size(self) -> int:
        return 1 + max(self.bos_token_id, self.eos_token_id, self.pad_token_id)

    def encode(self, text: str) -> list[int]:
        """Bytes of the text, also those that a command line could not decode; RequestError for others."""
        try:
            return list(text.encode("utf-8", errors="surrogateescape"))
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text: character {error.start} is half of a surrogate pair and has no UTF-8 form; "
                "remove it"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if 0 <= i < NUM_BYTES).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        return _ByteStream()


class _ByteStream(StreamDecoder):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if 0 <= token_id < NUM_BYTES else ""

    def flush(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class FileTokenizer(Tokenizer):
    """The tokenizer of a checkpoint's tokenizer.json; needs the package `tokenizers` (extra `hf`)."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                f"{path}: reading it needs the package tokenizers; "
                "install the extra: pip install 'dsv4[hf]', or give token ids"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise CheckpointError(
                f"{path}: not a tokenizer ({str(error).splitlines()[0]}); download it again"
            ) from error

    @property
    def vocab_size(self) -> int:
        # The largest id, not the number of tokens: ids may have gaps.
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self) -> StreamDecoder:
        return _TextStream(self)


class _TextStream(StreamDecoder):
    """Decodes a growing tail: text is given out when it no longer ends in an unfinished character.

    The tail keeps the tokens of the last piece, since a tokenizer may put a space between two tokens but
    none before the first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._num_shown = 0
        """Leading tokens of the tail whose text has been given out."""

    def push(self, token_id: int) -> str:
        self._tail.append(token_id)
        text = self._unseen()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._tail, self._num_shown = (
            self._tail[self._num_shown :],
            len(self._tail) - self._num_shown,
        )
        return text

    def flush(self) -> str:
        text = self._unseen()
        self._tail, self._num_shown = [], 0
        return text

    def _unseen(self) -> str:
        shown = self._tokenizer.decode(self._tail[: self._num_shown])
        return self._tokenizer.decode(self._tail)[len(shown) :]


def load_tokenizer(path: str | Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder: built in if the config says so, else its tokenizer.json,
    else None (token ids only).

    Raises ConfigError if the package for tokenizer.json is missing or the vocabulary is too small for the tokenizer,
    CheckpointError for a corrupt file.
    """
    file = Path(path) / TOKENIZER_FILE
    if config.tokenizer == "byte":
        known = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        tokenizer: Tokenizer = ByteTokenizer(
            **{key: value for key, value in known.items() if value is not None}
        )
        limit = NUM_BYTES
    elif file.is_file():
        tokenizer = FileTokenizer(file)
        limit = tokenizer.vocab_size
    else:
        return None
    if config.vocab_size < limit:
        raise ConfigError(
            f"vocab_size {config.vocab_size}: the tokenizer of {path} gives ids up to {limit - 1}; "
            "use the config.json and tokenizer of one release"
        )
    return tokenizer
