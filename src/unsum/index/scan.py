"""Scores of every row of an index for some queries, in one pass over the files, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unsum.index.store import Shard

_NEAR = 1 << 20  # numbers at a time on a processor: what has been widened is still in its cache when it is multiplied
_FAR = 1 << 24  # and on a GPU
_SCORES = 1 << 22  # scores that are held at a time


@dataclass(frozen=True)
class Scored:
    """The scores of rows that follow each other."""

    shard: int
    first: int  # the number of the first row in its shard
    scores: Tensor  # (rows, queries)


def scan(shards: Sequence[Shard], asked: Tensor, *, cosine: bool = False, whole: bool = False) -> Iterator[Scored]:
    """Inner products of all rows with queries (q, K), which are where the products are computed; or their cosines.
    `whole`: a shard at a time, for rows that belong together. Directions are multiplied, in float32, and lengths put
    back in float64: so no size is too large or too small."""
    lengths = asked.norm(dim=1)
    query = (asked / lengths.clamp_min(1e-300)[:, None]).float().contiguous()
    most = max(1, _SCORES // max(len(asked), 1))
    for shard in shards:
        stored, scales = shard.stored()
        for begin in range(0, len(stored), len(stored) if whole else most):
            part = slice(begin, len(stored) if whole else begin + most)
            scores = _scores(stored[part], query, cosine=cosine).double()
            if not cosine:
                scores *= scales[part].to(scores.device) * lengths[:, None]
            yield Scored(shard.number, begin, scores.T)


def _scores(stored: Tensor, query: Tensor, *, cosine: bool) -> Tensor:
    """(queries, rows), in parts that are widened into one buffer."""
    width, is_near = stored.shape[1], query.device.type == "cpu"
    some = max(1, (_NEAR if is_near else _FAR) // max(width, 1))
    found = torch.empty(len(query), len(stored), device=query.device)
    is_ready = is_near and stored.dtype == query.dtype
    buffer = torch.empty(0 if is_ready else min(some, len(stored)), width, device=query.device)
    for at in range(0, len(stored), some):
        part = stored[at : at + some]
        rows = part if is_ready else buffer[: len(part)].copy_(part, non_blocking=True)
        torch.mm(query, rows.T, out=found[:, at : at + len(part)])
        if cosine:
            found[:, at : at + len(part)] /= rows.norm(dim=1).clamp_min(1e-30)
    return found


class Best:
    """The k highest scores of each query so far, and the numbers that they belong to; of equal ones the first."""

    def __init__(self, queries: int, k: int) -> None:
        self._k = k
        self.scores = torch.zeros(queries, 0, dtype=torch.float64)
        self.numbers = torch.zeros(queries, 0, dtype=torch.long)

    def add(self, first: int, scores: Tensor) -> None:
        """Scores (rows, queries) of rows from this number on."""
        if not len(scores):
            return
        many = min(self._k, len(scores))
        found, place = scores.T.topk(many, dim=1)
        if bool(((scores >= found[:, -1]).sum(0) > many).any()):  # topk takes any of those that are equal
            ordered = scores.T.sort(dim=1, descending=True, stable=True)
            found, place = ordered.values[:, :many], ordered.indices[:, :many]
        every = torch.cat([self.scores, found.cpu()], 1)
        numbers = torch.cat([self.numbers, place.cpu() + first], 1)
        order = _descending(every, numbers)[:, : self._k]
        self.scores, self.numbers = every.gather(1, order), numbers.gather(1, order)


def _descending(scores: Tensor, numbers: Tensor) -> Tensor:
    """The order by score, and by number where scores are equal."""
    by_number = numbers.argsort(dim=1)
    by_score = scores.gather(1, by_number).argsort(dim=1, descending=True, stable=True)
    return by_number.gather(1, by_score)
