"""Which position belongs to which sample: by a dimension, by documents packed into rows, or by ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unsum.errors import BadSamples
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

_BY_IDS = "with unsum.gradients(model, samples=torch.tensor([0, 0, 1])) as g: ...  # the id of each row's sample"


def dim(k: int) -> Dim:
    """Samples lie along dimension `k` of the model's inputs and outputs.

    Examples:
        >>> dim(1)
        Dim(k=1)
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise BadSamples(
            f"dim({k!r}): the dimension of the samples is counted from the front, 0 or more.",
            write="with unsum.gradients(model, samples=unsum.dim(1)) as g: ...",
        )
    return Dim(k, is_said=True)


def packed(cu_seqlens: Tensor) -> Ids:
    """Documents packed into one row (or flattened rows): `cu_seqlens` has the start of each and the end of the last.

    Examples:
        >>> packed(torch.tensor([0, 3, 5])).given
        tensor([0, 0, 0, 1, 1])
    """
    given = torch.as_tensor(cu_seqlens)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise BadSamples(
            f"packed(cu_seqlens): these are whole numbers, got {given.dtype}.",
            write="unsum.packed(torch.tensor([0, 3, 5]))  # two documents, of 3 and of 2 tokens",
        )
    ends = given.cpu().long()
    if ends.dim() != 1 or len(ends) < 2 or ends[0] != 0 or bool((ends.diff() < 0).any()):
        raise BadSamples(
            f"packed(cu_seqlens): one row of numbers that begins with 0 and never decreases, got {_short(ends)}.",
            write="unsum.packed(torch.tensor([0, 3, 5]))  # two documents, of 3 and of 2 tokens",
        )
    return Ids(torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff()), flat=True, count=len(ends) - 1)


def read(samples: Samples | Tensor | None) -> Samples:
    """What a user may give for `samples=`."""
    if samples is None:
        return Dim(0)
    if isinstance(samples, Tensor):
        if samples.is_floating_point() or samples.dim() not in (1, 2):
            raise BadSamples(
                f"samples= takes whole numbers of shape (rows,) or (rows, positions), got {samples.dtype} of shape "
                f"{tuple(samples.shape)}.",
                write=_BY_IDS,
            )
        if samples.numel() and int(samples.min()) < -1:
            raise BadSamples(
                f"samples= has the id {int(samples.min())}: ids are 0 or more, and -1 belongs to no sample.",
                write=_BY_IDS,
            )
        return Ids(samples.cpu().long())
    if isinstance(samples, Dim | Ids):
        return samples
    is_number = isinstance(samples, int) and not isinstance(samples, bool) and samples >= 0
    raise BadSamples(
        f"samples={samples!r}: takes None, unsum.dim(k), unsum.packed(cu_seqlens), or a tensor of ids.",
        write=[
            f"with unsum.gradients(model, samples=unsum.dim({samples if is_number else 1})) as g: ...",
            "with unsum.gradients(model, samples=unsum.packed(cu_seqlens)) as g: ...",
            _BY_IDS,
        ],
    )


def _short(ends: Tensor) -> str:
    return str(ends.tolist()) if ends.numel() <= 8 else f"a tensor of shape {tuple(ends.shape)}"
