"""What a row of an index is made of: random projections of each parameter's gradient, or the leading coordinates of a
curvature's eigenbasis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unsum.curvature import Curvature
from unsum.factors.factors import Factors, kept_numbers, projection, sides
from unsum.fingerprint import fingerprint
from unsum.index.coordinates import Coordinates
from unsum.index.reducers import BlockRows, ParameterRows, Rows, TokenRows


class Sketch(ABC):
    """Maps the gradients of parameters to columns."""

    columns: dict[str, int]  # how many, of each parameter or block, in order

    @property
    def width(self) -> int:
        """K."""
        return sum(self.columns.values())

    @abstractmethod
    def rows(self) -> Rows:
        """A reducer that makes rows."""

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """What tells it from others."""

    @abstractmethod
    def how(self, name: str) -> str:
        """How a parameter is covered, in words."""

    def weights(self) -> Tensor | None:
        """(K,): what columns are multiplied by for influence; None if that is for the rows themselves to say."""
        return None


class Projected(Sketch):
    """k² numbers of each parameter, by random matrices from both sides; smaller parameters as they are. Of several
    independent sketches each has its own matrices; divided by √sketches, so that inner products of rows are their
    mean. A complex number is two columns."""

    def __init__(
        self, parameters: Mapping[str, Tensor], k: int, seed: int, sketches: int = 1, *, tokens: bool = False
    ) -> None:
        kept = {name: kept_numbers(tuple(p.shape), k) for name, p in parameters.items()}
        self._is_whole = {name: kept[name] == p.numel() for name, p in parameters.items()}
        self.columns = {
            name: kept[name] * (1 if self._is_whole[name] else sketches) * (2 if p.is_complex() else 1)
            for name, p in parameters.items()
        }
        self._k, self._seed, self.sketches, self._tokens = k, seed, sketches, tokens
        self._kept: dict[str, list[tuple[Tensor, Tensor] | None]] = {}

    def of(self, names: Iterable[str]) -> Projected:
        """The same for these parameters alone."""
        other = object.__new__(type(self))
        chosen = set(names)
        vars(other).update(vars(self), columns={n: size for n, size in self.columns.items() if n in chosen})
        return other

    def rows(self) -> Rows:
        return TokenRows(self.columns, self._of) if self._tokens else ParameterRows(self.columns, self._of)

    def _of(self, name: str, factors: Factors) -> Tensor:
        """(n, columns), or (n, t, columns)."""
        found = [
            factors.token_projected(matrices) if self._tokens else factors.projected(self._k, matrices)
            for matrices in self._matrices(name, factors)
        ]
        whole = found[0] if len(found) == 1 else torch.cat(found, -1) / self.sketches**0.5
        return torch.view_as_real(whole).flatten(-2) if whole.is_complex() else whole

    def _matrices(self, name: str, factors: Factors) -> list[tuple[Tensor, Tensor] | None]:
        """Of each sketch; kept, since every batch needs those of all parameters."""
        if name not in self._kept:
            wanted, self._kept[name] = sides(factors.shape, self._k), [None]
            if wanted is not None:
                seeds = [self._seed + 1_000_003 * j for j in range(self.sketches)]
                self._kept[name] = [projection(name, seed, *wanted, factors.device) for seed in seeds]
        return self._kept[name]

    def told(self) -> dict[str, Any]:
        return {"kind": "random", "k": self._k, "seed": self._seed, "sketches": self.sketches}

    def how(self, name: str) -> str:
        if name not in self.columns:
            return "left out: it has no positions"
        return "whole" if self._is_whole[name] else f"projected to {self.columns[name]} numbers"

    def apart(self, one: Tensor, other: Tensor) -> Tensor:
        """(…, sketches): inner products of rows (…, K), by each sketch alone."""
        total = torch.zeros(*one.shape[:-1], self.sketches, dtype=one.dtype)
        first = 0
        for name, size in self.columns.items():
            product = (one * other)[..., first : first + size]
            whole = self._is_whole[name]
            total += product.sum(-1, keepdim=True) if whole else (
                product.unflatten(-1, (self.sketches, -1)).sum(-1) * self.sketches
            )  # fmt: skip
            first += size
        return total


class Leading(Sketch):
    """Of each block of a curvature the k² coordinates of its eigenbasis that have the largest eigenvalues."""

    def __init__(self, curvature: Curvature, k: int) -> None:
        self._curvature, self._k = curvature, k
        self._places = {name: _largest(block.eigenvalues, k * k) for name, block in curvature.blocks.items()}
        self.columns = {name: len(place) for name, place in self._places.items()}
        self._bases = [Coordinates(block, self._places[name]) for name, block in curvature.blocks.items()]

    def rows(self) -> Rows:
        return BlockRows(self.columns, self._bases)

    def told(self) -> dict[str, Any]:
        return {"kind": "eigenbasis", "k": self._k, "curvature": self._mark()}

    def how(self, name: str) -> str:
        block = next(each for each in self._curvature.blocks.values() if name in each.names)
        return f"{self.columns[block.name]} coordinates of the eigenbasis of {' and '.join(block.names)}"

    def _mark(self) -> str:
        """A number that another curvature does not have."""
        values = [block.eigenvalues.reshape(-1).cpu().double() for block in self._curvature.blocks.values()]
        return f"{self._curvature!r}, eigenvalues {fingerprint(torch.cat(values))}"

    def weights(self) -> Tensor:
        """1 / (eigenvalue + damping), block by block."""
        found = []
        for name, block in self._curvature.blocks.items():
            damped = block.eigenvalues.reshape(-1).double().cpu()[self._places[name]] + block.damping
            found.append(torch.where(damped > 0, 1 / damped, 0.0))
        return torch.cat(found)


def _largest(values: Tensor, count: int) -> Tensor:
    """The places of the largest, in order; the first of equal ones."""
    flat = values.reshape(-1).cpu()
    order = torch.sort(flat, descending=True, stable=True).indices
    return order[: min(count, len(flat))].sort().values
