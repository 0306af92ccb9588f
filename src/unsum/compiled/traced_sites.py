"""Sites inside a compiled model: values leave it as further outputs, gradients through taps.

Torch's compiler reads the hooks of modules when it compiles them. So a model is compiled once more with hooks that say
"a module is entered" and "a module is left" (`hooks`). In the graph that the user's backend is given these calls are
gone, and in their place are further outputs, and hooks on the tensors whose gradients are wanted. Where a module's
share of the gradient of an argument is wanted, what the graph computes between the two calls reads an alias of the
argument. (The module's own code sees the argument itself, of which it may read more than the numbers.) Nothing of the
model is computed in another way. A tap is an input that nothing uses and that has the shape of one such tensor; the
compiled backward returns the tensor's gradient as that of the tap.

What cannot be told apart in this way raises `Untappable` while torch compiles, and the model runs eagerly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum.compiled import site_session
from unsum.compiled.pattern import Untappable
from unsum.compiled.traced import Choice, Gradient, Traced, Value
from unsum.graph.nodes import Edge, Node, edge_of
from unsum.seams.compiling import (
    Shapes,
    allow_in_graph,
    copied,
    may_stand_for_hook,
    registers_hook,
    run_as_it_is,
    with_inputs,
)
from unsum.seams.tensors import memory_number
from unsum.types import Kind, Path

_local = threading.local()


class Asking(Protocol):
    """A call of a compiled model in a block that asks for sites; its modules are known by number."""

    @property
    def copies(self) -> bool: ...  # whether values are copied where they are seen
    @property
    def compares_versions(self) -> bool: ...  # whether a value that is changed in place afterwards is never read

    def choose(self, place: int, kinds: Sequence[Kind], found: Mapping[Path, Tensor]) -> Sequence[Choice]:
        """Which tensors of a module's arguments or output are wanted, of these kinds."""
        ...

    def enter(self, place: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called outside the compiled parts of a model with graph breaks."""
        ...

    def leave(self, place: int, module: nn.Module, args: Any, output: Any) -> Any:
        """The same, after it."""
        ...

    def ran(self, traced: Traced, values: Sequence[Tensor], node: Node, taps: range, inner: Sequence[Edge]) -> None:
        """The compiled model has run: the values wanted, the node of its backward, where the taps are in it, and where
        those of its outputs are from which it computes others."""
        ...


# ---- what torch reads while it compiles ----------------------------------------------------------------------------


def _entered(place: int, paths: tuple[Path, ...], *tensors: Tensor) -> None:
    """Stands in the graph where a module is entered, with the tensors among its arguments."""


def _left(place: int, paths: tuple[Path, ...], *tensors: Tensor) -> None:
    """Stands in the graph where a module is left, with the tensors in its output."""


_KINDS: dict[Any, tuple[Kind, ...]] = {_entered: ("input", "grad_input"), _left: ("output", "grad_output")}


def _flat(value: Any, path: Any, paths: list[Any], tensors: list[Tensor]) -> None:
    """The tensors in a nested value, as `nested.leaves` gives them; in words that torch's compiler reads."""
    if isinstance(value, Tensor):
        paths.append(path)
        tensors.append(value)
    elif isinstance(value, list | tuple):
        for k, each in enumerate(value):
            _flat(each, (*path, k), paths, tensors)
    elif isinstance(value, dict):
        for key, each in value.items():
            _flat(each, (*path, key), paths, tensors)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            _flat(getattr(value, name), (*path, name), paths, tensors)


def hooks(place: int, *, waits: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What torch reads before and after each call of a module. `waits`: a gradient is wanted, so that a module which
    returns an argument returns an alias. Outside compiled parts the two are called."""
    enter, leave = _known_to_torch()

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not _is_in_dynamo():
            return enter(place, module, args, kwargs)
        paths: list[Any] = []
        tensors: list[Tensor] = []
        for k, each in enumerate(args):
            _flat(each, (k,), paths, tensors)
        _flat(kwargs, (), paths, tensors)
        _entered(place, tuple(paths), *tensors)
        return None

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if not _is_in_dynamo():
            return leave(place, module, args, output)
        paths: list[Any] = []
        tensors: list[Tensor] = []
        is_given = waits and isinstance(output, Tensor) and any(each is output for each in args)
        if is_given:
            output = output.view_as(output)
        _flat(output, (), paths, tensors)
        _left(place, tuple(paths), *tensors)
        return output if is_given else None

    for hook in (before, after):
        run_as_it_is(hook)
    return before, after


def _enter(place: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
    asking: Asking | None = getattr(_local, "asking", None)
    return None if asking is None else asking.enter(place, module, args, kwargs)  # None: of another thread


def _leave(place: int, module: nn.Module, args: Any, output: Any) -> Any:
    asking: Asking | None = getattr(_local, "asking", None)
    return None if asking is None else asking.leave(place, module, args, output)


@functools.cache
def _known_to_torch() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Tell torch's compiler which functions it is to leave as they are. (Not before they are needed: it takes a second
    to import.) Returns those that are called outside compiled parts."""
    for mark in _KINDS:
        allow_in_graph(mark)
    return torch.compiler.disable(_enter), torch.compiler.disable(_leave)


_is_in_dynamo = torch.compiler.is_dynamo_compiling


# ---- what is compiled ----------------------------------------------------------------------------------------------


def backend(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for torch.compile: the user's own, given the model with sites."""

    def compile_(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        return partial(_run, _compiled(inner, graph, inputs, options))

    return compile_


def _compiled(
    inner: Callable[..., Any], graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> Traced:
    made, asking = copied(graph), _now()
    traced = Traced(has_grad=torch.is_grad_enabled())
    (last,) = (node for node in made.graph.nodes if node.op == "output")
    traced.outputs = len(last.args[0])
    further, watched = _Rewriting(made, asking, traced).run()
    last.args = ((*last.args[0], *further),)
    with made.graph.inserting_before(last):
        made.graph.call_function(site_session.end, tuple(last.args[0]))
    inputs_of = [node for node in made.graph.find_nodes(op="placeholder") if _is_tensor(node)]
    with made.graph.inserting_before(next(node for node in made.graph.nodes if node.op != "placeholder")):
        made.graph.call_function(site_session.start, tuple(inputs_of))
    if watched:
        tensors = [node.meta["example_value"] for node in watched]
        traced.shapes = Shapes.among(made, [tuple(each.shape) for each in tensors])
        if traced.shapes is None:
            raise Untappable("the shape of a tensor is not known before the model runs")
        traced.kinds = [(each.dtype, each.device) for each in tensors]
        if len({device for _, device in traced.kinds}) > 1:
            raise Untappable("it is on several devices")
        given = [(each.shape, each.dtype, True) for each in tensors]
        made, added = with_inputs(made, given, tensors[0].device, site_session.hold)
        inputs = [*inputs, *added]
    made.recompile()
    with site_session.session(traced, compares_versions=asking.compares_versions) as session:
        traced.run = inner(made, inputs, **options)
    if watched and not session.is_complete:
        raise Untappable("the backend does not differentiate what it compiles")
    return traced


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


class _Rewriting:
    """Takes the calls that hooks have left in a graph out of it, and puts in what sees the tensors that are wanted."""

    def __init__(self, graph: torch.fx.GraphModule, asking: Asking, traced: Traced) -> None:
        self._graph, self._asking, self._traced = graph.graph, asking, traced
        self._inputs = {node: k for k, node in enumerate(self._graph.find_nodes(op="placeholder"))}
        (last,) = graph.graph.find_nodes(op="output")
        outputs = [(k, node) for k, node in enumerate(last.args[0]) if isinstance(node, torch.fx.Node)]
        self._outputs = {node: k for k, node in reversed(outputs)}  # the place of each
        values = [node.meta.get("example_value") for _, node in outputs]
        self._memories = {memory_number(value) for value in values if isinstance(value, Tensor)}
        self._further: list[Any] = []  # outputs
        self._watched: list[Any] = []  # nodes, by tap
        self._under_way: list[int] = []  # calls
        self._aliases: list[dict[Any, Any]] = []  # of calls under way: in the place of which nodes
        self._of: dict[Any, Any] = {}  # the node of which each alias is
        for inside in graph.modules():
            if (
                isinstance(inside, torch.fx.GraphModule)
                and inside is not graph
                and any(map(_is_mark, inside.graph.nodes))
            ):
                raise Untappable("a module is called inside a checkpoint, a loop or a condition that torch compiles")

    def run(self) -> tuple[list[Any], list[Any]]:
        """Returns the nodes of further outputs, and those whose gradients are wanted."""
        for node in list(self._graph.nodes):
            self._read_aliases(node)
            if _is_mark(node):
                with self._graph.inserting_before(node):
                    self._see(node)
                self._graph.erase_node(node)
        if self._under_way:
            raise Untappable("a module is entered in one compiled part and left in another")
        return self._further, self._watched

    def _read_aliases(self, node: Any) -> None:
        """In modules whose shares are wanted, a node reads aliases. A hook of the model's own is on the argument;
        from then on that node stands for the argument."""
        is_hook = registers_hook(node)
        for aliases in self._aliases:
            for before in node.all_input_nodes:
                if before not in aliases:
                    continue
                if is_hook:
                    aliases[node] = aliases[before]
                else:
                    node.replace_input_with(before, aliases[before])

    def _see(self, mark: Any) -> None:
        place, paths, *nodes = mark.args
        at = dict(zip(map(tuple, paths), nodes, strict=True))
        found = {path: node.meta["example_value"] for path, node in at.items()}
        choices = self._asking.choose(place, _KINDS[mark.target], found)
        if mark.target is _entered:
            call = len(self._traced.calls)
            self._traced.calls.append(place)
            self._under_way.append(call)
            given = dict.fromkeys(at[choice.path] for choice in choices if choice.kind == "grad_input")
            self._aliases.append({node: self._alias(node) for node in given if self._has_gradient(node)})
            at = {path: self._aliases[-1].get(node, node) for path, node in at.items()}
            self._graph.call_function(site_session.begin, (call, *nodes, *self._aliases[-1].values()))
        else:
            call = self._under_way.pop() if self._under_way else -1
            if call < 0 or self._traced.calls[call] != place:
                raise Untappable("calls of modules are not nested in one another")
            if not set(nodes).isdisjoint(self._aliases.pop().values()):
                raise Untappable("a module returns what it was given inside another value, or by keyword")
        for choice in choices:
            if choice.kind in ("input", "output"):
                self._value(call, choice, at[choice.path])
            else:
                self._gradient(call, choice, at[choice.path])

    def _has_gradient(self, node: Any) -> bool:
        return self._traced.has_grad and bool(node.meta["example_value"].requires_grad)

    def _alias(self, node: Any) -> Any:
        """What a module reads in the place of this node."""
        alias = self._graph.call_method("view_as", (node, node))
        alias.meta["example_value"] = node.meta["example_value"]
        self._of[alias] = node
        return alias

    def _value(self, call: int, choice: Choice, node: Any) -> None:
        while node in self._of:
            node = self._of[node]
        if self._asking.copies:  # whatever is done to the tensor afterwards
            self._traced.values.append(Value(call, choice, "outputs", self._traced.outputs + len(self._further)))
            self._further.append(self._detached(self._graph.call_method("clone", (node,)), node))
            return
        if (given := self._inputs.get(node)) is not None:
            self._traced.values.append(Value(call, choice, "inputs", given))
        else:
            if node not in self._outputs:
                self._outputs[node] = self._traced.outputs + len(self._further)
                self._further.append(self._leaving(node))
            self._traced.values.append(Value(call, choice, "outputs", self._outputs[node]))
        self._graph.call_function(site_session.note, (len(self._traced.values) - 1, node))

    def _leaving(self, node: Any) -> Any:
        """A further output. A copy, if it is a view of the memory of an output: torch would then differentiate that
        memory in the place of the output, and nodes between them would get no gradient."""
        is_view = memory_number(node.meta["example_value"]) in self._memories
        return self._detached(self._graph.call_method("clone", (node,)) if is_view else node, node)

    def _detached(self, node: Any, like: Any) -> Any:
        detached = self._graph.call_method("detach", (node,))
        detached.meta["example_value"] = like.meta["example_value"].detach()
        return detached

    def _gradient(self, call: int, choice: Choice, node: Any) -> None:
        traced = self._traced
        if not self._has_gradient(node):
            traced.silent.append((traced.calls[call], choice.kind))
            return
        if may_stand_for_hook(self._of.get(node, node)):
            raise Untappable("a hook is on a tensor whose gradient is asked for, and torch does not say where")
        if choice.kind == "grad_input":
            self._graph.call_function(site_session.watch_share, (len(self._watched), node))
        else:
            self._graph.call_function(site_session.watch, (call, len(self._watched), node))
        traced.gradients.append(Gradient(call, choice))
        self._watched.append(node)


def _is_mark(node: Any) -> bool:
    return node.op == "call_function" and node.target in _KINDS


# ---- while it runs -------------------------------------------------------------------------------------------------


def _run(traced: Traced, *given: Any) -> Any:
    asking, taps = _now(), traced.taps(given)
    found = traced.run(*given, *taps)
    outputs = found[: traced.outputs]
    values = [(given if each.among == "inputs" else found)[each.place] for each in traced.values]
    node, where = None, range(0)
    if taps:
        node = found[-1].grad_fn
        begin = next(k for k, (child, _) in enumerate(node.next_functions) if _variable(child) is taps[0])
        where = range(begin, begin + len(taps))
        traced.find(node, outputs)
    inner = [edge_of(outputs[k]) for k in traced.inner if outputs[k].grad_fn is not None]
    asking.ran(traced, values, node, where, inner)
    return outputs


def _variable(node: Node) -> Any:
    return getattr(node, "variable", None)


def _now() -> Asking:
    asking: Asking | None = getattr(_local, "asking", None)
    if asking is None:
        raise Untappable("a compiled model was called outside the block that compiled it")
    return asking


@contextmanager
def asking(who: Asking) -> Iterator[None]:
    """What is compiled, or runs, within is asked for by this call."""
    before = getattr(_local, "asking", None)
    _local.asking = who
    try:
        yield
    finally:
        _local.asking = before
