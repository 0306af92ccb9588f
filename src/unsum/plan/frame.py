"""Graphs that differ only in how many rows indices send where, as a loop over experts makes them. The sizes of all
other nodes are the frame that these graphs share. The plan of such a graph follows from the plan of another one in the
same frame: only the nodes whose rows are moved are asked again where their samples are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.plan.plan import Plan
from unsum.plan.signature import Signature
from unsum.plan.skeleton import Skeleton, picker
from unsum.seams.nodes import outputs_of

Pick = Callable[[Sequence[Any]], Sequence[Any]]


class Frame:
    """What later graphs must share with a graph that was followed from its cut down, for its plan to serve them.

    The signature does not hold the shapes of most nodes, since they follow from those of others (see `skeleton`). Where
    these others are moved, it says too little: the shapes of nodes beside moved ones are read themselves."""

    def __init__(self, plan: Plan, signature: Signature, starts: Mapping[Edge, Layout], nodes: Sequence[Node]) -> None:
        assert plan.followed is not None
        moved = plan.followed.moved
        columns: tuple[Any, ...] = signature
        known, told, shapes, *rest = columns
        self.plan, self._starts, self._rest = plan, list(starts.values()), rest
        # Meetings that are served by recordings stay as they are: these hold for the numbers that nodes have saved.
        far = {plan.order[place] for place, is_far in enumerate(moved) if is_far and place not in plan.ruled}
        self._told = told
        self._columns = [picker([k for k, at in enumerate(each) if at not in far]) for each in known.places.saved]
        self._shapes = shapes
        self._read = picker(list(_unmoved(known, shapes, far)))
        self._border = picker(_border(nodes, moved))
        self._beside = _shapes_of(self._border(nodes))

    def fits(self, signature: Signature, starts: Mapping[Edge, Layout], nodes: Sequence[Node]) -> bool:
        """Whether a graph of the same skeleton has the frame's sizes and numbers where rows are not moved."""
        columns: tuple[Any, ...] = signature
        _, told, shapes, *rest = columns
        if list(starts.values()) != self._starts or rest != self._rest or len(shapes) != len(self._shapes):
            return False
        for pick, now, then in zip(self._columns, told, self._told, strict=True):
            if now is not then and pick(now) != pick(then):
                return False
        return self._read(shapes) == self._read(self._shapes) and _shapes_of(self._border(nodes)) == self._beside


def _unmoved(known: Skeleton, shapes: Sequence[Any], far: set[int]) -> chain[int]:
    """Where in the column of shapes is what must be the same: all but the shapes of nodes that are `far`."""
    found: list[range | tuple[int, ...]] = []
    at = 0
    for place in known.places.shown:  # each has the number of its outputs, then a shape and a dtype for each
        end = at + 1 + 2 * int(shapes[at])
        found.append((at, *range(at + 2, end, 2)) if place in far else range(at, end))
        at = end
    for place in known.places.viewed:
        if place not in far:
            found.append((at,))
        at += 1
    return chain.from_iterable(found)


def _border(nodes: Sequence[Node], moved: Sequence[bool]) -> list[int]:
    """The nodes that are not moved themselves, beside one that is."""
    place = {node: k for k, node in enumerate(nodes)}
    found: dict[int, None] = {}
    for k, node in enumerate(nodes):
        for child, _ in node.next_functions:
            if child is not None and moved[k] != moved[place[child]]:
                found[k if moved[place[child]] else place[child]] = None
    return [k for k in found if not is_leaf(nodes[k])]


def _shapes_of(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    return [tuple(meta.shape) for node in nodes for meta in outputs_of(node)]
