"""The rows of an index with the highest scores, in one pass over the files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unsum.index import sieve
from unsum.index.scan import scan
from unsum.index.store import Shard


def best_rows(shards: Sequence[Shard], starts: Sequence[int], asked: Tensor, k: int, *, cosine: bool = False) -> Best:
    """The k rows with the highest inner products with queries (q, K), or cosines. `starts`: the number of the first row
    of each shard."""
    best = Best(len(asked), k)
    if not sieve.fits(asked, shards):
        begin = dict(zip((shard.number for shard in shards), starts, strict=True))
        for found in scan(shards, asked, cosine=cosine):
            best.add(begin[found.shard] + found.first, found.scores)
        return best
    chosen = sieve.Sieve(asked, k, cosine=cosine)
    first = 0
    for part in sieve.parts(shards, len(asked)):
        for rows, scores in chosen.candidates(part, best.lowest):
            best.add_some(first + rows, scores)
        first += sum(shard.rows for shard in part)
    return best


class Best:
    """The k highest scores of each query so far, and the numbers that they belong to; of equal ones the first."""

    def __init__(self, queries: int, k: int) -> None:
        self._k = k
        self.scores = torch.zeros(queries, 0, dtype=torch.float64)
        self.numbers = torch.zeros(queries, 0, dtype=torch.long)

    @property
    def lowest(self) -> Tensor:
        """(queries,): what a score must reach to be among them."""
        if self.scores.shape[1] < self._k:
            return torch.full((len(self.scores),), -torch.inf, dtype=torch.float64)
        return self.scores[:, -1]

    def add(self, first: int, scores: Tensor) -> None:
        """Scores (rows, queries) of rows from this number on."""
        if not len(scores):
            return
        many = min(self._k, len(scores))
        found, place = scores.T.topk(many, dim=1)
        if bool(((scores >= found[:, -1]).sum(0) > many).any()):  # topk takes any of those that are equal
            ordered = scores.T.sort(dim=1, descending=True, stable=True)
            found, place = ordered.values[:, :many], ordered.indices[:, :many]
        self._merge(found.cpu(), place.cpu() + first)

    def add_some(self, numbers: Tensor, scores: Tensor) -> None:
        """Scores (queries, some) of the rows with these numbers."""
        self._merge(scores, numbers.expand_as(scores))

    def _merge(self, found: Tensor, where: Tensor) -> None:
        every, numbers = torch.cat([self.scores, found], 1), torch.cat([self.numbers, where], 1)
        order = _descending(every, numbers)[:, : self._k]
        self.scores, self.numbers = every.gather(1, order), numbers.gather(1, order)


def _descending(scores: Tensor, numbers: Tensor) -> Tensor:
    """The order by score, and by number where scores are equal."""
    by_number = numbers.argsort(dim=1)
    by_score = scores.gather(1, by_number).argsort(dim=1, descending=True, stable=True)
    return by_number.gather(1, by_score)
