"""The outermost calls of a block: how many samples each was given, which wait for a backward; and which module made
which node."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unsum.graph.nodes import is_leaf
from unsum.seams.nodes import next_number, number_of
from unsum.step.reading import Reading, Told

_KEPT = 10_000  # modules' calls that are remembered once older graphs are gone
_WAITING = 1000  # calls without a backward, in a long block


@dataclass(frozen=True)
class Made:
    """An outermost call that was made."""

    n: int | None  # how many samples it was given, if any
    positions: int | None  # how many tokens each of them has, if it was given tokens


class OutermostCalls:
    """The outermost calls of a block, by their numbers."""

    def __init__(self) -> None:
        self.made: dict[int, Made] = {}
        self._waiting: dict[int, None] = {}  # those that had no backward yet
        self._nodes: dict[int, range] = {}  # the numbers of the nodes that each has made

    def end(self, call: int, start: int) -> None:
        """A call is over; its first node had this number."""
        self._nodes[call] = range(start, next_number())
        while len(self._nodes) > _WAITING:
            self._nodes.pop(next(iter(self._nodes)))

    def have_made(self, nodes: Iterable[Any]) -> frozenset[int]:
        """Those of the calls that have made any of these nodes."""
        numbers = sorted({number_of(node) for node in nodes if not is_leaf(node)})
        found = set()
        for call, own in self._nodes.items():
            at = bisect.bisect_left(numbers, own.start)
            if at < len(numbers) and numbers[at] < own.stop:
                found.add(call)
        return frozenset(found)

    def note(self, call: int, made: Made) -> None:
        """A call is made."""
        self.made[call] = made
        self._waiting[call] = None
        while len(self._waiting) > _WAITING:
            self._waiting.pop(next(iter(self._waiting)))

    def pending(self) -> frozenset[int]:
        """The calls whose backward may come: those since the last one, or else the last call."""
        last = next(reversed(self.made), None)
        return frozenset(self._waiting or ([] if last is None else [last]))

    def had_backward(self, calls: Collection[int]) -> None:
        """A backward of these calls begins."""
        for call in calls:
            self._waiting.pop(call, None)

    def number_of_samples(self, calls: Collection[int]) -> int | None:
        """How many samples these calls were given, if all were given as many."""
        found = {made.n for call in calls if (made := self.made.get(call)) is not None and made.n is not None}
        return found.pop() if len(found) == 1 else None

    def positions(self, calls: Collection[int]) -> int | None:
        """How many tokens each sample of these calls has, if that is known."""
        found = {made.positions for call in calls if (made := self.made.get(call)) is not None}
        return found.pop() if len(found) == 1 else None


class Spans:
    """Which nodes the calls of modules have made, by the numbers that torch gives to nodes."""

    def __init__(self) -> None:
        self._open: list[tuple[str, int]] = []  # names, and the number of the first node
        self._spans: list[tuple[int, int, str]] = []  # from, to, name

    def __len__(self) -> int:
        """How many calls are under way, one inside the other."""
        return len(self._open)

    def begin(self, name: str) -> None:
        """A module is called."""
        self._open.append((name, next_number()))

    def end(self) -> int:
        """The innermost call is over; returns the number that its first node had."""
        name, start = self._open.pop()
        self._spans.append((start, next_number(), name))
        return start

    def innermost(self) -> str:
        """The module whose call is under way."""
        return self._open[-1][0] if self._open else ""

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()
        self._spans.clear()

    def shorten(self) -> None:
        """Older graphs are gone: forget what made them."""
        del self._spans[:-_KEPT]

    def module_of(self, number: int) -> str:
        """The innermost module during whose call the node with this number was made."""
        ends = [end for _, end, _ in self._spans]  # calls end in order, inner ones first
        for start, end, name in self._spans[bisect.bisect_right(ends, number) :]:
            if start <= number < end:
                return name
        return ""


@dataclass(frozen=True)
class Look:
    """What can be told of a call before it is made."""

    rest: Hashable  # flags, dtypes
    sizes: tuple[tuple[int, ...], ...]  # of the tensors that it is given
    n: int | None
    positions: int | None


@dataclass(eq=False)
class Begun:
    """An outermost call that has begun."""

    call: int
    ways: list[Reading]  # in which it may be read
    alike: Hashable  # what such calls have in common, whatever the sizes
    rest: tuple[Hashable, ...]  # the purpose of its block, its name and flags
    sizes: tuple[tuple[int, ...], ...]  # of what it was given
    positions: int | None  # how many tokens each sample has, if it was given tokens
    told: Told | None  # by earlier calls: the first of the ways
    are_data: list[bool] = field(default_factory=list)  # whether it was given any data, read in each way
    outputs: list[tuple[bool, ...]] = field(default_factory=list)  # which of them may have samples, read in each way
    is_whole: bool = False  # whether it has returned

    def key(self, n: int | None) -> tuple[Hashable, ...]:
        """What such calls are remembered by."""
        return *self.rest, n == 1


def positions_of(given: Sequence[Tensor]) -> int | None:
    """How many tokens a sample has, if the first tensor of two dimensions or more is token ids or rows of vectors."""
    first = next((t for t in given if t.dim() > 1), None)
    if first is None:
        return None
    is_ids = first.dim() == 2 and not first.is_floating_point()
    return int(first.shape[1]) if is_ids or first.dim() == 3 else None
