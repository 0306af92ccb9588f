"""Layers of one shape together. Where a step is dominated by overhead rather than by arithmetic, a meeting only leaves
δ and what its node has saved; when all layers of its shape have done so, their rules are applied once, to all of them
as if they were one layer with more samples. What waits is bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.total import Kind
from unsum.graph.layout import Regular
from unsum.graph.nodes import Node
from unsum.graph.positions import Positions
from unsum.kernels.grouped import HELD, ROWS
from unsum.plan.plan import Plan, Route
from unsum.plan.teams import Left, Team
from unsum.rules.follow import finished
from unsum.rules.registry import Call
from unsum.seams.tensors import version_of
from unsum.step.launches import grouped_teams, norms_of
from unsum.step.pool import BOUND, SMALL, reduced
from unsum.step.unchanged import refuse_changed


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
        self._left: dict[Team, Left] = {}
        self.waits: dict[int, Team] = {}
        self._grouped = grouped_teams(plan, nodes, parameters)
        self._in_groups: dict[Team, Left] = {}  # those of all shapes that one launch serves
        device = next((p.device.type for p in parameters.values()), "")
        for team in dict.fromkeys(plan.together.values()):
            places = team.places
            if team in self._grouped.teams and skipped.isdisjoint(team.parameters):
                self._in_groups[team] = Left(len(places))
                self.waits |= dict.fromkeys(places, team)
                continue
            small = team.numel <= SMALL.get(device, 0) and team.rows <= ROWS.get(device, team.rows)
            if not small or len(places) == 1:
                continue
            if not parameters.keys() >= team.parameters:
                places = tuple(p for p in places if all(r.parameter in parameters for r in plan.routes[p]))
            self._left[team] = Left(len(places))
            self.waits |= dict.fromkeys(places, team)
        self._held, self._held_in_groups = 0, 0

    def add(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits; False if it is too large to."""
        team, node = self.waits[place], self._nodes[place]
        grouped = self._in_groups.get(team)
        if grouped is not None:
            return self._add_to_group(team, grouped, place, delta)
        tensors, size = [delta], delta.numel()
        for name in team.reads:
            saved = getattr(node, name)
            if saved is None or saved.shape[:1] != delta.shape[:1]:
                return False
            tensors.append(saved)
            size += saved.numel()
        if size > SMALL.get(delta.device.type, 0):
            return False
        left = self._left[team]
        left.places.append(place)
        left.tensors.append(tuple(tensors))
        left.versions.append(None if delta.is_inference() else version_of(delta))
        left.numel += size
        self._held += size
        if self._held > BOUND.get(delta.device.type, 0):
            self.flush()
        elif len(left.places) == left.size:
            self._reduce(team)
        return True

    def _add_to_group(self, team: Team, left: Left, place: int, delta: Tensor) -> bool:
        node, tensors = self._nodes[place], [delta]
        for name, numel in zip(team.reads, self._grouped.teams[team], strict=True):
            saved = getattr(node, name)
            if saved is None or saved.numel() != numel:
                return False
            tensors.append(saved)
        left.places.append(place)
        left.tensors.append(tuple(tensors))
        left.versions.append(None if delta.is_inference() else version_of(delta))
        self._held_in_groups += team.numel  # of δ: what was saved is there anyway when a backward begins
        if self._held_in_groups > HELD.get(delta.device.type, 0):
            self._reduce_groups()
        return True

    def flush(self) -> None:
        """Reduce what waits."""
        for team in self._left:
            self._reduce(team)
        self._reduce_groups()

    def _reduce_groups(self) -> None:
        waiting = {team: left for team, left in self._in_groups.items() if left.places}
        self._held_in_groups = 0
        for team, left in waiting.items():
            self._in_groups[team] = Left(left.size)
            self._refuse_changed(left)
        for team, route, sq in norms_of(self._grouped, waiting, self._plan, self._put):
            mark = "in groups", route.meeting
            if mark not in self._plan.tried:
                left = waiting[team]
                self._try(mark, route, self._stack(team, left.places[:1], left.tensors[:1]), sq)

    def _refuse_changed(self, left: Left) -> None:
        for place, tensors, version in zip(left.places, left.tensors, left.versions, strict=True):
            if version is not None and version_of(tensors[0]) != version:
                refuse_changed(str(self._plan.routes[place][0].parameter), [(tensors[0], version)])

    def _reduce(self, team: Team) -> None:
        left = self._left[team]
        self._left[team] = Left(left.size)
        self._held -= left.numel
        kinds: dict[Hashable, list[int]] = {}  # of one dtype and on one device
        self._refuse_changed(left)
        for k, tensors in enumerate(left.tensors):
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
                self._try(route.meeting, route, self._stack(team, places[-1:], tensors[-1:]), sq[-1])
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

    def _try(self, mark: Hashable, route: Route, alone: Call, found: Tensor) -> None:
        """The first time, compare with one meeting by itself."""
        self._plan.tried.add(mark)
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
