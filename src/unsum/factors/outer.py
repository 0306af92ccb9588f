"""A matrix that meets its input once per position: an outer product each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from unsum.factors.dense import Dense
from unsum.kernels import fused, product
from unsum.kernels.constants import constant
from unsum.kernels.product import Way, wide
from unsum.seams.operators import is_stand_in


@dataclass(frozen=True, eq=False)
class Outer:
    """G_n = Σ_t δ_nt ⊗ a_nt, never formed unless asked. Of several matrices side by side (the groups of a convolution,
    experts), each with its own `a` and δ, the groups are folded into the samples: sample n's g-th is n·groups + g."""

    a: Tensor  # (n·groups, t, i)
    delta: Tensor  # (n·groups, t, o)
    shape: tuple[int, ...]  # of the parameter
    turned: bool = False  # the parameter is (i, o) rather than (o, i)
    groups: int = 1
    lengths: Tensor | None = None  # how many positions each sample has, if not all the same
    dtype: torch.dtype | None = None  # of the parameter
    token_squares: Callable[[], Tensor] | None = None  # (n, t): |δ_nt|²·|a_nt|², from a pass that others share

    @property
    def n(self) -> int:
        return self.a.shape[0] // self.groups

    def numel(self) -> int:
        """How many numbers are held for one sample."""
        return (self.a.numel() + self.delta.numel()) // max(self.n, 1)

    def _placed(self, matrix: Tensor, *lead: int) -> Tensor:
        """(…·groups, o, i) in the parameter's own shape."""
        matrix = matrix.mT if self.turned else matrix
        return matrix.reshape(*lead, *self.shape).to(wide(self.dtype or matrix.dtype))

    def _by_sample(self, values: Tensor) -> Tensor:
        """(n·groups,) summed over the groups."""
        return values if self.groups == 1 else values.view(self.n, self.groups).sum(1)

    def per_sample(self) -> Tensor:
        """(n, *shape): 2·n·t·o·i operations."""
        return self._placed(torch.bmm(self.delta.mT, self.a), self.n)

    def tokens(self) -> Tensor:
        """(n, t, *shape): the part of each position."""
        each = self.delta[..., :, None] * self.a[..., None, :]  # (n·g, t, o, i)
        t = each.shape[1]
        each = each.unflatten(0, (self.n, self.groups)).movedim(2, 1)
        return self._placed(each, self.n, t)

    def sum(self) -> Tensor:
        """The sum over samples: one product, as torch does it."""
        return self._placed(self._product(self.delta, self.a))

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n: one product. The smaller of the two factors takes the weights."""
        w = w.repeat_interleave(self.groups) if self.groups > 1 else w
        if self.a.shape[-1] < self.delta.shape[-1]:
            return self._placed(self._product(self.delta, fused.scaled(self.a, w)))
        return self._placed(self._product(fused.scaled(self.delta, w), self.a))

    def _product(self, delta: Tensor, a: Tensor) -> Tensor:
        if self.groups == 1:
            return delta.flatten(0, 1).T @ a.flatten(0, 1)
        apart = lambda x: x.unflatten(0, (self.n, self.groups)).transpose(0, 1).flatten(1, 2)
        return torch.bmm(apart(delta).mT, apart(a))

    def way(self, *, want_sum: bool) -> Way:
        """The cheapest way to the norms."""
        return product.choose(self.a, self.delta, want_sum=want_sum)

    def sq_norms(self) -> Tensor:
        """(n,): by the cheapest way for the shape."""
        return self._by_sample(product.sq_norms(self.a, self.delta))

    def norms_and_sum(self, *, in_parts: bool = False) -> tuple[Tensor, Tensor]:
        """Norms, and the sum from the same product where that is the cheapest way. `in_parts`: squared norms may be
        (parts, n), still to be added up."""
        way = self.way(want_sum=True)
        if way != "product" or self.groups > 1:
            return self._by_sample(product.sq_norms(self.a, self.delta, way)), self.sum()
        rows, columns = (self.a, self.delta) if self.turned else (self.delta, self.a)
        sq, total = product.norms_and_sum(columns, rows, want_sum=True, in_parts=in_parts)  # ordered as .grad is
        assert total is not None
        return sq, total if total.shape == self.shape else total.reshape(self.shape)  # no view: `.grad` takes it as is

    @property
    def positions(self) -> int:
        """Of one sample."""
        return self.a.shape[1]

    def forms(self) -> bool:
        """Whether the cheapest way to norms and a sum forms every gradient."""
        return self.groups == 1 and self.way(want_sum=True) == "product"

    def norms_and_each(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None, Dense] | None:
        """Norms, the sum if it is wanted, and the gradients that are formed for them; None where none are."""
        if not self.forms():
            return None
        rows, columns = (self.a, self.delta) if self.turned else (self.delta, self.a)
        sq, total, each = product.norms_and_each(columns, rows, want_sum=want_sum)
        return sq, None if total is None else total.reshape(self.shape), Dense(each.reshape(self.n, *self.shape))

    def token_sq_norms(self) -> Tensor:
        """(n, t): |δ|²·|a|² of each position."""
        if self.token_squares is not None:
            return self.token_squares()
        n, t = self.a.shape[:2]
        each = fused.token_sq_norms(self.a.flatten(0, 1), self.delta.flatten(0, 1))[0].view(n, t)
        return each if self.groups == 1 else each.unflatten(0, (self.n, self.groups)).sum(1)

    def dot(self, other: Outer) -> Tensor:
        """(n, m): never forms a gradient where that is more work than n·m·t·s·(o + i)."""
        if self.groups == 1:
            return product.dots(self.a, self.delta, other.a, other.delta)
        mine, theirs = ([(k.a[g :: k.groups], k.delta[g :: k.groups]) for g in range(k.groups)] for k in (self, other))
        found = [product.dots(*one, *two) for one, two in zip(mine, theirs, strict=True)]
        return torch.stack(found).sum(0)

    def token_dots(self, other: Tensor) -> Tensor:
        """(n, t, m): δ_ntᵀ M a_nt for m tensors of the parameter's shape; one group only."""
        o, i = self.delta.shape[-1], self.a.shape[-1]
        matrices = other.reshape(len(other), i, o).mT if self.turned else other.reshape(len(other), o, i)
        a, delta = self.a.to(other.dtype), self.delta.to(other.dtype)
        return torch.stack([((delta @ matrix.conj()) * a).sum(-1) for matrix in matrices], -1)

    def by_position(self) -> Outer:
        """Every position as a sample of its own; one group only."""
        a, delta = (side.flatten(0, 1)[:, None] for side in (self.a, self.delta))
        return replace(self, a=a, delta=delta, lengths=None, token_squares=None)

    def split(self, some: int) -> list[Outer]:
        """So many samples at a time; one group only."""
        return [
            replace(self, a=a, delta=delta, lengths=None, token_squares=None)
            for a, delta in zip(self.a.split(some), self.delta.split(some), strict=True)
        ]

    def of(self, shape: tuple[int, ...], dtype: torch.dtype, *, turned: bool) -> Outer:
        """The same for a parameter of this shape, of which the matrix is a cast, or the transpose."""
        return Outer(
            self.a, self.delta, shape, self.turned != turned, self.groups, self.lengths, dtype, self.token_squares
        )

    def times(self, factor: Tensor | float) -> Outer:
        """Every gradient multiplied by the same number."""
        return replace(self, delta=self.delta * factor, token_squares=None)

    @property
    def joint(self) -> tuple[Any, ...]:
        """What others must have in common with it to be joined."""
        return self.turned, self.shape, self.groups, self.n, self.a.shape[-1], self.a.dtype, self.delta.dtype

    def plus(self, *others: Outer) -> Outer:
        """The sum with others of the same matrix: more positions."""
        join = lambda name: torch.cat([getattr(part, name) for part in (self, *others)], 1)
        return replace(self, a=join("a"), delta=join("delta"), lengths=None, token_squares=None)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R for a parameter seen as a matrix (rows, rest); no gradient is formed."""
        if self.groups > 1:
            return _two_sided(self.per_sample(), left, right)
        rows, columns = (self.a, self.delta) if self.turned else (self.delta, self.a)
        if len(self.shape) != 2 and self.turned:
            return _two_sided(self.per_sample(), left, right)
        if rows.shape[-1] != self.shape[0]:
            return _two_sided(self.per_sample(), left, right)
        left, right = _like(left, rows), _like(right, columns)
        if left.dim() == 3:  # of several parameters after each other
            many = rows.unflatten(0, (len(left), -1)) @ left.mT[:, None]
            rest = columns.unflatten(0, (len(left), -1)) @ right[:, None]
            return torch.bmm(many.flatten(0, 1).mT, rest.flatten(0, 1)).to(wide(self.a.dtype))
        return fused.two_sided(rows, columns, left, right).to(wide(self.a.dtype))  # type: ignore[no-any-return]


def _like(matrix: Tensor, other: Tensor) -> Tensor:
    """A projection in another's dtype, which is the same in every step: cast once."""
    if matrix.dtype == other.dtype or is_stand_in(other):
        return matrix.to(other)
    return _cast(matrix, other.dtype, other.device)


@lru_cache(maxsize=512)
def _cast(matrix: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return constant(matrix.to(device, dtype))


def _two_sided(values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return Dense(values).project(left, right)
