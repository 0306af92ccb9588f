"""`Kronecker`: sums of a aᵀ and δ δᵀ of every parameter that is met by outer products."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unsum.errors import NotAvailable, UnsupportedError
from unsum.factors.factors import Factors
from unsum.reducers.holding import Sizes
from unsum.reducers.reducer import Reduction
from unsum.reducers.tap import Shape, Tap


class Kronecker(Reduction):
    """A = Σ a aᵀ and G = Σ δ δᵀ of every parameter whose gradients are sums of outer products. Positions without a
    gradient (padding) do not count.

    Examples:
        >>> import torch, unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.Kronecker()) as g:
        ...     model(torch.ones(4, 3)).sum().backward()
        >>> g[unsum.Kronecker].factors()["weight"][1]
        tensor([[4., 4.],
                [4., 4.]])
    """

    _adds = False

    reads = ("factors()",)

    def reset(self) -> None:
        super().reset()
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        try:
            outers = factors.outers()
        except NotAvailable:
            self.left_out.append(name)
            return
        for share, outer in outers:
            if outer.groups > 1:
                self.left_out.append(name)
                return
            a, delta = (part.flatten(0, 1).to(factors.dtype) for part in (outer.a, outer.delta))
            a = a * (delta != 0).any(1, keepdim=True)
            self.add(name, a.T @ a, share.times(delta.T @ delta, 2))

    def add(self, name: str, a: Tensor, delta: Tensor) -> None:
        """A part of the two sums of one parameter."""
        known = self._factors.get(name)
        self._factors[name] = (a, delta) if known is None else (known[0] + a, known[1] + delta)

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap:
        """The sums leave a compiled model."""
        return _KroneckerTap(self, parameters)

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{parameter: (A (i, i), G (o, o))}."""
        self._check()
        return self._in_models_order(self._factors)


class _KroneckerTap(Tap):
    """A and G of every parameter; a zero for each that is left out."""

    inputs = 1  # as many numbers as there are samples: what leaves does not tell how many

    def __init__(self, reducer: Kronecker, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # `told`: what is left out
        self._to, self._names, self.taps = reducer, list(parameters), 2 * len(parameters)
        self._device = next(iter(parameters.values())).device
        self._sides: dict[str, tuple[int, int]] = {}

    @property
    def key(self) -> Hashable:
        return "kronecker"

    def prepare(self, sizes: Sizes, learnt: int, n: int) -> Hashable:
        self._sides = {name: size.sides for name, size in sizes.items() if size.sides is not None}
        return tuple(sorted(self._sides.items()))

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        sides = [self._sides.get(name, (1, 1)) for name in self._names]
        return [(side, side) for both in sides for side in both]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [torch.zeros(n, device=device)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> Kronecker:
        return Kronecker()

    def values(self, reducer: Kronecker) -> list[Tensor]:
        found, self.told = reducer.factors(), reducer.left_out
        for name, both in found.items():
            if tuple(side.shape[0] for side in both) != self._sides.get(name):
                raise UnsupportedError(f"Kronecker: the factors of {name} have other sizes than those that were learnt")
        zero = torch.zeros(1, 1, device=self._device)
        return [side for name in self._names for side in found.get(name, (zero, zero))]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        self._to.left_out += self.told
        for name, a, delta in zip(self._names, values[::2], values[1::2], strict=True):
            if name not in self.told:
                self._to.add(name, a, delta if scale is None else delta * scale**2)
