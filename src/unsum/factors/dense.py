"""Gradients as they are: formed, because no structure is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unsum.kernels import fused
from unsum.kernels.product import rows, squares


@dataclass(frozen=True, eq=False)
class Dense:
    """G_n, formed."""

    values: Tensor  # (n, *shape)

    @property
    def n(self) -> int:
        return self.values.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def numel(self) -> int:
        """How many numbers are held for one sample."""
        return self.values.numel() // max(self.n, 1)

    def per_sample(self) -> Tensor:
        """(n, *shape)."""
        return self.values

    def tokens(self) -> None:
        """There are no positions."""

    def token_sq_norms(self) -> None:
        """There are no positions."""

    def sum(self) -> Tensor:
        """The sum over samples."""
        return self.values.sum(0)

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n: one pass, in the order in which they lie in memory."""
        strides = self.values.stride()
        dims = sorted(range(1, self.values.dim()), key=lambda d: -strides[d])
        total = fused.weighted_sum(self.values.permute(0, *dims), w)
        return total.permute([dims.index(d) for d in range(1, self.values.dim())])

    def sq_norms(self) -> Tensor:
        """(n,)."""
        return squares(self.values)

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.sq_norms(), self.sum()

    def norms_and_each(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None, Dense]:
        """Norms, the sum if it is wanted, and the gradients."""
        return self.sq_norms(), self.sum() if want_sum else None, self

    def times(self, factor: Tensor | float) -> Dense:
        """Every gradient multiplied by the same number."""
        return Dense(self.values * factor)

    @property
    def joint(self) -> tuple[Any, ...]:
        """What others must have in common with it to be joined."""
        return self.shape, self.n

    def plus(self, *others: Dense) -> Dense:
        """The sum with others."""
        return Dense(sum((other.values for other in others), self.values))

    def dot(self, other: Dense) -> Tensor:
        """(n, m)."""
        return rows(self.values) @ rows(other.values).conj().T

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R for a parameter seen as a matrix (rows, rest)."""
        values = self.values.flatten(2)
        if left.dim() == 3:  # of several parameters after each other, each with its own
            each = values.unflatten(0, (len(left), -1))
            return (left.to(values)[:, None] @ each @ right.to(values)[:, None]).flatten(0, 1)
        return left.to(values) @ values @ right.to(values)
