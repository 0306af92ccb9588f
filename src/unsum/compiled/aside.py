"""Factors of small layers, set aside while torch writes down: at the end one operator gives the norms of all of them,
instead of several kernels for each. The weights' gradients stay torch's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unsum.factors.grouping import grouping
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Kind
from unsum.kernels import grouped
from unsum.kernels.traced import hint


@dataclass
class _Group:
    """What one operator is given, and whose norms it gives."""

    n: Any  # may be symbols
    t: Any
    held: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)  # a scale's name: its shift's

    def columns(self) -> list[list[Tensor]]:
        return [list(column) for column in zip(*(self.held[name] for name in self.names()), strict=True)]

    def names(self) -> list[str]:
        return sorted(self.held)


class Aside:
    """Takes factors, if one operator may serve them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], _Group] = {}
        self._held: dict[int, Tensor] = {}  # gradients that have to stay until the operators run, by id

    def take(self, name: str, kind: Kind, dtype: torch.dtype) -> bool:
        """Whether these factors, of a parameter of this dtype, were set aside."""
        found = grouping(kind, dtype)
        if found is None or not isinstance(kind, Outer | Scale):
            return False
        way, tensors = found
        delta = kind.delta
        n, t = delta.shape[:2]
        if not grouped.is_small(hint(n) * hint(t), delta.device.type):
            return False
        if not grouped.is_ready(delta.device, delta.dtype) or not self._hold(delta):
            return False
        norms = self._group("norm", n, t)
        scale = next((other for other, held in norms.held.items() if way == "shift" and held[0] is delta), None)
        if scale is not None:
            norms.beside[scale] = name
        else:
            self._group(way, n, t).held[name] = tensors
        return True

    def _hold(self, delta: Tensor) -> bool:
        """Whether there is room for one more."""
        held = {**self._held, id(delta): delta}
        if sum(hint(each.numel()) for each in held.values()) > grouped.HELD.get(delta.device.type, 0):
            return False
        self._held = held
        return True

    def _group(self, way: str, n: Any, t: Any) -> _Group:
        return self._groups.setdefault((way, hint(t)), _Group(n, t))

    def squares(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Names and squared norms (names, n) of all that was set aside."""
        for (way, _), group in sorted(self._groups.items(), key=lambda each: each[0]):
            names = group.names()
            if not names:
                continue
            given = (*group.columns(), group.n, group.t)
            if way == "gram":
                yield names, grouped.gram_sq_norms(*given)
            elif way == "shift":
                yield names, grouped.shift_sq_norms(*given)
            else:
                scales, shifts = grouped.norm_sq_norms(*given)
                yield names, scales
                with_shift = [k for k, name in enumerate(names) if name in group.beside]
                if with_shift:
                    shifts = shifts if len(with_shift) == len(names) else shifts[with_shift]
                    yield [group.beside[names[k]] for k in with_shift], shifts
