"""An extent of memory: where a tensor lies whose samples are known, and whose each number of a view of it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unsum.graph.layout import NOBODY, Layout, Regular, reshaped


@dataclass(frozen=True, eq=False)
class Extent:
    """An extent: where a tensor lies in its memory, and its owners."""

    storage: StorageWeakRef  # while this is held, no other memory has its number
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    owners: Layout
    n: int  # samples of the call, of which some may have no number here
    is_given: bool  # to the model, and not made of what was
    call: int  # the outermost call that it was given to
    reading: int  # which of the ways in which that call may be read
    by_values: bool = False  # whether numbers have said where its rows lie (indices), which differ from batch to batch

    @property
    def end(self) -> int:
        """Where the tensor ends in its memory, counted in numbers."""
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

    def owners_of(self, view: Tensor) -> Tensor | None:
        """The sample of every number of a view of this tensor; None where parts of it say nothing."""
        if (tuple(view.shape), view.stride(), view.storage_offset()) == (self.shape, self.stride, self.offset):
            return self.owners.owner().expand(self.shape)
        if self.dims is None:
            return None
        found = self._cut_out(view)
        return self.owner_at(addresses(view)) if found is None else found

    def _cut_out(self, view: Tensor) -> Tensor | None:
        """The sample of every number of a view that only exchanges dimensions and leaves out their ends, without a look
        at each number; None for any other view."""
        left, start = int(view.storage_offset()) - self.offset, dict.fromkeys(range(len(self.shape)), 0)
        for d in self.dims or ():
            start[d], left = divmod(left, self.stride[d])
        by_stride = {self.stride[d]: d for d in self.dims or ()}
        strided = zip(view.shape, view.stride(), strict=True)
        used = [None if size == 1 else by_stride.get(stride, -1) for size, stride in strided]
        own = [d for d in used if d is not None]
        sizes = dict(zip(used, view.shape, strict=True))
        if left or -1 in own or len(set(own)) < len(own) or any(start[d] + sizes[d] > self.shape[d] for d in own):
            return None
        found = self.owners.owner().expand(self.shape)
        for d in range(len(self.shape)):
            found = found.narrow(d, start[d], sizes.get(d, 1))
        rest = [d for d in range(len(self.shape)) if d not in own]
        found = found.permute(*own, *rest)
        for _ in rest:
            found = found.select(-1, 0)
        for k, from_dim in enumerate(used):
            found = found.unsqueeze(k) if from_dim is None else found
        return found

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


def addresses(view: Tensor) -> Tensor:
    """Where each number of a tensor lies in its memory, counted in numbers."""
    found = torch.full((), int(view.storage_offset()))
    for d, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        found = found + (torch.arange(size) * stride).view(-1, *[1] * (view.dim() - 1 - d))
    return found.expand(view.shape)


def covers(extent: Extent, view: Tensor) -> bool:
    """Whether all numbers of a tensor are numbers of the remembered one."""
    if extent.itemsize != view.element_size():
        return False
    offset, end = int(view.storage_offset()), 1
    end += offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    if offset < extent.offset or end > extent.end:
        return False
    if (tuple(view.shape), view.stride(), offset) == (extent.shape, extent.stride, extent.offset):
        return True
    if extent.dims is None:
        return False
    if prod(extent.shape) == extent.end - extent.offset:  # without gaps
        return True
    return bool((extent.owner_at(addresses(view)) != NOBODY).all())


def as_a_whole(extent: Extent, view: Tensor) -> Regular | None:
    """Whose a view is, if it is all of a tensor whose samples lie along a dimension, in the same order."""
    if not isinstance(extent.owners, Regular) or view.storage_offset() != extent.offset:
        return None
    if tuple(view.shape) == extent.shape and view.stride() == extent.stride:
        return extent.owners
    if view.numel() != prod(extent.shape) or not view.is_contiguous() or extent.stride != _dense(extent.shape):
        return None
    found = reshaped(extent.owners, tuple(view.shape), extent.owners.n)
    return found if isinstance(found, Regular) else None


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
