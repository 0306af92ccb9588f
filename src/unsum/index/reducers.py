"""Reducers that make the rows of an index while backward runs.

They look at one parameter after the other, in the same way in every batch: what comes of a batch does not depend on the
batches before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unsum.errors import NotAvailable
from unsum.factors.factors import Factors
from unsum.index.coordinates import Coordinates

Read = Callable[[str, Factors], Tensor]  # (n, columns) of a parameter, or (n, t, columns)


class Rows(ABC):
    """Rows (n, K), or (n, t, K) for tokens."""

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

    def end(self, left: Sequence[str]) -> None:  # noqa: B027
        """The backward is over."""

    def matrix(self) -> Tensor:
        """(n, K), on the processor, in float32."""
        return torch.cat([self._parts[name].float() for name in self._columns], 1).cpu()  # brought there at once


class ParameterRows(Rows):
    """Columns for each parameter."""

    def __init__(self, columns: Mapping[str, int], read: Read) -> None:
        super().__init__(columns)
        self._read = read

    def take(self, name: str, factors: Factors) -> None:
        if name in self._columns:
            self._parts[name] = self._read(name, factors)


class BlockRows(Rows):
    """Columns for each block of a curvature: some coordinates of its eigenbasis."""

    def __init__(self, columns: Mapping[str, int], bases: Sequence[Coordinates]) -> None:
        super().__init__(columns)
        self._of = {name: basis for basis in bases for name in basis.names}
        self._waiting: dict[str, dict[str, Tensor]] = {}  # gradients of blocks of which another part is to come

    def begin(self, n: int, again: bool) -> None:
        super().begin(n, again)
        self._waiting = {}

    def take(self, name: str, factors: Factors) -> None:
        basis = self._of[name]
        if basis.adds_up:
            found = basis.share(name, factors)
            self._parts[basis.name] = self._parts[basis.name] + found if basis.name in self._parts else found
            return
        parts = self._waiting.setdefault(basis.name, {})
        parts[name] = factors.per_sample()
        if len(parts) == len(basis.names):
            self._parts[basis.name] = basis.whole(self._waiting.pop(basis.name))


class TokenRows(Rows):
    """Columns for each parameter, at each position of the input."""

    by_position = True

    def __init__(self, columns: Mapping[str, int], read: Read) -> None:
        super().__init__(columns)
        self._read = read
        self._positions: int | None = None

    def select(self, calls: frozenset[int], positions: int | None) -> None:
        """The input of the backward that begins has so many positions, if that is known."""
        self._positions = positions

    def begin(self, n: int, again: bool) -> None:
        super().begin(n, again)
        self.left_out: set[str] = set()  # parameters that do not meet data once for each position of the input

    def take(self, name: str, factors: Factors) -> None:
        is_reached = any(terms for _, terms in factors.terms())
        if name not in self._columns or not is_reached:
            return
        try:
            self._parts[name] = self._read(name, factors)
        except NotAvailable:
            self.left_out.add(name)

    def end(self, left: Sequence[str]) -> None:
        """The backward is over. Where the input does not tell its positions, those that most parameters have are it."""
        counts: dict[int, int] = {}
        for part in self._parts.values():
            counts[part.shape[1]] = counts.get(part.shape[1], 0) + 1
        wanted = self._positions or max(counts, key=lambda t: (counts[t], t), default=0)
        self.left_out |= {name for name, part in self._parts.items() if part.shape[1] != wanted}
        self._t = wanted

    def refuse_left_out(self) -> None:
        """Raise if a parameter that has columns has no gradient for each position."""
        if self.left_out:
            name = sorted(self.left_out)[0]
            raise NotAvailable(
                f"tokens=True: {name} has no gradient for each position of the input in this batch, and had one in the "
                "first.",
                write="unsum.index.build(..., tokens=True, "
                f"params=[p for p, _ in model.named_parameters() if p != {name!r}])",
            )

    def matrix(self) -> Tensor:
        """(n, t, K). What nothing reached has zeros."""
        found = [
            self._parts[name].float().cpu() if name in self._parts else torch.zeros(self._n, self._t, size)
            for name, size in self._columns.items()
        ]
        return torch.cat(found, -1)
