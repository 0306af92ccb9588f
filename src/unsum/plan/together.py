"""Layers of one shape together. Where a step is dominated by overhead rather than by arithmetic, a meeting only leaves
δ and what its node has saved; when all layers of its shape have done so, their rules are applied once, to all of them
as if they were one layer with more samples. What waits is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.total import Kind
from unsum.graph.layout import Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.positions import Positions
from unsum.plan.plan import Meeting, Plan, Route
from unsum.plan.pool import BOUND, SMALL, reduced
from unsum.plan.signature import plain
from unsum.plan.unchanged import Held, refuse_changed, versions_of
from unsum.rules.follow import finished
from unsum.rules.registry import Call


def teams(
    nodes: Sequence[Node], routes: Mapping[int, Sequence[Route]], mixed: set[Node], alone: set[str]
) -> dict[int, Hashable]:
    """Which meetings are of one shape: those with the same key. `alone`: parameters that are met just once."""
    keys: dict[int, Hashable] = {}
    for place, there in routes.items():
        node = nodes[place]
        leading = [edge for edge, child, _ in below(node) if is_leaf(child) or child in mixed]
        if sorted(leading) == sorted(route.edge for route in there) and all(_fits(r, node, alone) for r in there):
            layout = there[0].by.layout
            keys[place] = (
                plain(node),
                layout,
                node._input_metadata[0].dtype,
                tuple((r.rule.name, r.edge, r.shape, r.turned, r.by.lead) for r in there),
            )
    count = Counter(keys.values())
    return {place: key for place, key in keys.items() if count[key] > 1}


def _fits(route: Route, node: Node, alone: set[str]) -> bool:
    layout = route.by.layout
    if route.parameter not in alone or route.rule.rows is None or not isinstance(layout, Regular):
        return False
    return layout.dim == 0 and layout.n * layout.block == layout.shape[0]


@dataclass(frozen=True)
class _Left:
    """What a meeting has left."""

    place: int
    delta: Tensor
    saved: list[Tensor]
    held: Held  # δ, as it came


@dataclass
class _Team:
    routes: Sequence[Route]  # of the first place
    names: list[str]  # of the saved tensors that the rules read
    size: int  # how many meetings
    left: list[_Left] = field(default_factory=list)


class Together:
    """The meetings of a plan that wait for others of their shape, in one backward. `put` gets the name of a parameter,
    its meeting and its squared norms; `deliver` parameters and the sums over samples."""

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        parameters: Mapping[str, nn.Parameter],
        skipped: frozenset[str],
        put: Callable[[str, Meeting, Tensor], None],
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
    ) -> None:
        self._plan, self._nodes, self._parameters = plan, nodes, parameters
        self._skipped, self._put, self._deliver = skipped, put, deliver
        self._teams: dict[Hashable, _Team] = {}
        self.waits: dict[int, _Team] = {}
        for place, key in plan.together.items():
            routes = plan.routes[place]
            if all(route.parameter in parameters for route in routes):
                names = dict.fromkeys(f"_saved_{name}" for route in routes for name in route.rule.rows or ())
                team = self._teams.setdefault(key, _Team(routes, list(names), 0))
                team.size += 1
                self.waits[place] = team
        self._held = 0

    def add(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits; False if it is too large to."""
        team, node = self.waits[place], self._nodes[place]
        saved = [getattr(node, name) for name in team.names]
        if any(tensor is None or tensor.shape[:1] != delta.shape[:1] for tensor in saved):
            return False
        size = delta.numel() + sum([tensor.numel() for tensor in saved])
        device = delta.device.type
        if size > SMALL.get(device, 0):
            return False
        team.left.append(_Left(place, delta, saved, versions_of(delta)))
        self._held += size
        if self._held > BOUND.get(device, 0):
            self.flush()
        elif len(team.left) == team.size:
            self._reduce(team)
        return True

    def flush(self) -> None:
        """Reduce what waits."""
        for team in self._teams.values():
            self._reduce(team)
        self._held = 0

    def _reduce(self, team: _Team) -> None:
        left, team.left = team.left, []
        kinds: dict[Hashable, list[_Left]] = {}
        for each in left:  # of one dtype and on one device
            refuse_changed(str(self._plan.routes[each.place][0].parameter), each.held)
            kinds.setdefault(tuple([(t.dtype, t.device) for t in (each.delta, *each.saved)]), []).append(each)
        for same in kinds.values():
            self._held -= sum([each.delta.numel() + sum([t.numel() for t in each.saved]) for each in same])
            self._apply(team, same)

    def _apply(self, team: _Team, left: list[_Left]) -> None:
        stacked = self._stack(team, left)
        for k, route in enumerate(team.routes):
            own = [self._plan.routes[each.place][k] for each in left]
            names = [str(route.parameter) for route in own]
            parameters = [self._parameters[name] for name in names]
            wanted = [name in self._skipped for name in names]
            kind = finished(_made(route, stacked, len(left)), parameters[0], turned=route.turned)
            sq, sums = reduced(kind, len(left), wants_sum=any(wanted))
            if route.meeting not in self._plan.tried:
                self._try(team, route, left, sq[-1])
            for name, each, values in zip(names, own, sq.unbind(), strict=True):
                self._put(name, each.meeting, values)
            if sums is not None:
                given = [(p, s) for p, s, w in zip(parameters, sums.unbind(), wanted, strict=True) if w]
                self._deliver([p for p, _ in given], [s for _, s in given])

    def _stack(self, team: _Team, left: Sequence[_Left]) -> Call:
        """These meetings as one."""
        delta = torch.cat([each.delta for each in left])
        saved = {name: torch.cat([each.saved[k] for each in left]).detach() for k, name in enumerate(team.names)}
        first = team.routes[0]
        return Call(_Stacked(self._nodes[left[0].place], saved), delta, first.by, first.shape)

    def _try(self, team: _Team, route: Route, left: Sequence[_Left], found: Tensor) -> None:
        """The first time, compare with the last meeting by itself."""
        self._plan.tried.add(route.meeting)
        alone = _made(route, self._stack(team, left[-1:]), 1).sq_norms()
        loose = 1e-6 if alone.dtype == torch.float64 else 5e-2
        if not bool(((found - alone).norm() <= loose * alone.norm()) | ~alone.isfinite().all()):
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
