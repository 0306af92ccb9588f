"""Small layers of one shape together: where a step is dominated by overhead rather than arithmetic, factors wait until
there are many of one shape, and are reduced by one product for all. What waits is bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

from unsum.factors.dense import Dense
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Kind
from unsum.kernels import product
from unsum.step.unchanged import Held, refuse_changed, versions_of

# Numbers in the factors of one layer, up to which it waits; and in all that wait.
SMALL = {"cpu": 1 << 16, "cuda": 1 << 23}
BOUND = {"cpu": 1 << 22, "cuda": 1 << 27}


@dataclass
class _Group:
    """Layers of one shape that wait, in columns: nothing is made for each of them but what is held."""

    like: Outer | None  # one of them; None where gradients are formed
    wants_sum: bool
    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # (n, *shape), or `a` of an outer product
    deltas: list[Tensor] = field(default_factory=list)  # of outer products
    held: list[Held] = field(default_factory=list)

    def joined(self) -> Outer | Dense:
        """As one layer with more samples."""
        if self.like is None:
            return Dense(torch.cat(self.values))
        return replace(self.like, a=torch.cat(self.values), delta=torch.cat(self.deltas))


def waits(kind: Kind) -> bool:
    """Whether factors are small enough to wait for others of their shape, and of a kind that can."""
    if isinstance(kind, Outer):
        return kind.groups == 1 and kind.a.numel() + kind.delta.numel() <= SMALL.get(kind.a.device.type, 0)
    if isinstance(kind, Scale):
        return kind.n * prod(kind.shape) <= SMALL.get(kind.delta.device.type, 0)
    return isinstance(kind, Dense) and kind.values.numel() <= SMALL.get(kind.values.device.type, 0)


class Pool:
    """Factors that wait for others of their shape. `put` gets names and squared norms, `deliver` the sums over
    samples."""

    def __init__(
        self,
        put: Callable[[Sequence[str], Tensor], None],
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
    ) -> None:
        self._put, self._deliver = put, deliver
        self._waiting: dict[Hashable, _Group] = {}
        self._held = 0

    def add(self, name: str, parameter: nn.Parameter, kind: Kind, *, wants_sum: bool) -> bool:
        """Whether this one waits; False if it is too large to, or of a kind that cannot."""
        if not waits(kind):
            return False
        if not isinstance(kind, Outer):
            assert isinstance(kind, Scale | Dense)
            self.add_formed(name, parameter, kind.per_sample(), wants_sum=wants_sum)
            return True
        a, delta = kind.a, kind.delta
        key = (a.shape, a.dtype, wants_sum, a.device, delta.shape, delta.dtype, kind.turned)
        group = self._waiting.get(key)
        if group is None:
            group = self._waiting[key] = _Group(kind, wants_sum)
        group.names.append(name)
        group.parameters.append(parameter)
        group.values.append(a)
        group.deltas.append(delta)
        group.held.append(versions_of(a, delta))
        self._count(a.numel() + delta.numel(), a.device)
        return True

    def add_formed(self, name: str, parameter: nn.Parameter, values: Tensor, *, wants_sum: bool) -> None:
        """Gradients (n, *shape), which wait."""
        key = (values.shape, values.dtype, wants_sum, values.device)
        group = self._waiting.get(key)
        if group is None:
            group = self._waiting[key] = _Group(None, wants_sum)
        group.names.append(name)
        group.parameters.append(parameter)
        group.values.append(values)
        self._count(values.numel(), values.device)

    def _count(self, size: int, device: torch.device) -> None:
        self._held += size
        if self._held > BOUND.get(device.type, 0):
            self.flush()

    def flush(self) -> None:
        """Reduce what waits."""
        for group in self._waiting.values():
            for name, held in zip(group.names, group.held, strict=False):  # what is formed is nobody else's
                refuse_changed(name, held)
            sq, sums = reduced(group.joined(), len(group.names), wants_sum=group.wants_sum)
            self._put(group.names, sq)
            if sums is not None:
                self._deliver(group.parameters, sums.unbind())
        self._waiting.clear()
        self._held = 0


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
