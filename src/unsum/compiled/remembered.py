"""What is known of a model's compiled calls: patterns of graphs, models with taps, what cannot run compiled."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from unsum.compiled.parts import Course
from unsum.compiled.pattern import Pattern
from unsum.plan.memory import watch_again

KEPT = 128  # layouts of a model
_WAYS = 4  # that are known of calls of one size
_SIZES = 4  # with which one rehearsal of parts runs


Sizes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Key:
    """What a call is like: its sizes apart, which may change from batch to batch."""

    rest: Hashable
    sizes: Sizes


@dataclass
class Record:
    """A model compiled with taps."""

    run: Callable[..., Any]
    reuses_memory: bool
    sizes: set[Sizes] = field(default_factory=set)  # with which it ran
    is_full: bool = False  # torch compiles it for no more sizes


@dataclass
class Memory:
    """What is known of a model's compiled calls."""

    patterns: OrderedDict[Key, list[Pattern | Course]] = field(default_factory=OrderedDict)
    rehearsed: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)  # where rules cover an eager call
    in_parts: set[Hashable] = field(default_factory=set)  # calls of models that have graph breaks
    rehearsals: dict[Hashable, tuple[Callable[..., Any], set[Sizes]]] = field(default_factory=dict)  # of these
    records: OrderedDict[Hashable, Record] = field(default_factory=OrderedDict)
    refused: dict[Hashable, str] = field(default_factory=dict)  # why calls cannot run compiled
    ambiguous: dict[Key, int] = field(default_factory=dict)  # sizes that could not be told apart; how many were known
    seen: weakref.WeakValueDictionary[int, Tensor] = field(default_factory=weakref.WeakValueDictionary)  # by parts
    made: dict[Hashable, int] = field(default_factory=dict)  # how often parts were given tensors that nobody knew
    missed: dict[tuple[Hashable, Key], int] = field(default_factory=dict)  # how often calls were not what was learnt

    def learnt(self, key: Key, new: Pattern | Course) -> None:
        known = self.patterns.setdefault(key, [])
        alike = [each for each in known if each.wanted == new.wanted]
        again = next((each for each in alike if each.whole == new.whole), None)
        oldest = alike[0] if again is None and len(alike) >= _WAYS else None
        known[:] = [*(each for each in known if each is not oldest and each is not again), again or new]  # the last one
        self.patterns.move_to_end(key)
        while len(self.patterns) > KEPT:
            self.patterns.popitem(last=False)

    def rehearse(self, rest: Hashable, run: Callable[..., Any]) -> None:
        """What takes such calls down. Few are kept: a number among the arguments that changes makes every call another
        one."""
        self.rehearsed[rest] = run
        while len(self.rehearsed) > KEPT:
            del self.rehearsed[next(iter(self.rehearsed))]

    def forgive(self, key: Key, wanted: frozenset[str]) -> None:
        """A call in parts has taught another way. Few of them are learnt: there may be one for every batch."""
        if len(self.of(key, wanted)) < _WAYS:
            self.missed = {each: times for each, times in self.missed.items() if each[1] != key}

    def rehearsal(self, key: Key, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """What runs the parts of a model as they are. Torch compiles one function for few sizes, and says nothing if it
        stops: then another is made."""
        run, sizes = self.rehearsals.get(key.rest, (None, set[Sizes]()))
        if run is None or (key.sizes not in sizes and len(sizes) >= _SIZES):
            run, sizes = self.rehearsals[key.rest] = make(), set()
        sizes.add(key.sizes)
        return run

    def place(self, what: Hashable, sizes: Sizes) -> Hashable:
        """Where the record of such a call is, or belongs. Torch compiles one function for few sizes; each of those that
        come after has a record of its own."""
        record = self.records.get(what)
        return what if record is None or not record.is_full or sizes in record.sizes else (what, sizes)

    def keep(self, place: Hashable, record: Record, sizes: Sizes) -> None:
        """A record has run with these sizes."""
        record.sizes.add(sizes)
        self.records[place] = record
        self.records.move_to_end(place)
        while len(self.records) > KEPT:
            self.records.popitem(last=False)

    def of(self, key: Key, wanted: frozenset[str]) -> list[Pattern | Course]:
        """What was learnt of calls with these sizes, of which these parameters were wanted."""
        return [each for each in self.patterns.get(key, []) if each.wanted == wanted]

    def known(self, key: Key, wanted: frozenset[str]) -> Pattern | Course | None:
        """What was learnt of calls with these sizes, or of such with others, if these sizes are known to change; with
        these parameters wanted."""
        if own := self.of(key, wanted):
            return own[-1]
        others = [(k.sizes, self.of(k, wanted)[-1:]) for k in self.patterns if _is_alike(k, key)]
        alike = [(sizes, p) for sizes, last in others for p in last if p.is_plain]
        if len({p.structure for _, p in alike}) != 1:
            return None
        for tensor, sizes in enumerate(key.sizes):
            for dim, size in enumerate(sizes):
                seen = {known[tensor][dim] for known, _ in alike}
                if size not in seen and (len(seen) < 2 or size < 2):
                    return None
        return alike[-1][1]

    def ways(self, key: Key, known: Pattern | Course) -> list[Pattern | Course]:
        """What is known of a call, and what else was learnt of such calls: attributes of a model choose its layers."""
        others = self.of(key, known.wanted) if known.is_plain else []
        return [known, *(each for each in reversed(others) if each is not known)]

    def alike(self, key: Key, wanted: frozenset[str]) -> list[Pattern | Course]:
        """What was learnt of calls with any sizes, of which these parameters were wanted."""
        return [each for k in self.patterns if _is_alike(k, key) for each in self.of(k, wanted)]


def _is_alike(one: Key, other: Key) -> bool:
    """Whether they differ by sizes alone."""
    return one.rest == other.rest and [len(sizes) for sizes in one.sizes] == [len(sizes) for sizes in other.sizes]


_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


def memory_of(model: nn.Module) -> Memory:
    """What is known of a model."""
    return _memories.setdefault(model, Memory())


def refuse(model: nn.Module, key: Hashable, why: str) -> None:
    """Let calls like this one run eagerly from now on, and say why."""
    memory_of(model).refused[key] = why
    watch_again(model)
