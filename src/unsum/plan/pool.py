"""Small layers of one shape together: where a step is dominated by overhead rather than arithmetic, factors wait until
there are many of one shape, and are reduced by one product for all. What waits is bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from unsum.factors.dense import Dense
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Kind
from unsum.kernels import product
from unsum.plan.unchanged import Held, refuse_changed, versions

# Numbers in the factors of one layer, up to which it waits; and in all that wait.
SMALL = {"cpu": 1 << 16, "cuda": 1 << 23}
BOUND = {"cpu": 1 << 22, "cuda": 1 << 27}


@dataclass(frozen=True)
class _Waiting:
    name: str
    parameter: nn.Parameter
    kind: Outer | Dense
    wants_sum: bool
    held: Held


class Pool:
    """Factors that wait for others of their shape. `put` gets squared norms, `deliver` the sums over samples."""

    def __init__(
        self,
        put: Callable[[str, Tensor], None],
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
    ) -> None:
        self._put, self._deliver = put, deliver
        self._waiting: dict[Hashable, list[_Waiting]] = {}
        self._held = 0

    def add(self, name: str, parameter: nn.Parameter, kind: Kind, *, wants_sum: bool) -> bool:
        """Whether this one waits; False if it is too large to, or of a kind that cannot."""
        device = parameter.device.type
        if isinstance(kind, Scale):
            kind = kind.formed()
        if not isinstance(kind, Outer | Dense) or (isinstance(kind, Outer) and kind.groups > 1):
            return False
        size = kind.numel() * kind.n
        if size > SMALL.get(device, 0):
            return False
        if isinstance(kind, Outer):
            of_kind: Hashable = (kind.a.shape, kind.delta.shape, kind.turned, kind.a.dtype, kind.delta.dtype)
        else:
            of_kind = (kind.values.shape, kind.values.dtype)
        key = (of_kind, wants_sum, parameter.device)
        self._waiting.setdefault(key, []).append(_Waiting(name, parameter, kind, wants_sum, versions(kind)))
        self._held += size
        if self._held > BOUND.get(device, 0):
            self.flush()
        return True

    def flush(self) -> None:
        """Reduce what waits."""
        for group in self._waiting.values():
            for waiting in group:
                refuse_changed(waiting.name, waiting.held)
            sq, sums = reduced(_joined([each.kind for each in group]), len(group), wants_sum=group[0].wants_sum)
            for waiting, values in zip(group, sq.unbind(), strict=True):
                self._put(waiting.name, values)
            if sums is not None:
                self._deliver([waiting.parameter for waiting in group], sums.unbind())
        self._waiting.clear()
        self._held = 0


def _joined(kinds: Sequence[Outer | Dense]) -> Outer | Dense:
    """Layers of one shape, as one with more samples."""
    first = kinds[0]
    if isinstance(first, Dense):
        return Dense(torch.cat([kind.values for kind in kinds]))  # type: ignore[union-attr]
    a, delta = (torch.cat([getattr(kind, name) for kind in kinds]) for name in ("a", "delta"))
    return replace(first, a=a, delta=delta, token_squares=None)


def reduced(kind: Kind, layers: int, *, wants_sum: bool) -> tuple[Tensor, Tensor | None]:
    """(layers, n) squared norms and (layers, *shape) sums of the gradients of layers that are given as one with
    layers·n samples."""
    if isinstance(kind, Outer):
        if not wants_sum:
            return kind.sq_norms().view(layers, -1), None
        each = torch.bmm(kind.delta.mT, kind.a)
        sums = each.unflatten(0, (layers, -1)).sum(1)
        sums = sums.mT if kind.turned else sums
    else:
        each = kind.per_sample()
        sums = each.unflatten(0, (layers, -1)).sum(1) if wants_sum else None
    return product.squares(each).view(layers, -1), None if sums is None else sums.reshape(layers, *kind.shape)
