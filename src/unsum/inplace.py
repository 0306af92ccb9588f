"""The gradient of a view whose memory was changed in place afterwards.

`nn.Linear` with a bias returns, for an input of three dimensions, a view of its matrix product. When such a tensor or
an alias of it is then changed in place (`+=`, `ReLU(inplace=True)`), autograd hangs a new node on the *base* and the
view's own node is left out of the graph: a hook there never fires, with no message. What stays in the graph is the
node of the base, and its gradient is that of the old value, provided that nothing else used the old value. So: note
where the base is, see before each backward whether the memory was changed, and look for the base in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_EMPTY = torch.empty(0)
NodeId = tuple[str, int, object]  # its name, its number, and a token: threads number their nodes independently


class LostError(Exception):
    """The gradient of the old value cannot be told from others; the text says why."""


class Changes:
    """Tells whether the memory of a tensor has been changed in place since. Holds neither the memory nor the graph."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._counter = counter = tensor.detach()
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
        counter.data = _EMPTY if is_plain else tensor.new_empty(0)  # lets go of the memory, keeps the version counter
        self._version = counter._version

    def __bool__(self) -> bool:
        return self._counter._version != self._version


class Anchor(NamedTuple):
    """Where to find the gradient of a view again. Holds no memory and no part of the graph."""

    changes: Changes
    chain: tuple[NodeId, ...]  # the view's node, …, the base's; empty where the base cannot stand for the view
    output: int  # which output of the base's node
    base: tuple[torch.Size, tuple[int, ...]]
    view: tuple[torch.Size, tuple[int, ...], int]

    def find(self, roots: Sequence[Any]) -> Any | None:
        """The base's node in the graph below `roots`; None if it is not there. Raises LostError."""
        if not self.chain:
            raise LostError("it is a view of a part of another tensor")
        found = None
        for node in walk(roots):
            for below, output in node.next_functions:
                if below is None or (place := _place(below, self.chain)) is None:
                    continue
                if place == len(self.chain) - 1:
                    if output != self.output:
                        continue
                    found = below
                if place and not node.name().endswith("CopySlices") and not _is(node, self.chain[place - 1]):
                    raise LostError(f"the old value was also used by {node.name()}")
        return found

    def to_view(self, grad: Tensor) -> Tensor:
        """The gradient of the view, from that of the base."""
        shape, stride = self.base
        return grad.new_empty_strided(shape, stride).copy_(grad).as_strided(*self.view)

    def to_base(self, grad: Tensor) -> Tensor:
        """The gradient of the base, from that of the view."""
        shape, stride = self.base
        whole = grad.new_empty_strided(shape, stride)
        whole.as_strided(*self.view).copy_(grad)
        return whole


def anchor(tensor: Tensor) -> Anchor | None:
    """Where the gradient of `tensor` will be found if it is changed in place; None where a hook on it suffices."""
    base = tensor._base
    if base is None or tensor.is_inference():
        return None
    node = base.grad_fn
    whole = node is not None and _is_whole(tensor, base)
    return Anchor(
        Changes(tensor),
        _chain(tensor.grad_fn, node) if whole else (),
        base.output_nr,
        (base.shape, base.stride()) if whole else (torch.Size(), ()),
        (tensor.shape, tensor.stride(), int(tensor.storage_offset() - base.storage_offset())),
    )


def _is_whole(view: Tensor, base: Tensor) -> bool:
    """Whether the two have the same elements, so that the gradient of one is that of the other rearranged."""
    dense = base.layout == torch.strided and (
        base.is_contiguous() or (base.dim() == 4 and base.is_contiguous(memory_format=torch.channels_last))
    )
    return dense and base.numel() == view.numel() and base.dtype == view.dtype


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph below these tensors or edges, once."""
    waiting: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    waiting = [node for node in waiting if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


class Token:
    """Belongs to one node and lives as long as it does."""

    __slots__ = ("__weakref__",)


def token(node: Any) -> Token:
    """The token of a node, kept in the node: recognises it without holding it."""
    notes = node.metadata
    found: Token | None = notes.get("unsum")
    if found is None:
        found = notes.setdefault("unsum", Token())  # in one go: another thread may do the same
    return found


def _id(node: Any) -> NodeId:
    return node.name(), node._sequence_nr(), token(node)


def _is(node: Any, identity: NodeId) -> bool:
    name, number, mark = identity
    return node._sequence_nr() == number and node.name() == name and token(node) is mark


def _place(node: Any, chain: tuple[NodeId, ...]) -> int | None:
    return next((i for i, identity in enumerate(chain) if _is(node, identity)), None)


def _chain(top: Any, bottom: Any) -> tuple[NodeId, ...]:
    chain: list[NodeId] = []
    for _ in range(16):
        chain.append(_id(top))
        if top == bottom:
            return tuple(chain)
        below = top.next_functions
        if not below or below[0][0] is None:
            return ()
        top = below[0][0]
    return ()
