"""`Project`: random projections of each sample's gradient."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor, nn

from unsum.errors import OptionError
from unsum.factors.factors import Factors, kept_numbers, projection, sides
from unsum.factors.stacked import Layers
from unsum.reducers.reducer import Reading
from unsum.reducers.tap import Shape, Tap


class Project(Reading):
    """Random projections: K numbers for each sample, whose inner products are, on average, those of gradients.

    A parameter of more than k² elements is mapped to k² numbers: its outer products are projected from both sides, and
    no gradient is formed. A smaller parameter is not projected. K = Σ min(elements, k²) over the parameters, in the
    order of their names. `dim` sets K instead: unsum takes the smallest k that gives at least that many numbers, and
    adds the surplus to random columns with random signs.

    Args:
        k: Numbers on each side of a parameter's projection.
        seed: The seed of the random matrices, which depend on it and on the parameters' names alone, on every device.
        dim: The number of columns of `matrix()`, instead of k.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.Project(k=2, seed=0)) as g:
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> g[unsum.Project].matrix().shape
        torch.Size([5, 4])
        >>> with unsum.gradients(model, unsum.Project(dim=3)) as g:
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> g[unsum.Project].matrix().shape
        torch.Size([5, 3])
    """

    _adds = True
    power, by_position, by_name = 1, False, True

    def __init__(self, k: int | None = None, seed: int = 0, *, dim: int | None = None) -> None:
        for name, value in (("k", k), ("dim", dim)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"Project({name}={value!r}): {name} is a whole number, 1 or more")
        if k is not None and dim is not None:
            raise OptionError(
                f"Project(k={k}, dim={dim}): give k, the numbers on each side, or dim, the columns in all"
            )
        self._k, self._seed, self._dim = 16 if k is None else k, seed, dim
        super().__init__()

    def order_by(self, parameters: Mapping[str, Tensor]) -> None:
        """The block's parameters: a number of columns tells k."""
        super().order_by(parameters)
        if self._dim is not None:
            self._k = _smallest([tuple(p.shape) for p in parameters.values()], self._dim)

    reads = ("matrix()",)

    def reset(self) -> None:
        super().reset()
        self._parts: dict[str, dict[int, Tensor]] = {}

    @property
    def wants(self) -> Hashable:  # type: ignore[override]
        """What is read of factors."""
        return "projected", self._k, self._seed

    def read(self, factors: Factors) -> Tensor:
        """(n, k·k)."""
        return factors.project(self._k, self._seed)

    def read_layers(self, layers: Layers) -> Tensor:
        """(layers, n, k·k): each by its own matrices."""
        factors, names = layers.factors, tuple(layers.names)
        wanted = sides(factors.shape, self._k)
        if wanted is None:
            return layers.apart(factors.projected(self._k, None))
        return layers.apart(factors.projected(self._k, _matrices(names, self._seed, wanted, layers.parameter.device)))

    def receive(self, names: Sequence[str], value: Tensor) -> None:
        """Add to a parameter's (n, k·k)."""
        parts = self._parts.setdefault(names[0], {})
        parts[self._now] = parts[self._now] + value if self._now in parts else value

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap:
        """(n, K) leave a compiled model."""
        return _ProjectTap(self, self._k, self._seed, parameters)

    def by_parameter(self) -> dict[str, Tensor]:
        """{parameter: (n, k·k)}."""
        self._check()
        return {name: self._in_order(parts) for name, parts in self._in_models_order(self._parts).items()}

    def matrix(self) -> Tensor:
        """(n, K): the projections of all parameters side by side, in the order of their names; (n, dim) with `dim`."""
        parts = self.by_parameter()
        whole = torch.cat([parts[name] for name in sorted(parts)], 1)
        return whole if self._dim is None else _folded(whole, self._dim, self._seed)


def _smallest(shapes: Sequence[Shape], dim: int) -> int:
    """The smallest k that leaves as many numbers or more; where all that there are do not suffice, all are kept."""
    most = max((prod(shape) for shape in shapes), default=1)
    k = 1
    while sum(kept_numbers(shape, k) for shape in shapes) < dim and k * k < most:
        k += 1
    return k


def _folded(whole: Tensor, dim: int, seed: int) -> Tensor:
    """(n, dim): each column is added, with a random sign, to one of dim, as evenly as can be."""
    n, columns = whole.shape
    if columns <= dim:
        return torch.nn.functional.pad(whole, (0, dim - columns))
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(columns, generator=generator) % dim
    sign = torch.randint(0, 2, (columns,), generator=generator) * 2 - 1
    return whole.new_zeros(n, dim).index_add_(1, place.to(whole.device), whole * sign.to(whole))


@lru_cache(maxsize=256)
def _matrices(
    names: tuple[str, ...], seed: int, wanted: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of several parameters of one shape: (layers, k, rows) and (layers, columns, k)."""
    left, right = zip(*[projection(name, seed, *wanted, device) for name in names], strict=True)
    return torch.stack(left), torch.stack(right)


class _Projected:
    """Takes factors with the matrices that it is given."""

    def __init__(self, k: int, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._k, self._matrices = k, matrices
        self.found: dict[str, Tensor] = {}

    def begin(self, n: int, again: bool) -> None: ...

    def take(self, name: str, factors: Factors) -> None:
        self.found[name] = factors.projected(self._k, self._matrices.get(name))

    def end(self, left: Sequence[str]) -> None: ...


class _ProjectTap(Tap):
    """(n, K): the projections of all parameters side by side."""

    inputs, by_parts = 1, True

    def __init__(self, reducer: Project, k: int, seed: int, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._to, self._k, self._seed = reducer, k, seed
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
            self._to.receive((name,), part)


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
