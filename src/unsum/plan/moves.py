"""Rows that data sends elsewhere: tokens that go to the experts chosen for them, and come back. Another batch sends
them elsewhere, but by whole numbers that nodes of the graph have saved. What is remembered is which numbers, and of
which rows they choose; whose the rows are is evaluated in every batch (`moved`), and compared where it must be as it
was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unsum.graph.layout import NOBODY, UNSEEN, Layout, Mapped, Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.owners import Owners
from unsum.plan.moved import Move, Moves
from unsum.plan.steady import keeps_rows


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
    found, holds = moves.sent(nodes)
    fits = all(map(bool, holds)) and all(r is not None and _agree(found[k].sample.cpu(), r) for k, r in learnt)
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
    count = node._input_metadata[0].shape[0]
    return Move(here, rows, count, sent.shape[0], sent if isinstance(sent, Regular) else None)


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
