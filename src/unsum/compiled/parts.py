"""Models with graph breaks: what was learnt of the parts that torch compiles, and of what joins them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from unsum.compiled.pattern import (
    Leaf,
    Pattern,
    Untappable,
    Way,
    described,
    leaf_of,
    made_below,
    numbers,
    refuse,
    ways_of,
)
from unsum.compiled.raw_inputs import Lines
from unsum.graph.nodes import Edge, Node, edge_of, ordered
from unsum.plan.plan import Plan
from unsum.plan.signature import plain
from unsum.reducers.holding import Sizes
from unsum.seams.nodes import outputs_of

_MOST = 200  # nodes between parts


@dataclass(frozen=True, eq=False)
class Run:
    """One part as it ran in a rehearsal."""

    begins: tuple[Node, ...]  # copies of the inputs that were computed before: the part ends here
    outputs: tuple[Edge, ...]  # (None, 0) for one without a gradient
    writes: bool  # whether it changes such an input in place
    inputs: Lines  # what is done to inputs before a parameter meets them
    raw: tuple[Hashable, ...]  # where tensors without a history come from that it is given


@dataclass(frozen=True)
class Part:
    """What was learnt of one part: its nodes, what leads to its inputs, the parameters that meet data there."""

    pattern: Pattern
    wires: Hashable
    names: frozenset[str]


@dataclass(frozen=True)
class Met:
    """A node between parts at which parameters meet data."""

    wires: int  # between which parts: those that lead to the inputs of this one, or, after the last, to the outputs
    line: int  # which of the nodes there
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Course:
    """What was learnt of one call of a model in parts, in the order in which they ran."""

    parts: tuple[Part, ...]
    wires: Hashable  # what leads to the call's outputs
    wanted: frozenset[str]  # all parameters that were asked for
    cut: frozenset[int]  # at which of the call's output tensors samples are told apart
    used: frozenset[int]  # which of them lead to the loss
    is_plain: bool  # whether nothing is computed between parts, of which only one size is known
    beside: tuple[Met, ...] = ()  # where parameters meet data between parts
    expected: Mapping[str, int] = field(default_factory=dict)  # how often factors come to these parameters

    @cached_property
    def whole(self) -> Hashable:
        """All by which a call is recognised."""
        return tuple(part.pattern.whole for part in self.parts), self.structure

    @cached_property
    def structure(self) -> Hashable:
        """What is the same for all sizes."""
        parts = tuple((part.pattern.structure, part.wires) for part in self.parts)
        beside = tuple(
            (met.wires, met.line, *((w.edge, w.rule.name, w.along, w.parameter) for w in met.ways))
            for met in self.beside
        )
        return parts, beside, self.wires, self.wanted, self.cut, self.used


class Wires:
    """The outputs of parts in a graph, and what is computed from them between parts."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._made: dict[Edge, tuple[int, int]] = {}

    def add(self, part: int, outputs: Sequence[Edge]) -> None:
        """A part has run; where its outputs are in the graph."""
        for k, edge in enumerate(outputs):
            if edge[0] is not None:
                self._made.setdefault(edge, (part, k))

    def nodes(self) -> frozenset[Node]:
        """The nodes of which outputs of parts come."""
        return frozenset(node for node, _ in self._made)

    def describe(self, edges: Sequence[Edge]) -> tuple[tuple[Hashable, tuple[Hashable, ...]], list[Node]]:
        """Where these edges lead, what the nodes on the way to outputs of parts, or to leaves, are; and these nodes."""
        places: dict[Node, int] = {}
        lines: list[Hashable] = []

        def end(edge: Edge) -> Hashable:
            node, output = edge
            if node is None or edge in self._made:
                return None if node is None else ("part", *self._made[edge])
            if (name := self._leaf(node)) is not None:
                return "leaf", name
            if node not in places:
                places[node] = len(lines)
                if len(lines) >= _MOST:
                    raise Untappable("too much is computed between its compiled parts")
                lines.append(None)
                shapes = tuple(numbers(tuple(meta.shape)) for meta in outputs_of(node))
                lines[places[node]] = numbers(plain(node)), shapes, tuple(end(each) for each in node.next_functions)
            return places[node], output

        ends = tuple(end(edge) for edge in edges)
        return (ends, tuple(lines)), list(places)


def edges_of(tensors: Sequence[object]) -> tuple[Edge, ...]:
    """The places of tensors in the graph, (None, 0) for anything else."""
    return tuple(edge_of(each) if isinstance(each, Tensor) else (None, 0) for each in tensors)


def course(
    plan: Plan,
    nodes: Sequence[Node],
    runs: Sequence[Run],
    own: Sequence[Node],
    outputs: Sequence[Edge],
    names: Mapping[int, str],
) -> Course:
    """From a plan that was learnt in a rehearsal: `nodes` is the graph, `own` those of the call. Raises where parts
    cannot be told apart, or where a parameter's gradient is not the business of one part alone."""
    if any(run.writes for run in runs):
        raise Untappable("a compiled part changes in place what another has computed")
    refuse(plan)
    leaf = leaf_of(names)
    wires, parts, home = Wires(leaf), [], dict[str, int]()
    between, taken = list[list[Node]](), set[int]()
    for k, run in enumerate(runs):
        lead, nodes_before = wires.describe([begin.next_functions[0] for begin in run.begins])
        between.append(nodes_before)
        part, at = _part(plan, nodes, run, leaf, (lead, run.raw))
        for name in part.names:
            if home.setdefault(name, k) != k:
                raise Untappable(f"{name} meets data in two compiled parts")
        parts.append(part)
        taken |= at
        wires.add(k, run.outputs)
    if not home:
        raise Untappable("no parameter meets data in a compiled part")
    place = {edge: k for k, edge in enumerate(outputs)}
    if any((nodes[at], output) not in place for at, output in plan.cut):
        raise Untappable("the loss's samples are not those of the call's outputs")
    cut = frozenset(place[nodes[at], output] for at, output in plan.cut)
    within = set(own)
    entered = {edge for node in nodes if node not in within for edge in node.next_functions}
    used = cut | {k for k, edge in enumerate(outputs) if edge in entered}
    ends, nodes_after = wires.describe([outputs[k] for k in sorted(used)])
    between.append(nodes_after)
    begins = {begin for run in runs for begin in run.begins}
    beside, met = _beside(plan, nodes, between, taken, begins, leaf)
    for name in met & home.keys():
        raise Untappable(f"{name} meets data in a compiled part, and outside of it")
    expected = {name: times for name, times in plan.expected.items() if name in met}
    wanted, is_plain = frozenset(names.values()), not any(between)
    return Course(tuple(parts), ends, wanted, cut, used, is_plain, beside, expected)


def _beside(
    plan: Plan, nodes: Sequence[Node], between: Sequence[Sequence[Node]], taken: set[int], begins: set[Node], leaf: Leaf
) -> tuple[tuple[Met, ...], frozenset[str]]:
    """Where parameters meet data between parts, and which. `taken`: the places of nodes in parts."""
    where = {node: (k, line) for k, found in reversed(list(enumerate(between))) for line, node in enumerate(found)}
    left = [at for at in (*plan.owned, *plan.mixed) if at not in taken]
    for at in left:
        if nodes[at] not in where:
            raise Untappable(f"a parameter is used outside the call, at {nodes[at].name()}")
    own = [nodes[at] for at in left]
    ways = ways_of(plan, nodes, own, set(left))
    starts = [own[k].next_functions[way.edge][0] for k, each in ways.items() for way in each]
    found = ordered(starts, stop=lambda node: leaf(node) is not None)
    if any(node not in where and leaf(node) is None for node in found) or not begins.isdisjoint(found):
        raise Untappable("a weight that is computed in one compiled part is used outside of it")
    met = tuple(Met(*where[own[k]], each) for k, each in ways.items())
    return met, frozenset(name for node in found if (name := leaf(node)))


def _part(plan: Plan, nodes: Sequence[Node], run: Run, leaf: Leaf, wires: Hashable) -> tuple[Part, set[int]]:
    """One part, and which nodes of the graph are in it."""
    begins = set(run.begins)
    inner: Leaf = lambda node: "" if node in begins else leaf(node)
    roots = [node for node, _ in run.outputs if node is not None]
    within = set(ordered(roots, stop=lambda node: inner(node) is not None))
    own = made_below(roots, inner)
    here = {at for at, node in enumerate(nodes) if node in within and inner(node) is None}
    ways = ways_of(plan, nodes, own, here)
    met = _met(own, ways, inner, begins)
    whole, kinds = described(own, inner)
    expected = {name: times for name, times in plan.expected.items() if name in met}
    pattern = Pattern(
        whole, kinds, ways, expected, plan.spare & met, frozenset(), frozenset(), plan.n, Sizes(), met, run.inputs
    )
    return Part(pattern, wires, met), here


def _met(own: Sequence[Node], ways: Mapping[int, Sequence[Way]], leaf: Leaf, begins: set[Node]) -> frozenset[str]:
    """The parameters that meet data in a part. Raises if another part has computed with them before."""
    starts = [own[place].next_functions[way.edge][0] for place, each in ways.items() for way in each]
    found = ordered(starts, stop=lambda node: leaf(node) is not None)
    if not begins.isdisjoint(found):
        raise Untappable("a weight that is computed in one compiled part is used in another")
    return frozenset(name for node in found if (name := leaf(node)))
