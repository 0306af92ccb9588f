"""The best rows by products in the index's own narrow dtype: candidates first, then their exact scores.

A product in float16 or bfloat16 reads each row once and widens nothing, at the speed of memory; its result is rounded.
How far rounding can move a score follows from the row's norm, which the shard holds. Rows whose score could reach the
k-th best are scored again in float64; no other row can be among the best. Which product is the fastest depends on the
processor, and is tried out once; the scores do not depend on it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.index.scan import widened
from unsum.index.store import DTYPES, Shard

_NEAR = 1 << 20  # numbers at a time: they stay in the processor's cache
_SCORES = 1 << 22  # scores that are held at a time
_AGAIN = 1 << 22  # numbers that are widened at a time to be scored again
_TILE = 16  # queries that a processor with matrix units multiplies at a time

Product = Callable[[Tensor, Tensor, Tensor], None]  # rows (n, K), queries (q, K), out (q, n)


class Sieve:
    """Queries (q, K) that look for their k best rows, on a processor."""

    def __init__(self, asked: Tensor, k: int, *, cosine: bool) -> None:
        self._k, self._cosine = k, cosine
        self._lengths = asked.norm(dim=1, keepdim=True)
        self._directions = asked / self._lengths.clamp_min(1e-300)

    def candidates(self, shards: Sequence[Shard], lowest: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows (some,), numbered through these shards, and their scores (queries, some): all that can be among the k
        best, where scores below `lowest` (queries,) cannot."""
        dtype, width = DTYPES[shards[0].told["dtype"]], shards[0].width
        product, narrow, own = fastest(dtype, width, len(self._directions), torch.get_num_threads())
        every = [(shard, slice(None)) for shard in shards]
        chosen = self._passing(every, product, narrow, own, lowest)
        if narrow != torch.float32:  # what is left passes a finer sieve: there, few are scored one by one
            finer = self._passing(
                _places(shards, chosen), in_float32, torch.float32, margin(torch.float32, width), lowest
            )
            chosen = chosen[finer]
        first = 0
        for shard, some in _places(shards, chosen):
            yield chosen[first : first + len(some)], self._exact(shard, some)
            first += len(some)

    def _passing(
        self, places: Sequence[tuple[Shard, Any]], product: Product, dtype: torch.dtype, off: float, lowest: Tensor
    ) -> Tensor:
        """Which of these rows can be among the best, by products that may be off by `off` for vectors of length 1."""
        queries, parts, norms, scales = self._directions.to(dtype), [], [], []
        for shard, some in places:
            stored, own = shard.stored()
            rows = stored[some]
            parts.append(torch.empty(len(queries), len(rows), dtype=dtype))
            product(rows, queries, parts[-1])
            norms.append(shard.norms()[some])
            scales.append(own[some])
        scores, sizes = torch.cat(parts, 1).double(), torch.cat(norms).double()
        if self._cosine:
            scores, margins = scores / sizes.clamp_min(1e-300), torch.full((1, 1), off, dtype=torch.float64)
        else:
            factors = torch.cat(scales) * self._lengths
            scores, margins = scores * factors, sizes * factors * off
        least = (scores - margins).topk(min(self._k, scores.shape[1]), dim=1).values[:, -1]
        return (scores + margins >= torch.maximum(least, lowest)[:, None]).any(0).nonzero().squeeze(1)

    def _exact(self, shard: Shard, some: Tensor) -> Tensor:
        """(queries, some), in float64; equal rows have equal scores, since each row is added up alone."""
        stored, scales = shard.stored()
        wide = stored[some].double()
        found = torch.stack([(wide * direction).sum(1) for direction in self._directions])
        if self._cosine:
            return found / wide.norm(dim=1).clamp_min(1e-300)
        return found * scales[some] * self._lengths


def _places(shards: Sequence[Shard], chosen: Tensor) -> list[tuple[Shard, Tensor]]:
    """Rows that are numbered through the shards, ascending: of each shard its own, in parts that fit when widened."""
    found, first = [], 0
    for shard in shards:
        own = chosen[torch.searchsorted(chosen, first) : torch.searchsorted(chosen, first + shard.rows)] - first
        found += [(shard, some) for some in own.split(max(1, _AGAIN // max(shard.width, 1))) if len(some)]
        first += shard.rows
    return found


def one_by_one(rows: Tensor, queries: Tensor, out: Tensor) -> None:
    """A product of a matrix and a vector for each query, while the rows are near."""
    some = len(rows) if len(queries) == 1 else max(1, _NEAR // max(rows.shape[1], 1))
    for at in range(0, len(rows), some):
        for query, place in zip(queries, out, strict=True):
            torch.mv(rows[at : at + some], query, out=place[at : at + some])


def together(rows: Tensor, queries: Tensor, out: Tensor) -> None:
    """One product of matrices."""
    torch.mm(queries, rows.T, out=out)


def in_tiles(rows: Tensor, queries: Tensor, out: Tensor) -> None:
    """One product of matrices, with zeros for the queries that are missing from a processor's tile."""
    whole = queries.new_zeros(-(-len(queries) // _TILE) * _TILE, queries.shape[1])
    whole[: len(queries)] = queries
    out.copy_(torch.mm(whole, rows.T)[: len(queries)])


def in_float32(rows: Tensor, queries: Tensor, out: Tensor) -> None:
    """Products of matrices in float32, of rows that are widened part by part."""
    for part, wide in widened(rows, queries):
        torch.mm(queries, wide.T, out=out[:, part])


@functools.cache
def fastest(dtype: torch.dtype, width: int, queries: int, threads: int) -> tuple[Product, torch.dtype, float]:
    """The product that is the fastest here, the dtype that it takes queries in and gives, and its margin. `threads` is
    what the trial depends on beside the processor."""
    wide = (together if dtype == torch.float32 else in_float32, torch.float32, margin(torch.float32, width))
    trials = [wide]
    if dtype != torch.float32:
        ways = (one_by_one, together, in_tiles)
        trials += [(way, dtype, margin(dtype, width)) for way in ways if adds_in_float32(way, dtype, width)]
    if len(trials) == 1:
        return wide
    rows = torch.ones(max(2, 4 * _NEAR // max(width, 1)), width, dtype=dtype)
    return min(trials, key=lambda trial: _seconds(trial[0], rows, torch.ones(queries, width, dtype=trial[1])))


def _seconds(product: Product, rows: Tensor, queries: Tensor) -> float:
    out, took = torch.empty(len(queries), len(rows), dtype=queries.dtype), []
    for _ in range(3):
        begin = time.perf_counter()
        product(rows, queries, out)
        took.append(time.perf_counter() - begin)
    return min(took)


def margin(dtype: torch.dtype, width: int) -> float:
    """How far a rounded product of vectors of length 1 may be from the true one: the query's rounding, the result's,
    numbers too small for the dtype, and what float32 loses when `width` products are added."""
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).tiny * unit
    return 3 * unit + width**0.5 * smallest + width * torch.finfo(torch.float32).eps


def adds_in_float32(product: Product, dtype: torch.dtype, width: int) -> bool:
    """Whether products are added in float32 here, tried out: then only the result is rounded to `dtype`."""
    chance = torch.Generator().manual_seed(0)
    rows, query = (1 + torch.rand(n, width, generator=chance) for n in (64, 1))  # all of one sign: nothing cancels
    rows, query, found = rows.to(dtype), query.to(dtype), torch.empty(1, 64, dtype=dtype)
    product(rows, query, found)
    true = query.double() @ rows.double().T
    return bool(((found.double() - true).abs() <= 0.6 * torch.finfo(dtype).eps * true).all())


def fits(asked: Tensor, shards: Sequence[Shard]) -> bool:
    """Whether the best of these rows can be found so: on a processor, with norms beside the rows."""
    return asked.device.type == "cpu" and bool(asked.isfinite().all()) and all(shard.has_norms for shard in shards)


def parts(shards: Sequence[Shard], queries: int) -> Iterator[list[Shard]]:
    """Shards whose scores are held together."""
    held: list[Shard] = []
    for shard in shards:
        if held and sum(one.rows for one in held) + shard.rows > _SCORES // max(queries, 1):
            yield held
            held = []
        if shard.rows:
            held.append(shard)
    if held:
        yield held
