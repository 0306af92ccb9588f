"""`SecondMoment`: Σ_n |g_n|² of every parameter, number by number."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.factors.factors import Factors
from unsum.reducers.reducer import Reduction


class SecondMoment(Reduction):
    """Σ_n |g_n|², number by number: with the sum, the variance of gradients and the noise scale.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.SecondMoment()) as g:
        ...     model(2 * torch.ones(3, 3)).sum().backward()
        >>> g[unsum.SecondMoment].sum_squares()["weight"]
        tensor([[12., 12., 12.],
                [12., 12., 12.]])
    """

    reads = ("sum_squares()",)

    def reset(self) -> None:
        super().reset()
        self._sums: dict[str, Tensor] = {}

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        each = factors.per_sample()
        each = torch.view_as_real(each) if each.is_complex() else each
        value = torch.einsum("n...,n...->...", each, each)
        value = value.sum(-1) if factors.is_complex else value
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def sum_squares(self) -> dict[str, Tensor]:
        """{parameter: Σ_n |g_n|²}."""
        self._check()
        return self._in_models_order(self._sums)
