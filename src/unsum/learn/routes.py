"""How gradients come to each parameter: as factors, how often; formed; or beside all data. From this follows when a
parameter's gradients are complete, and which weight gradients torch need not compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from unsum.graph.layout import Regular
from unsum.graph.nodes import Node, below, is_leaf, ordered
from unsum.graph.owners import Owners, Swept
from unsum.learn.audit import Audit, shape_of
from unsum.plan.plan import Meeting, Route
from unsum.reducers.holding import Size, Sizes
from unsum.rules.to_parameter import member_of, turns
from unsum.travel.walk import Walked


def routes(
    nodes: Sequence[Node],
    swept: Swept | Walked,
    mixed: set[Node],
    beside: Sequence[Node],
    names: Mapping[int, str],
    audit: Audit | None,
) -> dict[str, Any]:
    """`expected`, `sizes`, `late`, `free`, `dear`, `cheap`, `spare`, `reaches` and `streamed` of a plan."""
    place = {node: k for k, node in enumerate(nodes)}
    streams: dict[Node, None] = dict.fromkeys(beside)  # where gradients begin to pass formed
    expected: dict[str, int] = {}
    sizes: dict[str, Size] = {}
    late: set[str] = set()
    reaches: dict[tuple[int, int], str] = {}  # the parameters to which factors are followed
    dear: set[str] = set()  # parameters whose sum does not come with the norms
    followed, known = ({}, {}) if audit is None else (audit.followed, audit.sizes)
    for node, owners in swept.owners.items():
        if owners is None:
            continue
        for edge, child, _ in below(node):
            if not (is_leaf(child) or child in mixed):
                continue
            reached = _names(child, names)
            if (node, edge) not in followed or not isinstance(owners[0], Regular):
                streams[child] = None
            if (node, edge) not in followed:
                late |= reached
                continue
            for name in reached:  # just one, or none that is wanted
                expected[name] = expected.get(name, 0) + 1
                reaches[place[node], edge] = name
                sizes[name] = sizes[name] + known[node, edge] if name in sizes else known[node, edge]
                if not followed[node, edge] or not isinstance(owners[0], Regular):
                    dear.add(name)
    shared = {name for node in beside for _, child, _ in below(node) for name in _names(child, names)}
    streamed = mixed if swept.hidden else mixed & set(ordered(streams))
    if swept.hidden:
        late |= set(names.values())
    free = set(expected) - late - shared
    owned = {node for node, owners in swept.owners.items() if owners is not None}
    return {
        "streamed": frozenset(place[node] for node in streamed),
        "expected": expected,
        "sizes": Sizes({name: size for name, size in sizes.items() if name not in late}),
        "late": frozenset(late),
        "reaches": reaches,
        "free": frozenset(free),
        "dear": frozenset(dear),
        "cheap": skippable(nodes, owned, free - dear, names),
        "spare": skippable(nodes, owned, free, names),
    }


def _names(child: Node, names: Mapping[int, str]) -> set[str]:
    return {names[id(leaf.variable)] for leaf in ordered([child]) if is_leaf(leaf) and id(leaf.variable) in names}


def skippable(
    nodes: Sequence[Node], owned: set[Node], candidates: Iterable[str], names: Mapping[int, str]
) -> frozenset[str]:
    """Those without which every meeting is still run: a node all of whose edges are skipped is not."""
    skipped = set(candidates)
    runs: set[Node] = set()
    for node in reversed(nodes):  # from the leaves up
        if is_leaf(node):
            if names.get(id(node.variable)) not in skipped:
                runs.add(node)
            continue
        children = [child for _, child, _ in below(node)]
        if any(child in runs for child in children):
            runs.add(node)
        elif node in owned:
            own = {name for child in children for name in _names(child, names)} & skipped
            if own:
                size = {names[id(leaf.variable)]: prod(leaf.variable.shape) for leaf in nodes if _is_named(leaf, names)}
                skipped.discard(min(own, key=lambda name: (size[name], name)))
                runs.add(node)
    return frozenset(skipped)


def stranded(
    nodes: Sequence[Node],
    owned: Iterable[int],
    skipped: frozenset[str],
    others: frozenset[int],
    names: Mapping[int, str],
) -> tuple[int, ...]:
    """The places of meetings that torch would not run without the gradients that are skipped, by name; and without
    those of the `others`, by id."""
    meetings, runs, found = set(owned), set[Node](), []
    for place in reversed(range(len(nodes))):  # from the leaves up
        node = nodes[place]
        if is_leaf(node):
            is_run = names.get(id(node.variable)) not in skipped and id(node.variable) not in others
        else:
            is_run = any(child in runs for _, child, _ in below(node))
            if not is_run and place in meetings:
                found.append(place)
                is_run = True
        if is_run:
            runs.add(node)
    return tuple(found)


def _is_named(node: Node, names: Mapping[int, str]) -> bool:
    return is_leaf(node) and id(node.variable) in names


def rule_routes(
    audit: Audit,
    place: Mapping[Node, int],
    owned: Mapping[int, Owners],
    modules: Mapping[int, str],
    mixed: set[Node],
    n: int,
    names: Mapping[int, str],
) -> dict[int, tuple[Route, ...]]:
    """The rules that hold, with all that can be known of them beforehand."""
    found: dict[int, list[Route]] = {}
    for (node, edge), rule in audit.rules.items():
        at = place[node]
        child, output = node.next_functions[edge]
        if at not in owned or (layout := owned[at][0]) is None or not (is_leaf(child) or child in mixed):
            continue
        shape = shape_of(child, output)
        by = rule.applies(node, layout, n, shape)
        if by is None:
            continue
        meeting = Meeting(node.name(), modules[at], at, rule.name)
        followed = (node, edge) in audit.followed
        parameter, turned, member = straight(child, output, names) if followed else (None, False, None)
        parameter = parameter if isinstance(layout, Regular) or not by.has_nobodys else None
        found.setdefault(at, []).append(Route(edge, rule, by, shape, meeting, parameter, turned, member))
    # a matrix before its bias: its pass over δ serves both
    return {at: tuple(sorted(routes, key=lambda route: -prod(route.shape))) for at, routes in found.items()}


def straight(child: Node, output: int, names: Mapping[int, str]) -> tuple[str | None, bool, int | None]:
    """The parameter to which transposes and casts alone lead, whether it is transposed; and which of its matrices it
    is, if it is one of several."""
    turned, member = False, None
    while not is_leaf(child):
        _, deeper, place = below(child)[0]
        shape = shape_of(deeper, place)
        if turns(child, shape):
            turned = not turned
        elif member is None and (found := member_of(child, output, shape)) is not None:
            member = found
        elif child.name() != "ToCopyBackward0":
            return None, False, None
        child, output = deeper, place
    return names.get(id(child.variable)), turned, member
