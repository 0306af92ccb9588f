"""Norms of a table's gradients: positions that looked up the same row are added before they are squared."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch, power_of_two

ROWS = 8  # positions of one table's row that are added at once


@triton.jit
def _lookup_sq_norms(
    order, ids, ends, delta, squares, t, d, delta_n, delta_t, delta_d, rows: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample, first = place // t, place % t
    own = tl.load(ids + place)
    before = tl.load(ids + place - (first > 0).to(tl.int64))
    end = tl.load(ends + place)
    if (first > 0) & (before == own):
        end = first  # another program began with this row of the table
    columns = block * width + tl.arange(0, width)
    inside = columns < d
    summed = tl.zeros((rows, width), dtype=tl.float32)
    for start in range(first, end, rows):
        sorted_at = start + tl.arange(0, rows)
        is_row = sorted_at < end
        position = tl.load(order + sample * t + sorted_at, mask=is_row, other=0)
        here = delta + sample * delta_n + position[:, None] * delta_t + columns[None, :] * delta_d
        summed += tl.load(here, mask=is_row[:, None] & inside[None, :], other=0.0).to(tl.float32)
    whole = tl.sum(summed, axis=0)
    tl.store(squares + place * tl.num_programs(1) + block, tl.sum(whole * whole, axis=0))


def lookup_sq_norms(ids: Tensor, delta: Tensor) -> Tensor:
    """(n,): Σ over rows of the table of |Σ of the δ at its positions|², of ids (n, t) and δ (n, t, d)."""
    (n, t), d = ids.shape, delta.shape[2]
    sorted_ids, order = ids.sort(1)
    ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
    width = min(power_of_two(d), 256)
    blocks = blocks_of(d, width)
    squares = torch.empty((n, t * blocks), dtype=torch.float32, device=delta.device)
    launch(
        _lookup_sq_norms, (n * t, blocks, 1), (order, sorted_ids, ends, delta, squares), (t, d, *delta.stride()),
        {"rows": ROWS, "width": width}, 2,
    )  # fmt: skip
    return squares.sum(1)
