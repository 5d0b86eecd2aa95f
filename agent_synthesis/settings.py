"""Settings of schedules: for each schedule a frozen dataclass, whose fields say what they mean and what they may be.

    @dataclass(frozen=True)
    class MySettings(Settings):
        order: Order = setting(Order.ALONG, "the axis along which tiles come one after the other")
        dependent_launch: bool = setting(True, "whether a kernel may start while the previous one ends")
        threads: int = setting(256, "threads of a block", (128, 256, 512))

The one idea: a field is declared once, and the steps of a search, the names and values on the wire and the pages
follow. On the wire, settings are two maps in the order of the fields: of words (members of an enum, yes or no) and of
whole numbers. Whether a nest can be run that way is the schedule's to say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import EllipsisType
from typing import Self, TypeVar

from warpsmith.errors import IllegalMove

Value = StrEnum | bool | int | None
"""None: the nest has no such setting, so nothing of it is on the wire."""
V = TypeVar("V", bound=Value)
Domain = Iterable[Value] | EllipsisType
"""Values that a step may go to; `...` for those that are declared."""
_KEY = "setting"


Loads = StrEnum("Loads", "EVICT_FIRST CACHED")
"""Whether what a kernel reads is for it alone, or kept for others."""
Stores = StrEnum("Stores", "PLAIN STREAMING")
"""Whether results stay in the caches, or pass them."""
Exp = StrEnum("Exp", "ACCURATE FAST")
"""Which exponential a kernel calls."""


def setting(default: V, doc: str, values: Sequence[V] = ()) -> V:
    """A field of `Settings`.

    `values`: what a step of a search may go to, in the order of being tried; all of an enum, and yes and no, where none
    are given. A number without any is worked out by the schedule. `doc` goes on after the name: "threads of a block".
    """
    given: tuple[Value, ...] = tuple(values)
    if not given and isinstance(default, StrEnum):
        given = tuple(type(default))
    if not given and isinstance(default, bool):
        given = (True, False)
    return dataclasses.field(default=default, metadata={_KEY: Declared(doc, default, given)})


@dataclass(frozen=True)
class Declared:
    """What a field says of itself."""

    doc: str
    default: Value
    values: tuple[Value, ...]
    """Those that a step may go to."""

    @property
    def kind(self) -> type[StrEnum] | type[bool] | type[int]:
        """What its values are."""
        value = next(each for each in (self.default, *self.values) if each is not None)
        return bool if isinstance(value, bool) else int if isinstance(value, int) else type(value)

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        return "a whole number from 0 on" if self.kind is int else self.words

    @property
    def words(self) -> str:
        """What a step may go to, as on the wire."""
        return ", ".join(("yes" if each else "no") if isinstance(each, bool) else str(each) for each in self.values)

    def read(self, name: str, word: str | int) -> Value:
        """The value of a word or number from the wire. Raises IllegalMove, which says what is allowed."""
        if isinstance(word, str) and issubclass(self.kind, StrEnum) and word in self.values:
            return self.kind(word)
        if self.kind is bool and word in ("yes", "no"):
            return word == "yes"
        if self.kind is int and isinstance(word, int) and word >= 0:
            return word
        raise IllegalMove(f"{name} = {word}: it may be {self.allowed}")


@dataclass(frozen=True)
class Settings:
    """How a schedule is set; this one has nothing to set."""

    @classmethod
    @functools.cache
    def declared(cls) -> Mapping[str, Declared]:
        """Name → what the field says, in order."""
        return {field.name: field.metadata[_KEY] for field in dataclasses.fields(cls)}

    def one_change_away(self, **narrowed: Domain) -> list[Self]:
        """Those that differ in one setting, in the order of the fields; `narrowed`: other values than the declared."""
        return self.changes(**{name: narrowed.pop(name, ...) for name in self.declared()}, **narrowed)

    def changes(self, **domain: Domain) -> list[Self]:
        """Those that differ in one of the named settings, in that order."""
        found = []
        for name, values in domain.items():
            declared, current = self.declared()[name], self._value(name)
            for value in declared.values if isinstance(values, EllipsisType) else values:
                if current is not None and value != current:
                    found.append(dataclasses.replace(self, **{name: value}))
        return found

    def to_wire(self) -> tuple[dict[str, str], dict[str, int]]:
        """Words and numbers by name, as moves, analyses and archives have them."""
        choices: dict[str, str] = {}
        integers: dict[str, int] = {}
        for name in self.declared():
            match self._value(name):
                case bool(value):
                    choices[name] = "yes" if value else "no"
                case int(value):
                    integers[name] = value
                case StrEnum() as value:
                    choices[name] = value.value
        return choices, integers

    def words(self) -> dict[str, str | int]:
        """What `to_wire` gives, in one map."""
        choices, integers = self.to_wire()
        return {**choices, **integers}

    def changed(self, words: Mapping[str, str | int]) -> Self:
        """These settings with some as the wire has them.

        Raises:
            IllegalMove: names the setting, its value and what is allowed.
        """
        there = [name for name in self.declared() if self._value(name) is not None]
        return dataclasses.replace(self, **self._read(words, there))

    @classmethod
    def from_wire(cls, choices: Mapping[str, str], integers: Mapping[str, int]) -> Self:
        """What `to_wire` gave; what is not there has its default.

        Raises:
            IllegalMove: names the setting, its value and what is allowed.
        """
        return cls(**cls._read({**choices, **integers}, cls.declared()))

    @classmethod
    def _read(cls, words: Mapping[str, str | int], there: Collection[str]) -> dict[str, Value]:
        for name in words:
            if name not in there:
                raise IllegalMove(f"there is no setting {name!r}; there are: {', '.join(there) or 'none'}")
        return {name: cls.declared()[name].read(name, word) for name, word in words.items()}

    def _value(self, name: str) -> Value:
        value: Value = getattr(self, name)
        return value

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.words().items())
