"""One pass over gradients that are there: (n, …)."""

# mypy: ignore-errors
from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch, power_of_two
from unsum.seams.operators import hint

WIDTH = 1024  # numbers of a gradient that one program sums over all samples
WIDE = 2048  # numbers that one program weighs
SOME = 8  # samples read at once: so many loads are under way before the first is waited for


@triton.jit
def _norms_and_sum(each, total, squares, n, size, some: tl.constexpr, width: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * width + tl.arange(0, width)
    inside = at < size
    summed = tl.zeros((width,), dtype=tl.float32)
    for first in range(0, n, some):
        samples = first + tl.arange(0, some)
        here = each + samples.to(tl.int64)[:, None] * size + at[None, :]
        values = tl.load(here, mask=(samples < n)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        summed += tl.sum(values, axis=0)
        tl.store(squares + block * n + samples, tl.sum(values * values, axis=1), mask=samples < n)
    tl.store(total + at, summed, mask=inside)


def norms_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) squared norms and the sum over samples, from (n, …)."""
    squares, total = parts_and_sum(each)
    return squares.sum(0), total


def parts_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """(parts, n) squared norms, still to be added up, and the sum over samples, from (n, …)."""
    n, *shape = each.shape
    size = prod(shape)
    blocks, some = -(-size // WIDTH), min(SOME, power_of_two(hint(n)))
    total = torch.empty(shape, dtype=each.dtype, device=each.device)
    squares = torch.empty((blocks, n), dtype=torch.float32, device=each.device)
    launch(_norms_and_sum, (blocks, 1, 1), (each, total, squares), (n, size), {"some": some, "width": WIDTH}, 4)
    return squares, total


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
    launch(_weighted_sum, (-(-size // WIDE), 1, 1), (each, w, total), (n, size), {"block_size": WIDE}, 8)
    return total


@triton.jit
def _rounded(values):
    """To 8 bits, half to even, by the bits: Triton's interpreter cuts instead."""
    bits = values.to(tl.int32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, bits & -65536).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _bfloat16_parts(x, high, middle, low, size, block_size: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block_size + tl.arange(0, block_size)
    inside = at < size
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    first = _rounded(values)
    second = _rounded(values - first)
    tl.store(high + at, first.to(tl.bfloat16), mask=inside)
    tl.store(middle + at, second.to(tl.bfloat16), mask=inside)
    tl.store(low + at, _rounded(values - first - second).to(tl.bfloat16), mask=inside)


def bfloat16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors in bfloat16 whose sum x is."""
    parts = tuple(torch.empty_like(x, dtype=torch.bfloat16) for _ in range(3))
    size = x.numel()
    launch(_bfloat16_parts, (blocks_of(size, WIDE), 1, 1), (x, *parts), (size,), {"block_size": WIDE}, 8)
    return parts


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
    blocks, out = blocks_of(size, WIDE), torch.empty_like(x)
    w = w.to(x.device, torch.float32).contiguous()
    launch(_scaled, (n * blocks, 1, 1), (x, w, out), (size, blocks), {"block_size": WIDE}, 8)
    return out
