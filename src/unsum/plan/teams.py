"""Meetings of one shape: what is known of them beforehand, and what they leave while a backward runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any

from torch import Tensor

from unsum.graph.layout import Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.plan.plan import Route
from unsum.plan.signature import plain
from unsum.seams.nodes import SAVED, outputs_of


@dataclass(frozen=True, eq=False)
class Team:
    """Meetings of one shape, known when the graph is learnt."""

    routes: Sequence[Route]  # of the first of them
    reads: tuple[str, ...]  # the saved tensors that the rules read
    rows: int  # of δ: positions of all samples
    numel: int
    places: tuple[int, ...]
    parameters: frozenset[str]

    @cached_property
    def read(self) -> Callable[[Node], tuple[Tensor | None, ...]]:
        """What reads these saved tensors of a node."""
        if not self.reads:
            return lambda node: ()
        get: Any = attrgetter(*self.reads)
        return get if len(self.reads) > 1 else lambda node: (get(node),)  # type: ignore[no-any-return]


def teams(
    nodes: Sequence[Node], routes: Mapping[int, Sequence[Route]], mixed: set[Node], alone: Collection[str]
) -> dict[int, Team]:
    """The meetings that others of their shape may join. `alone`: parameters that are met just once."""
    alike: dict[Hashable, list[int]] = {}
    for place, there in routes.items():
        node = nodes[place]
        leading = [edge for edge, child, _ in below(node) if is_leaf(child) or child in mixed]
        if sorted(leading) == sorted(route.edge for route in there) and all(_fits(r, node, alone) for r in there):
            key = (
                plain(node),
                there[0].by.layout,
                outputs_of(node)[0].dtype,
                tuple((r.rule.name, r.edge, r.shape, r.turned, r.by.lead) for r in there),
            )
            alike.setdefault(key, []).append(place)
    found: dict[int, Team] = {}
    for places in alike.values():
        first = routes[places[0]]
        reads = dict.fromkeys(SAVED + name for route in first for name in route.rule.rows or ())
        names = frozenset(str(route.parameter) for place in places for route in routes[place])
        shape = first[0].by.layout.shape
        team = Team(first, tuple(reads), shape[0], prod(shape), tuple(places), names)
        found |= dict.fromkeys(places, team)
    return found


def _fits(route: Route, node: Node, alone: Collection[str]) -> bool:
    layout = route.by.layout
    if route.parameter not in alone or route.member is not None or route.rule.rows is None:
        return False
    if not isinstance(layout, Regular):
        return False
    return layout.dim == 0 and layout.n * layout.block == layout.shape[0]


@dataclass
class Left:
    """What the meetings of a team have left, in columns: no object is made for each of them."""

    size: int  # how many will come
    places: list[int] = field(default_factory=list)
    tensors: list[tuple[Tensor, ...]] = field(default_factory=list)  # δ and what was saved, of each
    versions: list[int] = field(default_factory=list)  # of all these tensors, as they came
    numel: int = 0
