"""Which position belongs to which sample: by a dimension, by documents packed into rows, or by ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unsum.errors import SamplesError
from unsum.graph.layout import Layout, Regular, mapped


@dataclass(frozen=True)
class Dim:
    """Samples lie along one dimension."""

    k: int = 0
    is_said: bool = field(default=False, repr=False, compare=False)  # by the user: where sizes coincide, it counts

    @property
    def ids(self) -> Tensor | None:
        return None

    def owners(self, shape: tuple[int, ...], n: int | None) -> Layout | None:
        """The sample of every position of a tensor of this shape; None if it cannot be told."""
        if n is None or len(shape) <= self.k or shape[self.k] != n:
            return None
        return Regular(shape, n, self.k, 1)


@dataclass(frozen=True, eq=False)
class Ids:
    """Every row, or every position of every row, has the id of its sample; -1 is nobody's."""

    given: Tensor
    flat: bool = False  # rows may also come flattened into one, or as one row
    count: int | None = None  # how many there are, also if some have no position

    @property
    def ids(self) -> Tensor:
        if self.count is not None:
            return torch.arange(self.count)
        found = self.given.unique()
        return found[found >= 0]

    def owners(self, shape: tuple[int, ...], n: int | None) -> Layout | None:
        """The sample of every position of a tensor of this shape; None if it cannot be told."""
        given = self.given
        if self.flat:
            if len(shape) > 1 and shape[0] * shape[1] == given.numel():
                given = given.view(shape[:2])
            elif not shape or shape[0] != given.numel():
                return None
        if tuple(shape[: given.dim()]) != tuple(given.shape):
            return None
        index = torch.searchsorted(self.ids, given.contiguous()).masked_fill(given < 0, -1)
        return mapped(index).widened(shape)


Samples = Dim | Ids


def dim(k: int) -> Dim:
    """Samples lie along dimension `k` of what the model is given and returns.

    Examples:
        >>> dim(1)
        Dim(k=1)
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise SamplesError(f"dim({k!r}): count the dimension of the samples from the front, 0 or more")
    return Dim(k, is_said=True)


def packed(cu_seqlens: Tensor) -> Ids:
    """Documents packed into one row (or rows, flattened), by where each begins and the last ends.

    Examples:
        >>> packed(torch.tensor([0, 3, 5])).given
        tensor([0, 0, 0, 1, 1])
    """
    given = torch.as_tensor(cu_seqlens)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise SamplesError(f"packed samples: cu_seqlens are whole numbers, got {given.dtype}")
    ends = given.cpu().long()
    if ends.dim() != 1 or len(ends) < 2 or ends[0] != 0 or bool((ends.diff() < 0).any()):
        raise SamplesError("packed samples: cu_seqlens begins with 0 and never decreases: [0, 3, 5] for two documents")
    return Ids(torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff()), flat=True, count=len(ends) - 1)


def read(samples: Samples | Tensor | None) -> Samples:
    """What a user may give for `samples=`."""
    if samples is None:
        return Dim(0)
    if isinstance(samples, Tensor):
        if samples.is_floating_point() or samples.dim() not in (1, 2):
            raise SamplesError("samples= takes whole numbers of shape (rows,) or (rows, positions)")
        if samples.numel() and int(samples.min()) < -1:
            raise SamplesError(f"samples= has the id {int(samples.min())}: ids are 0 or more, -1 is nobody's")
        return Ids(samples.cpu().long())
    if isinstance(samples, Dim | Ids):
        return samples
    raise SamplesError(f"samples={samples!r}: None, unsum.dim(k), unsum.packed(cu_seqlens), or a tensor of ids")
