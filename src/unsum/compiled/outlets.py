"""Models with graph breaks run compiled: each part that torch compiles gets taps of its own, as further inputs. Torch
calls a backend once for each part; only there can taps be added, since the model's code does not hand them on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.compiled.instrument import Graph, Instrumentation, hold, instrumented, tracing
from unsum.compiled.parts import Course, Part, Run, Wires, edges_of
from unsum.compiled.pattern import Ambiguous, Leaf, Unknown, Untappable
from unsum.compiled.raw_inputs import RawTensors, lines_of
from unsum.compiled.tapped import Guard, Outlet
from unsum.graph.nodes import Node
from unsum.learn.sides import Sides
from unsum.reducers.tap import Tap
from unsum.seams.compiling import Found, size_among, with_inputs
from unsum.seams.tensors import version_of

_local = threading.local()
Size = int | tuple[int, int]  # a number, or an input and a dimension of it


# ---- rehearsal ------------------------------------------------------------------------------------------------------


def as_they_are(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """A backend: each part runs as it is, between copies of its inputs and its outputs."""
    done = lines_of(graph)

    def run(*given: Any) -> Any:
        sides, runs, raw = _local.rehearsal
        came = raw.describe(given)
        own = [each.view_as(each) if _is_computed(each) else each for each in given]
        pairs = [(each, before) for each, before in zip(own, given, strict=True) if each is not before]
        for each, before in pairs:
            sides.is_same(each, before)
        begins = [each for each, _ in pairs]
        places, versions = [each.grad_fn for each in begins], [version_of(each) for each in begins]
        seams.watch(sides)
        try:
            outputs = graph.forward(*own)
        finally:
            seams.unwatch(sides)
        writes = versions != [version_of(each) for each in begins]
        raw.add(len(runs), outputs)
        runs.append(Run(tuple(places), edges_of(outputs), writes, done, came))
        return outputs

    return run


def _is_computed(given: Any) -> bool:
    return isinstance(given, Tensor) and given.grad_fn is not None


@contextmanager
def rehearsing_parts(sides: Sides, raw: RawTensors) -> Iterator[list[Run]]:
    """Parts are watched while they run. Yields what is known of each that ran."""
    runs: list[Run] = []
    _local.rehearsal = sides, runs, raw
    try:
        yield runs
    finally:
        _local.rehearsal = None


# ---- with taps ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Compiled:
    """A part that torch has compiled with taps."""

    run: Callable[..., Any]
    graph: Graph
    parameters: Sequence[tuple[int, str]]  # which inputs are wanted parameters, and their names when it was compiled
    n: Size
    positions: Size | None
    _as: dict[tuple[str, ...], tuple[Hashable, list[list[str]]]] = field(default_factory=dict)

    def known_as(self, names: tuple[str, ...]) -> tuple[Hashable, list[list[str]]]:
        """Its structure, and what is told of what leaves, with other parameters in the place of its own: torch uses
        what it has compiled for one block of a model for others that are alike."""
        if names not in self._as:
            other = dict(zip((name for _, name in self.parameters), names, strict=True))
            told = [[other.get(each, each) for each in form] for form in self.graph.told]
            self._as[names] = _renamed(self.graph.pattern.structure, other), told
        return self._as[names]


@dataclass
class Call:
    """One call of a model whose parts are compiled with taps."""

    courses: Sequence[Course]  # what was learnt of such calls
    are_sizes_known: bool  # whether this was with these sizes, so that more parts may be compiled
    wanted: Mapping[str, nn.Parameter]
    forms: Callable[[frozenset[str]], Sequence[Tap]]  # for these parameters
    frozen: frozenset[int]
    n: int
    positions: int | None
    before: int  # samples that come before
    leaf: Leaf
    make_tap: Callable[[tuple[int, ...]], Tensor]
    in_cuda_graphs: bool
    raw: RawTensors
    guard: Guard | None  # of graphs that do not compute the gradients of parameters
    outlets: list[Outlet] = field(default_factory=list)
    between: list[list[Node]] = field(default_factory=list)  # nodes before each part, and after the last
    ran: int = 0  # parts
    is_unknown: bool = False  # whether what it met was not learnt yet
    is_ambiguous: bool = False  # whether sizes could not be told apart

    def __post_init__(self) -> None:
        self._wires = Wires(self.leaf)
        self._names = {id(parameter): name for name, parameter in self.wanted.items()}
        self._device = next(iter(self.wanted.values())).device

    def _unknown(self, why: str) -> Unknown:
        self.is_unknown = True
        return Unknown(why)

    # ---- while torch compiles ---------------------------------------------------------------------------------

    def compile(
        self, inner: Callable[..., Any], graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> _Compiled:
        """Compile a part: the next of a course that was learnt."""
        parts = self._fitting(inputs)
        names = parts[0].names
        forms = self.forms(names) if names else []
        n = self._size(graph, self.n)
        positions = self._size(graph, self.positions) if self._takes_positions(forms) else None
        taps = [
            shape for form in forms for shape in form.shapes(n.value, None if positions is None else positions.value)
        ]
        none = frozenset[int]()  # a part that leaves nothing is as torch compiles it
        trace = Instrumentation(
            [part.pattern for part in parts], forms, self._chosen(names), self.frozen if names else none, len(taps),
            in_cuda_graphs=self.in_cuda_graphs, inputs=lines_of(graph),
        )  # fmt: skip
        if forms:
            given = self._given(forms)
            sizes = [(n.value, *each.shape[1:]) if by_sample else tuple(each.shape) for each, by_sample in given]
            like = self.make_tap(())
            tensors = [(shape, like.dtype, True) for shape in taps]
            tensors += [(size, each.dtype, False) for size, (each, _) in zip(sizes, given, strict=True)]
            graph, added = with_inputs(graph, tensors, like.device, hold)
            inputs = [*inputs, *added]
        try:
            with tracing(trace):
                run = instrumented(inner, graph, inputs, **options)
        except Exception:
            self.is_unknown |= trace.is_unknown
            raise
        if trace.graph is None:
            raise Untappable("the backend does not differentiate what it compiles")
        by_id = {id(parameter): name for name, parameter in trace.parameters.items()}
        own = [(k, by_id[id(each)]) for k, each in enumerate(inputs) if id(each) in by_id]
        return _Compiled(run, trace.graph, own, n.where, None if positions is None else positions.where)

    def _size(self, graph: torch.fx.GraphModule, size: int | None) -> Found:
        found = None if size is None else size_among(graph, size)
        if found is None:
            self.is_ambiguous = True
            raise Ambiguous("it has as many samples as positions, or as another size that may change")
        return found

    def _takes_positions(self, forms: Sequence[Tap]) -> bool:
        t = self.positions
        return t is not None and any(form.shapes(self.n, t) != form.shapes(self.n, t + 1) for form in forms)

    def _fitting(self, inputs: Sequence[Any]) -> list[Part]:
        """The next parts of courses, as they were learnt; those that use most of the parameters given."""
        if not self.are_sizes_known:
            raise self._unknown("these sizes were not learnt yet")
        here = {self._names[id(each)] for each in inputs if id(each) in self._names}
        parts = [course.parts[self.ran] for course in self.courses if len(course.parts) > self.ran]
        parts = [part for part in parts if here.issuperset(part.pattern.expected)]
        if not parts:
            raise self._unknown("a part was not learnt yet")
        most = max((part.names for part in parts), key=len)
        return [part for part in parts if part.names == most]

    def _chosen(self, names: frozenset[str]) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.wanted.items() if name in names}

    def _given(self, forms: Sequence[Tap]) -> list[tuple[Tensor, bool]]:
        """What reducers are given, and whether that has a row for each sample."""
        return [
            (each, form.in_order or form.by_sample)
            for form in forms for each in form.given(self.before, self.n, self._device)
        ]  # fmt: skip

    # ---- while it runs ----------------------------------------------------------------------------------------

    def run(self, part: _Compiled, given: Sequence[Any]) -> Any:
        """Run a part, if it is the next of a course that was learnt."""
        if _size(part.n, given) != self.n or (part.positions and _size(part.positions, given) != self.positions):
            raise self._unknown("a part is compiled for another number of samples")
        names = tuple(self._names.get(id(given[k]), "") for k, _ in part.parameters)
        structure, told = part.known_as(names)
        wires, between = self._wires.describe([edge for edge in edges_of(given) if edge[0] is not None])
        self.between.append(between)
        learnt = self._follow(frozenset(names), structure, (wires, self.raw.describe(given)))
        if not names:
            outputs = part.run(*given)
        else:
            if self._order(names) != self._order([name for _, name in part.parameters]):
                raise self._unknown("a part is compiled for parameters in another order")
            outputs = self._tapped(part, given, Graph(learnt.pattern, told), learnt.names)
        self._wires.add(self.ran, edges_of(outputs))
        self.raw.add(self.ran, outputs)
        self.ran += 1
        return outputs

    def _order(self, names: Sequence[str]) -> list[int]:
        """The order of the block's parameters among these."""
        places = {name: k for k, name in enumerate(self.wanted)}
        return sorted(range(len(names)), key=lambda k: places[names[k]])

    def _follow(self, names: frozenset[str], structure: Hashable, wires: Hashable) -> Part:
        """Go on with the courses whose next part is this one."""

        def fits(course: Course) -> bool:
            part = course.parts[self.ran] if self.ran < len(course.parts) else None
            return part is not None and (part.names, part.wires, part.pattern.structure) == (names, wires, structure)

        self.courses = [course for course in self.courses if fits(course)]
        if not self.courses:
            raise self._unknown("its parts come in an order that was not learnt yet")
        return self.courses[0].parts[self.ran]

    def _tapped(self, part: _Compiled, given: Sequence[Any], graph: Graph, names: frozenset[str]) -> Sequence[Any]:
        forms = self.forms(names)
        shapes = [shape for form in forms for shape in form.shapes(self.n, self.positions)]
        taps = [self.make_tap(shape) for shape in shapes]
        *outputs, held = part.run(*given, *taps, *(each for each, _ in self._given(forms)))
        if held.grad_fn is None:
            raise Untappable("the backend does not differentiate what it compiles")
        if self.guard is not None:
            seams.on_node(held.grad_fn, self.guard)
        self.outlets.append(Outlet(weakref.ref(taps[0]), graph, forms, len(taps), names))
        return tuple(outputs)

    def inside(self) -> frozenset[Node]:
        """The nodes at which parts end."""
        return self._wires.nodes()

    def finish(self, outputs: Sequence[Tensor]) -> Course:
        """The call is over: the course that it took."""
        for course in self.courses:
            ends = [outputs[k] for k in sorted(course.used) if k < len(outputs)]
            wires, between = self._wires.describe(edges_of(ends))
            if len(course.parts) == self.ran and wires == course.wires:
                self.between.append(between)
                return course
        raise self._unknown("its outputs do not come from its parts as they did when they were learnt")


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same structure with other names of parameters."""
    if isinstance(value, tuple | frozenset):
        return type(value)(_renamed(each, names) for each in value)
    return names.get(value, value) if isinstance(value, str) else value


def _size(where: Size, given: Sequence[Any]) -> int:
    return where if isinstance(where, int) else given[where[0]].shape[where[1]]


def parts_backend(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for torch.compile: the user's own, given each part of the model with taps."""

    def compile_(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        part = _now().compile(inner, graph, inputs, **options)
        return partial(_run, part)

    return compile_


def _run(part: _Compiled, *given: Any) -> Any:
    return _now().run(part, given)


def _now() -> Call:
    call: Call | None = getattr(_local, "call", None)
    if call is None:
        raise Untappable("a compiled model was called outside the block that compiled it")
    return call


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """The parts that run within belong to this call."""
    _local.call = call
    try:
        yield
    finally:
        _local.call = None
