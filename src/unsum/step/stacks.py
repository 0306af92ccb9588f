"""Meetings of layers of one shape, as those of one layer with more samples: a rule is applied once to all of them. What
clipping holds of them is written down (`recorded.Rehearsed`) and made again from that in later steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.stacked import Layers
from unsum.factors.total import Term
from unsum.graph.layout import Regular
from unsum.graph.nodes import Node
from unsum.graph.positions import Positions
from unsum.kernels import fused, recorded
from unsum.plan.plan import Ends, Plan, Route
from unsum.plan.teams import Team
from unsum.reducers import WeightedSum
from unsum.rules.registry import Call
from unsum.step.held import Form, taken_apart


class Taker(Protocol):
    """What takes what comes of the lanes."""

    clips: WeightedSum | None  # the only reducer, if its weights come from the norms

    def take_squares(self, ends: Ends, squares: Tensor) -> None:
        """(layers, n): the squared norms of these parameters."""
        ...

    def take_layers(self, ends: Ends, layers: Layers) -> None:
        """The gradients of these parameters."""
        ...

    def forms(self, names: Sequence[str]) -> tuple[bool, bool]:
        """Whether the gradients of these parameters are to be formed, and whether sums of some are wanted."""
        ...

    def take_held(self, ends: Ends, layers: Layers, sums: Tensor | None) -> None:
        """The gradients of these parameters as they are to be held, and their sums if they are wanted."""
        ...

    def compare(self, layers: Layers, last: Layers) -> None:
        """Raise if what is wanted of the last of these layers is not what is wanted of it alone."""
        ...


class Stacks:
    """Applies rules to meetings that lie after each other, and hands over what comes of them."""

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        parameters: Mapping[str, nn.Parameter],
        wants: Hashable,
        scale: Tensor | float | None,
        to: Taker,
    ) -> None:
        self._plan, self._nodes, self._parameters = plan, nodes, parameters
        self._wants, self._scale, self._to = wants, scale, to

    def apply(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> None:
        """Serve these meetings of a team, which have left these tensors."""
        if self._to.clips is not None and self._again(team, places, tensors):
            return
        stacked = self.call(team, places, tensors)
        for k, route in enumerate(team.routes):
            key = team, k, *places
            ends: Ends | None = self._plan.arranged.get(key)
            if ends is None:
                ends = self._plan.arrange(key, Ends([self._plan.routes[place][k] for place in places]))
            names = ends.names
            parameter = self._parameters[names[0]]
            kind = route.finished(_made(route, stacked, len(places)), parameter)
            layers = Layers(names, parameter, kind, self._plan.n, self._scale)
            if (mark := ("stacked", route.meeting, self._wants)) not in self._plan.tried:
                self._plan.tried.add(mark)
                alone = self.call(team, places[-1:], tensors[-1:])
                compare(route, alone, layers.apart(kind.sq_norms())[-1])
                one = route.finished(_made(route, alone, 1), parameter)
                self._to.compare(layers, Layers(names[-1:], parameter, one, self._plan.n, self._scale))
            self._to.take_layers(ends, layers)

    def _again(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> bool:
        """What is to be held of these meetings, by what was written down of it; False until all was tried."""
        if any(("stacked", route.meeting, self._wants) not in self._plan.tried for route in team.routes):
            return False
        every: list[Ends | None] = [self._plan.arranged.get((team, k, *places)) for k in range(len(team.routes))]
        ends = [each for each in every if each is not None]
        given = [tensor for own in tensors for tensor in own]
        if len(ends) < len(every) or any(tensor.is_complex() for tensor in given):
            return False
        asked = [self._to.forms(each.names) for each in ends]
        key = ("held", team, *places, *asked, fused.is_installed())
        known: list[recorded.Rehearsed] | None = self._plan.arranged.get(key)
        if known is None:
            known = self._plan.arrange(key, [recorded.Rehearsed() for _ in range(1 + len(ends))])
        if not known:
            return False
        try:
            found, about = known[0](lambda: self._held_of(team, places, tensors, ends, asked), given)
        except recorded.NotRecordable:
            known.clear()
            return False
        values = iter(found)
        for each, (_, wants_sum), form, again in zip(ends, asked, about, known[1:], strict=True):
            squares, *own = [next(values).detach() for _ in range(1 + len(form.names))]
            layers = Layers(each.names, self._parameters[each.names[0]], form.made(own), self._plan.n, self._scale)
            layers.know(squares, again, own)
            self._to.take_held(each, layers, next(values) if wants_sum else None)
        return True

    def _held_of(
        self,
        team: Team,
        places: Sequence[int],
        tensors: Sequence[tuple[Tensor, ...]],
        every: Sequence[Ends],
        asked: Sequence[tuple[bool, bool]],
    ) -> tuple[list[Tensor], list[Form]]:
        """Squared norms, the tensors that are held, and the sums if they are wanted; and the form of each route's
        gradients."""
        stacked = self.call(team, places, tensors)
        found: list[Tensor] = []
        about: list[Form] = []
        for route, ends, (forms, wants_sum) in zip(team.routes, every, asked, strict=True):
            parameter = self._parameters[ends.names[0]]
            kind = route.finished(_made(route, stacked, len(places)), parameter)
            layers = Layers(ends.names, parameter, kind, self._plan.n)
            layers = layers.formed() if forms else layers
            sums = [layers.sums()] if wants_sum else []
            form, own = taken_apart(layers.kind)
            about.append(form)
            found += [layers.sq_norms(), *own, *sums]
        return found, about

    def call(self, team: Team, places: Sequence[int], tensors: Sequence[tuple[Tensor, ...]]) -> Call:
        """These meetings as one."""
        delta, *saved = (torch.cat(column) for column in zip(*tensors, strict=True))
        named = {name: column.detach() for name, column in zip(team.reads, saved, strict=True)}
        first = team.routes[0]
        return Call(_Stacked(self._nodes[places[0]], named), delta, first.by, first.shape)


def _made(route: Route, stacked: Call, layers: int) -> Term:
    """What a rule makes of meetings as of one."""
    layout = route.by.layout
    assert isinstance(layout, Regular)
    many = Regular(tuple(stacked.delta.shape), layers * layout.n, 0, layout.block)
    kind = route.rule.make(replace(stacked, by=Positions(many, many.n, route.by.lead), shape=route.shape))
    assert kind is not None
    return kind


def compare(route: Route, alone: Call, found: Tensor) -> None:
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
