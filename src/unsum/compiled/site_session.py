"""What sees the tensors of sites while torch writes down a model, as calls in the graph that it writes down.

Torch runs the graph with stand-ins for tensors, and differentiates it. Hooks on watched tensors note their
gradients, which leave as the gradients of taps. What would not be told apart raises `Untappable`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unsum import seams
from unsum.compiled.pattern import Untappable
from unsum.compiled.traced import Traced
from unsum.graph.nodes import Edge, Node, edge_of, ordered
from unsum.seams.nodes import next_number, number_of
from unsum.seams.tensors import base_of, version_of

_local = threading.local()


@contextmanager
def session(traced: Traced, *, compares_versions: bool) -> Iterator[Session]:
    """What torch writes down within is this model."""
    made = _local.session = Session(traced, compares_versions=compares_versions)
    try:
        yield made
    finally:
        _local.session = None
        made.forget()


class Session:
    """One run of the model with stand-ins for tensors, and the backward that follows."""

    def __init__(self, traced: Traced, *, compares_versions: bool) -> None:
        self.traced, self.is_complete = traced, False
        self._compares_versions = compares_versions  # a value that is changed in place afterwards is never read
        self.begin_again()

    def begin_again(self) -> None:
        """Torch runs the model several times."""
        self._starts: dict[int, tuple[int, frozenset[Node], list[tuple[Tensor, int]]]] = {}
        self._given: list[tuple[Tensor, int]] = []  # inputs
        self._noted: list[tuple[int | None, Tensor, int]] = []  # which value it is, if it is one
        self._watched: dict[int, Edge] = {}
        self._grads: dict[int, Tensor] = {}

    def start(self, inputs: Sequence[Tensor]) -> None:
        self._given = [(each, version_of(each)) for each in inputs]

    def begin(self, call: int, tensors: Sequence[Tensor]) -> None:
        versions = [(each, version_of(each)) for each in tensors]
        self._starts[call] = next_number(), frozenset(each.grad_fn for each in tensors), versions

    def note(self, value: int | None, tensor: Tensor) -> None:
        self._noted.append((value, tensor, version_of(tensor)))

    def watch(self, call: int, tap: int, tensor: Tensor) -> None:
        node, (start, given, versions) = tensor.grad_fn, self._starts[call]
        if any(version_of(each) != version for each, version in versions):
            raise Untappable("a module changes its argument in place")  # other names of it may lead elsewhere
        if node is None or number_of(node) < start or node in given:
            raise Untappable("a module returns what it was given, or a parameter")
        self.watch_share(tap, tensor)

    def watch_share(self, tap: int, tensor: Tensor) -> None:
        if base_of(tensor) is not None:
            self.note(None, tensor)  # if it is changed in place, its gradient comes elsewhere
        node = tensor.grad_fn
        self._watched[tap] = node, tensor.output_nr
        seams.on_gradient(
            tensor, partial(self._grads.__setitem__, tap)
        )  # among hooks of the model's own, in their order

    def end(self, outputs: Sequence[Any]) -> None:
        """The forward is over."""
        if any(version_of(each) != version and each.requires_grad for each, version in self._given):
            raise Untappable("it changes an input in place, through which gradients come")
        changed = [value for value, tensor, version in self._noted if version_of(tensor) != version]
        self._noted = []
        for value in changed:
            if value is None or not self._compares_versions:
                raise Untappable("a tensor is changed in place after it was seen")
            self.traced.values[value].is_changed = True
        below = [_edges(each) for each in outputs[: self.traced.outputs]]
        own = [edge_of(each) if edges else None for each, edges in zip(outputs, below, strict=False)]
        self.traced.inner = frozenset(
            k
            for k, edge in enumerate(own)
            if edge is not None and any(edge != own[j] and edge in edges for j, edges in enumerate(below))
        )
        for tap, edge in self._watched.items():
            self.traced.gradients[tap].reached_from = frozenset(k for k, edges in enumerate(below) if edge in edges)

    def forget(self) -> None:
        """Torch has compiled the model: no tensor of it is held."""
        self.begin_again()

    def finish(self, taps: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The backward is over: what leaves through the taps."""
        missing = [k for k, each in enumerate(self.traced.gradients) if each.reached_from and k not in self._grads]
        if missing:
            raise Untappable("a gradient does not come where it was waited for")
        self.traced.order, self.is_complete = list(self._grads), True
        return tuple(
            grad.to(tap.dtype) if (grad := self._grads.get(k)) is not None else None for k, tap in enumerate(taps)
        )


def _edges(tensor: Any) -> frozenset[Edge]:
    """The places in the graph that lead to a tensor, and its own."""
    if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
        return frozenset()
    return frozenset([edge_of(tensor), *(edge for node in ordered([tensor.grad_fn]) for edge in node.next_functions)])


class _Hold(torch.autograd.Function):
    """Where gradients leave. It is made first, so its backward runs last."""

    @staticmethod
    def forward(ctx: Any, *taps: Tensor) -> Tensor:
        _session().begin_again()
        ctx.session, ctx.taps = _session(), taps
        return taps[0].new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.session.finish(ctx.taps)


def hold(*taps: Tensor) -> Tensor:
    """Take in the taps: the first call of a graph."""
    return _Hold.apply(*taps)  # type: ignore[no-any-return]


def start(*inputs: Tensor) -> None:
    """Note the inputs of the graph."""
    _session().start(inputs)


def begin(call: int, *tensors: Tensor) -> None:
    """A module is entered."""
    _session().begin(call, tensors)


def note(value: int, tensor: Tensor) -> None:
    """A value is seen."""
    _session().note(value, tensor)


def watch(call: int, tap: int, tensor: Tensor) -> None:
    """The gradient of a tensor is wanted."""
    _session().watch(call, tap, tensor)


def watch_share(tap: int, tensor: Tensor) -> None:
    """The gradient of an alias is wanted, which a module reads in the place of an argument."""
    _session().watch_share(tap, tensor)


def end(*outputs: Any) -> None:
    """The outputs are there: the last call of a graph."""
    _session().end(outputs)


def _session() -> Session:
    now: Session | None = getattr(_local, "session", None)
    if now is None:
        raise Untappable("the backend runs what it was given, and compiles nothing")
    return now
