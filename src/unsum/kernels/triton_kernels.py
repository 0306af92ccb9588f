"""The Triton kernels. Imported only where they are used (`fused`, the tests)."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import launch

BLOCK = 2048  # numbers of a gradient that one program sums over all samples
ROWS = 64  # positions that one program sums


@triton.jit
def _norms_and_sum(each, total, squares, n, size, block_size: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * block_size + tl.arange(0, block_size)
    inside = at < size
    summed = tl.zeros((block_size,), dtype=tl.float32)
    here = each + at
    for sample in range(n):
        values = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        here += size
        summed += values
        tl.store(squares + block * n + sample, tl.sum(values * values, axis=0))
    tl.store(total + at, summed, mask=inside)


def norms_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) squared norms and the sum over samples, from (n, …)."""
    squares, total = parts_and_sum(each)
    return squares.sum(0), total


def parts_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """(parts, n) squared norms, still to be added up, and the sum over samples, from (n, …)."""
    n = each.shape[0]
    size = each.numel() // n
    blocks = -(-size // BLOCK)
    total = torch.empty(each.shape[1:], dtype=each.dtype, device=each.device)
    squares = torch.empty((blocks, n), dtype=torch.float32, device=each.device)
    launch(_norms_and_sum, (blocks, 1, 1), (each, total, squares), (n, size), {"block_size": BLOCK}, 8)
    return squares, total


@triton.jit
def _scale_and_shift(
    delta, x, mean, rstd, sums, t, d, parts, rows: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    sample, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * width + tl.arange(0, width)
    inside = columns < d
    scaled = tl.zeros((width,), dtype=tl.float32)
    shifted = tl.zeros((width,), dtype=tl.float32)
    for k in range(rows):
        row = part * rows + k
        if row < t:
            position = sample.to(tl.int64) * t + row
            gradient = tl.load(delta + position * d + columns, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(x + position * d + columns, mask=inside, other=0.0).to(tl.float32)
            centred = (value - tl.load(mean + position).to(tl.float32)) * tl.load(rstd + position).to(tl.float32)
            scaled += gradient * centred
            shifted += gradient
    at = (sample.to(tl.int64) * parts + part) * d + columns
    half = tl.num_programs(0).to(tl.int64) * parts * d
    tl.store(sums + at, scaled, mask=inside)
    tl.store(sums + half + at, shifted, mask=inside)


def scale_and_shift(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t δ·(x - mean)·rstd and Σ_t δ of δ and x (n, t, d), mean and rstd one number for each position."""
    n, t, d = delta.shape
    parts, width = -(-t // ROWS), min(triton.next_power_of_2(d), 1024)
    sums = torch.empty((2, n, parts, d), dtype=torch.float32, device=delta.device)
    given = (delta, x, mean.contiguous(), rstd.contiguous(), sums)
    launch(_scale_and_shift, (n, parts, -(-d // width)), given, (t, d, parts), {"rows": ROWS, "width": width}, 4)
    scale, shift = sums.sum(2).unbind()
    return scale, shift
