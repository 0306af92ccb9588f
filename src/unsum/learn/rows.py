"""The rows of inputs: tensors whose samples are known, remembered by where they lie in memory.

A node at which a weight meets data saves that data. Where what it has saved is a view of a remembered tensor, or a copy
that was followed, its rows say whose the node's positions are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from unsum.graph.layout import Layout, Regular, complete, mapped
from unsum.graph.nodes import Node
from unsum.graph.saved import saved_by
from unsum.learn.extents import Extent, addresses, as_a_whole, covers
from unsum.learn.follow import FILLS, KEEPS, MOVES, Known, goes_by_values, made_of, of_copy
from unsum.learn.within import RULES, TOGETHER
from unsum.nested import leaves
from unsum.seams.tensors import memory_number

_CHOOSING = ("Index", "Gather", "Scatter", "Take", "Masked", "UnsafeIndex")  # by whole numbers
_MULTIPLY = ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Linear", "Mv", "Addmv", "MkldnnRnn", "CudnnRnn", "Addr")


def _common(node: Node, dims: int) -> int:
    """How many of the first dimensions of what a node has saved may be those of its output."""
    name = node.name()
    if "Convolution" in name or "Conv2D" in name:
        return min(dims, 1)
    if "Attention" in name:
        return min(dims, 2)
    return dims - 1 if name.startswith(_MULTIPLY) else dims


class Rows:
    """The tensors of a block whose rows are known. They are remembered without being held."""

    def __init__(self) -> None:
        self._extents: dict[int, list[Extent]] = {}  # by the number of their memory
        self.asked: Collection[int] | None = None  # the calls of which it is asked; None: all

    def remember(
        self,
        tensor: Tensor,
        owners: Layout,
        n: int,
        call: int,
        reading: int = 0,
        *,
        is_given: bool = True,
        by_values: bool = False,
    ) -> None:
        """The owners of this tensor, in a call with n samples, are known: as it is read so, if it may be read in
        several ways."""
        if tensor.layout != torch.strided or not tensor.numel() or self._holds(tensor, call, reading):
            return
        try:
            storage = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            return
        if len(self._extents) > 1000:
            self._extents = {key: there for key, there in self._extents.items() if not there[0].storage.expired()}
        there = self._extents.setdefault(storage.cdata, [])
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        size = tensor.element_size()
        there.append(
            Extent(storage, shape, tensor.stride(), offset, size, owners, n, is_given, call, reading, by_values)
        )
        del there[:-64]

    def _holds(self, tensor: Tensor, call: int, reading: int) -> bool:
        there = self._extents.get(memory_number(tensor), ())
        return any((extent.call, extent.reading) == (call, reading) and covers(extent, tensor) for extent in there)

    def as_read(self, call: int, reading: int) -> Rows:
        """What would be remembered if a call were read in this way."""
        other = Rows()
        for key, there in self._extents.items():
            if own := [extent for extent in there if (extent.call, extent.reading) == (call, reading)]:
                other._extents[key] = own
        return other

    def choose(self, call: int, reading: int) -> None:
        """A call that could be read in several ways is to be read in this one."""
        for there in self._extents.values():
            there[:] = [extent for extent in there if extent.call != call or extent.reading == reading]
        self._extents = {key: there for key, there in self._extents.items() if there}

    def follow(self, function: Any, name: str, args: Any, kwargs: Any, made: Tensor) -> None:
        """A tensor was made of others, without a node. Where these are remembered, and the function moves numbers about
        or changes each by itself, so is what was made: its owners are found by calling the function on theirs."""
        if (
            not any(name in functions for functions in (MOVES, KEEPS, RULES, TOGETHER))
            or made.layout != torch.strided
            or not made.numel()
        ):
            return
        if kwargs.get("out") is not None:  # called again, it would write to the user's own
            return
        if memory_number(made) in self._extents:  # a view: known by where it lies
            return
        readings: dict[tuple[int, int], Known] = {}
        given = [tensor for _, tensor in leaves((args, kwargs))]
        for tensor in given:
            for extent in reversed(self._extents.get(memory_number(tensor), ())):
                known = readings.setdefault((extent.call, extent.reading), {})
                if id(tensor) not in known and covers(extent, tensor):
                    known[id(tensor)] = extent, tensor
        for (call, reading), known in readings.items():
            layout = made_of(function, name, args, kwargs, known, made) if known else None
            if layout is not None:
                n = max(extent.n for extent, _ in known.values())
                by_values = any(extent.by_values for extent, _ in known.values())
                by_values = by_values or goes_by_values(function, name, args, kwargs, known, made, layout)
                self.remember(made, layout, n, call, reading, is_given=False, by_values=by_values)

    def written(self, name: str, target: Tensor, others: Sequence[Tensor]) -> None:
        """A tensor is written to. What is changed number by number, without another remembered tensor, keeps its
        owners; of all else nothing is known any more."""
        is_kept = name.rstrip("_") in KEEPS or name in FILLS
        if not is_kept or any(memory_number(other) in self._extents for other in others):
            self._extents.pop(memory_number(target), None)

    def find_copies(self, given: Sequence[Tensor], nodes: Callable[[], Iterable[Node]]) -> None:
        """A function was given these tensors and has made these nodes. Where a node has saved a copy of what is
        remembered (a kernel wants it dense, or time first), the copy is remembered as well."""
        known = [
            (extent, tensor)
            for tensor in given
            if not is_lazy(tensor) and tensor.grad_fn is None and tensor.is_floating_point() and tensor.dim() > 1
            for extent in self._extents.get(memory_number(tensor), ())
            if covers(extent, tensor)
        ]
        if not known:
            return
        for node in nodes():
            for saved in saved_by(node):
                if saved.requires_grad or not saved.is_contiguous() or memory_number(saved) in self._extents:
                    continue
                for extent, tensor in known:
                    layout = of_copy(extent, tensor, saved)
                    if layout is not None:
                        self.remember(
                            saved, layout, extent.n, extent.call, extent.reading,
                            is_given=False, by_values=extent.by_values,
                        )  # fmt: skip

    def _extent(self, tensor: Tensor) -> Extent | None:
        """Where a tensor that is remembered, and of which this is a view, lies: of the calls that are asked about, the
        last that was given it."""
        there = self._extents.get(memory_number(tensor), ())
        if not there or not tensor.numel():
            return None
        asked = [extent for extent in there if self.asked is None or extent.call in self.asked]
        return next((extent for extent in reversed(asked) if covers(extent, tensor)), None)

    def forget(self) -> None:
        """Let go of everything."""
        self._extents.clear()

    def __bool__(self) -> bool:
        return bool(self._extents)

    def of(self, tensor: Tensor) -> Layout | None:
        """The owners of a tensor that is remembered, or of a view of all of it."""
        extent = self._extent(tensor)
        return None if extent is None else as_a_whole(extent, tensor)

    def are_saved_by(self, node: Node) -> bool:
        """Whether a node has saved rows of a tensor whose samples are known."""
        return any(self._extent(tensor) is not None for tensor in saved_by(node))

    def are_given_to(self, node: Node) -> bool:
        """Whether a node has saved rows of a tensor that the model was given."""
        return any((extent := self._extent(tensor)) is not None and extent.is_given for tensor in saved_by(node))

    def went_by_values(self, node: Node) -> bool:
        """Whether a node has saved rows that lie where numbers have said, which may say otherwise in another batch."""
        return any((extent := self._extent(tensor)) is not None and extent.by_values for tensor in saved_by(node))

    def owners(self, node: Node, shape: tuple[int, ...]) -> Layout | None:
        """The sample of every position of a node's output of this shape, from the rows of what the node has saved."""
        for tensor in saved_by(node):
            extent = self._extent(tensor)
            # Fewer dimensions stand for the first ones only if they are ids, as of an embedding.
            if extent is None or 0 in shape or not shape or not tensor.dim():
                continue
            if not tensor.is_floating_point() and node.name().startswith(_CHOOSING):
                continue  # which rows to take, not rows
            if tensor.dim() != len(shape) and (tensor.is_floating_point() or tensor.dim() > len(shape)):
                continue
            if (whole := as_a_whole(extent, tensor)) is not None and whole.dim < tensor.dim():
                if node.name().startswith("EmbeddingBag") and whole.n == shape[0] == whole.shape[0] // whole.block:
                    return Regular(shape, whole.n, 0, 1)  # the ids of a bag, all in a row
                same = tuple(tensor.shape[: whole.dim + 1]) == tuple(shape[: whole.dim + 1])
                if same and whole.dim < _common(node, tensor.dim()):
                    return Regular(shape, whole.n, whole.dim, whole.block)
                continue
            if extent.dims is None:
                continue
            own = extent.owner_at(addresses(tensor))
            for common in range(_common(node, own.dim()), 0, -1):
                if tuple(own.shape[:common]) != tuple(shape[:common]):
                    continue
                rest = own.flatten(common) if own.dim() > common else own[..., None]
                if bool((rest == rest[..., :1]).all()):
                    return _regular(rest[..., 0], extent.owners, shape)
        return None


def _regular(rows: Tensor, owners: Layout, shape: tuple[int, ...]) -> Layout:
    found = complete(rows, owners.n) if isinstance(owners, Regular) else None
    if isinstance(found, Regular):
        return Regular(shape, found.n, found.dim, found.block)
    return mapped(rows).widened(shape)
