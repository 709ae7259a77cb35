"""What the host knows of a live slot, also while the device is some forwards ahead of it.

A forward that `begin`s may write [length, length + n). It is settled by `commit` (the host knows what was accepted), or
first by `advance` (only the device knows) and by a commit later; commits settle forwards in the order they advanced.
"""

from __future__ import annotations

from collections import deque

from attrs import define, field


@define(kw_only=True)
class SlotBook:
    """Tokens, all of them absolute."""

    length: int = 0
    """Committed, as far as the host knows."""
    reserved: int = 0
    floor: int = 0
    """No rollback below: attached, or shared with a fork."""
    pages: list[int] = field(factory=list)
    written: int = 0
    """Highest position + 1 that settled forwards have written; a rollback does not lower it."""
    begun: int = 0
    """Query length of the forward that is not settled yet; a forward that is begun again counts once."""
    advanced: deque[int] = field(factory=deque)
    """Query lengths of the forwards that only the device has settled; 0 where the slot was idle."""

    @property
    def lead(self) -> int:
        """Most tokens that the device's length can be ahead of `length`."""
        return sum(self.advanced)

    @property
    def lead_forwards(self) -> int:
        """Forwards that may have given the device its lead."""
        return sum(1 for num_tokens in self.advanced if num_tokens)

    @property
    def highest(self) -> int:
        """Highest position + 1 that can have been written."""
        return max(self.written, self.length + self.lead + self.begun)

    @property
    def open_tokens(self) -> int:
        """Tokens written behind the committed ones and not settled by anybody."""
        return max(self.written - self.length - self.lead, self.begun)

    @property
    def most_accepted(self) -> int:
        """Most tokens that the next commit can accept."""
        return self.lead or self.highest - self.length

    def begin(self, num_tokens: int) -> None:
        self.begun = max(self.begun, num_tokens)

    def advance(self, *, idle: bool) -> None:
        """The device has taken over the begun forward's accepted tokens.

        An idle slot is noted too: the commit of 0 tokens that may follow must not settle another forward.
        """
        self.advanced.append(0 if idle else self._settle_begun())

    def commit(self, num_tokens: int) -> None:
        """Settle the oldest forward with its accepted tokens, or as many forwards as had that many."""
        wrote = self.advanced.popleft() if self.advanced else self._settle_begun()
        while self.advanced and wrote < num_tokens:
            wrote += self.advanced.popleft()
        if wrote < num_tokens:
            wrote += self._settle_begun()
        self.written = max(self.written, self.length + wrote)
        self.length += num_tokens

    def _settle_begun(self) -> int:
        wrote, self.begun = self.begun, 0
        return wrote
