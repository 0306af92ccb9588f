"""A scale or a shift: each position brings δ·x, or δ, to the parameter, number by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from unsum.factors.dense import Dense
from unsum.kernels.product import wide


@dataclass(frozen=True, eq=False)
class Scale:
    """G_n = Σ_t δ_nt·x_nt, summed over what was broadcast; `x` is computed when it is needed, None for a shift."""

    delta: Tensor  # (n, t, *features)
    x: Callable[[], Tensor] | None  # (n, t, *features)
    shape: tuple[int, ...]
    over: tuple[int, ...] | None = None  # the parameter's shape beside the features, 1 where it was broadcast
    lengths: Tensor | None = None
    dtype: torch.dtype | None = None
    summed: Callable[[], Tensor] | None = None  # (n, *features): Σ_t δ_nt·x_nt, if there is a faster way to it
    token_squares: Callable[[], Tensor] | None = None  # (n, t): |δ_nt·x_nt|², from a pass that others share
    normalised: tuple[Tensor, Tensor, Tensor] | None = None  # what `x` is made of: (values - mean)·rstd

    @property
    def n(self) -> int:
        return self.delta.shape[0]

    def numel(self) -> int:
        """How many numbers are held for one sample."""
        return self.delta.numel() // max(self.n, 1) * (1 if self.x is None else 2)

    @property
    def is_whole(self) -> bool:
        """Whether features are the parameter as it is, as most often: nothing was broadcast but to positions."""
        return self.over is None and self.delta.shape[2:] == self.shape

    @cached_property
    def _values(self) -> Tensor:
        wanted, shape = wide(self.dtype or self.delta.dtype), (self.n, *self.shape)
        if self.is_whole:
            return self._each().sum(1, dtype=wanted) if self.summed is None else self.summed().to(wanted)
        if self.summed is not None:
            return self.summed().to(wanted).sum_to_size(self._broadcast()).reshape(shape)
        each = self._each()
        kept = self._broadcast()
        over = [1, *(d + 1 for d in range(1, len(kept)) if kept[d] == 1 != each.shape[d + 1])]  # in one pass
        return each.sum(over, dtype=wanted).reshape(shape)

    def _broadcast(self) -> tuple[int, ...]:
        over = self.shape if self.over is None else self.over
        features = self.delta.dim() - 2
        return (self.n, *(1 for _ in range(features - len(over))), *over[max(len(over) - features, 0) :])

    def formed(self) -> Dense:
        """The gradients, which are small."""
        return Dense(self._values)

    def per_sample(self) -> Tensor:
        """(n, *shape)."""
        return self._values

    def _each(self) -> Tensor:
        return self.delta if self.x is None else self.delta * self.x()

    def tokens(self) -> Tensor:
        """(n, t, *shape): the part of each position."""
        each = self._each()
        n, t = each.shape[:2]
        _, *rest = self._broadcast()
        whole = each.flatten(0, 1).sum_to_size((n * t, *rest)).reshape(n, t, *self.shape)
        return whole.to(wide(self.dtype or self.delta.dtype))

    def token_sq_norms(self) -> Tensor:
        """(n, t)."""
        wanted = wide(self.dtype or self.delta.dtype)
        summed_over = self._broadcast()[1:] != tuple(self.delta.shape[2:])
        if self.token_squares is not None and not summed_over:
            return self.token_squares().to(wanted)
        each = self.tokens() if summed_over else self._each()
        flat = each.reshape(*each.shape[:2], prod(each.shape[2:]))
        return torch.linalg.vector_norm(flat, dim=2, dtype=wanted).square()

    def sum(self) -> Tensor:
        """The sum over samples."""
        return self.formed().sum()

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n."""
        return self.formed().weighted_sum(w)

    def sq_norms(self) -> Tensor:
        """(n,)."""
        return self.formed().sq_norms()

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.formed().norms_and_sum()

    def norms_and_each(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None, Dense]:
        """Norms, the sum if it is wanted, and the gradients."""
        return self.formed().norms_and_each(want_sum=want_sum)

    def times(self, factor: Tensor | float) -> Scale:
        """Every gradient multiplied by the same number."""
        return replace(self, delta=self.delta * factor, summed=None, token_squares=None)

    @property
    def joint(self) -> tuple[Any, ...]:
        """What others must have in common with it to be joined."""
        return self.shape, self.n

    def plus(self, *others: Scale) -> Dense:
        """The sum with others."""
        return self.formed().plus(*(other.formed() for other in others))

    def dot(self, other: Scale) -> Tensor:
        """(n, m)."""
        return self.formed().dot(other.formed())

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R for a parameter seen as a matrix (rows, rest)."""
        return self.formed().project(left, right)
