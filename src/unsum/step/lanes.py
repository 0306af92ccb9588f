"""Meetings that wait for others. Where a step is dominated by overhead rather than by arithmetic, a meeting only leaves
δ and what its node has saved, and two lanes serve what has been left:

- *grouped*: squared norms of all layers, whatever their shapes, from one launch (`launches`);
- *stacked*: the rules are applied once to all layers of one shape, as to one layer with more samples.

What waits is bounded. Small gradients that were formed wait too, for others of their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unsum.factors.dense import Dense
from unsum.factors.scale import Scale
from unsum.factors.stacked import Layers
from unsum.factors.total import Term
from unsum.graph.nodes import Node
from unsum.kernels.grouped import HELD, ROWS
from unsum.plan.plan import Meeting, Plan
from unsum.plan.teams import Left, Team
from unsum.rules.registry import Call
from unsum.seams.tensors import is_changed, version_of
from unsum.step.launches import Arrangement, Served, arranged, served
from unsum.step.stacks import Stacks, Taker, compare
from unsum.step.unchanged import refuse_changed

# Numbers in what one layer leaves, up to which it waits; and in all that wait.
SMALL = {"cpu": 1 << 16, "cuda": 1 << 23}
BOUND = {"cpu": 1 << 22, "cuda": 1 << 27}


@dataclass(frozen=True, eq=False)
class Waits:
    """Which meetings of a plan wait, and how: the same in every backward that is asked for the same."""

    teams: dict[int, Team]  # by place
    launched: Mapping[Team, Served]  # of these, the teams whose norms are all that is wanted, and come from launches
    leaves: dict[int, tuple[Callable[[Node], tuple[Any, ...]], tuple[int, ...], int]]  # by place, of these: what reads
    # the saved tensors, how many numbers each has, and how many δ has
    sizes: dict[Team, int]  # how many meetings of the others will come


def waits(
    plan: Plan,
    nodes: Sequence[Node],
    parameters: Mapping[str, nn.Parameter],
    skipped: frozenset[str],
    *,
    norms_alone: bool,
) -> Waits:
    """Which meetings wait, if these parameters are wanted, and of those that are `skipped` the weight gradient too."""
    device = next((p.device for p in parameters.values()), None)
    small, rows = (0, None) if device is None else (SMALL.get(device.type, 0), ROWS.get(device.type))
    key = device, small, rows, norms_alone, skipped, *parameters
    known: Waits | None = plan.arranged.get(key)
    if known is not None:
        return known
    launched = served(plan, nodes, parameters).served if norms_alone else {}
    launched = {team: each for team, each in launched.items() if skipped.isdisjoint(team.parameters)}
    found = plan.arrange(key, Waits({}, launched, {}, {}))
    for team in dict.fromkeys(plan.together.values()):
        places = team.places
        if (ready := launched.get(team)) is not None:
            found.leaves.update(dict.fromkeys(places, (team.read, ready.numels, team.numel)))
        else:
            if team.numel > small or (rows is not None and team.rows > rows):
                continue
            if not parameters.keys() >= team.parameters:
                places = tuple(p for p in places if all(r.parameter in parameters for r in plan.routes[p]))
            if len(places) < 2:
                continue
            found.sizes[team] = len(places)
        found.teams.update(dict.fromkeys(places, team))
    return found


class Lanes:
    """The meetings of one graph that wait, in one backward. `wants`: what is read, by which plans know what was
    tried."""

    # More than twelve attributes: what all meetings of a graph share, so that each leaves its δ in a few instructions.
    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        parameters: Mapping[str, nn.Parameter],
        waits: Waits,
        wants: Hashable,
        scale: Tensor | float | None,
        to: Taker,
    ) -> None:
        self._plan, self._nodes, self._parameters, self._waits = plan, nodes, parameters, waits
        self._to, self._stacks = to, Stacks(plan, nodes, parameters, wants, scale, to)
        self._left = {team: Left(size) for team, size in waits.sizes.items()}
        self._held = 0
        self._leaves = waits.leaves
        self._places: list[int] = []  # of meetings that wait for a launch
        self._tensors: list[Tensor] = []  # what they have left, one after the other
        self._versions: list[int] = []  # of these, as they came
        self._numel = 0
        self._bound = max([HELD.get(p.device.type, 0) for p in [*parameters.values()][:1]], default=0)

    @property
    def places(self) -> Mapping[int, Team]:
        """The meetings that wait, by place."""
        return self._waits.teams

    def add(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits; False if what it leaves is too large, or not as it was learnt."""
        leaves = self._leaves.get(place)
        if leaves is None:
            return self._add_to_stack(place, delta)
        read, numels, size = leaves
        saved = read(self._nodes[place])
        for tensor, numel in zip(saved, numels):  # noqa: B905 - as many as the team reads
            if tensor is None or tensor.numel() != numel:
                return False
        self._places.append(place)
        left = (delta, *saved)
        self._tensors += left
        self._versions += _versions(left)
        self._numel += size  # of δ: what was saved is there anyway when a backward begins
        if self._numel > self._bound:
            self._launch()
        return True

    def _add_to_stack(self, place: int, delta: Tensor) -> bool:
        team = self._waits.teams[place]
        tensors: tuple[Any, ...] = (delta, *team.read(self._nodes[place]))
        rows, size = delta.shape[:1], 0
        for tensor in tensors:
            if tensor is None or tensor.shape[:1] != rows:
                return False
            size += tensor.numel()
        device = delta.device.type
        if size > SMALL.get(device, 0):
            return False
        left = self._left[team]
        left.places.append(place)
        left.tensors.append(tensors)
        left.versions += _versions(tensors)
        left.numel += size
        self._held += size
        if self._held > BOUND.get(device, 0):
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
        places, tensors, versions = self._places, self._tensors, self._versions
        self._places, self._tensors, self._versions, self._numel = [], [], [], 0
        if not places:
            return
        key = self._waits, *places
        arrangement: Arrangement | None = self._plan.arranged.get(key)
        if is_new := arrangement is None:
            arrangement = arranged(self._plan, places, self._waits.teams, self._waits.launched)
        self._refuse_changed(places, tensors, versions)
        untried: dict[Meeting, Call] = {}  # the first of each team, by itself
        for team, place, where in arrangement.teams if is_new else ():
            if (mark := ("grouped", team.routes[0].meeting)) not in self._plan.tried:
                self._plan.tried.add(mark)
                alone = self._stacks.call(team, [place], [tuple([tensors[k] for k in where])])
                untried |= {route.meeting: alone for route in self._plan.routes[place]}
        if is_new:  # kept once its teams are marked: before, a refusal would leave them untried
            self._plan.arrange(key, arrangement)
        for launch in arrangement.launches:
            for ends, squares in launch.norms(tensors):
                self._to.take_squares(ends, squares)
                for k, route in enumerate(ends.routes) if untried else ():
                    if route.meeting in untried:
                        compare(route, untried[route.meeting], squares[k])

    def _refuse_changed(self, places: Sequence[int], tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Raise where a δ that waited, or what its node had saved, was changed in place, or its memory was given
        back."""
        if _versions(tensors) == versions and all(map(Tensor.data_ptr, tensors)):
            return
        whose = [place for place in places for _ in range(1 + len(self._waits.teams[place].reads))]
        for place, tensor, version in zip(whose, tensors, versions, strict=True):
            if version >= 0 and is_changed(tensor, version):
                refuse_changed(str(self._plan.routes[place][0].parameter))

    # ---- stacked --------------------------------------------------------------------------------------------------

    def _stack(self, team: Team) -> None:
        left = self._left[team]
        self._left[team] = Left(left.size)
        self._held -= left.numel
        alike: dict[Hashable, list[int]] = {}  # of one dtype and on one device
        self._refuse_changed(left.places, [each for tensors in left.tensors for each in tensors], left.versions)
        for k, tensors in enumerate(left.tensors):
            alike.setdefault(tuple([(t.dtype, t.device) for t in tensors]), []).append(k)
        for same in alike.values():
            self._stacks.apply(team, [left.places[k] for k in same], [left.tensors[k] for k in same])


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Which versions of tensors these are; -1 where changes are not counted."""
    try:
        return list(map(version_of, tensors))
    except RuntimeError:  # some were made in inference mode
        return [-1 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


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
