"""What is remembered of one structure (kinds, edges and parameter names of a graph, without sizes), and the plan that
follows from it for any sizes: the samples travel by the table, and nothing is compared again."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unsum.factors.total import Term
from unsum.graph.layout import Layout, Mapped, Regular, same
from unsum.graph.nodes import Edge, Node
from unsum.graph.owners import Owners
from unsum.graph.rounded import rounding_of
from unsum.kernels import costs
from unsum.learn.audit import is_followed, shape_of
from unsum.learn.routes import skippable, straight
from unsum.learn.rows import Rows
from unsum.learn.setting import Setting, numbers_saved_by
from unsum.plan.plan import Plan, Route, has_doubts
from unsum.plan.teams import teams
from unsum.reducers.holding import Sizes, size_of
from unsum.rules.registry import Call
from unsum.seams.nodes import outputs_of
from unsum.seams.tensors import memory_number, version_of
from unsum.travel import Journey
from unsum.travel.trail import Followed, Trail
from unsum.travel.walk import walk


@dataclass(frozen=True)
class Constants:
    """Nodes that belong to nobody, and have saved numbers that are no parameters: an anchor, a memory. In another batch
    the same node may have saved data."""

    places: frozenset[int] = frozenset()
    known: tuple[tuple[StorageWeakRef, int], ...] = ()  # memory of what they had saved, and its version

    def hold(self, nodes: Sequence[Node], setting: Setting, *, watched: bool) -> bool:
        """Whether they belong to nobody in this graph as well: what they have saved is what it was; or it was seen that
        it is no data."""
        mine = [nodes[place] for place in self.places]
        if any(setting.rows.are_saved_by(node) for node in mine):
            return False
        return not any(map(setting.sides.is_data, mine)) if watched else self.are_the_same(nodes, setting)

    def are_the_same(self, nodes: Sequence[Node], setting: Setting) -> bool:
        """Whether what they have saved is what it was: parameters, or the very tensors, with the same numbers."""
        if not self.places:
            return True
        trusted, known = setting.trusted_memory, {each.cdata: v for each, v in self.known if not each.expired()}
        return all(
            (number := memory_number(tensor)) in trusted or known.get(number) == _version(tensor)
            for place in self.places
            for tensor in numbers_saved_by(nodes[place])
        )

    def are_the_models(self, nodes: Sequence[Node], setting: Setting) -> bool:
        """Whether what they have saved is the model's own: then it may be the same the next time."""
        own = setting.own_memory if self.places else ()
        return all(memory_number(t) in own for place in self.places for t in numbers_saved_by(nodes[place]))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def constants_among(nodes: Sequence[Node], places: Collection[int]) -> Constants:
    """Those of these nodes that have saved numbers which were not computed with gradients."""
    found = {place: held for place in places if (held := list(numbers_saved_by(nodes[place])))}
    known = {memory_number(tensor): tensor for held in found.values() for tensor in held}
    refs = [(StorageWeakRef(tensor.untyped_storage()), _version(tensor)) for tensor in known.values()]
    return Constants(frozenset(found), tuple(refs))


@dataclass(frozen=True)
class Judged:
    """What values have shown of a structure, once. Nodes are named by their places."""

    weights: frozenset[int]  # that do not depend on data
    nobodys: frozenset[int]  # that have no owners
    silent: frozenset[int]  # at which values decide, in every batch
    rows: frozenset[int]  # that have saved rows of an input, which say whose they are as well
    copies: frozenset[int]  # that have saved copies of them: asked as well where the forward was watched in any case
    by_copies: bool  # whether some of `rows` are copies of inputs, so that every forward has to be watched
    moved: dict[tuple[int, int], str]  # edges at which indices decide, and which layout they led to
    trail: Trail | None  # how the table goes through it; None if values must be asked
    constants: Constants  # what belongs to nobody, though it is no parameter: later it may be data
    skips: dict[frozenset[str], frozenset[str]] = field(default_factory=dict)  # which gradients torch need not compute

    def shown(self, *, watched: bool) -> frozenset[int]:
        """Those that show whose rows they have saved, if the forward was watched, or was not."""
        return self.rows | self.copies if watched else self.rows

    @property
    def is_dynamic(self) -> bool:
        """Whether whose the rows are may be another matter in a batch of the same sizes."""
        return bool(self.silent or self.moved)


def starts_of(plan: Plan, nodes: Sequence[Node], known: Mapping[Edge, Layout], n: int) -> dict[Edge, Layout] | None:
    """Where ownership starts in a graph of a known structure; None if it does not fit."""
    found: dict[Edge, Layout] = {}
    for (place, output), before in zip(plan.cut, plan.layouts, strict=True):
        edge = nodes[place], output
        said = known.get(edge)
        if isinstance(before, Mapped):
            if not isinstance(said, Mapped):
                return None
            found[edge] = said
            continue
        shape = tuple(outputs_of(nodes[place])[output].shape)
        size = shape[before.dim] if before.dim < len(shape) else -1
        is_whole = before.n * before.block == before.shape[before.dim]
        block = size // n if is_whole else before.block
        if said is None and (size != n if is_whole and before.block == 1 else not is_whole and before.block != 1):
            return None  # that it was one block of one row, or so many, says nothing of other sizes
        if isinstance(said, Mapped) or size < 0 or not block or size % (n * block):
            return None
        found[edge] = Regular(shape, n, before.dim, block)
    return found


class RuleFails(Exception):
    """A rule says nothing of the way in which samples lie now, or what it makes does not come to its parameter: the
    structure has to be judged anew."""


def derived(
    plan: Plan,
    judged: Judged,
    nodes: Sequence[Node],
    starts: Mapping[Edge, Layout],
    n: int,
    names: Mapping[int, str],
    rows: Rows,
    same_sizes: Plan | None,
    in_frame: Plan | None,
    shown: Collection[int],
) -> Plan | None:
    """The plan for a graph of this structure; None if it does not follow, and the graph must be judged itself. Where a
    plan for the `same_sizes` is at hand, or for sizes that differ only in rows that indices move (`in_frame`), only
    what indices and values decide is found anew. `shown`: the nodes that have saved rows of inputs. Raises RuleFails
    where a rule does not serve this graph."""
    if same_sizes is not None and same_sizes.followed is not None and judged.trail is not None:
        moved = _moved(same_sizes, judged.trail, judged, nodes, n, rows, shown)
        if moved is None or _lie_alike(same_sizes.owned, moved.owned):
            return moved
    elif in_frame is not None and in_frame.n == n and judged.trail is not None:
        moved = _moved(in_frame, judged.trail, judged, nodes, n, rows, shown)
        if moved is not None and _serves(in_frame, moved, nodes):
            return moved
    found = _owners(plan, judged, nodes, starts, n)
    if found is None:
        return None
    owned = {place: owners for place in plan.owned if (owners := found[place]) is not None}
    if len(owned) < len(plan.owned) or not agree(shown, owned, nodes, rows):
        return None
    routes = _fitted(_led(plan, nodes, names), owned, nodes, n)
    if not _reach(plan, routes, nodes):
        raise RuleFails
    _refuse_other_ways(plan, routes, nodes)
    if same_sizes is not None and _lie_alike(same_sizes.owned, owned):
        return replace(
            same_sizes, owned=owned, routes=routes, has_doubts=has_doubts(owned), layouts=tuple(starts.values())
        )
    dear = frozenset(_dear(plan, routes, nodes))
    if dear not in judged.skips:
        judged.skips[dear] = skippable(nodes, {nodes[place] for place in owned}, plan.free - dear, names)
    mixed = {nodes[place] for place in plan.mixed}
    return replace(
        plan,
        n=n,
        owned=owned,
        layouts=tuple(starts.values()),
        routes=routes,
        together=teams(nodes, routes, mixed, plan.alone),
        dear=dear,
        cheap=judged.skips[dear],
        sizes=Sizes(),
        has_doubts=has_doubts(owned),
        grouped={},
        arranged={},
        recordings={},
        uses=[],
        followed=Followed(found, judged.trail.steps) if judged.moved and judged.trail is not None else None,
    )


def _moved(
    plan: Plan, trail: Trail, judged: Judged, nodes: Sequence[Node], n: int, rows: Rows, shown: Collection[int]
) -> Plan | None:
    """The plan for a graph of the same sizes, in which indices move rows otherwise."""
    journey = Journey(n, {(nodes[place], edge): form for (place, edge), form in judged.moved.items()})
    assert plan.followed is not None
    found = trail.again(nodes, plan.followed, journey)
    if found is None or not _are_true(journey.holds):
        return None
    moved = {place: owners for place, owners in found.items() if place in plan.owned}
    owned = plan.owned | moved
    routes = _fitted({place: plan.routes[place] for place in moved if place in plan.routes}, moved, nodes, n)
    if not agree(shown, owned, nodes, rows):
        return None
    return replace(plan, owned=owned, routes=plan.routes | routes, has_doubts=has_doubts(owned))


def _serves(plan: Plan, moved: Plan, nodes: Sequence[Node]) -> bool:
    """Whether a plan of the same frame serves the graph: what is known of its meetings holds for their numbers of rows.
    (Meetings that wait for others are not asked: their samples follow each other in blocks.)"""
    others = {place: owners for place, owners in moved.owned.items() if owners is not plan.owned[place]}
    known = {place: plan.owned[place] for place in others if place in plan.ruled or place in moved.ruled}
    routes = {place: moved.routes[place] for place in others if place in moved.routes}
    if not _lie_alike(known, others) or not _reach(plan, routes, nodes):
        return False
    _refuse_other_ways(plan, routes, nodes)
    return True


def _lie_alike(before: Mapping[int, Owners], now: Mapping[int, Owners]) -> bool:
    """Whether samples lie at every meeting as they did: which meetings wait for others, what goes to which launch and
    what was recorded of them holds for that way alone."""
    return all(
        outs is now[place] or list(map(_way, outs)) == list(map(_way, now[place])) for place, outs in before.items()
    )


def _way(layout: Layout | None) -> Hashable:
    """How samples lie; of a map, whatever it says of each row."""
    if not isinstance(layout, Mapped):
        return layout
    return layout.map.shape, layout.behind, layout.is_whole, layout.held is None


def agree(shown: Collection[int], owned: Mapping[int, Owners], nodes: Sequence[Node], rows: Rows) -> bool:
    """Whether nodes that had saved rows of an input have so again, and these say the same owners: an input may have
    been turned before, which leaves no node."""
    for place in shown:
        said = rows.owners(nodes[place], tuple(outputs_of(nodes[place])[0].shape))
        own = owned.get(place)
        if said is None or own is None or (own[0] is not None and not same(own[0], said)):
            return False
    return True


def _owners(
    plan: Plan, judged: Judged, nodes: Sequence[Node], starts: Mapping[Edge, Layout], n: int
) -> Sequence[Owners | None] | None:
    """The owners of all nodes, by place; None if they are not as they were when the structure was judged."""
    journey = Journey(n, {(nodes[place], edge): form for (place, edge), form in judged.moved.items()})
    if judged.trail is not None and n > 1:
        found = judged.trail.follow(nodes, starts, plan.cut, journey)
        return found if found is not None and _are_true(journey.holds) else None
    weights = {nodes[place] for place in judged.weights}
    walked = walk(nodes, starts, journey, lambda node: node not in weights, {nodes[place] for place in judged.silent})
    nobodys = {node for node, owners in walked.owners.items() if owners is None}
    is_alike = len(nobodys) == len(judged.nobodys) and all(nodes[place] in nobodys for place in judged.nobodys)
    if walked.mixing or walked.hidden or not is_alike or not _are_true(journey.holds):
        return None
    return [walked.owners.get(node) for node in nodes]


def _are_true(holds: Sequence[Tensor]) -> bool:
    """Whether all of these hold: one look at each device."""
    devices = dict.fromkeys(each.device for each in holds)
    return all(bool(torch.stack([each for each in holds if each.device == device]).all()) for device in devices)


def _led(plan: Plan, nodes: Sequence[Node], names: Mapping[int, str]) -> dict[int, list[Route]]:
    """The routes of a plan, to where they lead in this graph. Which of several matrices was met, and whether it was
    turned, are numbers that nodes on the way have saved: a structure does not tell them."""
    found: dict[int, list[Route]] = {}
    for place, there in plan.routes.items():
        found[place] = []
        for route in there:
            if route.parameter is not None:
                child, output = nodes[place].next_functions[route.edge]
                parameter, turned, member = straight(child, output, names)
                if (parameter, turned, member) != (route.parameter, route.turned, route.member):
                    route = replace(route, parameter=parameter, turned=turned, member=member)
            found[place].append(route)
    return found


def _reach(plan: Plan, routes: Mapping[int, Sequence[Route]], nodes: Sequence[Node]) -> bool:
    """Whether factors come to their parameters wherever they did when the structure was judged: it is counted on that
    none is formed on its way. (A slice takes every second row now, say.)"""
    memos: dict[int, dict[Any, Any]] = {}
    for place, edge in plan.reaches:
        node = nodes[place]
        route = next((each for each in routes.get(place, ()) if each.edge == edge), None)
        if route is None or route.parameter is not None or 0 in outputs_of(node)[0].shape:
            continue
        kind = _without_numbers(route, node, memos.setdefault(place, {}) if route.rule.several else {})
        if kind is None or not is_followed(kind, *node.next_functions[edge]):
            return False
    return True


def _refuse_other_ways(plan: Plan, routes: Mapping[int, Sequence[Route]], nodes: Sequence[Node]) -> None:
    """Raise where samples lie in another way than in the plan, and a rule does not speak for that: torch does not
    compute the gradients that rules were to bring."""
    for place, there in routes.items():
        if all(_kind(route.by.layout) == _kind(was.by.layout) for route, was in zip(there, plan.routes[place])):  # noqa: B905
            continue
        memo: dict[Any, Any] = {}
        for route in there:
            if 0 not in outputs_of(nodes[place])[0].shape and _without_numbers(route, nodes[place], memo) is None:
                raise RuleFails


def _kind(layout: Layout) -> Hashable:
    """The way in which samples lie, as far as rules go by it."""
    return layout.dim if isinstance(layout, Regular) else (layout.map.dim(), layout.is_whole, layout.held is None)


def _without_numbers(route: Route, node: Node, memo: dict[Any, Any]) -> Term | None:
    """What the rule makes of a gradient of zeros."""
    meta, *others = outputs_of(node)
    delta = torch.zeros((), dtype=meta.dtype, device=meta.device).expand(tuple(meta.shape))
    return route.rule.make(Call(node, delta, route.by, route.shape, memo=memo, others=[None] * len(others)))


def _fitted(
    routes: Mapping[int, Sequence[Route]], owned: Mapping[int, Owners], nodes: Sequence[Node], n: int
) -> dict[int, tuple[Route, ...]]:
    """The same routes for other sizes. Raises RuleFails where a rule does not hold."""
    found: dict[int, tuple[Route, ...]] = {}
    for place, there in routes.items():
        fitted = [_route(route, nodes[place], owned[place][0], n) for route in there]
        found[place] = tuple(route for route in fitted if route is not None)
        if len(found[place]) < len(fitted):
            raise RuleFails
    return found


def _route(route: Route, node: Node, layout: Layout | None, n: int) -> Route | None:
    shape = shape_of(*node.next_functions[route.edge])
    by = None if layout is None else route.rule.applies(node, layout, n, shape)
    if by is None:
        return None
    parameter = route.parameter
    if parameter is not None and isinstance(layout, Mapped) and by.has_nobodys:
        if route.member is None:
            return None
        parameter = None  # followed node by node, and what is nobody's beside it
    return Route(route.edge, route.rule, by, shape, route.meeting, parameter, route.turned, route.member)


def _dear(plan: Plan, routes: Mapping[int, Sequence[Route]], nodes: Sequence[Node]) -> set[str]:
    """The parameters whose gradient does not come with their norms, for these sizes."""
    dear = set(plan.dear)
    for there in routes.values():
        for route in there:
            layout, lead = route.by.layout, route.by.lead
            name = None if rounding_of(nodes[route.meeting.place]) else route.parameter
            is_matrix = len(route.shape) == 2 and isinstance(layout, Regular) and lead == len(layout.shape) - 1
            if name is None or route.rule.several or not is_matrix or name not in plan.alone or layout.dim >= lead:  # type: ignore[union-attr]
                continue
            t = prod(layout.shape[:lead]) // max(route.by.n, 1)
            o = layout.shape[-1]
            device = outputs_of(nodes[route.meeting.place])[0].device.type
            way = "rank one" if t == 1 else costs.cheaper(t, prod(route.shape) // max(o, 1), o, device, want_sum=True)
            (dear.discard if way == "product" else dear.add)(name)
    return dear


def sizes_of(plan: Plan, nodes: Sequence[Node]) -> Sizes:
    """What holding the gradients of each parameter takes, in a graph of this plan."""
    if plan.sizes:
        return plan.sizes
    found = Sizes()
    memos: dict[int, dict[Any, Any]] = {}
    for (place, edge), name in plan.reaches.items():
        route = next((route for route in plan.routes.get(place, ()) if route.edge == edge), None)
        if route is None or name in plan.late:
            continue
        memo = memos.setdefault(place, {}) if route.rule.several else {}  # a pass through time serves all edges
        kind = _without_numbers(route, nodes[place], memo)
        if kind is not None:
            found[name] = found[name] + size_of(kind) if name in found else size_of(kind)
    if not plan.is_dynamic:
        plan.sizes.update(found)
    return found
