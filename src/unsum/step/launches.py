"""Squared norms of many layers from one launch, whatever their shapes: what the kernels are given waits here. The
weights' own gradients stay torch's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from unsum.factors.grouping import Way, grouping
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.graph.nodes import Node
from unsum.kernels import grouped
from unsum.plan.plan import Ends, Plan, Route
from unsum.plan.skeleton import picker
from unsum.plan.teams import Team
from unsum.rules.registry import Call
from unsum.seams.nodes import outputs_of

T = TypeVar("T")  # whom norms belong to: a route in a backward, a name while torch writes down


@dataclass(eq=False)
class _Launch(Generic[T]):
    """What one launch is given, in columns, and whose norms it gives."""

    way: Way
    n: Any  # may be symbols
    t: Any
    whose: list[T] = field(default_factory=list)
    beside: dict[int, T] = field(default_factory=dict)  # whose shift comes with a scale, by the scale's row
    columns: list[list[Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The function that gives the norms."""
        return f"{self.way}_sq_norms"


class Launches(Generic[T]):
    """Sorts tensors, or what stands for them, into launches: one for all of a way."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Launch[T]] = {}
        # By the id of their δ, which waits here. Branches that are added up have the same.
        self._scales: dict[int, list[tuple[_Launch[T], int]]] = {}

    def add(
        self, way: Way, n: Any, t: Any, alike: Hashable, whose: Sequence[T], columns: Sequence[Sequence[Any]]
    ) -> None:
        """The tensors of these parameters, in columns. `alike`: only those that say the same may share a launch."""
        if way == "shift" and self._scales:
            whose, columns = self._beside_scales(whose, columns[0])
            if not whose:
                return
        launch = self._waiting.get((way, alike))
        if launch is None:
            launch = self._waiting[way, alike] = _Launch(way, n, t, columns=[[] for _ in columns])
        if way == "norm":
            for row, delta in enumerate(columns[0], len(launch.whose)):
                self._scales.setdefault(id(delta), []).append((launch, row))
        launch.whose.extend(whose)
        for held, column in zip(launch.columns, columns, strict=True):
            held.extend(column)

    def _beside_scales(self, whose: Sequence[T], deltas: Sequence[Any]) -> tuple[list[T], list[list[Any]]]:
        """Shifts come with the scale of their norm layer, each scale with one. Returns those without one."""
        names: list[T] = []
        rest: list[Any] = []
        for name, delta in zip(whose, deltas, strict=True):
            if waiting := self._scales.get(id(delta)):
                launch, row = waiting.pop(0)
                launch.beside[row] = name
            else:
                names.append(name)
                rest.append(delta)
        return names, [rest]

    def sorted(self) -> list[_Launch[T]]:
        """The launches; nothing waits any longer."""
        waiting, self._waiting, self._scales = self._waiting, {}, {}
        return list(waiting.values())

    def norms(self, *, kept: bool) -> Iterator[tuple[list[T], Tensor]]:
        """Whose, and their squared norms (layers, n), as operators that torch writes down; nothing waits any longer.
        `kept`: their tables may stay in memory, as they may not in a CUDA graph."""
        for launch in self.sorted():
            found = getattr(grouped, launch.name)(*launch.columns, launch.n, launch.t, kept)
            scales, shifts = found if launch.way == "norm" else (found, found)
            yield launch.whose, scales
            if launch.beside:
                have = sorted(launch.beside)
                yield [launch.beside[k] for k in have], shifts if len(have) == len(launch.whose) else shifts[have]


# ---- what waits in a backward --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Ready:
    """A launch, as it is made in every backward."""

    kernel: str
    n: int
    t: int
    pick: Sequence[Callable[[Sequence[Tensor]], Sequence[Tensor]]]  # a column each, from all that was left
    ends: Ends
    beside: Ends | None  # shifts that come with these scales
    rows: list[int] | None  # of which of them; None: of all

    def norms(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Ends, Tensor]]:
        """Squared norms (layers, n), from what was left."""
        found = grouped.launched(self.kernel, *[pick(tensors) for pick in self.pick], n=self.n, t=self.t)
        scales, shifts = found if isinstance(found, tuple) else (found, found)
        yield self.ends, scales
        if self.beside is not None:
            yield self.beside, shifts if self.rows is None else shifts[self.rows]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Which of the tensors that meetings have left goes to which launch: found out once for meetings that come in this
    order."""

    launches: Sequence[_Ready]
    teams: Sequence[tuple[Team, int, range]]  # each with the first place that came, and where its tensors are


def arranged(plan: Plan, came: Sequence[int], waits: Mapping[int, Team], served: Mapping[Team, Served]) -> Arrangement:
    """For meetings at these places, each of which leaves δ and its team's saved tensors."""
    launches: Launches[Route] = Launches()
    lies: dict[Team, list[tuple[int, range]]] = {}  # where the tensors of each meeting are
    size = 0
    for place in came:
        team = waits[place]
        lies.setdefault(team, []).append((place, range(size, size := size + 1 + len(team.reads))))
    slots = list(range(size))  # in place of tensors: the same object for the same tensor
    for team, each in lies.items():
        ready = served[team]
        for form in ready.forms:
            whose = [plan.routes[place][form.route] for place, _ in each]
            columns = [[slots[where[c]] for _, where in each] for c in form.columns]
            launches.add(form.way, plan.n, ready.t, form.alike, whose, columns)
    found = []
    for launch in launches.sorted():
        have, pick = sorted(launch.beside), [picker(column) for column in launch.columns]
        beside = Ends([launch.beside[k] for k in have]) if have else None
        rows = None if len(have) == len(launch.whose) else have
        found.append(_Ready(f"grouped_{launch.name}", launch.n, launch.t, pick, Ends(launch.whose), beside, rows))
    return Arrangement(found, [(team, *each[0]) for team, each in lies.items()])


# ---- which meetings of a plan are served so -------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a parameter's norms come from what a meeting leaves: δ (0), and its saved tensors (from 1 on)."""

    route: int  # which of the team's
    way: Way
    columns: tuple[int, ...]
    alike: Hashable


@dataclass(frozen=True, eq=False)
class Served:
    """A team whose norms come from launches."""

    t: int
    forms: Sequence[Form]  # scales before shifts
    numels: tuple[int, ...]  # how many numbers each of the saved tensors has


@dataclass(frozen=True, eq=False)
class Teams:
    """The teams of a plan whose norms come from launches."""

    served: Mapping[Team, Served]
    parameters: frozenset[str]


_NONE = Teams({}, frozenset())


def served(plan: Plan, nodes: Sequence[Node], parameters: Mapping[str, nn.Parameter]) -> Teams:
    """The teams whose norms come from launches; found once for a plan, these parameters and a device."""
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    if not grouped.ROWS.get(device.type, 0):
        return _NONE
    key = device, *parameters
    known: Teams | None = plan.grouped.get(key)
    if known is None:
        teams = dict.fromkeys(plan.together.values())
        found = {team: _served(team, nodes[team.places[0]], parameters, device) for team in teams}
        own = {team: each for team, each in found.items() if each is not None}
        known = plan.grouped[key] = Teams(own, frozenset().union(*[team.parameters for team in own]))
    return known


def _served(team: Team, node: Node, parameters: Mapping[str, nn.Parameter], device: torch.device) -> Served | None:
    """The rules are applied to one meeting: where its factors are the very tensors that it leaves, so are those of the
    others."""
    by, meta = team.routes[0].by, outputs_of(node)[0]
    if not grouped.is_small(prod(by.layout.shape[: by.lead]), device.type) or not parameters.keys() >= team.parameters:
        return None
    if meta.device != device or not grouped.is_on(device, meta.dtype):
        return None
    saved = [getattr(node, name) for name in team.reads]
    if any(each is None for each in saved):
        return None
    leaves = [torch.empty(tuple(meta.shape), dtype=meta.dtype, device=device), *saved]
    forms: list[Form] = []
    counts: set[int] = set()
    memo: dict[Any, Any] = {}
    for k, route in enumerate(team.routes):
        kind = route.rule.make(Call(node, leaves[0], route.by, route.shape, memo=memo))
        parameter = parameters[str(route.parameter)]
        kind = None if kind is None else route.finished(kind, parameter)
        found = None if kind is None else grouping(kind, parameter.dtype)
        if found is None or not isinstance(kind, Outer | Scale):
            return None
        way, tensors = found
        columns = tuple([next((c for c, each in enumerate(leaves) if _is_same(t, each)), -1) for t in tensors])
        if -1 in columns:
            return None
        counts.add(t := kind.delta.shape[1])
        forms.append(Form(k, way, columns, (t, *[leaves[c].dtype for c in columns])))
    if len(counts) != 1:
        return None
    forms.sort(key=lambda form: form.way == "shift")
    return Served(counts.pop(), forms, tuple(each.numel() for each in saved))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether these are the same numbers in memory."""
    lies = one.data_ptr() == other.data_ptr() and one.is_contiguous() and other.is_contiguous()
    return lies and one.numel() == other.numel() and one.dtype == other.dtype
