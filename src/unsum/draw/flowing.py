"""How large the gradients are that flow through a graph which can still be walked.

The nodes are called by hand, so that no hook of the user's fires and no `.grad` changes. A Python function is never
called: its backward may compute anything, a whole backward of its own (a reentrant checkpoint does).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.draw.entering import raw_saved
from unsum.draw.openings import is_hooked
from unsum.errors import OptionError, UnsupportedError
from unsum.graph.nodes import Edge, Node, is_leaf, place
from unsum.graph.replay import replay
from unsum.seams.modes import without_functions
from unsum.seams.nodes import outputs_of, packed

Slot = tuple[Node, int]  # a node, and along which of its edges


@dataclass(frozen=True)
class Flowing:
    """What is known of the gradients that flow."""

    sizes: Mapping[Slot, float] = field(default_factory=dict)  # the norm of what is sent
    quiet: Mapping[Slot, str] = field(default_factory=dict)  # why there is none, where it is not for `silence`
    silence: str = ""
    arrived: Mapping[int, Tensor] = field(default_factory=dict)  # what leaves are given in all, by the tensor's id


FREED = "Its size is not known: the backward has freed the graph (retain_graph=True keeps it)"
BEFORE = "Its size is known after a backward, or with flow=True"
HOOKED = "Its size is not known: a checkpoint, or hooks on saved tensors, would have to compute it again"
OPAQUE = "Its size is not known: it comes out of a custom function, which is not called again (it may do anything)"
CHANGED = "Its size is not known: a hook or an edit has changed the gradient on the way"
NESTED = "Its size is not known: it comes out of an operation that cannot be called by hand"
SHAPED = "Its size is not known: the loss is no scalar"


def obstacle(nodes: Sequence[Node]) -> str:
    """Why nodes cannot be called again; empty if they can."""
    hooked = freed = False
    for node in nodes:
        if is_leaf(node):
            continue
        hooked = hooked or any(is_hooked(saved) for saved in raw_saved(node))
    if hooked:
        return HOOKED
    for node in nodes:
        freed = freed or (not is_leaf(node) and _is_freed(node))
    return FREED if freed else ""


def _is_freed(node: Node) -> bool:
    for name, _ in packed(node):
        try:
            getattr(node, name if not isinstance(node, BackwardCFunction) else "saved_tensors")
        except RuntimeError:  # freed, or changed in place since
            return True
    return False


def flows_of(
    loss: Tensor, nodes: Sequence[Node], changed: Collection[Edge], *, asked: bool | None, is_after: bool
) -> Flowing:
    """The norm of what each node sends along each edge, and why there is none where there is none. `changed` are the
    tensors whose gradient hooks or edits replace."""
    if asked is False or (asked is None and not is_after):
        return Flowing(silence=BEFORE)
    why = SHAPED if loss.numel() != 1 else obstacle(nodes)
    if why and asked:
        raise OptionError(f"flow=True: {why[0].lower()}{why[1:]}")
    if why:
        return Flowing(silence=why)
    with torch.random.fork_rng(), without_functions():
        return _Walk(changed).run(loss, nodes)


class _Walk:
    """From the loss to the leaves; what is not known is carried as the reason why."""

    def __init__(self, changed: Collection[Edge]) -> None:
        self._changed = changed
        self._front: dict[Node, list[Tensor | str | None]] = {}
        self._sizes: dict[Slot, float] = {}
        self._quiet: dict[Slot, str] = {}
        self._arrived: dict[int, Tensor | str] = {}

    def run(self, loss: Tensor, nodes: Sequence[Node]) -> Flowing:
        self._send(place(loss), torch.ones_like(loss))
        for node in nodes:
            if node in self._front:
                self._through(node, self._front.pop(node))
        arrived = {key: value for key, value in self._arrived.items() if isinstance(value, Tensor)}
        return Flowing(self._sizes, self._quiet, "", arrived)

    def _send(self, edge: Edge, value: Tensor | str) -> None:
        node, output = edge
        if is_leaf(node):
            self._arrived[id(node.variable)] = _added(self._arrived.get(id(node.variable)), value)
            return
        outputs = self._front.setdefault(node, [None] * len(outputs_of(node)))
        outputs[output] = _added(outputs[output], value)

    def _through(self, node: Node, grads: Sequence[Tensor | str | None]) -> None:
        results = self._results(node, grads)
        for slot, edge in enumerate(node.next_functions):
            if edge[0] is None:
                continue
            value = results if isinstance(results, str) else results[slot]
            if isinstance(value, str):
                self._quiet[node, slot] = value
            elif value is not None:
                self._sizes[node, slot] = size_of(value)
            if value is not None:
                self._send(edge, value)

    def _results(self, node: Node, grads: Sequence[Tensor | str | None]) -> Sequence[Tensor | None] | str:
        why = next((grad for grad in grads if isinstance(grad, str)), None)
        if why is not None:
            return why
        if any((node, output) in self._changed for output in range(len(grads))):
            return CHANGED
        if isinstance(node, BackwardCFunction):
            return OPAQUE
        try:
            return replay(node, [grad for grad in grads if not isinstance(grad, str)])
        except UnsupportedError:  # a nested tensor, for one
            return NESTED


def _added(known: Tensor | str | None, value: Tensor | str) -> Tensor | str:
    if known is None or isinstance(value, str):
        return value
    return known if isinstance(known, str) else known + value


def size_of(tensor: Tensor) -> float:
    """The norm of a gradient."""
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return float(torch.linalg.vector_norm(dense.to(torch.complex128 if dense.is_complex() else torch.float64)))


def differs(leaf: Tensor, arrived: Tensor, largest: float) -> bool:
    """Whether a leaf has stored something else than what is given to it. `largest` is the norm of the largest gradient:
    what is zero but for rounding (the bias of keys in attention) is never the same twice."""
    grad = leaf.grad
    if grad is None:
        return False
    wanted = arrived.detach().to(grad.dtype)
    near = 1e-2 if grad.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return abs(size_of(grad.detach().to_dense() - wanted.to_dense())) > near * max(
        size_of(grad), size_of(wanted), 1e-3 * largest
    )
