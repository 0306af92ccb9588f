"""Several matrices side by side, of which each position meets one: experts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.kernels import costs, segments
from unsum.kernels.product import wide


@dataclass(frozen=True, eq=False)
class Routed:
    """G_n[e] = Σ δ_r ⊗ a_r over the rows of sample n that matrix e met. Rows stay where they are; beside them is held
    whose each is, and which matrix it met."""

    a: Tensor  # (rows, i)
    delta: Tensor  # (rows, o)
    sample: Tensor  # (rows,): -1 for nobody's
    matrix: Tensor | int  # (rows,): `matrices` for those that met none; or the one that all rows met
    n: int
    matrices: int
    shape: tuple[int, ...]  # of the parameter
    turned: bool = False  # its matrices are (i, o) rather than (o, i)
    ends: Tensor | None = None  # (matrices,): where each one's rows end, if they are in order and all somebody's
    held: Tensor | None = None  # (n, t): the rows of each sample, where all are known to have as many
    dtype: torch.dtype | None = None  # of the parameter

    @cached_property
    def index(self) -> Tensor:
        """(n, t): the rows of each sample, then -1. Waits for the device, unless all have as many."""
        return segments.padded(*self._by_sample) if self.held is None else self.held

    @property
    def lengths(self) -> Tensor | None:
        """How many positions each sample has; None if all are known to have as many."""
        return self._by_sample[1].diff() if self.held is None else None

    @cached_property
    def _by_sample(self) -> tuple[Tensor, Tensor]:
        return segments.sort(self.sample, self.n)

    @cached_property
    def _each(self) -> Tensor:
        """(rows,): the matrix that each row met."""
        matrix = self.matrix
        return torch.full_like(self.sample, matrix) if isinstance(matrix, int) else matrix

    def numel(self) -> int:
        """How many numbers are held for one sample."""
        return (self.a.numel() + self.delta.numel()) // max(self.n, 1)

    def _placed(self, found: Tensor, *lead: int) -> Tensor:
        """(…·matrices, o, i) in the parameter's own shape."""
        found = found.mT if self.turned else found
        return found.reshape(*lead, *self.shape).to(wide(self.dtype or found.dtype))

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor]:
        """The rows, sorted by sample and matrix; and the bounds of these n·matrices segments."""
        nowhere = (self.sample < 0) | (self._each >= self.matrices)
        cell = (self.sample * self.matrices + self._each).masked_fill_(nowhere, self.n * self.matrices)
        return segments.sort(cell, self.n * self.matrices)

    def _in_cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """δ and `a` of the rows that count, sorted by sample and matrix; and where each segment ends."""
        order, bounds = self._cells
        return self.delta[order], self.a[order], bounds[1:]

    def outer(self) -> Outer:
        """The same as outer products of n·matrices samples, padded to the longest. Waits for the device."""
        index = segments.padded(*self._cells)
        take = lambda rows: segments.taken(rows, index, is_full=False)
        return Outer(
            take(self.a), take(self.delta), self.shape, turned=self.turned, groups=self.matrices, dtype=self.dtype
        )

    def _take(self, rows: Tensor) -> Tensor:
        return segments.taken(rows, self.index, is_full=self.held is not None)

    @cached_property
    def _met(self) -> Tensor:
        """(n, t): the matrix that each position met, -1 for none."""
        matrix = self._each.masked_fill(self._each >= self.matrices, -1)
        found = self._take(matrix)
        return found if self.held is not None else found.masked_fill_(self.index < 0, -1)

    def per_sample(self) -> Tensor:
        """(n, *shape): 2·rows·o·i operations."""
        return self._placed(segments.products(*self._in_cells()), self.n)

    def tokens(self) -> Tensor:
        """(n, t, *shape): the part of each position."""
        a, delta, met = self._take(self.a), self._take(self.delta), self._met
        each = delta[..., :, None] * a[..., None, :]
        is_here = met[..., None] == torch.arange(self.matrices, device=met.device)
        each = torch.where(is_here[..., None, None], each[:, :, None], 0)
        return self._placed(each, *self.index.shape)

    def sum(self) -> Tensor:
        """The sum over samples: one product for each matrix, as torch does it."""
        return self._placed(self._summed(self.delta, self.a))

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n: one product for each matrix. The smaller of the two factors takes the weights, unrounded."""
        each = torch.cat([w, w.new_zeros(1)]).to(self.delta.device, wide(self.delta.dtype))[self.sample.long()]
        scaled = lambda x: (x * each[:, None]).to(x.dtype)
        if self.a.shape[1] < self.delta.shape[1]:
            return self._placed(self._summed(self.delta, scaled(self.a)))
        return self._placed(self._summed(scaled(self.delta), self.a))

    def _summed(self, delta: Tensor, a: Tensor) -> Tensor:
        if self.ends is not None:
            return segments.products(delta, a, self.ends)
        order, bounds = segments.sort(self._each.masked_fill(self.sample < 0, self.matrices), self.matrices)
        return segments.products(delta[order], a[order], bounds[1:])

    def sq_norms(self) -> Tensor:
        """(n,): by the cheapest way for the shape, without waiting for a device if it can be."""
        device, t, i, o = self.a.device.type, len(self.a) // max(self.n, 1), self.a.shape[1], self.delta.shape[1]
        way = costs.cheaper(t, i, o, device, want_sum=False, matrices=self.matrices)
        has_kernel = device == "cpu" or segments.has_kernel(self.delta, self.a)
        return self.sq_norms_by("padded" if way == "product" and not has_kernel else way)

    def sq_norms_by(self, way: str) -> Tensor:
        """(n,): by a way of one's choice: "gram", "product" or "padded"."""
        if way == "padded":
            return self.outer().sq_norms()
        if way == "gram":
            return segments.gram_norms(self._take(self.delta), self._take(self.a), self._met)
        return segments.product_norms(*self._in_cells()).view(self.n, self.matrices).sum(1)

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """Both; nothing is saved here."""
        return self.sq_norms(), self.sum()

    def norms_and_each(self, *, want_sum: bool) -> None:
        """No gradient is formed."""

    def token_sq_norms(self) -> Tensor:
        """(n, t): |δ|²·|a|² of each position."""
        square = lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype)).square()
        each = self._take(square(self.a) * square(self.delta))
        return each.masked_fill_(self._met < 0, 0)

    def dot(self, other: Routed) -> Tensor:
        """(n, m): never forms a gradient where that is more work."""
        return self.outer().dot(other.outer())

    def times(self, factor: Tensor | float) -> Routed:
        """Every gradient multiplied by the same number."""
        return replace(self, delta=self.delta * factor)

    @property
    def joint(self) -> tuple[Any, ...]:
        """What others must have in common with it to be joined."""
        widths = (self.a.shape[1], self.delta.shape[1], self.a.dtype, self.delta.dtype)
        return self.turned, self.shape, self.matrices, self.n, widths

    def plus(self, *others: Routed) -> Routed:
        """The sum with others of the same matrices: more rows."""
        parts = (self, *others)
        join = lambda name: torch.cat([getattr(part, name) for part in parts])
        held = None
        if all(part.held is not None for part in parts):
            before = itertools.accumulate((len(part.a) for part in parts), initial=0)
            held = torch.cat([part.index + first for part, first in zip(parts, before, strict=False)], 1)
        return replace(
            self, a=join("a"), delta=join("delta"), sample=join("sample"), matrix=join("_each"), held=held, ends=None
        )

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R for a parameter seen as a matrix (rows, rest)."""
        values = self.per_sample()
        return left.to(values) @ values.flatten(2) @ right.to(values)
