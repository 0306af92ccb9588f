"""Teams whose norms come from one launch for all layers, whatever their shapes: where a step is short and norms are all
that is wanted, meetings only leave δ and what their nodes have saved, and torch computes the weights' gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from unsum.factors.grouping import Way, grouping
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.graph.nodes import Node
from unsum.kernels import grouped
from unsum.plan.plan import Plan, Route
from unsum.plan.teams import Left, Team
from unsum.rules.follow import finished
from unsum.rules.registry import Call
from unsum.seams.nodes import outputs_of


@dataclass(frozen=True)
class Form:
    """How a parameter's norms come from what a meeting has left: from which of δ (0) and the tensors that were saved
    (from 1 on)."""

    way: Way
    columns: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """The meetings of a team in a launch."""

    team: Team
    route: int  # which of its routes
    columns: tuple[int, ...]
    beside: int | None  # the route of the shift, whose norms come with those of a scale


@dataclass(frozen=True, eq=False)
class Launch:
    """What one launch gives."""

    way: str
    t: int  # positions of a sample
    parts: list[_Part] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Grouped:
    """The teams of a plan whose norms come so, on one device."""

    teams: Mapping[Team, tuple[int, ...]]  # how many numbers each of the saved tensors has
    launches: Sequence[Launch]
    parameters: frozenset[str]


def grouped_teams(plan: Plan, nodes: Sequence[Node], parameters: Mapping[str, nn.Parameter]) -> Grouped:
    """Found once for a plan and a device."""
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    known: Grouped | None = plan.grouped.get(device)
    if known is None or not parameters.keys() >= known.parameters:
        known = plan.grouped[device] = _find(plan, nodes, parameters, device)
    return known


def left_to_torch(
    plan: Plan, nodes: Sequence[Node], wanted: Mapping[int, nn.Parameter], names: Mapping[int, str]
) -> frozenset[str]:
    """The parameters whose norms come so: their gradients do not come with them."""
    if not grouped.ROWS.get(next((p.device.type for p in wanted.values()), ""), 0):
        return frozenset()
    return grouped_teams(plan, nodes, {names[key]: parameter for key, parameter in wanted.items()}).parameters


def _find(plan: Plan, nodes: Sequence[Node], parameters: Mapping[str, nn.Parameter], device: torch.device) -> Grouped:
    teams: dict[Team, tuple[int, ...]] = {}
    launches: dict[Hashable, Launch] = {}
    for team in dict.fromkeys(plan.together.values()):
        by = team.routes[0].by
        rows = prod(by.layout.shape[: by.lead])
        if not grouped.is_small(rows, device.type) or not parameters.keys() >= team.parameters:
            continue
        left = _left_by(team, nodes[team.places[0]], device)
        found = None if left is None else _template(team, nodes[team.places[0]], left, parameters)
        if left is None or found is None:
            continue
        forms, t = found
        teams[team] = tuple(each.numel() for each in left[1:])
        for part, way in _parts(team, forms):
            key = (way, t, part.beside is None, *(left[c].dtype for c in part.columns))
            launches.setdefault(key, Launch(way, t)).parts.append(part)
    names: frozenset[str] = frozenset().union(*(team.parameters for team in teams))
    return Grouped(teams, list(launches.values()), names)


def _left_by(team: Team, node: Node, device: torch.device) -> list[Tensor] | None:
    """What a meeting will leave, with some δ; None where the kernels are not for it."""
    meta = outputs_of(node)[0]
    if meta.device != device or not grouped.is_on(device, meta.dtype):
        return None
    delta = torch.empty(tuple(meta.shape), dtype=meta.dtype, device=device)
    saved = [getattr(node, name) for name in team.reads]
    return None if any(each is None for each in saved) else [delta, *saved]


def _template(
    team: Team, node: Node, left: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> tuple[list[Form], int] | None:
    """The rules are applied to one meeting: where its factors are the very tensors that it leaves, so are those of the
    others."""
    forms, counts, memo = [], set(), {}  # type: ignore[var-annotated]
    for route in team.routes:
        kind = route.rule.make(Call(node, left[0], route.by, route.shape, memo=memo))
        parameter = parameters[str(route.parameter)]
        if kind is None:
            return None
        kind = finished(kind, parameter, turned=route.turned)
        found = grouping(kind, parameter.dtype)
        if found is None or not isinstance(kind, Outer | Scale):
            return None
        way, tensors = found
        columns = _columns(tensors, left)
        if columns is None:
            return None
        forms.append(Form(way, columns))
        counts.add(kind.delta.shape[1])
    return (forms, counts.pop()) if len(counts) == 1 else None


def _columns(tensors: Sequence[Tensor], left: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Which of the tensors that a meeting leaves these are, number for number; None if one is not among them."""
    found = []
    for tensor in tensors:
        same = [k for k, each in enumerate(left) if _is_same(tensor, each)]
        if not same:
            return None
        found.append(same[0])
    return tuple(found)


def _is_same(one: Tensor, other: Tensor) -> bool:
    lies = one.data_ptr() == other.data_ptr() and one.is_contiguous() and other.is_contiguous()
    return lies and one.numel() == other.numel() and one.dtype == other.dtype


def _parts(team: Team, forms: Sequence[Form]) -> Iterator[tuple[_Part, str]]:
    """A shift whose scale is there needs no part of its own."""
    shifts = {form.columns[0]: k for k, form in enumerate(forms) if form.way == "shift"}
    for k, form in enumerate(forms):
        if form.way == "norm":
            yield _Part(team, k, form.columns, shifts.pop(form.columns[0], None)), form.way
    for k, form in enumerate(forms):
        if form.way == "gram" or k in shifts.values():
            yield _Part(team, k, form.columns, None), form.way


def norms_of(
    found: Grouped, left: Mapping[Team, Left], plan: Plan, put: Callable[[Sequence[Route], Tensor], None]
) -> Iterator[tuple[Team, Route, Tensor]]:
    """Hand over the squared norms of all that wait. Yields, for each route of each team, those of the first of them."""
    for launch in found.launches:
        parts = [part for part in launch.parts if part.team in left]
        if not parts:
            continue
        columns: list[list[Tensor]] = [[] for _ in parts[0].columns]
        routes: list[Route] = []
        beside: list[Route] = []
        firsts = []
        for part in parts:
            came = left[part.team]
            firsts.append(len(routes))
            by_place = [plan.routes[place] for place in came.places]
            routes += [each[part.route] for each in by_place]
            if part.beside is not None:
                beside += [each[part.beside] for each in by_place]
            each = list(zip(*came.tensors, strict=True))
            for column, c in zip(columns, part.columns, strict=True):
                column += each[c]
        sq = grouped.launched(f"grouped_{launch.way}_sq_norms", *columns, n=plan.n, t=launch.t)
        own, other = sq if launch.way == "norm" else (sq, sq)
        put(routes, own)
        if beside:
            put(beside, other)
        for part, first in zip(parts, firsts, strict=True):
            yield part.team, routes[first], own[first]
            if part.beside is not None:
                yield part.team, beside[first], other[first]
