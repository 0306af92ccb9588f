"""`SecondMoment`: Σ_n |g_n|² of every parameter, number by number."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unsum.factors.factors import Factors
from unsum.reducers.reducer import Reduction
from unsum.reducers.tap import Shape, Tap


class SecondMoment(Reduction):
    """Σ_n |g_n|², element by element: with the sum, the variance of gradients and the noise scale.

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
        self.add(name, _squared(factors))

    def add(self, name: str, value: Tensor) -> None:
        """A part of the sum of one parameter."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap:
        """The sums leave a compiled model."""
        return _MomentTap(self, parameters)

    def sum_squares(self) -> dict[str, Tensor]:
        """{parameter: Σ_n |g_n|²}."""
        self._check()
        return self._in_models_order(self._sums)


def _squared(factors: Factors) -> Tensor:
    each = factors.per_sample()
    each = torch.view_as_real(each) if each.is_complex() else each
    value = torch.einsum("n...,n...->...", each, each)
    return value.sum(-1) if factors.is_complex else value


class _MomentTap(Tap):
    """Σ_n g_n² of every parameter."""

    inputs = 1  # as many numbers as there are samples: what leaves does not tell how many
    by_sample = by_parts = True

    def __init__(self, reducer: SecondMoment, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._to, self._parameters, self.taps = reducer, parameters, len(parameters)

    @property
    def key(self) -> Hashable:
        return "second moment"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [tuple(p.shape) for p in self._parameters.values()]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [torch.zeros(n, device=device)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> SecondMoment:
        return SecondMoment()

    def values(self, reducer: SecondMoment) -> list[Tensor]:
        found = reducer.sum_squares()
        return [found[name] for name in self._parameters]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        for name, value in zip(self._parameters, values, strict=True):
            self._to.add(name, value if scale is None else value * scale**2)
