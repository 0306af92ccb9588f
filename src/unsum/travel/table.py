"""Which function of the table speaks for which kind of node, and what it is told.

A function of the table answers one question: the samples of a node's result lie there, so where do those of the
argument at this edge lie? Its answer is a layout; MIXED, if positions of the argument get a gradient from several
samples (a weight, or samples that interact); or SILENT, if it cannot say. Then the node is asked by values (`values`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.graph.layout import UNSEEN, Layout, Mapped, Regular, along, merged
from unsum.graph.nodes import Node, is_custom, signed
from unsum.graph.rounded import rounding_of
from unsum.seams.nodes import saved_of

Shape = tuple[int, ...]


class Answer(Enum):
    """What the table says where there is no layout."""

    MIXED = "mixed"
    SILENT = "silent"


MIXED, SILENT = Answer.MIXED, Answer.SILENT


@dataclass(frozen=True, eq=False)
class Taken:
    """A map of rows that an index has taken from rows in blocks, one block for each sample."""

    map: Tensor  # of the rows that were taken
    index: Tensor  # which they are
    size: int  # how many there were to take from


@dataclass
class Journey:
    """One walk over a graph. On a GPU nothing is looked at on the way: what must be true is collected, to be read all
    at once, and `expected` says which layouts the rows had that indices move when the graph was judged."""

    n: int
    expected: dict[tuple[Node, int], str] | None = None  # None: the graph is being judged, numbers may be looked at
    holds: list[Tensor] = field(default_factory=list)
    taken: dict[int, Taken] = field(default_factory=dict)  # by the id of the map of the rows that were taken

    def joined(self, known: Layout | None, layout: Layout) -> Layout | None:
        """The layout of a tensor that is used in two ways; None if they contradict each other."""
        if known is None:
            return layout
        return merged(known, layout, self.n, None if self.expected is None else self.holds)

    def agree(self, one: Tensor, other: Tensor) -> bool:
        """Whether owners along one dimension are the same, where both are seen."""
        if one is other or one.shape != other.shape:
            return True
        device = one.device if one.device.type != "cpu" else other.device
        one, other = one.to(device), other.to(device)
        clear = ((one == other) | (one == UNSEEN) | (other == UNSEEN)).all()
        if self.expected is None or device.type == "cpu":
            return bool(clear)
        self.holds.append(clear)
        return True


class At:
    """One node and one of its edges: the layout of a result, and the shape of the argument."""

    __slots__ = ("arg", "edge", "journey", "kind", "layout", "node", "outs", "shape")

    def __init__(self, node: Node, kind: str, outs: Sequence[Layout | None], layout: Layout, journey: Journey) -> None:
        self.node, self.kind, self.outs, self.layout, self.journey = node, kind, outs, layout, journey
        self.shape = layout.shape
        self.edge, self.arg = 0, self.shape

    def saved(self, name: str) -> Any:
        """What the node has saved."""
        return saved_of(self.node, name)

    def dims(self, name: str = "dim", rank: int | None = None) -> list[int]:
        """Dimensions that the node has saved, counted from 0."""
        given = self.saved(name)
        rank = len(self.shape) if rank is None else rank
        return [signed(d) % max(rank, 1) for d in (given if isinstance(given, tuple | list) else (given,))]

    @property
    def varies(self) -> Sequence[int]:
        """The dimensions of the result along which the sample may change."""
        return (self.layout.dim,) if isinstance(self.layout, Regular) else range(self.layout.map.dim())

    def same(self) -> Layout | Answer:
        """The argument has its samples where the result has them."""
        layout, arg = self.layout, self.arg
        if arg == self.shape:
            return layout
        if isinstance(layout, Regular):
            fits = layout.dim < len(arg) and arg[layout.dim] == self.shape[layout.dim]
            return Regular(arg, layout.n, layout.dim, layout.block) if fits else SILENT
        lead = layout.map.dim()
        return layout.with_behind(arg[lead:]) if arg[:lead] == self.shape[:lead] else SILENT

    def same_if(self, holds: bool) -> Layout | Answer:
        """The same, under this condition."""
        return self.same() if holds else SILENT

    def along(self, dim: int, of: Layout | None = None) -> Layout | Answer:
        """The samples lie along this dimension of the argument as they do along the one of the result."""
        layout = self.layout if of is None else of
        if isinstance(layout, Regular):
            fits = 0 <= dim < len(self.arg) and self.arg[dim] == layout.shape[layout.dim]
            return Regular(self.arg, layout.n, dim, layout.block) if fits else SILENT
        rows = self.rows(layout)
        return SILENT if rows is None else self.by_rows(rows[1], dim)

    def by_rows(self, rows: Tensor, dim: int) -> Layout | Answer:
        """The argument's samples along a dimension, as a vector of owners."""
        fits = 0 <= dim < len(self.arg) and self.arg[dim] == len(rows)
        return along(rows, dim, self.arg, self.journey.n) if fits else SILENT

    def rows(self, layout: Layout | None = None) -> tuple[int, Tensor] | None:
        """The dimension along which samples change, if it is one, and the owners along it."""
        layout = self.layout if layout is None else layout
        if isinstance(layout, Regular):
            return layout.dim, layout.along().int()
        map_ = layout.map
        if map_.dim() == 1:
            return 0, map_
        # One owner after the other along one dimension, the same along all others: those take no step in memory, or
        # they are looked at.
        steps = [d for d in range(map_.dim()) if map_.stride(d) and map_.shape[d] > 1]
        if len(steps) > 1 and (map_.device.type == "cpu" or self.journey.expected is None):
            steps = [d for d in steps if not bool((map_ == map_.narrow(d, 0, 1)).all())]
        if len(steps) != 1 or not map_.numel():
            return None
        return steps[0], map_[tuple(slice(None) if d == steps[0] else 0 for d in range(map_.dim()))]


Travel = Callable[[At], "Layout | Answer"]

TABLE: dict[str, Travel] = {}
PREFIXES: dict[str, Travel] = {}  # of kinds that have many variants
TOGETHER: set[Travel] = set()  # functions that look at all results of a node
_kinds: dict[str, tuple[str, Travel | None]] = {}  # by the name of a node


def travels(kinds: str, *, prefixes: str = "", together: bool = False) -> Callable[[Travel], Travel]:
    """Say how samples travel at these kinds of nodes, named as the graph names them without "Backward0". `together`:
    the function looks at all results of the node; others are asked for each result."""

    def register(travel: Travel) -> Travel:
        if together:
            TOGETHER.add(travel)
        TABLE.update(dict.fromkeys(kinds.split(), travel))
        PREFIXES.update(dict.fromkeys(prefixes.split(), travel))
        _kinds.clear()
        return travel

    return register


def entry(name: str) -> tuple[str, Travel | None]:
    """The kind of a node with this name, and its function, if the table has one."""
    if name not in _kinds:
        kind = name.rpartition("::")[2].split("Backward")[0]
        found = TABLE.get(kind) or next((PREFIXES[p] for p in PREFIXES if kind.startswith(p)), None)
        _kinds[name] = kind, found
    return _kinds[name]


def ask(at: At, travel: Travel) -> Layout | Answer:
    """The samples of an argument, as a function of the table says them from the results of the node."""
    return travel(at) if len(at.outs) == 1 or travel in TOGETHER else of_each(at, travel)


def of_each(at: At, travel: Travel) -> Layout | Answer:
    """The samples of an argument of a node with several results: the function is asked for each result whose samples
    lie elsewhere than those of the first. SILENT where the answers contradict each other."""
    first, answer = at.layout, travel(at)
    for out in at.outs:
        if out is None or out is first or _are_alike(out, first):
            continue
        at.layout, at.shape = out, out.shape
        other = travel(at)
        at.layout, at.shape = first, first.shape
        if isinstance(answer, Answer) or isinstance(other, Answer):
            return answer if answer is other else SILENT
        joined = at.journey.joined(answer, other)
        if joined is None:
            return SILENT
        answer = joined
    return answer


def _are_alike(one: Layout, other: Layout) -> bool:
    """Whether two results have their samples along the same dimension in the same order, seen without a comparison."""
    if isinstance(one, Regular):
        return isinstance(other, Regular) and (one.n, one.dim, one.block) == (other.n, other.dim, other.block)
    return isinstance(other, Mapped) and one.map is other.map


def start(node: Node, outs: Sequence[Layout | None], journey: Journey) -> At | None:
    """What the functions of the table are told of a node; None if nothing is known of its results."""
    layout = next((out for out in outs if out is not None), None)
    if layout is None:
        return None
    return At(node, "", outs, layout, journey)


def down(at: At, edge: int, shape: Shape) -> Layout | Answer:
    """Where the samples of the argument at an edge lie, which has this shape."""
    node = at.node
    layout = at.layout
    if isinstance(layout, Mapped) and not layout.map.dim() and all(out is None or out is layout for out in at.outs):
        return layout.with_behind(shape)  # all of it is one sample's, and so is what comes of it
    if isinstance(node, BackwardCFunction) and not rounding_of(node):
        if is_custom(node):
            return SILENT
        passed = at.outs[edge - len(node.next_functions)]  # FSDP's own, which hands on each gradient as it is
        return SILENT if passed is None else passed
    at.kind, travel = entry(node.name())
    if travel is None:
        return SILENT
    at.edge, at.arg = edge, shape
    try:
        return ask(at, travel)
    except (AttributeError, IndexError):  # another version of torch saves something else
        return SILENT
