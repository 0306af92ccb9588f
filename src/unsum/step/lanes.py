"""Meetings that wait for others. Where a step is dominated by overhead rather than by arithmetic, a meeting only leaves
δ and what its node has saved, and two lanes serve what has been left:

- *grouped*: squared norms of all layers, whatever their shapes, from one launch (`launches`);
- *stacked*: the rules are applied once to all layers of one shape, as to one layer with more samples.

What waits is bounded. Small gradients that were formed wait too, for others of their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.dense import Dense
from unsum.factors.scale import Scale
from unsum.factors.stacked import Layers
from unsum.factors.total import Term
from unsum.graph.layout import Regular
from unsum.graph.nodes import Node
from unsum.graph.positions import Positions
from unsum.kernels.grouped import HELD, ROWS
from unsum.plan.plan import Meeting, Plan, Route
from unsum.plan.teams import Left, Team
from unsum.rules.registry import Call
from unsum.rules.to_parameter import finished
from unsum.seams.tensors import version_of
from unsum.step.launches import Launches, Served
from unsum.step.unchanged import refuse_changed

# Numbers in what one layer leaves, up to which it waits; and in all that wait.
SMALL = {"cpu": 1 << 16, "cuda": 1 << 23}
BOUND = {"cpu": 1 << 22, "cuda": 1 << 27}


class Taker(Protocol):
    """What takes what comes of the lanes."""

    def take_squares(self, routes: Sequence[Route], squares: Tensor) -> None:
        """(layers, n): the squared norms of the parameters at the ends of these ways."""
        ...

    def take_layers(self, routes: Sequence[Route], layers: Layers) -> None:
        """The gradients of the parameters at the ends of these ways."""
        ...

    def compare(self, layers: Layers, last: Layers) -> None:
        """Raise if what is wanted of the last of these layers is not what is wanted of it alone."""
        ...


class Lanes:
    """The meetings of one graph that wait, in one backward. `launched`: the teams whose norms are all that is wanted,
    and come from launches. `wants`: what is read, by which plans know what was tried."""

    # More than twelve attributes: what all meetings of a graph share, so that each leaves its δ in a few instructions.
    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        parameters: Mapping[str, nn.Parameter],
        launched: Mapping[Team, Served],
        wants: Hashable,
        scale: Tensor | float | None,
        to: Taker,
    ) -> None:
        self._plan, self._nodes, self._parameters = plan, nodes, parameters
        self._launched, self._wants, self._scale, self._to = launched, wants, scale, to
        self._left: dict[Team, Left] = {}
        self._held = 0
        self._of_launches: dict[Team, list[tuple[int, tuple[Tensor, ...], int | None]]] = {
            each: [] for each in launched
        }
        self._held_by_launches = 0
        self.waits: dict[int, Team] = {}  # by place
        device = next((p.device.type for p in parameters.values()), "")
        small, rows = SMALL.get(device, 0), ROWS.get(device)
        for team in dict.fromkeys(plan.together.values()):
            places = team.places
            if team not in launched:
                if team.numel > small or (rows is not None and team.rows > rows):
                    continue
                if not parameters.keys() >= team.parameters:
                    places = tuple(p for p in places if all(r.parameter in parameters for r in plan.routes[p]))
                if len(places) < 2:
                    continue
                self._left[team] = Left(len(places))
            self.waits |= dict.fromkeys(places, team)

    def add(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits; False if what it leaves is too large, or not as it was learnt."""
        team, node = self.waits[place], self._nodes[place]
        tensors = (delta, *[getattr(node, name) for name in team.reads])
        version = None if delta.is_inference() else version_of(delta)
        ready = self._launched.get(team)
        if ready is not None:
            for saved, numel in zip(tensors[1:], ready.numels, strict=True):
                if saved is None or saved.numel() != numel:
                    return False
            self._of_launches[team].append((place, tensors, version))
            self._held_by_launches += team.numel  # of δ: what was saved is there anyway when a backward begins
            if self._held_by_launches > HELD.get(delta.device.type, 0):
                self._launch()
            return True
        size = 0
        for tensor in tensors:
            if tensor is None or tensor.shape[:1] != delta.shape[:1]:
                return False
            size += tensor.numel()
        if size > SMALL.get(delta.device.type, 0):
            return False
        left = self._left[team]
        left.places.append(place)
        left.tensors.append(tensors)
        left.versions.append(version)
        left.numel += size
        self._held += size
        if self._held > BOUND.get(delta.device.type, 0):
            for waiting in self._left:
                self._stack(waiting)
        elif len(left.places) == left.size:
            self._stack(team)
        return True

    def flush(self) -> None:
        """Serve what waits."""
        for team in self._left:
            self._stack(team)
        self._launch()

    # ---- grouped --------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        came, self._held_by_launches = self._of_launches, 0
        self._of_launches = {team: [] for team in came}
        launches: Launches[Route] = Launches()
        untried: dict[Meeting, Call] = {}  # the first of each team, by itself
        for team, left in came.items():
            if not left:
                continue
            places, tensors, _ = zip(*left, strict=True)
            for place, held, version in left:
                self._refuse_changed(place, held[0], version)
            ready, columns, routes = self._launched[team], list(zip(*tensors, strict=True)), self._plan.routes
            for form in ready.forms:
                whose, chosen = [routes[place][form.route] for place in places], [columns[c] for c in form.columns]
                launches.add(form.way, self._plan.n, ready.t, form.alike, whose, chosen)
            if (mark := ("grouped", team.routes[0].meeting)) not in self._plan.tried:
                self._plan.tried.add(mark)
                alone = self._call(team, places[:1], tensors[:1])
                untried |= {route.meeting: alone for route in routes[places[0]]}
        for owners, squares in launches.norms():
            self._to.take_squares(owners, squares)
            for k, route in enumerate(owners) if untried else ():
                if route.meeting in untried:
                    _compare(route, untried[route.meeting], squares[k])

    def _refuse_changed(self, place: int, delta: Tensor, version: int | None) -> None:
        if version is not None and version_of(delta) != version:
            refuse_changed(str(self._plan.routes[place][0].parameter), [(delta, version)])

    # ---- stacked --------------------------------------------------------------------------------------------------

    def _stack(self, team: Team) -> None:
        left = self._left[team]
        self._left[team] = Left(left.size)
        self._held -= left.numel
        alike: dict[Hashable, list[int]] = {}  # of one dtype and on one device
        for k, (place, tensors, version) in enumerate(zip(left.places, left.tensors, left.versions, strict=True)):
            self._refuse_changed(place, tensors[0], version)
            alike.setdefault(tuple([(t.dtype, t.device) for t in tensors]), []).append(k)
        for same in alike.values():
            self._apply(team, [left.places[k] for k in same], [left.tensors[k] for k in same])

    def _apply(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> None:
        stacked = self._call(team, places, tensors)
        for k, route in enumerate(team.routes):
            own = [self._plan.routes[place][k] for place in places]
            names = [str(route.parameter) for route in own]
            parameter = self._parameters[names[0]]
            kind = finished(_made(route, stacked, len(places)), parameter, turned=route.turned)
            layers = Layers(names, parameter, kind, self._plan.n, self._scale)
            if (mark := ("stacked", route.meeting, self._wants)) not in self._plan.tried:
                self._plan.tried.add(mark)
                alone = self._call(team, places[-1:], tensors[-1:])
                _compare(route, alone, layers.apart(kind.sq_norms())[-1])
                one = finished(_made(route, alone, 1), parameter, turned=route.turned)
                self._to.compare(layers, Layers(names[-1:], parameter, one, self._plan.n, self._scale))
            self._to.take_layers(own, layers)

    def _call(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> Call:
        """These meetings as one."""
        delta, *saved = (torch.cat(column) for column in zip(*tensors, strict=True))
        named = {name: column.detach() for name, column in zip(team.reads, saved, strict=True)}
        first = team.routes[0]
        return Call(_Stacked(self._nodes[places[0]], named), delta, first.by, first.shape)


class Waiting:
    """Small gradients that were formed, and wait for others of their shape."""

    def __init__(self, n: int, scale: Tensor | float | None, take: Callable[[Layers], None]) -> None:
        self._n, self._scale, self._take = n, scale, take
        self._held: dict[Hashable, list[tuple[str, nn.Parameter, Tensor]]] = {}
        self._numel = 0

    def add(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """(n, *shape) of one parameter."""
        self._held.setdefault((values.shape, values.dtype, values.device), []).append((name, parameter, values))
        self._numel += values.numel()
        if self._numel > BOUND.get(values.device.type, 0):
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        held, self._held, self._numel = self._held, {}, 0
        for group in held.values():
            values = [value for _, _, value in group]
            kind = Dense(values[0] if len(values) == 1 else torch.cat(values))
            self._take(Layers([name for name, _, _ in group], group[0][1], kind, self._n, self._scale))


def small(kind: Term) -> Tensor | None:
    """(n, *shape): gradients that are small; None of others."""
    if isinstance(kind, Scale):
        device = kind.delta.device.type
    elif isinstance(kind, Dense):
        device = kind.values.device.type
    else:
        return None
    return kind.per_sample() if kind.n * prod(kind.shape) <= SMALL.get(device, 0) else None


def _made(route: Route, stacked: Call, layers: int) -> Term:
    """What a rule makes of meetings as of one."""
    layout = route.by.layout
    assert isinstance(layout, Regular)
    many = Regular(tuple(stacked.delta.shape), layers * layout.n, 0, layout.block)
    kind = route.rule.make(replace(stacked, by=Positions(many, many.n, route.by.lead), shape=route.shape))
    assert kind is not None
    return kind


def _compare(route: Route, alone: Call, found: Tensor) -> None:
    """Refuse a rule that does not give the same for one meeting by itself."""
    wanted = _made(route, alone, 1).sq_norms()
    loose = 1e-6 if wanted.dtype == torch.float64 else 5e-2
    off = (found - wanted).norm()
    if bool((off <= loose * wanted.norm()) | ~wanted.isfinite().all()):
        return
    # Where parts cancel, as those of a key's bias do, what is left is rounding beside them.
    parts = _made(route, replace(alone, delta=alone.delta.abs(), memo={}), 1).sq_norms()
    if not bool(off <= loose * parts.norm()):
        raise UnsupportedError(
            f"the rule {route.rule.name} does not give the same for layers together as for each: its rows= names "
            "saved tensors whose first dimension is not that of the gradient"
        )


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
