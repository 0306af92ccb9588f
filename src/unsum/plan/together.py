"""Layers of one shape together. Where a step is dominated by overhead rather than by arithmetic, a meeting only leaves
δ and what its node has saved; when all layers of its shape have done so, their rules are applied once, to all of them
as if they were one layer with more samples. What waits is bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.total import Kind
from unsum.graph.layout import Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.positions import Positions
from unsum.plan.plan import Plan, Route
from unsum.plan.pool import BOUND, SMALL, reduced
from unsum.plan.signature import plain
from unsum.plan.unchanged import refuse_changed
from unsum.rules.follow import finished
from unsum.rules.registry import Call

# Positions up to which layers wait for each other. On a GPU 8192 took 2.8 times a plain step, layer by layer far less.
ROWS = {"cuda": 4096}


@dataclass(frozen=True, eq=False)
class Team:
    """Meetings of one shape, known when the graph is learnt."""

    routes: Sequence[Route]  # of the first of them
    reads: tuple[str, ...]  # the saved tensors that the rules read
    rows: int  # of δ: positions of all samples
    numel: int
    places: tuple[int, ...]
    parameters: frozenset[str]


def teams(
    nodes: Sequence[Node], routes: Mapping[int, Sequence[Route]], mixed: set[Node], alone: set[str]
) -> dict[int, Team]:
    """The meetings that have others of their shape. `alone`: parameters that are met just once."""
    alike: dict[Hashable, list[int]] = {}
    for place, there in routes.items():
        node = nodes[place]
        leading = [edge for edge, child, _ in below(node) if is_leaf(child) or child in mixed]
        if sorted(leading) == sorted(route.edge for route in there) and all(_fits(r, node, alone) for r in there):
            key = (
                plain(node),
                there[0].by.layout,
                node._input_metadata[0].dtype,
                tuple((r.rule.name, r.edge, r.shape, r.turned, r.by.lead) for r in there),
            )
            alike.setdefault(key, []).append(place)
    found: dict[int, Team] = {}
    for places in alike.values():
        first = routes[places[0]]
        reads = dict.fromkeys(f"_saved_{name}" for route in first for name in route.rule.rows or ())
        names = frozenset(str(route.parameter) for place in places for route in routes[place])
        shape = first[0].by.layout.shape
        team = Team(first, tuple(reads), shape[0], prod(shape), tuple(places), names)
        if len(places) > 1:
            found |= dict.fromkeys(places, team)
    return found


def _fits(route: Route, node: Node, alone: set[str]) -> bool:
    layout = route.by.layout
    if route.parameter not in alone or route.rule.rows is None or not isinstance(layout, Regular):
        return False
    return layout.dim == 0 and layout.n * layout.block == layout.shape[0]


@dataclass
class _Left:
    """What the meetings of a team have left, in columns: no object is made for each of them."""

    size: int  # how many will come
    places: list[int] = field(default_factory=list)
    tensors: list[tuple[Tensor, ...]] = field(default_factory=list)  # δ and what was saved, of each
    versions: list[int | None] = field(default_factory=list)  # of δ, as it came
    numel: int = 0


class Together:
    """The meetings of a plan that wait for others of their shape, in one backward. `put` gets the ways to
    parameters and their squared norms; `deliver` parameters and the sums over samples."""

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        parameters: Mapping[str, nn.Parameter],
        skipped: frozenset[str],
        put: Callable[[Sequence[Route], Tensor], None],
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
    ) -> None:
        self._plan, self._nodes, self._parameters = plan, nodes, parameters
        self._skipped, self._put, self._deliver = skipped, put, deliver
        self._left: dict[Team, _Left] = {}
        self.waits: dict[int, Team] = {}
        device = next((p.device.type for p in parameters.values()), "")
        for team in dict.fromkeys(plan.together.values()):
            if team.numel > SMALL.get(device, 0) or team.rows > ROWS.get(device, team.rows):
                continue
            places = team.places
            if not parameters.keys() >= team.parameters:
                places = tuple(p for p in places if all(r.parameter in parameters for r in plan.routes[p]))
            self._left[team] = _Left(len(places))
            self.waits |= dict.fromkeys(places, team)
        self._held = 0

    def add(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits; False if it is too large to."""
        team, node = self.waits[place], self._nodes[place]
        tensors, size = [delta], delta.numel()
        for name in team.reads:
            saved = getattr(node, name)
            if saved is None or saved.shape[:1] != delta.shape[:1]:
                return False
            tensors.append(saved)
            size += saved.numel()
        device = delta.device.type
        if size > SMALL.get(device, 0):
            return False
        left = self._left[team]
        left.places.append(place)
        left.tensors.append(tuple(tensors))
        left.versions.append(None if delta.is_inference() else delta._version)
        left.numel += size
        self._held += size
        if self._held > BOUND.get(device, 0):
            self.flush()
        elif len(left.places) == left.size:
            self._reduce(team)
        return True

    def flush(self) -> None:
        """Reduce what waits."""
        for team in self._left:
            self._reduce(team)

    def _reduce(self, team: Team) -> None:
        left = self._left[team]
        self._left[team] = _Left(left.size)
        self._held -= left.numel
        kinds: dict[Hashable, list[int]] = {}  # of one dtype and on one device
        for k, (tensors, version) in enumerate(zip(left.tensors, left.versions, strict=True)):
            if version is not None and tensors[0]._version != version:
                refuse_changed(str(self._plan.routes[left.places[k]][0].parameter), [(tensors[0], version)])
            kinds.setdefault(tuple([(t.dtype, t.device) for t in tensors]), []).append(k)
        for same in kinds.values():
            self._apply(team, [left.places[k] for k in same], [left.tensors[k] for k in same])

    def _apply(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> None:
        stacked = self._stack(team, places, tensors)
        for k, route in enumerate(team.routes):
            own = [self._plan.routes[place][k] for place in places]
            names = [str(route.parameter) for route in own]
            parameters = [self._parameters[name] for name in names]
            wanted = [name in self._skipped for name in names]
            kind = finished(_made(route, stacked, len(places)), parameters[0], turned=route.turned)
            sq, sums = reduced(kind, len(places), wants_sum=any(wanted))
            if route.meeting not in self._plan.tried:
                self._try(route, self._stack(team, places[-1:], tensors[-1:]), sq[-1])
            self._put(own, sq)
            if sums is not None and all(wanted):
                self._deliver(parameters, sums.unbind())
            elif sums is not None:
                given = [(p, s) for p, s, w in zip(parameters, sums.unbind(), wanted, strict=True) if w]
                self._deliver([p for p, _ in given], [s for _, s in given])

    def _stack(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> Call:
        """These meetings as one."""
        delta, *saved = (torch.cat(column) for column in zip(*tensors, strict=True))
        named = {name: column.detach() for name, column in zip(team.reads, saved, strict=True)}
        first = team.routes[0]
        return Call(_Stacked(self._nodes[places[0]], named), delta, first.by, first.shape)

    def _try(self, route: Route, alone: Call, found: Tensor) -> None:
        """The first time, compare with the last meeting by itself."""
        self._plan.tried.add(route.meeting)
        wanted = _made(route, alone, 1).sq_norms()
        loose = 1e-6 if wanted.dtype == torch.float64 else 5e-2
        if not bool(((found - wanted).norm() <= loose * wanted.norm()) | ~wanted.isfinite().all()):
            raise UnsupportedError(
                f"the rule {route.rule.name} does not give the same for layers together as for each: its rows= names "
                "saved tensors whose first dimension is not that of the gradient"
            )


def _made(route: Route, stacked: Call, layers: int) -> Kind:
    """What a rule makes of meetings as of one."""
    layout = route.by.layout
    assert isinstance(layout, Regular)
    many = Regular(tuple(stacked.delta.shape), layers * layout.n, 0, layout.block)
    kind = route.rule.make(replace(stacked, by=Positions(many, many.n, route.by.lead), shape=route.shape))
    assert kind is not None
    return kind


class _Stacked:
    """Nodes of one kind as one: its saved tensors are theirs after each other; the rest they have in common."""

    def __init__(self, node: Node, saved: Mapping[str, Tensor]) -> None:
        self._node, self._tensors = node, saved

    def __getattr__(self, name: str) -> Any:
        if name in self._tensors:
            return self._tensors[name]
        value = getattr(self._node, name)
        if isinstance(value, Tensor):
            raise AttributeError(f"a rule reads {name}, which its rows= does not name")
        return value
