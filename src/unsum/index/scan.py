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
    """(queries, rows): products in float32, or cosines."""
    found = query.new_empty(len(query), len(stored))
    for part, rows in widened(stored, query):
        torch.mm(query, rows.T, out=found[:, part])
        if cosine:
            found[:, part] /= rows.norm(dim=1).clamp_min(1e-30)
    return found


def widened(stored: Tensor, query: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows in the dtype and on the device of `query`, in parts that share one buffer: use a part before the next."""
    width, is_near = stored.shape[1], query.device.type == "cpu"
    some = max(1, (_NEAR if is_near else _FAR) // max(width, 1))
    is_ready = is_near and stored.dtype == query.dtype
    buffer = query.new_empty(0 if is_ready else min(some, len(stored)), width)
    for at in range(0, len(stored), some):
        part = stored[at : at + some]
        rows = part if is_ready else buffer[: len(part)].copy_(part, non_blocking=True)
        yield slice(at, at + len(part)), rows
