"""Small layers of one shape together: where a step is dominated by overhead rather than arithmetic, factors wait until
there are many of one shape, and are reduced by one product for all. What waits is bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unsum.factors.dense import Dense
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Kind
from unsum.kernels import product

# Numbers in the factors of one layer, up to which it waits; and in all that wait.
SMALL = {"cpu": 1 << 16, "cuda": 1 << 23}
BOUND = {"cpu": 1 << 22, "cuda": 1 << 27}


@dataclass(frozen=True)
class _Waiting:
    name: str
    parameter: nn.Parameter
    kind: Outer | Dense
    wants_sum: bool


class Pool:
    """Factors that wait for others of their shape. `put` gets squared norms, `deliver` the sums over samples."""

    def __init__(self, put: Callable[[str, Tensor], None], deliver: Callable[[nn.Parameter, Tensor], None]) -> None:
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
        key: Hashable
        if isinstance(kind, Outer):
            key = (
                kind.a.shape,
                kind.delta.shape,
                kind.turned,
                kind.a.dtype,
                kind.delta.dtype,
                wants_sum,
                parameter.device,
            )
        else:
            key = (kind.values.shape, kind.values.dtype, wants_sum, parameter.device)
        self._waiting.setdefault(key, []).append(_Waiting(name, parameter, kind, wants_sum))
        self._held += size
        if self._held > BOUND.get(device, 0):
            self.flush()
        return True

    def flush(self) -> None:
        """Reduce what waits."""
        for group in self._waiting.values():
            kinds = [waiting.kind for waiting in group]
            sq, sums = _outers(kinds, group) if isinstance(kinds[0], Outer) else _dense(kinds, group)  # type: ignore[arg-type]
            for k, waiting in enumerate(group):
                self._put(waiting.name, sq[k])
                if sums is not None:
                    self._deliver(waiting.parameter, sums[k].reshape(waiting.parameter.shape))
        self._waiting.clear()
        self._held = 0


def _outers(kinds: list[Outer], group: list[_Waiting]) -> tuple[Tensor, Tensor | None]:
    """(layers, n) and (layers, *shape), from one product."""
    first, wants_sum, n = kinds[0], group[0].wants_sum, kinds[0].n
    a, delta = torch.cat([kind.a for kind in kinds]), torch.cat([kind.delta for kind in kinds])
    if not wants_sum:
        return product.sq_norms(a, delta).view(len(kinds), n), None
    each = torch.bmm(delta.mT, a)
    sums = each.unflatten(0, (len(kinds), n)).sum(1)
    return product.squares(each).view(len(kinds), n), sums.mT if first.turned else sums


def _dense(kinds: list[Dense], group: list[_Waiting]) -> tuple[Tensor, Tensor | None]:
    values = torch.stack([kind.values for kind in kinds])
    sq = product.squares(values.flatten(0, 1)).view(values.shape[:2])
    return sq, values.sum(1) if group[0].wants_sum else None
