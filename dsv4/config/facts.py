"""Reading a config file of any style: one fact, and all the places that may state it.

Published, transformers and official files differ in names and nesting only. So a fact is looked up
at every place that may state it; two places that disagree are a conflict, and a key that no lookup
asked for is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field

from dsv4.config.checks import refuse_unknown
from dsv4.errors import ConfigError

MISSING = object()
"""A fact without a default: absent everywhere is an error."""


@define
class Facts:
    """A parsed JSON object and the places looked at so far; a place is a key, or `outer.inner`."""

    document: Mapping[str, Any]
    where: str
    """What messages call the document: its path, or `config`."""
    asked: set[str] = field(factory=set)
    missing: list[str] = field(factory=list)

    def stated(self, *places: str) -> dict[str, Any]:
        """Mark places as known; return those that state something (null states nothing)."""
        found = {}
        for place in places:
            self.asked.add(place)
            value = self._lookup(place)
            if value is not None:
                found[place] = value
        return found

    def get(self, *places: str, default: Any = MISSING) -> Any:
        """The one value of a fact. Raises ConfigError if two places disagree; records the fact as
        missing if none states it and there is no default."""
        found = self.stated(*places)
        if not found:
            if default is MISSING:
                self.missing.append(places[0])
            return None if default is MISSING else default
        (first, value), *others = found.items()
        for place, other in others:
            if other != value:
                raise ConfigError(
                    f"{self.where}: {first} {value!r} conflicts with {place} {other!r}; "
                    "make them equal or remove one"
                )
        return value

    def require(self, place: str, allowed: tuple[object, ...], reason: str) -> None:
        """Refuse a value that would ask for a computation this library does not have."""
        for value in self.stated(place).values():
            if value not in allowed:
                choices = " or ".join(repr(choice) for choice in allowed)
                raise ConfigError(
                    f"{self.where}: {place} {value!r}: only {choices} is supported ({reason}); "
                    f"set it to {allowed[0]!r} or remove it"
                )

    def refuse_missing(self) -> None:
        """Raise one ConfigError that lists every fact that was asked for and not stated."""
        if self.missing:
            names = ", ".join(repr(name) for name in self.missing)
            raise ConfigError(f"{self.where}: missing key {names}; add it")

    def refuse_unknown(self) -> None:
        """Raise one ConfigError that lists every key that nothing asked for."""
        inside = {
            place[:dot] for place in self.asked for dot, char in enumerate(place) if char == "."
        }
        refuse_unknown(self.where, self._paths(inside), self.asked | inside)

    def _lookup(self, place: str) -> Any:
        value: Any = self.document
        for key in place.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def _paths(self, inside: set[str]) -> Iterator[str]:
        """Every key, and every key of the objects named by `inside`, which must be objects."""
        pending = list(self.document.items())
        while pending:
            path, value = pending.pop(0)
            yield path
            if path in inside and value is not None:
                if not isinstance(value, Mapping):
                    raise ConfigError(
                        f"{self.where}: {path} {value!r}: must be an object; give its keys"
                    )
                pending += [(f"{path}.{key}", inner) for key, inner in value.items()]
