"""How each reducer takes its numbers through taps: which tensors it is given, which leave, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum.errors import SamplesError
from unsum.factors.factors import Factors, kept_numbers, projection, sides
from unsum.reducers import Norms, Project, TokenNorms
from unsum.reducing import Reducer
from unsum.weighted import WeightedSum

Shape = tuple[int, ...]


class Form(Protocol):
    """A reducer, as a compiled model sees it."""

    taps: int  # how many tensors leave
    inputs: int  # how many it is given
    told: list[str]  # what there is to know of them, found out while torch writes down

    @property
    def key(self) -> Hashable:
        """What is compiled in: another key, another compilation."""
        ...

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        """Of what leaves."""
        ...

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        """What it is given for n samples, of which so many came before."""
        ...

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        """The number of samples, while torch writes down."""
        ...

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> Reducer:
        """What takes factors while torch writes down."""
        ...

    def values(self, reducer: Any) -> list[Tensor]:
        """What leaves, when all factors have come."""
        ...

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        """What has left, after a backward."""
        ...


class _NormsForm:
    """(parameters, n): squared norms."""

    taps, inputs = 1, 0

    def __init__(self, reducer: Norms, parameters: Mapping[str, nn.Parameter]) -> None:
        self._to, self._names = reducer, list(parameters)
        self.told: list[str] = []  # in which order norms leave, found out while torch writes down

    @property
    def key(self) -> Hashable:
        return "norms"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [(len(self._names), n)]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return []

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return taps[0].shape[1]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> Norms:
        return Norms()

    def values(self, reducer: Norms) -> list[Tensor]:
        groups = sorted(reducer.groups(), key=lambda group: group[0][0])
        self.told = [name for names, _ in groups for name in names]
        return [torch.cat([squares for _, squares in groups])]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        self._to.put(self.told, values[0] if scale is None else values[0] * scale**2)


class _Tokens:
    """Adds up what has the input's positions."""

    def __init__(self, t: int) -> None:
        self.total: Tensor | None = None
        self.left_out: list[str] = []
        self._t = t

    def begin(self, n: int, again: bool) -> None: ...

    def take(self, name: str, factors: Factors) -> None:
        try:
            squares = factors.token_sq_norms()
        except SamplesError:
            self.left_out.append(name)
            return
        if squares.shape[1] != self._t:
            self.left_out.append(name)
        else:
            self.total = squares if self.total is None else self.total + squares

    def end(self, left: Sequence[str]) -> None: ...


class _TokensForm:
    """(n, t): squared norms of every token's part."""

    taps, inputs = 1, 0

    def __init__(self, reducer: TokenNorms, parameters: Mapping[str, nn.Parameter]) -> None:
        self._to = reducer
        self.told: list[str] = []  # what is left out, found out while torch writes down

    @property
    def key(self) -> Hashable:
        return "tokens"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        t = self._to.positions_of(positions)
        if t is None:
            raise SamplesError("TokenNorms: the input does not tell its positions")
        return [(n, t)]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return []

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return taps[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Tokens:
        return _Tokens(taps[0].shape[1])

    def values(self, reducer: _Tokens) -> list[Tensor]:
        if reducer.total is None:
            raise SamplesError("TokenNorms: no parameter has the input's positions")
        self.told = reducer.left_out
        return [reducer.total]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        self._to.put(values[0] if scale is None else values[0] * scale**2, self.told)


class _Projected:
    """Takes factors with the matrices that it is given."""

    def __init__(self, k: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._k, self._matrices = k, matrices
        self.found: dict[str, Tensor] = {}

    def begin(self, n: int, again: bool) -> None: ...

    def take(self, name: str, factors: Factors) -> None:
        self.found[name] = factors.projected(self._k, self._matrices.get(name))

    def end(self, left: Sequence[str]) -> None: ...


class _ProjectForm:
    """(n, K): the projections of all parameters side by side."""

    taps, inputs = 1, 1

    def __init__(self, reducer: Project, parameters: Mapping[str, nn.Parameter]) -> None:
        self._to, self._k, self._seed = reducer, *reducer.options()
        self.told: list[str] = []
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}

    @property
    def key(self) -> Hashable:
        return "projected", self._k

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [(n, sum(kept_numbers(shape, self._k) for shape in self._shapes.values()))]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [_bank(tuple(self._shapes.items()), self._k, self._seed, device)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return taps[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Projected:
        bank, first = inputs[0], 0
        matrices: dict[str, tuple[Tensor, Tensor]] = {}
        for name, shape in self._shapes.items():
            if (wanted := sides(shape, self._k)) is not None:
                k, rows, columns = wanted
                left = bank[first : first + k * rows].view(k, rows)
                first += k * rows
                matrices[name] = left, bank[first : first + columns * k].view(columns, k)
                first += columns * k
        return _Projected(self._k, matrices)

    def values(self, reducer: _Projected) -> list[Tensor]:
        return [torch.cat([reducer.found[name] for name in self._shapes], 1)]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        whole = values[0] if scale is None else values[0] * scale
        sizes = [kept_numbers(shape, self._k) for shape in self._shapes.values()]
        for name, part in zip(self._shapes, whole.split(sizes, 1), strict=True):
            self._to.receive(name, part)


@lru_cache(maxsize=16)
def _bank(shapes: tuple[tuple[str, Shape], ...], k: int, seed: int, device: torch.device) -> Tensor:
    """The matrices of all parameters, one after the other: one input instead of two for each."""
    parts = [
        matrix.flatten()
        for name, shape in shapes
        if (wanted := sides(shape, k)) is not None
        for matrix in projection(name, seed, *wanted, device)
    ]
    return torch.cat(parts) if parts else torch.zeros(1, device=device)


class _SumForm:
    """Σ w_n G_n of every parameter, with weights that are known before."""

    inputs = 1

    def __init__(self, reducer: WeightedSum, parameters: Mapping[str, nn.Parameter]) -> None:
        self._to, self._parameters, self.taps = reducer, parameters, len(parameters)
        self.told: list[str] = []

    @property
    def key(self) -> Hashable:
        return "sum"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [tuple(p.shape) for p in self._parameters.values()]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [self._to.given(first, n).to(device)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> WeightedSum:
        return WeightedSum(inputs[0])

    def values(self, reducer: WeightedSum) -> list[Tensor]:
        found = reducer.latest()
        return [found[name] if name in found else torch.zeros_like(p) for name, p in self._parameters.items()]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        for name, value in zip(self._parameters, values, strict=True):
            self._to.add(name, value if scale is None else value * scale)


_FORMS: dict[type, Callable[..., Form]] = {Norms: _NormsForm, TokenNorms: _TokensForm, Project: _ProjectForm}


def form(reducer: Reducer, parameters: Mapping[str, nn.Parameter]) -> Form | None:
    """The form of a reducer; None if it has none."""
    if type(reducer) is WeightedSum:
        return _SumForm(reducer, parameters) if not reducer.clips else None
    make = _FORMS.get(type(reducer))
    return None if make is None else make(reducer, parameters)
