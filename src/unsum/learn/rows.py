"""Rows of tensors whose samples are known, found again in what nodes have saved.

A node at which a weight meets data saves that data. Where it is a view of a tensor whose samples are known, its rows
say whose the node's positions are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unsum.graph.layout import NOBODY, Layout, Regular, complete, mapped, regular, reshaped
from unsum.graph.nodes import Node
from unsum.graph.saved import saved_by
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


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a tensor lies in its memory, and its owners."""

    storage: StorageWeakRef  # while this is held, no other memory has its number
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    owners: Layout
    is_given: bool  # to the model, and not made of what was
    call: int  # the outermost call that it was given to

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)) + 1

    @cached_property
    def dims(self) -> list[int] | None:
        """The dimensions by their strides, the largest first; None where positions may share memory (`expand`, sliding
        windows): then parts of the tensor say nothing."""
        order = sorted((d for d, size in enumerate(self.shape) if size > 1), key=lambda d: self.stride[d])
        reach = 0
        for d in order:
            if self.stride[d] <= reach:
                return None
            reach += (self.shape[d] - 1) * self.stride[d]
        return order[::-1]

    def owner_at(self, addresses: Tensor) -> Tensor:
        """The sample of each address in this memory; NOBODY where the tensor has no number."""
        left = addresses - self.offset
        inside = left >= 0
        at = [torch.zeros_like(left) for _ in self.shape]
        for d in self.dims or ():
            at[d] = left.div(self.stride[d], rounding_mode="floor")
            inside &= at[d] < self.shape[d]
            left = left - at[d] * self.stride[d]
        inside &= left == 0
        index = tuple(torch.where(inside, coordinate, 0) for coordinate in at)
        return torch.where(inside, self.owners.owner().expand(self.shape)[index], NOBODY)


class Rows:
    """Remembers tensors whose samples are known, without holding them."""

    def __init__(self) -> None:
        self._places: dict[int, list[_Place]] = {}  # by the number of their memory
        self._prints: list[tuple[int, Tensor]] = []  # of inputs: how many numbers a sample has, and sums over them
        self.call = 0  # the outermost call under way
        self.asked: Collection[int] | None = None  # the calls of which it is asked; None: all

    def take_prints(self, tensor: Tensor, owners: Layout) -> None:
        """Remember an input by sums over each sample's numbers, to know copies of it."""
        if isinstance(owners, Regular) and tensor.is_floating_point() and tensor.numel():
            self._prints.append((tensor.numel() // owners.n, _sums(tensor, owners)))
            del self._prints[:-16]

    def by_prints(self, node: Node, shape: tuple[int, ...]) -> Layout | None:
        """The layout of a node's output of this shape, if it has saved a copy of an input that fits just one."""
        if not self._prints:
            return None
        found = [layout for n in {len(p) for _, p in self._prints} if n > 1 for layout in regular(shape, n)
                 if self.resembles(node, layout)]  # fmt: skip
        return found[0] if len(found) == 1 else None

    def follow(self, tensor: Tensor, made: Tensor) -> None:
        """A tensor was made of another of the same shape, number by number: it has the same rows."""
        owners = self.of(tensor)
        if owners is not None and tensor.shape == made.shape:
            self.remember(made, owners, is_given=False)
            self.take_prints(made, owners)

    def resembles(self, node: Node, layout: Layout) -> bool | None:
        """Whether a node has saved a copy of an input whose samples lie as the layout says; None if that cannot be
        told."""
        if not isinstance(layout, Regular):
            return None
        for tensor in saved_by(node):
            shape = tuple(tensor.shape)
            if not tensor.is_floating_point() or shape[: layout.dim + 1] != layout.shape[: layout.dim + 1]:
                continue
            if layout.dim >= _common(node, tensor.dim()):
                continue
            for count, wanted in self._prints:
                if count * layout.n == tensor.numel() and len(wanted) == layout.n:
                    found = _sums(tensor, Regular(shape, layout.n, layout.dim, layout.block))
                    total = torch.isclose(found.sum(0), wanted.sum(0).to(found.device), rtol=1e-4, atol=1e-6).all()
                    if bool(total):  # the same numbers
                        return bool(torch.isclose(found, wanted.to(found.device), rtol=1e-4, atol=1e-6).all())
        return None

    def remember(self, tensor: Tensor, owners: Layout, *, is_given: bool = True) -> None:
        """The owners of this tensor, in the call under way, are known."""
        if tensor.layout != torch.strided or not tensor.numel() or self.holds(tensor):
            return
        try:
            storage = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            return
        if len(self._places) > 1000:
            self._places = {key: there for key, there in self._places.items() if not there[0].storage.expired()}
        there = self._places.setdefault(storage.cdata, [])
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        size = tensor.element_size()
        there.append(_Place(storage, shape, tensor.stride(), offset, size, owners, is_given, self.call))
        del there[:-64]

    def _place(self, tensor: Tensor) -> _Place | None:
        """Where a tensor that is remembered, and of which this is a view, lies: of the calls that are asked about, the
        last that was given it."""
        there = self._places.get(memory_number(tensor), ())
        if not there or not tensor.numel():
            return None
        asked = [place for place in there if self.asked is None or place.call in self.asked]
        return next((place for place in reversed(asked) if _covers(place, tensor)), None)

    def drop(self, call: int) -> None:
        """Forget what this call was given."""
        for there in self._places.values():
            there[:] = [place for place in there if place.call != call]
        self._places = {key: there for key, there in self._places.items() if there}

    def forget(self) -> None:
        """Let go of everything."""
        self._places.clear()
        self._prints.clear()

    def __bool__(self) -> bool:
        return bool(self._places)

    def holds(self, tensor: Tensor) -> bool:
        """Whether all of this tensor is known of the call under way."""
        there = self._places.get(memory_number(tensor), ())
        return any(place.call == self.call and _covers(place, tensor) for place in there)

    def of(self, tensor: Tensor) -> Layout | None:
        """The owners of a tensor that is remembered, or of a view of all of it."""
        place = self._place(tensor)
        return None if place is None else _as_a_whole(place, tensor)

    def are_saved_by(self, node: Node) -> bool:
        """Whether a node has saved rows of a tensor whose samples are known."""
        return any(self._place(tensor) is not None for tensor in saved_by(node))

    def are_given_to(self, node: Node) -> bool:
        """Whether a node has saved rows of a tensor that the model was given."""
        return any((place := self._place(tensor)) is not None and place.is_given for tensor in saved_by(node))

    def owners(self, node: Node, shape: tuple[int, ...]) -> Layout | None:
        """The sample of every position of a node's output of this shape, from the rows of what the node has saved."""
        for tensor in saved_by(node):
            place = self._place(tensor)
            # Fewer dimensions stand for the first ones only if they are ids, as of an embedding.
            if place is None or 0 in shape or not shape or not tensor.dim():
                continue
            if not tensor.is_floating_point() and node.name().startswith(_CHOOSING):
                continue  # which rows to take, not rows
            if tensor.dim() != len(shape) and (tensor.is_floating_point() or tensor.dim() > len(shape)):
                continue
            if (whole := _as_a_whole(place, tensor)) is not None and whole.dim < tensor.dim():
                same = tuple(tensor.shape[: whole.dim + 1]) == tuple(shape[: whole.dim + 1])
                if same and whole.dim < _common(node, tensor.dim()):
                    return Regular(shape, whole.n, whole.dim, whole.block)
                continue
            if place.dims is None:
                continue
            own = place.owner_at(_addresses(tensor))
            for common in range(_common(node, own.dim()), 0, -1):
                if tuple(own.shape[:common]) != tuple(shape[:common]):
                    continue
                rest = own.flatten(common) if own.dim() > common else own[..., None]
                if bool((rest == rest[..., :1]).all()):
                    return _regular(rest[..., 0], place.owners, shape)
        return None


def _addresses(view: Tensor) -> Tensor:
    """Where each number of a tensor lies in its memory, counted in numbers."""
    found = torch.full((), int(view.storage_offset()))
    for d, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        found = found + (torch.arange(size) * stride).view(-1, *[1] * (view.dim() - 1 - d))
    return found.expand(view.shape)


def _covers(place: _Place, view: Tensor) -> bool:
    """Whether all numbers of a tensor are numbers of the remembered one."""
    if place.itemsize != view.element_size():
        return False
    offset, end = int(view.storage_offset()), 1
    end += offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    if offset < place.offset or end > place.end:
        return False
    if (tuple(view.shape), view.stride(), offset) == (place.shape, place.stride, place.offset):
        return True
    if place.dims is None:
        return False
    if prod(place.shape) == place.end - place.offset:  # without gaps
        return True
    return bool((place.owner_at(_addresses(view)) != NOBODY).all())


def _regular(rows: Tensor, owners: Layout, shape: tuple[int, ...]) -> Layout:
    found = complete(rows, owners.n) if isinstance(owners, Regular) else None
    if isinstance(found, Regular):
        return Regular(shape, found.n, found.dim, found.block)
    return mapped(rows).widened(shape)


def _as_a_whole(place: _Place, view: Tensor) -> Regular | None:
    """Whose a view is, if it is all of a tensor whose samples lie along a dimension, in the same order."""
    if not isinstance(place.owners, Regular) or view.storage_offset() != place.offset:
        return None
    if tuple(view.shape) == place.shape and view.stride() == place.stride:
        return place.owners
    if view.numel() != prod(place.shape) or not view.is_contiguous() or place.stride != _dense(place.shape):
        return None
    found = reshaped(place.owners, tuple(view.shape), place.owners.n)
    return found if isinstance(found, Regular) else None


def _sums(tensor: Tensor, owners: Regular) -> Tensor:
    """(n, 2): for each sample, the sum of its numbers and that of their squares."""
    values = tensor.detach().double().unflatten(owners.dim, (-1, owners.n, owners.block))
    values = values.movedim(owners.dim + 1, 0).flatten(1)
    return torch.stack([values.sum(1), values.square().sum(1)], 1)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
