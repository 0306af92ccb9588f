"""Whose are rows that data has sent elsewhere? Evaluated in every batch, where the numbers are: from the indices that
nodes of the graph have saved, all layers at once. Nothing is looked at here; what must be so is handed back as truth
values on the device, to be read all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from unsum.graph.layout import Layout, Mapped, Regular
from unsum.graph.nodes import Node
from unsum.graph.positions import positions
from unsum.graph.saved import saved_by
from unsum.plan.plan import Plan, Route


@dataclass(frozen=True)
class Move:
    """A node whose result is rows of another tensor, chosen by whole numbers. The gradient goes the other way: what
    arrives at a row of the result is sent to the row that was chosen."""

    place: int
    rows: Regular | int  # whose the rows of the result are: by a layout, or those that the move at this place sends
    count: int  # how many rows the result has
    size: int  # how many the other tensor has
    sent: Regular | None  # the layout that these must have, if they have one


@dataclass(frozen=True, eq=False)
class Sent:
    """The rows that a move sends."""

    sample: Tensor  # (rows,): int32
    held: Tensor | None  # (n, t): the rows of each sample, where all have as many


@dataclass
class Moves:
    """All moves of a graph, in the order in which gradients pass them."""

    moves: list[Move] = field(default_factory=list)
    follows: dict[int, int] = field(
        default_factory=dict
    )  # nodes whose rows are those that the move at this place sends
    same: set[tuple[int, int]] = field(default_factory=set)  # moves that must send the same rows

    def sent(self, nodes: Sequence[Node]) -> tuple[dict[int, Sent], list[Tensor]]:
        """What each move sends in this graph, and what must be true if it is as it was."""
        found: dict[int, Sent] = {}
        holds: list[Tensor] = []
        for batch in self._batches:
            indices = {move: next(iter(saved_by(nodes[move.place]))) for move in batch}
            devices = dict.fromkeys(index.device for index in indices.values())
            for device in devices:
                here = [move for move in batch if indices[move].device == device]
                index = torch.stack([indices[move].long() for move in here])
                _send(here, index % here[0].size, found, holds)  # negative ones count from the end
        for one, other in self.same:
            mine, theirs = found[one].sample, found[other].sample
            holds.append((mine == theirs).all() if mine.shape == theirs.shape else mine.new_zeros((), dtype=torch.bool))
        return found, holds

    @cached_property
    def _batches(self) -> list[list[Move]]:
        """Moves that may be evaluated at once: of one shape, and after those whose rows they take."""
        depth: dict[int, int] = {}
        found: dict[object, list[Move]] = {}
        for move in self.moves:
            depth[move.place] = 0 if isinstance(move.rows, Regular) else depth[move.rows] + 1
            own = move.rows if isinstance(move.rows, Regular) else None
            found.setdefault((depth[move.place], own, move.count, move.size, move.sent), []).append(move)
        return sorted(found.values(), key=lambda batch: depth[batch[0].place])

    def applied(self, plan: Plan, found: dict[int, Sent]) -> Plan | None:
        """The plan for a graph in which the moves send these rows; None if a rule does not hold there."""
        owned, routes = dict(plan.owned), dict(plan.routes)
        for place, move in self.follows.items():
            if place not in owned:
                continue
            sent = found[move]
            owned[place] = [None if known is None else _mapped(sent, known.shape) for known in owned[place]]
            moved = [_again(route, owned[place][0], plan.n) for route in routes.get(place, ())]
            if any(route is None for route in moved):
                return None
            if moved:
                routes[place] = tuple(route for route in moved if route is not None)
        return replace(plan, owned=owned, routes=routes, has_doubts=False)


def _send(moves: Sequence[Move], index: Tensor, found: dict[int, Sent], holds: list[Tensor]) -> None:
    """Moves of one shape; `index` is (moves, rows)."""
    first, count = moves[0], index.shape[1]
    held: Tensor | None = None
    if isinstance(first.rows, Regular):
        rows = first.rows.along(index.device).int().expand(index.shape)
        split = index.unflatten(1, (-1, first.rows.n, first.rows.block))
        held = split.movedim(2, 1).flatten(2)
    else:
        before = [found[move.rows] for move in moves if isinstance(move.rows, int)]
        rows = torch.stack([each.sample for each in before])
        known = [each.held for each in before if each.held is not None]
        if len(known) == len(before):
            own = torch.stack(known)
            held = index.gather(1, own.flatten(1)).view(own.shape)
    if first.sent is not None:
        sent = first.sent.along(index.device).int()
        holds.append((sent[index] == rows).all())
        sent = sent.expand(len(index), -1)
    else:
        sent = rows.new_full((len(index), first.size), -1).scatter_(1, index, rows)
        holds.append((sent >= 0).all())
    if count != first.size:  # some are taken more than once
        held = None
        if first.sent is None:
            holds.append((sent.gather(1, index) == rows).all())
    for k, move in enumerate(moves):
        found[move.place] = Sent(sent[k], None if held is None else held[k])


def _mapped(sent: Sent, shape: tuple[int, ...]) -> Mapped:
    return Mapped(sent.sample, tuple(shape[1:]), is_whole=True, held=sent.held)


def _again(route: Route, layout: Layout | None, n: int) -> Route | None:
    by = None if layout is None else positions(layout, n, len(layout.shape) - route.by.lead)
    return None if by is None else replace(route, by=by)
