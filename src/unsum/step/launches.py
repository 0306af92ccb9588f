"""Squared norms of many layers from one launch, whatever their shapes: what the kernels are given waits here. The
weights' own gradients stay torch's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
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
from unsum.plan.plan import Plan
from unsum.plan.teams import Team
from unsum.rules.registry import Call
from unsum.rules.to_parameter import finished
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
    columns: list[list[Tensor]] = field(default_factory=list)


class Launches(Generic[T]):
    """Waits with tensors until `norms` launches one kernel for all of a way."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, _Launch[T]] = {}
        # By the id of their δ, which waits here. Branches that are added up have the same.
        self._scales: dict[int, list[tuple[_Launch[T], int]]] = {}

    def add(
        self, way: Way, n: Any, t: Any, alike: Hashable, whose: Sequence[T], columns: Sequence[Sequence[Tensor]]
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

    def _beside_scales(self, whose: Sequence[T], deltas: Sequence[Tensor]) -> tuple[list[T], list[list[Tensor]]]:
        """Shifts come with the scale of their norm layer, each scale with one. Returns those without one."""
        names: list[T] = []
        rest: list[Tensor] = []
        for name, delta in zip(whose, deltas, strict=True):
            if waiting := self._scales.get(id(delta)):
                launch, row = waiting.pop(0)
                launch.beside[row] = name
            else:
                names.append(name)
                rest.append(delta)
        return names, [rest]

    def norms(self, *, traced: bool = False) -> Iterator[tuple[list[T], Tensor]]:
        """Whose, and their squared norms (layers, n); nothing waits any longer."""
        waiting, self._waiting, self._scales = self._waiting, {}, {}
        for launch in waiting.values():
            name = f"{launch.way}_sq_norms"
            if traced:
                found = getattr(grouped, name)(*launch.columns, launch.n, launch.t)
            else:
                found = grouped.launched(f"grouped_{name}", *launch.columns, n=launch.n, t=launch.t)
            scales, shifts = found if launch.way == "norm" else (found, found)
            yield launch.whose, scales
            if launch.beside:
                have = sorted(launch.beside)
                yield [launch.beside[k] for k in have], shifts if len(have) == len(launch.whose) else shifts[have]


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


def served(plan: Plan, nodes: Sequence[Node], parameters: Mapping[str, nn.Parameter]) -> Mapping[Team, Served]:
    """The teams whose norms come from launches; found once for a plan and a device."""
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    if not grouped.ROWS.get(device.type, 0):
        return {}
    if device not in plan.grouped:
        plan.grouped[device] = {
            team: found
            for team in dict.fromkeys(plan.together.values())
            if (found := _served(team, nodes[team.places[0]], parameters, device)) is not None
        }
    known: Mapping[Team, Served] = plan.grouped[device]
    return {team: found for team, found in known.items() if parameters.keys() >= team.parameters}


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
        kind = None if kind is None else finished(kind, parameter, turned=route.turned)
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
