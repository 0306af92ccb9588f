"""Parameters of one shape together: their gradients as those of one parameter with more samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from unsum.factors.dense import Dense
from unsum.factors.factors import Factors, GroupFactors
from unsum.factors.outer import Outer
from unsum.factors.total import Term
from unsum.kernels import fused, product
from unsum.kernels.product import rows, wide
from unsum.kernels.recorded import Rehearsed

LARGE = 1 << 20  # numbers, from which one pass over each layer's gradients is as good as one product for all


@dataclass(eq=False)
class Layers:
    """The gradients of several parameters of one shape. `kind` has the samples of the first, then those of the second,
    and so on; each has n."""

    names: Sequence[str]
    parameter: Tensor  # the first of them
    kind: Term
    n: int
    scale: Tensor | float | None = None  # of all gradients
    _squares: Tensor | None = field(default=None, init=False)  # (layers, n), once they are known; without the scale
    _again: Rehearsed | None = field(default=None, init=False)  # weighted sums of such layers
    _own: Sequence[Tensor] = field(default=(), init=False)  # the tensors of `kind`

    def know(self, squares: Tensor, again: Rehearsed, own: Sequence[Tensor]) -> None:
        """Squared norms (layers, n) that came with these tensors, of which `kind` is made; how sums are made again."""
        self._squares, self._again, self._own = squares, again, own

    @cached_property
    def factors(self) -> Factors:
        """All of them as one parameter with more samples."""
        share = GroupFactors(len(self.names) * self.n, [self.kind], self.scale)
        return Factors(", ".join(self.names), self.parameter, [share], is_over=False)

    def apart(self, values: Tensor) -> Tensor:
        """(layers, n, …) of what has one row for each sample of each layer."""
        return values.view(len(self.names), self.n, *values.shape[1:])

    def sq_norms(self) -> Tensor:
        """(layers, n)."""
        if self._squares is None:
            self._squares = self.apart(self.kind.sq_norms())
        return self._times(self._squares, 2)

    def sums(self) -> Tensor:
        """(layers, *shape): over the samples of each, as torch computes it: not scaled. Where norms are not known yet,
        they come with it."""
        kind = self.kind
        if not isinstance(kind, Outer) or kind.groups > 1 or kind.lengths is not None:
            summed = self.apart(kind.per_sample()).sum(1)
        elif self._squares is None:
            each = torch.bmm(kind.delta.mT, kind.a)
            self._squares = self.apart(product.squares(each))
            summed = self._placed(kind, self.apart(each).sum(1))
        else:
            summed = self._placed(kind, self._product(kind.a, kind.delta))
        return summed

    def weighted_sums(self, w: Tensor) -> Tensor:
        """(layers, *shape): Σ w_n G_n of each, with weights (n,), or (layers, n) where each layer has its own."""
        if self._again is None or self.scale is not None:
            return self._weighted_sums(w)
        return self._again(lambda: ([self._weighted_sums(w)], None), [w, *self._own])[0][0]

    def _weighted_sums(self, w: Tensor) -> Tensor:
        kind = self.kind
        if isinstance(kind, Outer) and kind.groups == 1:
            w = w.repeat(len(self.names)) if w.dim() == 1 else w.reshape(-1)
            narrow = kind.a.shape[-1] < kind.delta.shape[-1]  # the smaller of the two factors takes the weights
            a = fused.scaled(kind.a, w) if narrow else kind.a
            delta = kind.delta if narrow else fused.scaled(kind.delta, w)
            return self._times(self._placed(kind, self._product(a, delta)))
        each = self.apart(kind.per_sample())
        if each.numel() > LARGE * len(self.names):
            own_weights = w.expand(len(self.names), self.n)
            sums = [Dense(own).weighted_sum(own_w) for own, own_w in zip(each, own_weights, strict=True)]
            return self._times(torch.stack(sums))
        flat = self.apart(rows(kind.per_sample())).to(wide(each.dtype))
        w = w.to(flat) if w.dim() == 1 else w.to(flat).unsqueeze(1)
        return self._times(torch.matmul(w, flat).view(len(self.names), *kind.shape))

    def formed(self) -> Layers:
        """The same multiplied out, where norms form the gradients; itself where they do not."""
        made = self.kind.norms_and_each(want_sum=False)
        if made is None:
            return self
        self._squares = self.apart(made[0])
        other = Layers(self.names, self.parameter, made[2], self.n, self.scale)
        other._squares = self._squares
        return other

    def _times(self, value: Tensor, power: int = 1) -> Tensor:
        return value if self.scale is None else value * self.scale**power

    def _product(self, a: Tensor, delta: Tensor) -> Tensor:
        """(layers, o, i): the sum over samples and positions."""
        layers = len(self.names)
        return torch.bmm(delta.view(layers, -1, delta.shape[-1]).mT, a.view(layers, -1, a.shape[-1]))

    def _placed(self, kind: Outer, values: Tensor) -> Tensor:
        values = values.mT if kind.turned else values
        return values.reshape(len(self.names), *kind.shape)
