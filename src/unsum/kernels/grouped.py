"""Squared norms of many layers in one launch, for steps in which starting kernels is what takes time. All layers have
the same samples and positions; nothing is put side by side. As everything in `fused`, each has a twin."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from unsum.kernels import costs, fused, twins
from unsum.kernels.fused import Make, offer

# Positions of all samples, up to which layers wait for each other. On a GPU 8192 took 2.8 times a plain step when
# layers were put side by side; layer by layer took far less.
ROWS = {"cuda": 4096}
HELD = {"cuda": 1 << 28}  # numbers in the gradients that wait for one launch
_dtype = attrgetter("dtype")
LONGEST = 512  # positions of a sample, up to which pairs of them are taken
FEW = 1 << 32  # products of numbers, up to which pairs of positions are as good as free


def is_small(rows: int, device: str) -> bool:
    """Whether a step with so many positions of all samples is one in which starting kernels takes the time."""
    return 0 < rows <= ROWS.get(device, 0)


def suits(n: int, t: int, i: int, o: int, device: str) -> bool:
    """Whether pairs of positions are the right way for a layer."""
    if t > LONGEST:
        return False
    return n * t * t * (i + o) <= FEW or costs.cheaper(t, i, o, device, want_sum=True) == "gram"


def is_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether all of these kernels are there."""
    return all(fused.is_on(name, device, dtype) for name in NAMES)


def is_ready(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a compiler may call them."""
    return all(fused.is_ready(name, device, dtype) for name in NAMES)


def _fit(*columns: Sequence[Tensor]) -> bool:
    """Whether one launch reaches all: it knows one dtype for each column, and a table holds addresses of one device."""
    device = columns[0][0].device
    index = columns[0][0].get_device()
    for column in columns:
        dtype = column[0].dtype
        if dtype not in fused.DTYPES:
            return False
        if set(map(Tensor.get_device, column)) != {index} or set(map(_dtype, column)) != {dtype}:
            return False
    if len(columns) == 4 and [c[0].dtype for c in columns[::2]] != [c[0].dtype for c in columns[1::2]]:
        return False
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def _example(make: Make, *, with_a: bool = False, with_norm: bool = False) -> tuple[Any, ...]:
    n, t, shapes = 3, 70, ((33, 20), (64, 48), (16, 5000))
    found = [[make(n * t, i) for i, _ in shapes]] if with_a else []
    found.append([make(n, t, o) for _, o in shapes])
    if with_norm:
        rows = lambda: [make(n, t).float() for _ in shapes]
        found += [[make(n, t, o) for _, o in shapes], rows(), rows()]
    return *found, n, t, False


def _squares(*given: Any) -> Tensor:
    first, n = given[0][0], given[-3]
    return first.new_empty((len(given[0]), n), dtype=twins.wide(first.dtype))


gram_sq_norms = offer(
    "grouped_gram_sq_norms", "(Tensor[] a, Tensor[] delta, SymInt n, SymInt t, bool kept) -> Tensor",
    lambda make: _example(make, with_a=True), _fit, fake=_squares,
)  # fmt: skip
gram_sq_norms.__doc__ = """(layers, n): |δᵀa|² of each sample and layer by pairs of positions, of tensors that have n·t
rows, in any shape and of any width. `kept`: the table of addresses may stay in memory for the next call. Inside a CUDA
graph it may not, since the graph's memory is used again."""

shift_sq_norms = offer(
    "grouped_shift_sq_norms",
    "(Tensor[] delta, SymInt n, SymInt t, bool kept) -> Tensor",
    _example,
    _fit,
    fake=_squares,
)
shift_sq_norms.__doc__ = "(layers, n): |Σ_t δ|² of each sample and layer."

norm_sq_norms = offer(
    "grouped_norm_sq_norms",
    "(Tensor[] delta, Tensor[] x, Tensor[] mean, Tensor[] rstd, SymInt n, SymInt t, bool kept) -> (Tensor, Tensor)",
    lambda make: _example(make, with_norm=True), _fit, fake=lambda *given: (_squares(*given), _squares(*given)),
)  # fmt: skip
norm_sq_norms.__doc__ = """(layers, n) twice: |Σ_t δ·(x - mean)·rstd|² and |Σ_t δ|²; mean and rstd have one number for
each row."""

NAMES = ("grouped_gram_sq_norms", "grouped_shift_sq_norms", "grouped_norm_sq_norms")


def launched(name: str, *columns: Sequence[Tensor], n: int, t: int) -> Any:
    """The same, without a look at each tensor beyond what one launch needs: they are on a GPU, of dtypes that were
    tried."""
    way = fused.kernels() if _fit(*columns) else twins
    return getattr(way, name)(*columns, n, t)
