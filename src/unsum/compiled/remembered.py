"""What is known of a model's compiled calls: patterns of graphs, models with taps, what cannot run compiled."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unsum.compiled.pattern import Pattern

KEPT = 128  # layouts of a model


@dataclass(frozen=True)
class Key:
    """What a call is like: its sizes apart, which may change from batch to batch."""

    rest: Hashable
    sizes: tuple[tuple[int, ...], ...]


@dataclass
class Record:
    """A model compiled with taps."""

    run: Callable[..., Any]
    pattern: Pattern
    reuses_memory: bool
    told: list[list[str]] = field(default_factory=list)  # by its forms


@dataclass
class Memory:
    """What is known of a model's compiled calls."""

    patterns: OrderedDict[Key, list[Pattern]] = field(default_factory=OrderedDict)
    rehearsed: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)  # where rules cover an eager call
    records: dict[Hashable, Record] = field(default_factory=dict)
    refused: dict[Hashable, str] = field(default_factory=dict)  # why calls cannot run compiled
    missed: dict[Hashable, int] = field(default_factory=dict)  # how often calls were not what was learnt

    def learnt(self, key: Key, new: Pattern) -> None:
        known = self.patterns.setdefault(key, [])
        if all(each.nodes != new.nodes for each in known):
            known.append(new)
        del known[:-4]
        self.patterns.move_to_end(key)
        while len(self.patterns) > KEPT:
            self.patterns.popitem(last=False)

    def known(self, key: Key) -> Pattern | None:
        """What was learnt of calls with these sizes, or of such with others, if these sizes are known to change."""
        if key in self.patterns:
            return self.patterns[key][-1]
        alike = [(k.sizes, p[-1]) for k, p in self.patterns.items() if k.rest == key.rest and _same_rank(k, key)]
        if len({p.structure for _, p in alike}) != 1:
            return None
        for tensor, sizes in enumerate(key.sizes):
            for dim, size in enumerate(sizes):
                seen = {known[tensor][dim] for known, _ in alike}
                if size not in seen and (len(seen) < 2 or size < 2):
                    return None
        return alike[-1][1]


def _same_rank(one: Key, other: Key) -> bool:
    return [len(sizes) for sizes in one.sizes] == [len(sizes) for sizes in other.sizes]


_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


def memory_of(model: nn.Module) -> Memory:
    """What is known of a model."""
    return _memories.setdefault(model, Memory())
