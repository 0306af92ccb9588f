"""Sums over the positions of a sample, for the scale and shift of norm layers: δ and x are read once.

Positions and features are read in tiles, so that few features (64 channels of an image) fill a program as many do.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch, power_of_two

TILE = 4096  # numbers that a program holds of each sum
ENOUGH = 528  # programs: four for each multiprocessor of a large GPU


@triton.jit
def _sums(
    delta, x, mean, spread, scale, shift, t, d, parts, each, eps,
    delta_n, delta_t, delta_d, x_n, x_t, x_d,
    by_channel: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    sample, part, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    columns = block * width + tl.arange(0, width)
    inside = columns < d
    if by_channel:  # the layer's statistics; their spread is a variance
        centre = tl.load(mean + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        rstd = 1.0 / tl.sqrt(tl.load(spread + columns, mask=inside, other=1.0).to(tl.float32) + eps)
    scaled = tl.zeros((rows, width), dtype=tl.float32)
    shifted = tl.zeros((rows, width), dtype=tl.float32)
    for first in range(part * each, min((part + 1) * each, t), rows):
        position = first + tl.arange(0, rows)
        is_row = position < min((part + 1) * each, t)
        mask = is_row[:, None] & inside[None, :]
        long = position.to(tl.int64)[:, None]
        gradient = tl.load(delta + sample * delta_n + long * delta_t + columns[None, :] * delta_d, mask=mask, other=0.0)
        value = tl.load(x + sample * x_n + long * x_t + columns[None, :] * x_d, mask=mask, other=0.0)
        gradient, value = gradient.to(tl.float32), value.to(tl.float32)
        if by_channel:
            scaled += gradient * (value - centre)
        else:  # the position's own; their spread is one over the deviation
            own = tl.load(mean + sample * t + position, mask=is_row, other=0.0).to(tl.float32)[:, None]
            by = tl.load(spread + sample * t + position, mask=is_row, other=0.0).to(tl.float32)[:, None]
            scaled += gradient * ((value - own) * by)
        shifted += gradient
    at = (sample * parts + part) * d + columns
    of_scale = tl.sum(scaled, axis=0)
    if by_channel:
        of_scale *= rstd
    tl.store(scale + at, of_scale, mask=inside)
    tl.store(shift + at, tl.sum(shifted, axis=0), mask=inside)


def _launch(delta: Tensor, x: Tensor, mean: Tensor, spread: Tensor, eps: float, by_channel: bool):
    n, t, d = delta.shape
    width = min(power_of_two(d), 256)
    tile = TILE if delta.stride(2) == x.stride(2) == 1 else TILE // 2  # single numbers to load take more registers
    rows = max(1, min(tile // width, power_of_two(t)))
    blocks = blocks_of(d, width)
    parts = max(1, min(blocks_of(t, 2 * rows), blocks_of(ENOUGH, n * blocks)))
    each = blocks_of(blocks_of(t, parts), rows) * rows
    parts = blocks_of(t, each)
    sums = torch.empty((2, n, parts, d), dtype=torch.float32, device=delta.device)
    launch(
        _sums, (n, parts, blocks), (delta, x, mean.contiguous(), spread.contiguous(), sums[0], sums[1]),
        (t, d, parts, each, eps, *delta.stride(), *x.stride()),
        {"by_channel": by_channel, "rows": rows, "width": width}, 4,
    )  # fmt: skip
    scale, shift = (sums[:, :, 0] if parts == 1 else sums.sum(2)).unbind()
    return scale, shift


def scale_and_shift(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_t δ·(x - mean)·rstd and Σ_t δ of δ and x (n, t, d), mean and rstd (n, t)."""
    return _launch(delta, x, mean, rstd, 0.0, False)


def channel_sums(delta: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Σ_t δ·(x - mean)/√(variance + eps) and Σ_t δ of δ and x (n, t, d), mean and variance (d,); any strides."""
    return _launch(delta, x, mean, variance, eps, True)
