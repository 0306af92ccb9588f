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

from unsum.seams.nodes import VIEW, number_of, token
from unsum.seams.tensors import version_of

_EMPTY, _NONE = torch.empty(0), torch.Size()
_tuple: Any = tuple.__new__  # a named tuple by way of its own class takes twice as long
NodeId = tuple[int, object]  # its number, and a token: threads number their nodes independently. None: by its number
_Strided = tuple[torch.Size, tuple[int, ...], tuple[int, ...], int]  # of a base, and strides and offset of the view


class LostError(Exception):
    """The gradient of the old value cannot be told from others; the text says why."""


def _counter(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter, and nothing else."""
    counter = tensor.detach()
    try:
        counter.data = _EMPTY
    except (RuntimeError, TypeError):  # a sparse tensor, or a subclass
        counter.data = tensor.new_empty(0)
    return counter


class Changes:
    """Tells whether the memory of a tensor has been changed in place since. Holds neither the memory nor the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self._counter = _counter(tensor)
        self._version = version_of(self._counter)

    def __bool__(self) -> bool:
        return version_of(self._counter) != self._version


class Anchor(NamedTuple):
    """Where to find the gradient of a view again. Holds no memory and no part of the graph."""

    counter: Tensor
    version: int
    chain: tuple[NodeId, ...]  # the view's node, …, the base's; empty where the base cannot stand for the view
    output: int  # which output of the base's node
    view: torch.Size
    strided: _Strided | None  # None: `base.view(...)`, which has its elements in the same order

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
        if self.strided is None:
            return grad.clone(memory_format=torch.contiguous_format).view(self.view)
        shape, stride, view_stride, offset = self.strided
        return grad.new_empty_strided(shape, stride).copy_(grad).as_strided(self.view, view_stride, offset)

    def to_base(self, grad: Tensor, base: torch.Size) -> Tensor:
        """The gradient of the base, which has this shape, from that of the view."""
        if self.strided is None:
            return grad.clone(memory_format=torch.contiguous_format).view(base)
        shape, stride, view_stride, offset = self.strided
        whole = grad.new_empty_strided(shape, stride)
        whole.as_strided(self.view, view_stride, offset).copy_(grad)
        return whole


def anchor(tensor: Tensor, base: Tensor) -> Anchor | None:
    """Where the gradient of `tensor`, a view of `base`, will be found if it is changed in place; None where a hook on
    it suffices."""
    top: Any = tensor.grad_fn
    bottom: Any = base.grad_fn
    if bottom is None and tensor.is_inference():
        return None
    counter = _counter(tensor)
    version = version_of(counter)
    if bottom is None:
        return Anchor(counter, version, (), 0, _NONE, None)
    number = number_of(bottom)
    if type(top) is VIEW and number_of(top) == number + 1:  # as linears return: no node was made between the two
        chain = (number + 1, None), (number, token(bottom))
        return _tuple(Anchor, (counter, version, chain, base.output_nr, tensor.shape, None))  # type: ignore[no-any-return]
    if base.numel() != tensor.numel() or base.dtype != tensor.dtype or not _is_dense(base):
        return Anchor(counter, version, (), 0, _NONE, None)
    offset = int(tensor.storage_offset() - base.storage_offset())
    strided = base.shape, base.stride(), tensor.stride(), offset
    return Anchor(counter, version, _chain(top, bottom), base.output_nr, tensor.shape, strided)


def _is_dense(base: Tensor) -> bool:
    """Whether its elements fill its memory: then a view with as many is the same ones, perhaps rearranged."""
    return base.layout == torch.strided and (
        base.is_contiguous() or (base.dim() == 4 and base.is_contiguous(memory_format=torch.channels_last))
    )


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


def _is(node: Any, identity: NodeId) -> bool:
    number, mark = identity
    return number_of(node) == number and (mark is None or token(node) is mark)


def _place(node: Any, chain: tuple[NodeId, ...]) -> int | None:
    return next((i for i, identity in enumerate(chain) if _is(node, identity)), None)


def _chain(top: Any, bottom: Any) -> tuple[NodeId, ...]:
    chain: list[NodeId] = []
    for _ in range(16):
        chain.append((number_of(top), token(top)))
        if top == bottom:
            return tuple(chain)
        below = top.next_functions
        if not below or below[0][0] is None:
            return ()
        top = below[0][0]
    return ()
