"""Text of a request as its tokens arrive: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import Protocol


class TextDecoder(Protocol):
    """Turns tokens into text one by one, keeping back bytes that do not make a character yet."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Collects text, ends it before the first stop string, and hands out what can no longer change."""

    def __init__(self, decoder: TextDecoder | None, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._num_taken = 0
        self._done = False
        self.text = ""
        """Everything so far; cut before the stop string once there is one."""

    def push(self, token_id: int) -> bool:
        """Add a token; True if its text completes a stop string. Nothing may be added after that."""
        return self._decoder is not None and self._append(self._decoder.push(token_id))

    def finish(self) -> None:
        """Declare the text complete: what was kept back becomes final."""
        if not self._done and self._decoder is not None:
            self._append(self._decoder.flush())
        self._done = True

    def take(self) -> str:
        """The final text since the last call."""
        end = len(self.text) - (0 if self._done else self._num_uncertain())
        taken = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return taken

    def _append(self, piece: str) -> bool:
        # A match may begin in older text, but ends in the new piece.
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self._done = True
        return bool(found)

    def _num_uncertain(self) -> int:
        """Length of the longest tail that may still become a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
