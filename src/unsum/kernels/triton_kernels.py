"""The Triton kernels. Imported only where they are used (`fused`, the tests)."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    n, size = each.shape[0], each[0].numel()
    blocks = triton.cdiv(size, BLOCK)
    total = torch.empty(each.shape[1:], dtype=each.dtype, device=each.device)
    squares = torch.empty((blocks, n), dtype=torch.float32, device=each.device)
    _norms_and_sum[(blocks,)](each, total, squares, n, size, block_size=BLOCK, num_warps=8)
    return squares.sum(0), total


@triton.jit
def _scale_and_shift(
    delta, x, mean, rstd, scale, shift, t, d, parts, rows: tl.constexpr, width: tl.constexpr
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
    tl.store(scale + at, scaled, mask=inside)
    tl.store(shift + at, shifted, mask=inside)


def scale_and_shift(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t δ·(x - mean)·rstd and Σ_t δ of δ and x (n, t, d), mean and rstd (n, t)."""
    n, t, d = delta.shape
    parts, columns = triton.cdiv(t, ROWS), min(triton.next_power_of_2(d), 1024)
    sums = torch.empty((2, n, parts, d), dtype=torch.float32, device=delta.device)
    grid = (n, parts, triton.cdiv(d, columns))
    _scale_and_shift[grid](
        delta, x, mean.contiguous(), rstd.contiguous(), sums[0], sums[1], t, d, parts,
        rows=ROWS, width=columns, num_warps=4,
    )  # fmt: skip
    scale, shift = sums.sum(2)
    return scale, shift


@triton.jit
def _weighted_sum(each, w, total, n, size, block_size: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block_size + tl.arange(0, block_size)
    inside = at < size
    summed = tl.zeros((block_size,), dtype=tl.float32)
    here = each + at
    for sample in range(n):
        summed += tl.load(here, mask=inside, other=0.0).to(tl.float32) * tl.load(w + sample)
        here += size
    tl.store(total + at, summed, mask=inside)


def weighted_sum(each: Tensor, w: Tensor) -> Tensor:
    """Σ w_n each_n from (n, …) and (n,), in float32."""
    n, size = each.shape[0], each[0].numel()
    total = torch.empty(each.shape[1:], dtype=torch.float32, device=each.device)
    w = w.to(each.device, torch.float32).contiguous()
    _weighted_sum[(triton.cdiv(size, BLOCK),)](each, w, total, n, size, block_size=BLOCK, num_warps=8)
    return total


@triton.jit
def _scaled(x, w, out, size, blocks, block_size: tl.constexpr):
    program = tl.program_id(0)
    sample, block = program // blocks, program % blocks
    within = block.to(tl.int64) * block_size + tl.arange(0, block_size)
    at = sample.to(tl.int64) * size + within
    values = tl.load(x + at, mask=within < size, other=0.0).to(tl.float32) * tl.load(w + sample)
    tl.store(out + at, values, mask=within < size)


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """x (n, …) with the n-th part multiplied by w_n."""
    n, size = x.shape[0], x[0].numel()
    blocks, out = triton.cdiv(size, BLOCK), torch.empty_like(x)
    w = w.to(x.device, torch.float32).contiguous()
    _scaled[(n * blocks,)](x, w, out, size, blocks, block_size=BLOCK, num_warps=8)
    return out
