"""A table whose rows are looked up: each position brings a gradient to one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.kernels import fused
from unsum.kernels.product import wide


@dataclass(frozen=True, eq=False)
class Lookup:
    """G_n has δ_nt added to row ids_nt. Rows of `padding` get nothing (their δ is zero here)."""

    ids: Tensor  # (n, t)
    delta: Tensor  # (n, t, d)
    shape: tuple[int, ...]  # (rows, d)
    lengths: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def n(self) -> int:
        return self.ids.shape[0]

    def numel(self) -> int:
        """How many numbers are held for one sample."""
        return (self.ids.numel() + self.delta.numel()) // max(self.n, 1)

    def _wide(self) -> torch.dtype:
        return wide(self.dtype or self.delta.dtype)

    def per_sample(self) -> Tensor:
        """(n, rows, d)."""
        n, rows = self.n, self.shape[0]
        flat = torch.zeros(n * rows, self.shape[1], dtype=self._wide(), device=self.delta.device)
        place = self.ids + rows * torch.arange(n, device=self.ids.device)[:, None]
        return flat.index_add_(0, place.flatten(), self.delta.flatten(0, 1).to(flat.dtype)).view(n, *self.shape)

    def tokens(self) -> Tensor:
        """(n, t, rows, d): the part of each position."""
        return self.by_position().per_sample().view(*self.ids.shape, *self.shape)

    def by_position(self) -> Lookup:
        """Every position as a sample of its own."""
        return Lookup(self.ids.reshape(-1, 1), self.delta.flatten(0, 1)[:, None], self.shape, dtype=self.dtype)

    def sum(self) -> Tensor:
        """The sum over samples."""
        return self._added(self.delta)

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n."""
        return self._added(fused.scaled(self.delta, w))

    def _added(self, delta: Tensor) -> Tensor:
        total = torch.zeros(self.shape, dtype=self._wide(), device=delta.device)
        return total.index_add_(0, self.ids.flatten(), delta.flatten(0, 1).to(total.dtype))

    def sq_norms(self) -> Tensor:
        """(n,): positions of one row are added first: sorted by row, so that no (n, rows, d) is formed."""
        return fused.lookup_sq_norms(self.ids, self.delta).to(self._wide())

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """Both; nothing is saved here."""
        return self.sq_norms(), self.sum()

    def norms_and_each(self, *, want_sum: bool) -> None:
        """No gradient is formed."""

    def token_sq_norms(self) -> Tensor:
        """(n, t): |δ|² of each position."""
        return torch.linalg.vector_norm(self.delta, dim=-1, dtype=self._wide()).square()

    def dot(self, other: Lookup) -> Tensor:
        """(n, m): through the pairs of positions that share a row."""
        found = torch.zeros(self.n, other.n, dtype=self._wide(), device=self.delta.device)
        mine, theirs = self.delta.to(self._wide()), other.delta.to(self._wide())
        for k in range(self.n):
            pairs = torch.einsum("td,msd->mts", mine[k], theirs)
            found[k] = (pairs * (self.ids[k, :, None] == other.ids[:, None, :])).sum((1, 2))
        return found

    def dot_dense(self, other: Tensor) -> Tensor:
        """(n, m): with m whole tables: each position's δ with the rows that it looked up."""
        return self.token_dots(other).sum(1)

    def token_dots(self, other: Tensor) -> Tensor:
        """(n, t, m): the same by position."""
        delta = self.delta.to(other.dtype)
        return torch.stack([(delta * table.conj()[self.ids]).sum(-1) for table in other], -1)

    def cross(self, other: Outer) -> Tensor:
        """(n,): ⟨G, G'⟩ with a matrix of the same parameter (a tied head): its δ at this sample's own rows."""
        delta, a = (other.a, other.delta) if other.turned else (other.delta, other.a)
        t = delta.shape[1]
        chosen = delta.gather(2, self.ids[:, None, :].expand(-1, t, -1))  # (n, t, s)
        return (chosen.to(self._wide()) * torch.bmm(a, self.delta.to(a.dtype).mT).to(self._wide())).sum((1, 2))

    def times(self, factor: Tensor | float) -> Lookup:
        """Every gradient multiplied by the same number."""
        return replace(self, delta=self.delta * factor)

    @property
    def joint(self) -> tuple[Any, ...]:
        """What others must have in common with it to be joined."""
        return self.shape, self.n

    def plus(self, *others: Lookup) -> Lookup:
        """The sum with others: more positions."""
        join = lambda name: torch.cat([getattr(part, name) for part in (self, *others)], 1)
        return replace(self, ids=join("ids"), delta=join("delta"), lengths=None)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R, from the columns of L at the rows that were looked up."""
        rows = left.to(self.delta).T[self.ids]  # (n, t, k)
        return torch.bmm(rows.mT, self.delta @ right.to(self.delta)).to(self._wide())
