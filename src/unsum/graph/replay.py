"""Calling the nodes of the graph by hand, with other gradients.

By linearity, a node that is given one sample's part of its gradient returns that sample's part of what it hands on.
Not the engine calls it but we, so that no hook fires and no `.grad` changes. A node may run a backward of its own
inside its backward (a reentrant checkpoint does): that too is done by hand.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointError

from unsum import seams
from unsum.errors import UnsupportedError
from unsum.graph.nodes import Edge, Node, is_leaf, ordered, place
from unsum.seams.nodes import current_backward, outputs_of
from unsum.seams.sharding import POST_BACKWARD
from unsum.seams.tensors import put_version_back, version_of

Grads = Sequence[Tensor | None]


Heard = tuple[Sequence[Any], Grads]  # what a node differentiated by itself: roots and their gradients


def replay(node: Node, grads: Grads, heard: list[Heard] | None = None, *, still: bool = False) -> list[Tensor | None]:
    """What the node sends along each of its edges, fitted to the tensor that it is the gradient of. `heard` gets the
    backwards that it ran inside, if they were to bring gradients to leaves. With `still`, what cancels is nothing."""
    with torch.no_grad():
        results = _python(node, grads, heard) if isinstance(node, BackwardCFunction) else _call(node, grads)
    fitted: list[Tensor | None] = []
    for (child, output), value in zip(node.next_functions, results, strict=True):
        fitted.append(None if child is None or value is None else fit(value, child, output, still=still))
    return fitted


def _call(node: Node, grads: Grads) -> Sequence[Tensor | None]:
    try:
        result = _elsewhere(lambda: node(*grads)) if remembers_memory(node) else node(*grads)
    except RuntimeError as error:
        raise UnsupportedError(
            f"the backward of {node.name()} cannot be run a second time, which per-sample gradients need: {error}.",
            write="with unsum.gradients(model, params='head.*') as g: ...  # parameters that lie after it alone",
        ) from error
    return result if isinstance(result, tuple) else (result,)


def remembers_memory(node: Node) -> bool:
    """Whether a node is cuDNN's attention. Its backward remembers, thread by thread, the strides of the first gradient
    of each shape, and gives wrong results for gradients with other strides. A call by hand must not come first."""
    return bool(node.name().startswith("ScaledDotProductCudnn"))


def nested(where: str) -> UnsupportedError:
    """The error for a nested tensor at this place."""
    return UnsupportedError(
        f"{where}: unsum cannot tell the samples of a nested tensor apart; pad it instead.",
        write="x = torch.nested.to_padded_tensor(x, 0.0)",
    )


def _elsewhere(call: Callable[[], Any]) -> Any:
    """Call nodes in a thread of its own: what they remember is not seen by the user's thread, and torch does not take
    them for a part of the backward that runs there."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def within() -> Any:
        with torch.no_grad(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            return call()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(within).result()


def _python(node: Node, grads: Grads, heard: list[Heard] | None) -> Sequence[Tensor | None]:
    """A custom autograd.Function: its `apply` returns a result for every argument, tensors or not."""
    full = [zeros(node, i) if grad is None else grad for i, grad in enumerate(grads)]
    if type(node).__name__ == POST_BACKWARD:  # it must not average anything now
        result: Any = (None, *full)
    else:
        result = _applied(node, full, heard)
    results = result if isinstance(result, tuple) else (result,)
    needed = iter([r for r, needs in zip(results, node.needs_input_grad, strict=False) if needs])
    return [None if child is None else next(needed, None) for child, _ in node.next_functions]


def _applied(node: Node, grads: Sequence[Tensor], heard: list[Heard] | None) -> Any:
    """What the backward of a custom Function returns. What it deletes from its context is put back."""
    held = dict(node.__dict__)
    try:
        with _instead_of_the_engine([] if heard is None else heard), _unwritten(node):
            return node.apply(*grads)
    except CheckpointError as error:  # what it has saved can be had once alone
        raise UnsupportedError(
            f"{node.name()} is called inside a checkpoint, where it cannot be run a second time: it is called in no "
            "module of the model, or the checkpoint was not there in the steps before.",
            write=[
                "class Layer(nn.Module): ...  # calls it in its forward: checkpoint(layer, x, use_reentrant=False)",
                "loss_fn(model(x), y).backward()  # again, if the checkpoint is new: this step will be watched",
            ],
        ) from error
    finally:
        node.__dict__.update(held)


_tried: weakref.WeakSet[Any] = weakref.WeakSet()  # nodes that were seen to leave what they saved as it is


@contextlib.contextmanager
def _unwritten(node: Node) -> Iterator[None]:
    """A context for a call of a custom Function's backward: raises if it writes to the tensors that the Function has
    saved (through `.data`, torch does not notice), and puts them back. Only a node's first call by hand is looked at,
    outside the user's backward."""
    held = [] if current_backward() != -1 or node in _tried else _saved_by(node)
    before = [(tensor, version_of(tensor), tensor.clone()) for tensor in held]
    changed = []
    try:
        yield
    finally:
        changed = [(t, v, c) for t, v, c in before if version_of(t) != v or not _is_same(t, c)]
        for tensor, version, copy in changed:
            with contextlib.suppress(RuntimeError):  # several of its places may be one in memory
                tensor.data.copy_(copy)
                put_version_back(tensor, version)
    if changed:
        raise UnsupportedError(
            f"the backward of {node.name()} changes what it has saved, so it cannot be run a second time, which "
            "per-sample gradients need.",
            write=[
                "y, = ctx.saved_tensors; y = y / 2  # in its backward: out of place",
                "with unsum.gradients(model, params='head.*') as g: ...  # parameters that lie after it alone",
            ],
        )
    if before:
        _tried.add(node)


def _saved_by(node: Node) -> list[Tensor]:
    """What a custom Function has saved, as far as it can be read and written."""
    try:
        saved = node.saved_tensors
    except RuntimeError:  # changed in place since: its backward does not read it, or fails by itself
        return []
    found = [each for each in saved if isinstance(each, Tensor) and each.layout == torch.strided]
    return [each for each in found if not each.is_meta and not each.is_inference()]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same numbers; NaN counts as the same."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def zeros(node: Node, output: int) -> Tensor:
    """A gradient of zeros for one of a node's outputs."""
    meta = outputs_of(node)[output]
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def fit(value: Tensor, child: Node, output: int, *, still: bool = False) -> Tensor:
    """A gradient as the engine would hand it on: dense, summed over what was broadcast, real where the tensor is. With
    `still`, a sum that cancels to rounding (a maximum that is subtracted for stability) is zero."""
    like: Any = child.variable if is_leaf(child) else outputs_of(child)[output]
    if value.layout == torch.jagged:
        raise nested(child.name())
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_complex() and not like.dtype.is_complex:
        value = value.real
    shape = tuple(like.shape)
    if tuple(value.shape) == shape:
        return value.to(like.dtype)
    total = value.sum_to_size(shape)
    if still:
        small = {torch.float64: 1e-13, torch.complex128: 1e-13}.get(value.dtype, 1e-5)
        total = torch.where(total.abs() <= small * value.abs().sum_to_size(shape), 0, total)
    return total.to(like.dtype)


def flow(roots: Sequence[Any], grads: Sequence[Tensor | None], stops: Collection[Edge] = ()) -> dict[Edge, Tensor]:
    """The gradients that arrive at leaves and at the edges at which to stop."""
    front: dict[Node, list[Tensor | None]] = {}
    arrived: dict[Edge, Tensor] = {}

    def send(edge: Edge, value: Tensor) -> None:
        node, output = edge
        if edge in stops or is_leaf(node):
            arrived[edge] = arrived[edge] + value if edge in arrived else value
            return
        outputs = front.setdefault(node, [None] * len(outputs_of(node)))
        known = outputs[output]
        outputs[output] = value if known is None else known + value

    for root, grad in zip(roots, grads, strict=True):
        edge = place(root)
        if edge[0] is not None:
            send(edge, torch.ones_like(root) if grad is None else grad)
    for node in ordered(list(front)):
        if node in front:
            for edge, value in zip(node.next_functions, replay(node, front.pop(node)), strict=True):
                if edge[0] is not None and value is not None:
                    send(edge, value)
    return arrived


@contextlib.contextmanager
def _instead_of_the_engine(heard: list[Heard]) -> Iterator[None]:
    """Backwards inside are done by hand, and every `.grad` is put back when the node has had its answer."""
    kept: dict[Tensor, Tensor | None] = {}

    def backward(roots: Sequence[Any], grads: Sequence[Tensor | None], inputs: Sequence[Any], accumulates: bool) -> Any:
        if accumulates:
            heard.append((roots, grads))
        wanted = [place(given) for given in inputs]
        arrived = (
            _elsewhere(lambda: apart(roots, grads, set(wanted)))
            if seams.is_narrow()
            else flow(roots, grads, set(wanted))
        )
        if not accumulates:
            return tuple(arrived.get(edge) for edge in wanted)
        for (node, _), value in arrived.items():
            if is_leaf(node):
                leaf = node.variable
                kept.setdefault(leaf, leaf.grad)
                leaf.grad = value if leaf.grad is None else leaf.grad + value
        return ()

    def apart(roots: Sequence[Any], grads: Sequence[Tensor | None], stops: set[Edge]) -> dict[Edge, Tensor]:
        with seams.instead_of_backward(backward):
            return flow(roots, grads, stops)

    with seams.instead_of_backward(backward):
        try:
            yield
        finally:
            for leaf, grad in kept.items():
                leaf.grad = grad
