"""`Kronecker`: sums of a aᵀ and δ δᵀ of every parameter that is met by outer products."""

from __future__ import annotations

from torch import Tensor

from unsum.errors import SamplesError
from unsum.factors.factors import Factors
from unsum.reducers.reducer import Reduction


class Kronecker(Reduction):
    """A = Σ a aᵀ and G = Σ δ δᵀ of every parameter that is met by outer products. Positions without a gradient
    (padding) are no positions.

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
        except SamplesError:
            self.left_out.append(name)
            return
        for share, outer in outers:
            if outer.groups > 1:
                self.left_out.append(name)
                return
            a, delta = (part.flatten(0, 1).to(factors.dtype) for part in (outer.a, outer.delta))
            a = a * (delta != 0).any(1, keepdim=True)
            new = a.T @ a, share.times(delta.T @ delta, 2)
            known = self._factors.get(name)
            self._factors[name] = new if known is None else (known[0] + new[0], known[1] + new[1])

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{parameter: (A (i, i), G (o, o))}."""
        self._check()
        return self._in_models_order(self._factors)
