"""Reading what nodes have saved inside a checkpoint, more than once.

A non-reentrant checkpoint lets each saved tensor be unpacked once in a backward, and computes its region again for the
first. A node that is called again needs its tensors again. While torch's own hooks are on top, hooks of ours go over
them that ask torch once and keep the answer until they are told to forget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from unsum.graph.nodes import Node
from unsum.nested import leaves
from unsum.seams.checkpoints import saved_hooks
from unsum.seams.nodes import SAVED, current_backward, saved_tensors

_SMALL = 1 << 28  # bytes
_RESULT = f"{SAVED}result"


class _Box:
    """What torch's checkpoint has packed, and the tensor once it was unpacked."""

    __slots__ = ("inner", "tensor", "unpack")

    def __init__(self, inner: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.inner, self.unpack = inner, unpack
        self.tensor: Tensor | None = None


def saved_by(node: Node, *, results: bool = True) -> Iterator[Tensor]:
    """The tensors that a node has saved; without `results`, those of them that it was given."""
    for name in saved_tensors(type(node)):
        if not results and name.startswith(_RESULT):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed, or changed in place since
            continue
        yield from (tensor for _, tensor in leaves(value) if tensor.layout == torch.strided)


def memory_of(tensor: Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none of its own."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor subclass without memory of its own
        return None


class Saved:
    """Keeps what checkpoints unpack, for the time of a sweep or of a backward."""

    def __init__(self) -> None:
        self._open: list[_Box] = []
        self._reading = 0  # whether it is we who read, inside a backward
        self.is_needed = False  # whether there was a checkpoint

    def over_checkpoint(self) -> AbstractContextManager[Any]:
        """Hooks of ours for what is computed within, if a checkpoint's own are on top."""
        top = saved_hooks(True)
        if top is None or "_checkpoint_hook." not in getattr(top[1], "__qualname__", ""):
            return contextlib.nullcontext()
        pack, unpack = top
        self.is_needed = True
        return torch.autograd.graph.saved_tensors_hooks(lambda t: _Box(pack(t), unpack), self._unpack)

    def _unpack(self, box: _Box) -> Tensor:
        """Keep what we read, until its node runs: a node that takes its own tensors is the last to need them, and what
        a checkpoint spares would be lost if they were kept to the end of the backward."""
        is_ours = bool(self._reading) or current_backward() == -1
        if box.tensor is None:
            tensor = box.unpack(box.inner)
            if is_ours:
                box.tensor = tensor
                self._open.append(box)
            return tensor
        tensor = box.tensor
        if not is_ours:
            box.tensor = None
        return tensor

    def read_by(self, hook: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
        """A hook whose reads inside a backward are ours."""

        def reading(place: int, grads: Any) -> None:
            self._reading += 1
            try:
                hook(place, grads)
            finally:
                self._reading -= 1

        return reading

    @contextlib.contextmanager
    def once(self, *, keep: bool) -> Iterator[None]:
        """Outside a backward every unpacking computes its region again; within this, each region once. With `keep`,
        small regions are not computed again in the backward either, so that the user's hooks in them fire as often as
        without us."""
        group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
        try:
            with contextlib.nullcontext() if group is None else group():
                yield
        finally:
            held = sum(box.tensor.nbytes for box in self._open if box.tensor is not None)
            if not keep or held > _SMALL:
                self.forget()

    def forget(self) -> None:
        """Let go of the tensors; they are computed again when they are needed again."""
        for box in self._open:
            box.tensor = None
        self._open.clear()
