"""Rows that data sends elsewhere: tokens that go to the experts chosen for them, and come back. Another batch sends
them elsewhere, but by whole numbers that nodes of the graph have saved. What is remembered is which numbers, and of
which rows they choose; whose the rows are is evaluated in every batch, and compared where it must be as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unsum.graph.layout import NOBODY, UNSEEN, Layout, Mapped, Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.owners import Owners
from unsum.graph.positions import positions
from unsum.graph.saved import saved_by
from unsum.plan.plan import Plan, Route
from unsum.plan.steady import keeps_rows


@dataclass(frozen=True)
class Move:
    """A node whose result is rows of another tensor, chosen by whole numbers. The gradient goes the other way: what
    arrives at a row of the result is sent to the row that was chosen."""

    place: int
    rows: Regular | int  # whose the rows of the result are: by a layout, or those that the move at this place sends
    size: int  # how many rows the other tensor has
    sent: Regular | None  # the layout that these must have, if they have one


@dataclass
class Moves:
    """All moves of a graph, in the order in which gradients pass them."""

    moves: list[Move] = field(default_factory=list)
    follows: dict[int, int] = field(
        default_factory=dict
    )  # nodes whose rows are those that the move at this place sends
    same: set[tuple[int, int]] = field(default_factory=set)  # moves that must send the same rows

    def rows(self, nodes: Sequence[Node]) -> dict[int, Tensor] | None:
        """The sample of each row that each move sends in this graph; None if something is not as it was."""
        found: dict[int, Tensor] = {}
        holds: list[Tensor] = []  # compared at the end: on a GPU, every look waits for it
        for move in self.moves:
            index = next(iter(saved_by(nodes[move.place])))
            rows = (move.rows.along() if isinstance(move.rows, Regular) else found[move.rows]).to(index.device)
            if move.sent is None:
                sent = rows.new_full((move.size,), -1).index_copy_(0, index, rows)
                holds.append((sent >= 0).all())
            else:
                sent = move.sent.along().to(index.device)
            holds.append((sent[index] == rows).all())
            found[move.place] = sent
        holds += [(found[one] == found[other]).all() for one, other in self.same]
        return found if not holds or bool(torch.stack(holds).all()) else None

    def applied(self, plan: Plan, nodes: Sequence[Node]) -> Plan | None:
        """The plan for this graph; None if it is another layout."""
        rows = self.rows(nodes)
        if rows is None:
            return None
        owned, routes = dict(plan.owned), dict(plan.routes)
        for place, owners in plan.owned.items():
            if place not in self.follows:
                continue
            map_ = rows[self.follows[place]].cpu()
            owned[place] = [None if known is None else _mapped(map_, known.shape) for known in owners]
            moved = [_again(route, owned[place][0], plan.n) for route in plan.routes.get(place, ())]
            if any(route is None for route in moved):
                return None
            if moved:
                routes[place] = tuple(route for route in moved if route is not None)
        return replace(plan, owned=owned, routes=routes)


def _again(route: Route, layout: Layout | None, n: int) -> Route | None:
    by = None if layout is None else positions(layout, n, len(layout.shape) - route.by.lead)
    return None if by is None else replace(route, by=by)


def _mapped(rows: Tensor, shape: tuple[int, ...]) -> Mapped:
    return Mapped(rows.to(torch.int32)).widened(shape)


def find(nodes: Sequence[Node], owners: Mapping[Node, Owners | None]) -> Moves | None:
    """How all rows that follow no regular layout come about; None if that is not known of some."""
    moves = Moves()
    learnt: list[tuple[int, Tensor | None]] = []  # what the sweep has found of the rows that some move sends
    arriving: dict[Node, list[int | None]] = {}  # the moves from which the rows of a node come
    for here, node in enumerate(nodes):
        known = owners.get(node)
        if not known:
            continue
        irregular = any(isinstance(layout, Mapped) for layout in known)
        if irregular:
            first, *others = arriving.get(node, [None])
            if first is None or None in others:
                return None
            moves.follows[here] = first
            moves.same |= {(first, other) for other in others if other not in (first, None)}  # type: ignore[misc]
            learnt += [(first, _rows(layout)) for layout in known]
        sent = moves.follows.get(here)
        if _takes_rows(node) and (move := _move(here, node, sent, known[0], owners)) is not None:
            moves.moves.append(move)
            sent = here
        for edge, child, output in below(node):
            shape = () if is_leaf(child) else tuple(child._input_metadata[output].shape)
            keeps = sent == here or keeps_rows(node, edge, shape)
            arriving.setdefault(child, []).append(sent if keeps else None)
    rows = moves.rows(nodes)
    fits = rows is not None and all(r is not None and _agree(rows[k].cpu(), r) for k, r in learnt)
    return moves if fits else None


def _agree(rows: Tensor, seen: Tensor) -> bool:
    return rows.shape == seen.shape and bool(((rows == seen) | (seen == UNSEEN)).all())


def _move(
    here: int, node: Node, arrived: int | None, layout: Layout | None, owners: Mapping[Node, Owners | None]
) -> Move | None:
    """A node that takes rows, if it must be followed: where both ends are regular, its numbers are part of the plan."""
    (_, child, output), *_ = below(node)
    known = owners.get(child)
    sent = known[output] if known and len(known) > output else None
    rows = layout if arrived is None and isinstance(layout, Regular) else arrived
    if sent is None or rows is None or (isinstance(rows, Regular) and (isinstance(sent, Regular) or rows.dim != 0)):
        return None
    if not sent.shape[0] or (isinstance(sent, Regular) and sent.dim != 0):
        return None  # of no rows, or of which nothing was held
    return Move(here, rows, sent.shape[0], sent if isinstance(sent, Regular) else None)


def _takes_rows(node: Node) -> bool:
    """Whether a node takes rows along the first dimension, by one tensor of whole numbers."""
    if node.name() == "IndexBackward0":
        given = node._saved_indices
        return (
            given[0] is not None
            and given[0].dtype == torch.int64
            and all(i is None for i in given[1:])
            and given[0].dim() == 1
        )
    return node.name() == "IndexSelectBackward0" and node._saved_dim == 0


def _rows(layout: Layout | None) -> Tensor | None:
    """The sample of each row, if each is of one, or was not seen."""
    rows = layout.rows() if isinstance(layout, Mapped) else None
    return None if rows is None or bool((rows == NOBODY).any()) else rows.cpu()
