"""`WeightedSum` with a function of the norms, in a compiled model.

The weights are needed inside the backward, after the last norm and before the first sum, and only the user's function
gives them. The function is not traced: a threshold that it reads from elsewhere would become a constant. An operator
stands for it in the compiled backward. When the backward runs, the operator calls the function on the numbers of that
backward. What is held until then (gradients, or factors) is held by the compiled code.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.factors import Factors
from unsum.reducers.holding import GRADIENTS, Sizes, choose, free_memory, grown
from unsum.reducers.tap import Shape, Tap
from unsum.seams.operators import python_operator

_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, ClippedTap] = weakref.WeakValueDictionary()


class Clipping(Protocol):
    """The reducer, as its tap sees it."""

    chosen: dict[str, str]

    def weigh(self, sq_norms: Tensor) -> Tensor: ...
    def add(self, name: str, value: Tensor) -> None: ...
    def end(self, left: Sequence[str]) -> None: ...


def _weights_of(sq_norms: Tensor, whose: Tensor) -> Tensor:
    """The weights for these squared norms, by the function of the reducer with this number. In memory of its own: the
    function may return what it keeps, and compiled code uses memory again. Zeros in a backward that no block waits
    for: its sums go nowhere."""
    found = torch.zeros_like(sq_norms, memory_format=torch.contiguous_format)
    tap = _open.get(int(whose[0]))
    return found if tap is None or not tap.waits else found.copy_(tap.weigh(sq_norms).detach())


_operator = python_operator(
    "unsum::weights_of_norms",
    _weights_of,
    "(Tensor sq_norms, Tensor whose) -> Tensor",
    lambda sq_norms, whose: sq_norms.new_empty(sq_norms.shape),
)


def rows_of_groups(squares: Mapping[str, Tensor], groups: Mapping[str, int]) -> Tensor:
    """(groups, n): the squared norms of the parameters of each group, added up."""
    none = torch.zeros_like(next(iter(squares.values())))
    rows = [none] * (max(groups.values()) + 1)
    for name, own in squares.items():
        rows[groups[name]] = rows[groups[name]] + own
    return torch.stack(rows)


class _Clipped:
    """Takes factors while torch writes down, and makes the sums when the weights are there."""

    sums = True

    def __init__(self, chosen: Mapping[str, str], groups: Mapping[str, int] | None, whose: Tensor) -> None:
        self._chosen, self._groups, self._whose = chosen, groups, whose
        self._squares: dict[str, Tensor] = {}
        self._held: dict[str, Factors] = {}
        self.sq_norms: Tensor | None = None
        self.found: dict[str, Tensor] = {}
        self.left: list[str] = []

    def begin(self, n: int, again: bool) -> None: ...

    def forms(self, name: str) -> bool:
        return self._chosen.get(name, GRADIENTS) == GRADIENTS

    def take(self, name: str, factors: Factors) -> None:
        held = factors.formed() if self.forms(name) else factors
        self._squares[name], self._held[name] = held.sq_norms(), held

    def end(self, left: Sequence[str]) -> None:
        self.left, groups = list(left), self._groups
        every = torch.stack(list(self._squares.values())).sum(0) if groups is None else None
        self.sq_norms = rows_of_groups(self._squares, groups) if groups is not None else every
        weights = _operator(self.sq_norms, self._whose)
        for name, held in self._held.items():
            self.found[name] = held.weighted_sum(weights if groups is None else weights[groups[name]])


class ClippedTap(Tap):
    """Σ w_n G_n of every parameter leaves, with weights that a function gives while the backward runs; and the squared
    norms that it was given."""

    inputs, calls_python, together = 1, True, True

    def __init__(
        self,
        reducer: Clipping,
        parameters: Mapping[str, nn.Parameter],
        memory: float | None,
        groups: Mapping[str, int] | None,
    ) -> None:
        super().__init__()  # `told`: what nothing reached
        self._to, self._parameters, self._memory, self._groups = reducer, parameters, memory, groups
        self.taps = 1 + len(parameters)
        self._chosen: dict[str, str] = {}
        self._scale: Tensor | float | None = None
        self._asked = 0  # how often the function was called in this backward
        self._number = next(_numbers)
        _open[self._number] = self

    @property
    def key(self) -> Hashable:
        groups = None if self._groups is None else tuple(self._groups.get(name) for name in self._parameters)
        return "clipped", groups

    def prepare(self, sizes: Sizes, learnt: int, n: int) -> Hashable:
        """Choose what is held. Another choice is another compilation: so neither each number of samples nor each byte
        that becomes free makes a difference."""
        times = 1 if n <= learnt else 2 ** math.ceil(math.log2(n / max(learnt, 1)))
        wanted = sizes if times == 1 else Sizes({name: grown(size, times) for name, size in sizes.items()})
        devices = {p.device for p in self._parameters.values()}
        free = free_memory(devices, 2 * wanted.needed) if self._memory is None else self._memory
        budget = 2 ** math.floor(math.log2(free)) if self._memory is None and 0 < free < math.inf else free
        self._chosen = choose(wanted, budget)
        return tuple(sorted(self._chosen.items()))

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        norms: Shape = (n,) if self._groups is None else (max(self._groups.values()) + 1, n)
        return [norms, *(tuple(p.shape) for p in self._parameters.values())]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [torch.tensor([self._number])]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return taps[0].shape[-1]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Clipped:
        return _Clipped(self._chosen, self._groups, inputs[0])

    def values(self, reducer: _Clipped) -> list[Tensor]:
        assert reducer.sq_norms is not None
        self.told = reducer.left
        return [reducer.sq_norms, *(reducer.found[name] for name in self._parameters)]

    def begin(self, scale: Tensor | float | None) -> None:
        self._scale, self._asked, self.waits = scale, 0, True
        self._to.chosen = {name: self._chosen[name] for name in self._parameters if name in self._chosen}

    def weigh(self, sq_norms: Tensor) -> Tensor:
        """The weights for the squared norms of the backward under way."""
        self._asked += 1
        return self._to.weigh(sq_norms if self._scale is None else sq_norms * self._scale**2)

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        if self._asked != 1:
            raise UnsupportedError(
                f"WeightedSum: the function of the norms was called {self._asked} times in this backward of the "
                "compiled model, and the sums may not be by its weights (does the backend replay what it recorded?).",
                write="with unsum.gradients(compiled._orig_mod, reducer) as g: ...  # and call compiled._orig_mod",
            )
        for name, value in zip(self._parameters, values[1:], strict=True):
            self._to.add(name, value if scale is None else value * scale)
        self._to.end(self.told)
