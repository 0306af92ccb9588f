"""Events of blocks that are alike, for a time line: the first block by itself, the others as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from unsum.repeats import repeats, span

_LEAST = 3  # blocks: two are drawn as they are


@dataclass(frozen=True)
class Shown:
    """An event as it is drawn: once, or for several blocks that are alike."""

    event: Any
    number: int  # of the event, in the trace
    path: tuple[str, ...]  # the module's name in parts; "1 … 11" where it stands for several
    times: int = 1

    @property
    def lane(self) -> str:
        return ".".join(self.path) or "the model"

    @property
    def kind(self) -> str:
        return str(self.event.site).partition(":")[2]


def folded(events: Sequence[Any]) -> list[Shown]:
    """The events, oldest first. Of numbered blocks in a row with the same events, the lowest stays; of the others one
    stands for all, in the forward and in each backward by itself."""
    shown = [
        Shown(event, number, tuple(filter(None, str(event.site).partition(":")[0].split("."))))
        for number, event in enumerate(events)
    ]
    phases = [list(phase) for _, phase in groupby(shown, lambda each: each.event.backward)]
    return [each for phase in phases for each in _folded(phase, 0)]


def _folded(shown: Sequence[Shown], depth: int) -> Iterator[Shown]:
    """All have the first `depth` parts of their names in common."""
    blocks = [list(block) for _, block in groupby(shown, lambda each: each.path[depth : depth + 1])]
    k = 0
    while k < len(blocks):
        _, times = repeats(k, len(blocks), lambda k, other, _: _follows(blocks[k], blocks[other], depth, other - k))
        run = blocks[k : k + (times if times >= _LEAST else 1)]
        for block in _as_two(run, depth) if len(run) > 1 else run:
            yield from _folded(block, depth + 1) if len(block[0].path) > depth else block
        k += len(run)


def _follows(first: Sequence[Shown], other: Sequence[Shown], depth: int, steps: int) -> bool:
    """Whether `other` has the same events, and a number so many steps up or down."""
    one, two = (block[0].path[depth : depth + 1] for block in (first, other))
    if not all(part and part[0].isdecimal() for part in (one, two)) or abs(int(one[0]) - int(two[0])) != steps:
        return False
    return [_beyond(each, depth) for each in first] == [_beyond(each, depth) for each in other]


def _beyond(shown: Shown, depth: int) -> tuple[Any, ...]:
    event = shown.event
    return shown.path[depth + 1 :], shown.kind, event.shape, event.call, event.type


def _as_two(run: Sequence[Sequence[Shown]], depth: int) -> list[Sequence[Shown]]:
    """The block with the lowest number, and one for the others, as they come."""
    in_order = sorted(run, key=lambda block: int(block[0].path[depth]))
    lowest, others = in_order[0], in_order[1:]
    part = span(others[0][0].path[depth], others[-1][0].path[depth], len(others))
    stands = next(block for block in run if block is not lowest)
    one = [
        replace(each, path=(*each.path[:depth], part, *each.path[depth + 1 :]), times=each.times * len(others))
        for each in stands
    ]
    return [lowest, one] if run[0] is lowest else [one, lowest]
