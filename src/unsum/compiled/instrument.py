"""What happens while torch writes down a model: hooks on its nodes, and numbers that leave as gradients of taps."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.compiled.pattern import Leaf, OtherParameters, Pattern, Unknown, Untappable, Way, described, made
from unsum.compiled.raw_inputs import Lines, lines_of
from unsum.factors.dense import Dense
from unsum.factors.grouping import grouping
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.graph.nodes import Node, below
from unsum.kernels import grouped
from unsum.learn.audit import shape_of
from unsum.plan.plan import Plan
from unsum.reducers import SQ_NORMS
from unsum.reducers.tap import Tap
from unsum.rules.registry import Call, find
from unsum.rules.to_parameter import cast, finished, follow
from unsum.seams.operators import hint
from unsum.step.collect import Collector
from unsum.step.launches import Launches

_local = threading.local()


@dataclass(frozen=True)
class Graph:
    """One graph that torch has compiled with taps. One model may have several: for other sizes, or other attributes."""

    pattern: Pattern  # as which it was recognised
    told: list[list[str]]  # what is known of what leaves, by the forms


@dataclass
class Instrumentation:
    """What is wanted of a model while it is compiled."""

    patterns: Sequence[Pattern]  # of calls with these flags and sizes; none: they were never learnt
    forms: Sequence[Tap]
    parameters: Mapping[str, nn.Parameter]  # those wanted
    frozen: frozenset[int]  # ids of parameters whose gradient nobody wants
    taps: int  # how many of the inputs are taps
    in_cuda_graphs: bool = False  # whether CUDA graphs are recorded of what is compiled
    inputs: Lines = ()  # what is done to inputs before a parameter meets them
    graph: Graph | None = None  # the one that ran
    is_unknown: bool = False  # whether calls of these sizes are to be learnt first
    session: Session | None = field(default=None, repr=False)

    @cached_property
    def names(self) -> dict[int, str]:
        """Of the parameters wanted, by id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def unknown(self, why: str) -> Unknown:
        """What is raised where calls are to be learnt first."""
        self.is_unknown = True
        return Unknown(why)


@contextmanager
def tracing(wanted: Instrumentation) -> Iterator[None]:
    """If torch compiles within, this is what it is for."""
    before = getattr(_local, "wanted", None)
    _local.wanted = wanted
    try:
        yield
    finally:
        _local.wanted = before


def _now() -> Instrumentation:
    trace: Instrumentation | None = getattr(_local, "wanted", None)
    if trace is None:
        raise Untappable("a compiled model was called outside the block that compiled it")
    return trace


class _Hold(torch.autograd.Function):
    """Where numbers leave. It is made first, so its backward runs last."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        trace = _now()
        ctx.session = trace.session = Session(trace, given)
        return given[0].new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.session.finish()


def hold(*given: Tensor) -> Tensor:
    """Takes in the taps, and what reducers are given."""
    return _Hold.apply(*given)  # type: ignore[no-any-return]


def _attach(count: int, *tensors: Any) -> Any:
    """The last call of a graph: its outputs are there, and so are the parameters."""
    outputs, parameters = tensors[:count], tensors[count:]
    trace = _now()
    if not trace.forms:  # there is no call that takes in taps
        trace.session = Session(trace, ())
    assert trace.session is not None
    trace.session.attach(outputs, parameters)
    return outputs


class Session:
    """One run of the model with stand-ins for tensors, and the backward that follows."""

    def __init__(self, trace: Instrumentation, given: Sequence[Tensor]) -> None:
        self._trace = trace
        self._taps, self._inputs = given[: trace.taps], given[trace.taps :]
        self._sums: dict[int, Tensor] = {}
        self._collector: Collector | None = None
        self._pattern: Pattern | None = None
        self._skipped: frozenset[str] = frozenset()  # parameters whose gradient torch need not compute
        self._small: dict[int, list[tuple[str, Tensor]]] = {}  # gradients of scales and shifts, by their size
        self._launches: Launches[str] = Launches()
        self._held: dict[int, Tensor] = {}  # gradients that have to stay until the kernels run, by id
        self._reducers: list[Any] = []

    def attach(self, outputs: Sequence[Any], parameters: Sequence[Any]) -> None:
        leaves = self._leaves(parameters)
        leaf: Leaf = lambda node: leaves[node] if node in leaves else "" if _is_input(node) else None
        tensors = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        nodes = [node for node in made(tensors, leaf) if node.name() != "_HoldBackward"]
        pattern = self._recognised(nodes, leaf)
        if not self._trace.forms:  # a part of a model, in which nothing is wanted: it must only be what was learnt
            self._trace.graph = Graph(pattern, [])
            return
        n = self._begin(pattern)
        for place, ways in pattern.ways.items():
            seams.on_node(nodes[place], partial(self._meet, nodes[place], ways, n, leaf))

    def _leaves(self, parameters: Sequence[Any]) -> dict[Node, str]:
        """Where the parameters are in the graph; what they get instead of torch's own gradient, where there is any."""
        names = self._trace.names
        leaves: dict[Node, str] = {}
        for known, value in zip(_local.given, parameters, strict=True):
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            leaves[torch.autograd.graph.get_gradient_edge(value).node] = names.get(id(known), "")
            seams.on_gradient(value, partial(self._instead, id(known)))
        return leaves

    def _instead(self, key: int, grad: Tensor) -> Tensor | None:
        """The gradient of a parameter that comes with its norms; zeros if nobody wants it."""
        if key in self._trace.frozen:
            return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(
                grad.shape
            )  # none of its numbers is used
        summed = self._sums.pop(key, None)
        return None if summed is None else summed.to(grad.dtype).reshape(grad.shape)

    def _recognised(self, nodes: Sequence[Node], leaf: Leaf) -> Pattern:
        if not self._trace.patterns:
            raise self._trace.unknown("these sizes were not learnt yet")
        whole, _ = described(nodes, leaf)
        alike = [pattern for pattern in self._trace.patterns if pattern.nodes == whole]
        for pattern in alike:
            if pattern.inputs == self._trace.inputs:
                return pattern
        if alike:
            raise self._trace.unknown("what is done to the inputs is not what was learnt")
        raise self._trace.unknown(
            f"what torch compiles is not what was learnt: {_difference(self._trace.patterns[-1].nodes, whole)}"
        )

    def _begin(self, pattern: Pattern) -> int:
        trace, inputs = self._trace, list(self._inputs)
        n: int | None = None
        for form, taps in zip(trace.forms, self._by_form(self._taps), strict=True):
            size = form.size(taps, inputs)
            n = size if n is None else n
            self._reducers.append(form.reducer(taps, [inputs.pop(0) for _ in range(form.inputs)]))
        assert n is not None
        self._pattern = pattern
        comes = any(getattr(r, "wants", None) == SQ_NORMS or getattr(r, "sums", False) for r in self._reducers)
        if comes and not trace.frozen:
            self._skipped = pattern.spare
        plan = Plan.empty(n, expected=pattern.expected)
        self._collector = Collector(
            plan, trace.parameters, trace.names, self._reducers,
            keep=False, scale=None, check=False, skipped=self._skipped, only=None,
            deliver=self._deliver, eager=False,
        )  # fmt: skip
        for reducer in self._reducers:
            reducer.begin(n, False)
        return n

    def _by_form(self, taps: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        first = 0
        for form in self._trace.forms:
            yield taps[first : first + form.taps]
            first += form.taps

    def _deliver(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        self._sums.update((id(p), value) for p, value in zip(parameters, values, strict=True))

    def _meet(self, node: Node, ways: Sequence[Way], n: int, leaf: Leaf, grads: Sequence[Tensor | None]) -> None:
        delta = grads[0]
        if delta is None or any(grad is not None for grad in grads[1:]):
            raise Untappable(f"the gradients that arrive at {node.name()} are not those that were learnt")
        memo: dict[str, Any] = {}
        for way in ways:
            child, output = node.next_functions[way.edge]
            by = way.along.positions(delta.shape, n, way.lead)
            shape = self._shape(child, output, leaf) if way.parameter is None else way.shape
            call = Call(node, delta, by, shape, memo=memo)
            rule = find(node, way.edge)  # torch may have taken down another operation than was learnt
            kind = None if rule is None else rule.make(call)
            if kind is None:
                raise Untappable(f"there is no rule for {node.name()}, or it does not hold")
            name = way.parameter
            if name is not None:
                self._arrive(name, way, finished(kind, self._trace.parameters[name], turned=way.turned))
            else:
                self._follow(kind, child, output, way, leaf)

    def _shape(self, child: Node, output: int, leaf: Leaf) -> tuple[int, ...]:
        """Of the tensor at an edge."""
        name = leaf(child)
        return tuple(self._trace.parameters[name].shape) if name else shape_of(child, output)

    def _follow(self, kind: Term, child: Node, output: int, way: Way, leaf: Leaf) -> None:
        while (name := leaf(child)) is None:
            nexts = below(child)
            deeper, place = nexts[0][1:]
            shape = self._shape(deeper, place, leaf)
            followed = follow(kind, child, output, shape) if len(nexts) == 1 else None
            if followed is None:
                raise Untappable(f"{child.name()} between a parameter and its data cannot be followed")
            kind, child, output = followed, deeper, place
        if name:
            self._arrive(name, way, cast(kind, self._trace.parameters[name].dtype))

    def _arrive(self, name: str, way: Way, kind: Term) -> None:
        assert self._collector is not None and self._pattern is not None
        parameter = self._trace.parameters[name]
        is_norms = [getattr(reducer, "wants", None) for reducer in self._reducers] == [SQ_NORMS]
        alone = is_norms and self._pattern.expected[name] == 1
        if alone and self._launched(name, kind, parameter.dtype):
            self._collector.pass_by(parameter)
            return
        if not alone or not isinstance(kind, Scale | Dense):
            self._collector.meet(parameter, {way.meeting: None}, kind)
            return
        each = kind.per_sample().flatten(1)  # few numbers: their squares are added up at the end, for all at once
        self._small.setdefault(parameter.numel(), []).append((name, each))
        self._collector.pass_by(parameter)
        if name in self._skipped:
            self._sums[id(parameter)] = each.sum(0)

    def _launched(self, name: str, kind: Term, dtype: torch.dtype) -> bool:
        """Whether one launch for many layers will give the norms of these factors, of a parameter of this dtype."""
        found = grouping(kind, dtype)
        if found is None or not isinstance(kind, Outer | Scale):
            return False
        delta = kind.delta
        n, t = delta.shape[:2]
        is_small = grouped.is_small(hint(n) * hint(t), delta.device.type)
        if not is_small or not grouped.is_ready(delta.device, delta.dtype):
            return False
        held = {**self._held, id(delta): delta}
        if sum(hint(each.numel()) for each in held.values()) > grouped.HELD.get(delta.device.type, 0):
            return False
        self._held = held
        way, tensors = found
        self._launches.add(way, n, t, hint(t), [name], [[tensor] for tensor in tensors])
        return True

    def finish(self) -> tuple[Tensor | None, ...]:
        assert self._collector is not None and self._pattern is not None
        for names, squares in self._launches.norms(kept=not self._trace.in_cuda_graphs):
            self._reducers[0].receive(names, squares)
        for group in self._small.values():
            held = sorted(group, key=lambda each: each[0])
            squares = torch.stack([each for _, each in held]).square().sum(2)
            self._reducers[0].receive([name for name, _ in held], squares)
        self._collector.finish()
        values: list[Tensor | None] = []
        for form, reducer, taps in zip(self._trace.forms, self._reducers, self._by_form(self._taps), strict=True):
            values += [v.to(tap.dtype).expand(tap.shape) for v, tap in zip(form.values(reducer), taps, strict=True)]
        self._trace.graph = Graph(self._pattern, [list(form.told) for form in self._trace.forms])
        return (*values, *(None for _ in self._inputs))


def _is_input(node: Node) -> bool:
    """Whether this is where a stand-in for an input of the model begins."""
    return node.name() in ("torch::autograd::Error", "torch::autograd::AccumulateGrad")


def _difference(learnt: Sequence[Any], found: Sequence[Any]) -> str:
    for place, (one, other) in enumerate(zip(learnt, found, strict=False)):
        if one != other:
            return f"node {place} is {other}, learnt was {one}"
    return f"{len(found)} nodes, learnt were {len(learnt)}"


def backend(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for torch.compile: the user's own, given the model with what is wanted of it at its end."""

    def compile_(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        trace = _now()
        trace.inputs = lines_of(graph)
        compiled = instrumented(inner, graph, inputs, **options)
        own = {k: trace.names.get(id(each), "") for k, each in enumerate(inputs) if isinstance(each, nn.Parameter)}
        return _noted(compiled, trace.graph, own)

    return compile_


def instrumented(
    inner: Callable[..., Any], graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Compile a graph by the user's own backend, with a call at its end that sees outputs and parameters."""
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    parameters = [(node, value) for node, value in zip(given, inputs, strict=True) if isinstance(value, nn.Parameter)]
    (last,) = (node for node in graph.graph.nodes if node.op == "output")
    outputs = list(last.args[0])
    with graph.graph.inserting_before(last):
        attached = graph.graph.call_function(_attach, (len(outputs), *outputs, *(node for node, _ in parameters)))
        passed = [graph.graph.call_function(operator.getitem, (attached, k)) for k in range(len(outputs))]
    for before, after in zip(outputs, passed, strict=True):
        if isinstance(before, torch.fx.Node):
            after.meta.update(before.meta)
    last.args = (tuple(passed),)
    graph.recompile()
    _local.given = [value for _, value in parameters]
    try:
        compiled: Callable[..., Any] = inner(graph, inputs, **options)
        return compiled
    finally:
        _local.given = []


def _noted(compiled: Callable[..., Any], graph: Graph | None, own: Mapping[int, str]) -> Callable[..., Any]:
    """Tell with each run which graph it was. `own`: the names of parameters among its inputs. Torch runs what it has
    compiled for one layer also with another in its place, which an attribute of the model names."""

    def run(*given: Any) -> Any:
        trace = _now()
        if any(trace.names.get(id(given[k]), "") != name for k, name in own.items()):
            trace.is_unknown = True
            raise OtherParameters("it is compiled for other parameters")
        trace.graph = graph
        return compiled(*given)

    return run
