"""The gradients of the queries: as they are, in factors, or turned by a curvature, one tensor for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unsum.curvature.vectors import dots
from unsum.errors import NotAvailable
from unsum.factors.factors import Factors
from unsum.gathered import Gradients

Rows = Mapping[str, Tensor]  # {parameter: (m, *shape)}


@dataclass(eq=False)
class Queries:
    """The gradients of some queries, with which those of training examples are multiplied."""

    m: int
    kept: list[Gradients] = field(default_factory=list)  # as they came, in batches
    rows: Rows | None = None  # multiplied out

    def dot(self, name: str, factors: Factors) -> Tensor:
        """(n, m): inner products of a parameter's gradients with all queries."""
        if self.rows is not None:
            return factors.dot(self.rows[name])
        return torch.cat([factors.dot(gradients[name]) for gradients in self.kept], 1)

    def token_dots(self, name: str, factors: Factors) -> Tensor:
        """(n, t, m)."""
        if self.rows is None:
            self.rows = formed(self.kept)
        return factors.token_dots(self.rows[name])

    def norms(self) -> Tensor:
        """(m,)."""
        if self.rows is None:
            return torch.cat([gradients.norms() for gradients in self.kept])
        return dots(self.rows, self.rows).sqrt()


def held(gradients: Gradients) -> int:
    """How many numbers the factors of these queries are."""
    return sum(
        share.n * term.numel() for name in gradients for share, terms in gradients[name].terms() for term in terms
    )


def formed(kept: list[Gradients], some: slice = slice(None)) -> Rows:
    """{parameter: (m, *shape)} of some of these queries, in float32 at least; one parameter after the other."""
    found = {}
    for name in kept[0]:
        each = [gradients[name].per_sample() for gradients in kept]
        rows = each[0] if len(each) == 1 else torch.cat(each)
        found[name] = rows if len(rows[some]) == len(rows) else rows[some].clone()
    return found


class Scored:
    """A reducer: the inner products of every training example's gradient with the queries'."""

    by_position = True

    def __init__(self, queries: Queries, *, tokens: bool) -> None:
        self._queries, self._tokens = queries, tokens
        self._positions: int | None = None
        self.left_out: dict[str, None] = {}

    def select(self, calls: frozenset[int], positions: int | None) -> None:
        """The input of the backward that begins has so many positions, if that is known."""
        self._positions = positions

    def begin(self, n: int, again: bool) -> None:
        """A backward with n examples begins."""
        self.scores: Tensor | None = None  # (n, m)
        self.by_token: Tensor | None = None  # (n, t, m)
        self._found: dict[int, dict[str, Tensor]] = {}  # the same by t and parameter

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        found = self._queries.dot(name, factors).real.double()
        self.scores = found if self.scores is None else self.scores + found
        if self._tokens and self._positions is not None and factors.is_ragged:  # of chosen rows, as of an expert
            self.left_out[name] = None
        elif self._tokens:
            try:
                by_token = self._queries.token_dots(name, factors).real.double()
            except NotAvailable:
                self.left_out[name] = None
            else:
                self._found.setdefault(by_token.shape[1], {})[name] = by_token

    def end(self, left: Sequence[str]) -> None:
        """The backward is over. Where the input does not tell its positions, those that most parameters have are it."""
        counts = {t: len(found) for t, found in self._found.items()}
        wanted = self._positions or max(counts, key=lambda t: (counts[t], t), default=0)
        self.left_out |= {name: None for t, found in self._found.items() if t != wanted for name in found}
        if wanted in self._found:
            self.by_token = torch.stack(list(self._found[wanted].values())).sum(0)
        self._found = {}
