"""Rows of tensors whose samples are known, found again in what nodes have saved.

A node at which a weight meets data saves that data. Where it is a view of a tensor whose samples are known, its rows
say whose the node's positions are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unsum.graph.layout import NOBODY, Layout, Regular, complete, mapped, regular, reshaped
from unsum.graph.nodes import Node
from unsum.graph.saved import saved_by

_CHOOSING = ("Index", "Gather", "Scatter", "Take", "Masked", "UnsafeIndex")  # by whole numbers


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
    overlaps: bool  # several samples in the same place, as `expand` makes them: parts of it say nothing

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)) + 1


class Rows:
    """Remembers tensors whose samples are known, without holding them."""

    def __init__(self) -> None:
        self._places: dict[int, list[_Place]] = {}  # by the number of their memory
        self._prints: list[tuple[int, Tensor]] = []  # of inputs: how many numbers a sample has, and sums over them

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
            for count, wanted in self._prints:
                if count * layout.n == tensor.numel() and len(wanted) == layout.n:
                    found = _sums(tensor, Regular(shape, layout.n, layout.dim, layout.block))
                    total = torch.isclose(found.sum(0), wanted.sum(0).to(found.device), rtol=1e-4, atol=1e-6).all()
                    if bool(total):  # the same numbers
                        return bool(torch.isclose(found, wanted.to(found.device), rtol=1e-4, atol=1e-6).all())
        return None

    def remember(self, tensor: Tensor, owners: Layout, *, is_given: bool = True) -> None:
        """The owners of this tensor are known. What was said first of a place stays."""
        if tensor.layout != torch.strided or not tensor.numel():
            return
        try:
            storage = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            return
        if len(self._places) > 1000:
            self._places = {key: there for key, there in self._places.items() if not there[0].storage.expired()}
        there = self._places.setdefault(storage.cdata, [])
        place = _Place(
            storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.element_size(), owners,
            is_given, torch._debug_has_internal_overlap(tensor) == 1,
        )  # fmt: skip
        if not any(known.offset == place.offset and known.end == place.end for known in there):
            there.append(place)
            del there[:-64]

    def _place(self, tensor: Tensor) -> _Place | None:
        """Where a tensor that is remembered, and of which this is a view, lies."""
        there = self._places.get(_number(tensor), ())
        if not there or not tensor.numel():
            return None
        offset = int(tensor.storage_offset())
        return next((place for place in there if place.offset <= offset < place.end), None)

    def forget(self) -> None:
        """Let go of everything."""
        self._places.clear()
        self._prints.clear()

    def __bool__(self) -> bool:
        return bool(self._places)

    def holds(self, tensor: Tensor) -> bool:
        """Whether something is known of this tensor's place in memory."""
        return self._place(tensor) is not None

    def of(self, tensor: Tensor) -> Layout | None:
        """The owners of a tensor that is remembered, or of a view of all of it."""
        place = self._place(tensor)
        return None if place is None or place.itemsize != tensor.element_size() else _as_a_whole(place, tensor)

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
            if (
                place is None
                or place.itemsize != tensor.element_size()
                or 0 in shape
                or not shape
                or not tensor.numel()
            ):
                continue
            if not tensor.dim():
                continue
            if not tensor.is_floating_point() and node.name().startswith(_CHOOSING):
                continue  # which rows to take, not rows
            if tensor.dim() != len(shape) and (tensor.is_floating_point() or tensor.dim() > len(shape)):
                continue
            if (whole := _as_a_whole(place, tensor)) is not None and whole.dim < tensor.dim():
                if tuple(tensor.shape[: whole.dim + 1]) == tuple(shape[: whole.dim + 1]):
                    return Regular(shape, whole.n, whole.dim, whole.block)
                continue
            if place.overlaps:
                continue
            own = self._of_view(place, tensor)
            for common in range(own.dim(), 0, -1):
                if tuple(own.shape[:common]) != tuple(shape[:common]):
                    continue
                rest = own.flatten(common) if own.dim() > common else own[..., None]
                if bool((rest == rest[..., :1]).all()):
                    return _regular(rest[..., 0], place.owners, shape)
        return None

    def _of_view(self, place: _Place, view: Tensor) -> Tensor:
        count = view.untyped_storage().nbytes() // view.element_size()
        whole = torch.full((count,), NOBODY, dtype=torch.int32)
        whole.as_strided(place.shape, place.stride, place.offset).copy_(place.owners.owner())
        return whole.as_strided(view.shape, view.stride(), view.storage_offset())


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


def _number(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -1
