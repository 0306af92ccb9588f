"""What a row of an index is made of: random projections of each parameter's gradient, or the leading coordinates of a
curvature's eigenbasis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.curvature import Curvature
from unsum.curvature.blocks import Block
from unsum.factors.factors import Factors, kept_numbers
from unsum.fingerprint import fingerprint


class Rows(ABC):
    """A reducer that makes rows (n, K). It looks at one parameter after the other, in the same way in every batch: what
    comes does not depend on the batches before."""

    by_position = False

    def __init__(self, columns: Mapping[str, int]) -> None:
        self._columns = columns

    def begin(self, n: int, again: bool) -> None:
        """A backward with n samples begins."""
        self._n = n
        self._parts: dict[str, Tensor] = {}

    @abstractmethod
    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""

    def end(self, left: Sequence[str]) -> None:
        """The backward is over."""
        assert self._parts.keys() == self._columns.keys()

    def matrix(self) -> Tensor:
        """(n, K), on the processor, in float32."""
        return torch.cat([self._parts[name].float().cpu() for name in self._columns], 1)


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
        """What the manifest says of it."""

    def weights(self) -> Tensor | None:
        """(K,): what columns are multiplied by for influence; None if that is for the rows themselves to say."""
        return None


class Projected(Sketch):
    """k² numbers of each parameter, by random matrices from both sides; smaller parameters as they are."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], k: int, seed: int) -> None:
        self.columns = {name: kept_numbers(shape, k) for name, shape in shapes.items()}
        self._k, self._seed = k, seed

    def rows(self) -> Rows:
        return _ProjectedRows(self.columns, self._k, self._seed)

    def told(self) -> dict[str, Any]:
        return {"kind": "random", "k": self._k, "seed": self._seed, "columns": self.columns}


class _ProjectedRows(Rows):
    def __init__(self, columns: Mapping[str, int], k: int, seed: int) -> None:
        super().__init__(columns)
        self._k, self._seed = k, seed

    def take(self, name: str, factors: Factors) -> None:
        self._parts[name] = factors.project(self._k, self._seed)


class Leading(Sketch):
    """Of each block of a curvature the k² coordinates of its eigenbasis that have the largest eigenvalues."""

    def __init__(self, curvature: Curvature, k: int) -> None:
        self._curvature, self._k = curvature, k
        self._places = {name: _largest(block.eigenvalues, k * k) for name, block in curvature.blocks.items()}
        self.columns = {name: len(place) for name, place in self._places.items()}

    def rows(self) -> Rows:
        return _LeadingRows(self.columns, self._curvature.blocks, self._places)

    def told(self) -> dict[str, Any]:
        return {"kind": "eigenbasis", "k": self._k, "columns": self.columns, "curvature": self._mark()}

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


class _LeadingRows(Rows):
    def __init__(self, columns: Mapping[str, int], blocks: Mapping[str, Block], places: Mapping[str, Tensor]) -> None:
        super().__init__(columns)
        self._blocks, self._places = blocks, places
        self._of = {each: name for name, block in blocks.items() for each in block.names}
        self._waiting: dict[str, dict[str, Tensor]] = {}  # gradients of blocks of which another part is to come

    def begin(self, n: int, again: bool) -> None:
        super().begin(n, again)
        self._waiting = {}

    def take(self, name: str, factors: Factors) -> None:
        block = self._blocks[self._of[name]]
        parts = self._waiting.setdefault(block.name, {})
        parts[name] = factors.per_sample()
        if len(parts) == len(block.names):
            found = block.into(self._waiting.pop(block.name)).flatten(1)
            self._parts[block.name] = found[:, self._places[block.name].to(found.device)]


def _largest(values: Tensor, count: int) -> Tensor:
    """The places of the largest, in order; the first of equal ones."""
    flat = values.reshape(-1).cpu()
    order = torch.sort(flat, descending=True, stable=True).indices
    return order[: min(count, len(flat))].sort().values
