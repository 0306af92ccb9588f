"""Examples of an index that stand out, and examples that are nearly the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unsum.index.store import Shard

_BLOCK = 1 << 24  # numbers that are read at a time
_SAME = 1 - 1e-6  # the cosine of a row with itself, after rounding
_PAIRED = 4096  # rows that are compared with as many others at a time


@dataclass(frozen=True, eq=False)
class Pairs:
    """Examples that are nearly the same, most alike first. What `i.duplicates` gives.

    Examples:
        >>> pairs = Pairs(torch.tensor([[0, 3], [3, 4], [1, 9]]), torch.tensor([1.0, 0.999, 0.99]))
        >>> pairs.clusters()
        [[0, 3, 4], [1, 9]]
    """

    ids: Tensor  # (pairs, 2): numbers of examples, the smaller one first
    scores: Tensor  # (pairs,): their cosines

    def __repr__(self) -> str:
        return f"{len(self.ids)} pairs of examples that are nearly the same: .ids, .scores, .clusters()"

    def clusters(self) -> list[list[int]]:
        """Groups of examples in which each is nearly the same as another of the group; the largest first."""
        leader: dict[int, int] = {}

        def first(k: int) -> int:
            while leader.setdefault(k, k) != k:
                leader[k] = leader[leader[k]]
                k = leader[k]
            return k

        for one, other in self.ids.tolist():
            here, there = sorted((first(one), first(other)))
            leader[there] = here
        groups: dict[int, list[int]] = {}
        for k in sorted(leader):
            groups.setdefault(first(k), []).append(k)
        return sorted(groups.values(), key=lambda group: (-len(group), group))


def norms(shards: Sequence[Shard]) -> Tensor:
    """(rows,): the norm of each row."""
    found = []
    for shard in shards:
        _, scales = shard.stored()
        if shard.has_norms:
            kept = shard.norms()
        else:
            kept = torch.cat([stored.float().norm(dim=1) for _, stored, _ in blocks([shard])])
        found.append(kept.double() * scales)
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def stand_out(values: Tensor, threshold: float) -> Tensor:
    """The numbers of values far above the others, highest first: the logarithm is above the median by more than
    `threshold` times 1.48 times the median deviation."""
    logs = values.clamp_min(1e-300).log()
    middle = logs.median()
    wide = 1.4826 * (logs - middle).abs().median().clamp_min(1e-12)
    order = values.argsort(descending=True, stable=True)
    return order[((logs - middle) / wide > threshold)[order]]


def duplicates(shards: Sequence[Shard], threshold: float) -> Pairs:
    """Pairs of rows with a cosine of `threshold` or more: every row is compared with every other, in parts that fit."""
    pairs, scores = [torch.zeros(0, 2, dtype=torch.long)], [torch.zeros(0, dtype=torch.float64)]
    for first, stored, _ in blocks(shards, _PAIRED):
        mine = _directions(stored)
        for begin, others, _ in blocks(shards, _PAIRED, after=first):
            cosines = mine @ _directions(others).T
            cosines.masked_fill_(_not_after(first, begin, cosines), -1.0)
            found = (cosines >= min(threshold, _SAME)).nonzero()
            pairs.append(found + torch.tensor([first, begin]))
            scores.append(cosines[found[:, 0], found[:, 1]].double())
    order = torch.cat(scores).argsort(descending=True, stable=True)
    return Pairs(torch.cat(pairs)[order], torch.cat(scores)[order])


def blocks(shards: Sequence[Shard], most: int = 1 << 62, after: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(the first row's number, rows, scales) in parts that fit, of so many rows at most; those that end before the row
    `after` are passed over."""
    first = 0
    for shard in shards:
        some = max(1, min(most, _BLOCK // max(shard.width, 1)))
        if first + shard.rows > after:
            stored, scales = shard.stored()
            for begin in range(0, len(stored), some):
                if first + min(begin + some, len(stored)) > after:
                    yield first + begin, stored[begin : begin + some], scales[begin : begin + some]
        first += shard.rows


def _directions(stored: Tensor) -> Tensor:
    rows = stored.float()
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)


def _not_after(first: int, begin: int, table: Tensor) -> Tensor:
    """Where the second of a pair is not after the first."""
    mine, others = (torch.arange(start, start + size) for start, size in zip((first, begin), table.shape, strict=True))
    return others[None] <= mine[:, None]
