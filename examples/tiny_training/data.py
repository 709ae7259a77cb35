"""Training text: the Python standard library's own sources, with a key to remember planted in some samples.

A recall sample states a random key once, as a comment line, and asks for it again far outside the window:

    # key: K7QX
    ... code ...
    # key: K7QX        <- the four characters after `# key: ` can be known from the first line alone

Token ids are byte values; the special tokens lie above 255. Legend: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import queue
import sysconfig
import threading
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

KEY_PREFIX = b"# key: "
KEY_LENGTH = 4
ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
ANSWER_WEIGHT = 8.0
"""Loss weight of a byte that only memory can tell."""
EARLY = 96
"""A third of the keys are stated in the first bytes of a sample, as in a recall trial."""
NEWLINE = 10
# Tables and third-party code: no prose of programs, or not the standard library.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
_HELD_OUT_OF = 20  # one file in 20 is never trained on


@frozen(eq=False)
class Corpus:
    """Two streams of token ids (int16), their files separated by `eos bos`."""

    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def standard_library(cls, *, bos: int, eos: int, root: Path | None = None) -> Corpus:
        """Every source file below `root` (default: this interpreter's standard library); a file's name alone decides
        its side, so any machine with the same sources makes the same split."""
        root = root or Path(sysconfig.get_path("stdlib"))
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            text = path.read_bytes().replace(b"\r\n", b"\n")
            if not _SKIPPED_FOLDERS.isdisjoint(name.parts) or not _is_prose(text):
                continue
            held_out = zlib.crc32(name.as_posix().encode()) % _HELD_OUT_OF == 0
            body = np.frombuffer(text, np.uint8).astype(np.int16)
            sides[held_out].extend((np.array([bos], np.int16), body, np.array([eos], np.int16)))
        return cls(*(np.concatenate(side) for side in sides))


def _is_prose(text: bytes) -> bool:
    """Neither a stub nor a file made to be undecodable, as some of the library's own tests are."""
    try:
        return len(text.decode("utf-8")) > 200
    except UnicodeDecodeError:
        return False


@frozen(eq=False)
class Batch:
    """ids [B, S] int64; weights [B, S] fp32: `weights[b, s]` is the loss weight of predicting `ids[b, s]`."""

    ids_BS: Tensor
    weights_BS: Tensor


def random_key(rng: np.random.Generator) -> bytes:
    return bytes(ALPHABET[i] for i in rng.integers(len(ALPHABET), size=KEY_LENGTH))


def line_start(text: np.ndarray, at: int, limit: int = 120) -> int:
    """The next line start at or after `at`, or `at` itself if none is within `limit`."""
    breaks = np.flatnonzero(text[max(at - 1, 0) : at + limit] == NEWLINE)
    return max(at - 1, 0) + int(breaks[0]) + 1 if at > 0 and breaks.size else at


class Planter:
    """Draws samples: a crop of the corpus, and in a fraction of them a key with one or more asks."""

    def __init__(
        self, text: np.ndarray, *, num_tokens: int, recall: float, max_asks: int, nearest: int
    ) -> None:
        self._text, self._num_tokens = text, num_tokens
        self._recall, self._max_asks, self._nearest = recall, max_asks, nearest

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """-> (ids [S] int16, weights [S] fp32)."""
        start = line_start(self._text, int(rng.integers(len(self._text) - self._num_tokens - 200)))
        crop = self._text[start : start + self._num_tokens]
        if rng.random() >= self._recall:
            return crop, np.ones(self._num_tokens, np.float32)
        line = np.array([*KEY_PREFIX, *random_key(rng), NEWLINE], np.int16)
        pieces, weights, end = [], [], 0
        for i, at in enumerate(self._places(rng, len(line))):
            at = max(line_start(crop, at), end)
            mark = np.ones(len(line), np.float32)
            # the first statement cannot be predicted: learning its bytes would be noise
            mark[len(KEY_PREFIX) : -1] = ANSWER_WEIGHT if i else 0.0
            pieces += [crop[end:at], line]
            weights += [np.ones(at - end, np.float32), mark]
            end = at
        pieces.append(crop[end:])
        weights.append(np.ones(self._num_tokens - end, np.float32))
        cut = self._num_tokens
        return np.concatenate(pieces)[:cut], np.concatenate(weights)[:cut]

    def _places(self, rng: np.random.Generator, line: int) -> list[int]:
        """Crop positions of the statement and of its asks; distances are log-uniform from `nearest` on."""
        margin = line + 130  # room for the line itself and for the move to a line start
        last = self._num_tokens - (self._max_asks + 1) * line - margin
        # most far asks need an early statement, and one at the very start has little before it to stand on
        reach = (EARLY, last // 8, last - self._nearest)[rng.integers(3)]
        stated = int(rng.integers(max(reach, 1)))
        spread = np.log(max(last - stated, self._nearest + 1) / self._nearest)
        wanted = 1 + int(rng.integers(self._max_asks))
        asks = stated + self._nearest * np.exp(spread * rng.random(wanted))
        return [stated, *sorted(int(ask) for ask in asks)]

    def batch(self, rng: np.random.Generator, num_sequences: int) -> Batch:
        ids, weights = zip(*(self.sample(rng) for _ in range(num_sequences)), strict=True)
        return Batch(torch.from_numpy(np.stack(ids)).long(), torch.from_numpy(np.stack(weights)))


def batches(
    planter: Planter, *, num_sequences: int, seed: int, ahead: int = 8
) -> Generator[Batch, None, None]:
    """An endless stream of batches, made by a thread that stays `ahead` of its reader.

    In pageable memory: pinning from another thread would break the capture of a graph, and a batch is small.
    """
    ready: queue.Queue[Batch] = queue.Queue(ahead)
    stopped = threading.Event()

    def produce() -> None:
        rng = np.random.default_rng(seed)
        while not stopped.is_set():
            made = planter.batch(rng, num_sequences)
            while not stopped.is_set():
                try:
                    ready.put(made, timeout=0.1)
                    break
                except queue.Full:
                    continue

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            yield ready.get()
    finally:
        stopped.set()
        thread.join()


def recall_prompt(
    text: np.ndarray, rng: np.random.Generator, distance: int
) -> tuple[list[int], bytes]:
    """(prompt ids, key): a statement, exactly `distance` bytes of code, and the ask `# key: `.

    The code starts at a line start and ends with a newline, as before an ask of the training text.
    """
    key, lead = random_key(rng), int(rng.integers(16, 80))
    start = line_start(text, int(rng.integers(len(text) - distance - lead - 200)))
    code = text[start : start + lead + distance].copy()
    code[code > 255] = NEWLINE  # ends of files
    code[[lead - 1, -1]] = NEWLINE
    ids = [*code[:lead], *KEY_PREFIX, *key, NEWLINE, *code[lead:], *KEY_PREFIX]
    return [int(i) for i in ids], key
