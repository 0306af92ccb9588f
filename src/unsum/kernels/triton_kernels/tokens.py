"""Squared norms of each position's part: rows are read once, nothing of their size is written."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch

TILE = 2048  # numbers that one program reads at once


@triton.jit
def _square(start, here, inside, step, d, rows: tl.constexpr, width: tl.constexpr):
    """Σ of the squares of each row."""
    summed = tl.zeros((rows, width), dtype=tl.float32)
    for first in range(0, d, width):
        columns = first + tl.arange(0, width)
        mask = inside[:, None] & (columns < d)[None, :]
        values = tl.load(start + here[:, None] * step + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        summed += values * values
    return tl.sum(summed, axis=1)


@triton.jit
def _token_sq_norms(
    a, delta, both, alone, count, i, o, a_step, delta_step, rows: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    inside = here < count
    of_delta = _square(delta, here, inside, delta_step, o, rows, width)
    tl.store(both + here, _square(a, here, inside, a_step, i, rows, width) * of_delta, mask=inside)
    tl.store(alone + here, of_delta, mask=inside)


def _tile(*widths: int) -> dict[str, int]:
    """Rows of a program, and numbers of each at once: as many as leave no part of a row."""
    width = 512 if all(each % 512 == 0 for each in widths) else 256
    return {"rows": TILE // width, "width": width}


def token_sq_norms(a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """|a|²·|δ|² and |δ|² of each row of a (rows, i) and δ (rows, o)."""
    (count, i), o = a.shape, delta.shape[1]
    found = torch.empty((2, count), dtype=torch.float32, device=a.device)
    both, alone = found.unbind()
    numbers = (count, i, o, a.stride(0), delta.stride(0))
    tile = _tile(i, o)
    launch(_token_sq_norms, (blocks_of(count, tile["rows"]), 1, 1), (a, delta, both, alone), numbers, tile, 4)
    return both, alone


@triton.jit
def _normalised_token_sq_norms(
    delta, x, mean, rstd, scale, shift, count, d, delta_step, x_step, rows: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    here = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    inside = here < count
    centre = tl.load(mean + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    by = tl.load(rstd + here, mask=inside, other=0.0).to(tl.float32)[:, None]
    scaled = tl.zeros((rows, width), dtype=tl.float32)
    shifted = tl.zeros((rows, width), dtype=tl.float32)
    for first in range(0, d, width):
        columns = first + tl.arange(0, width)
        mask = inside[:, None] & (columns < d)[None, :]
        gradient = tl.load(delta + here[:, None] * delta_step + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + here[:, None] * x_step + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        product = gradient * ((value - centre) * by)
        scaled += product * product
        shifted += gradient * gradient
    tl.store(scale + here, tl.sum(scaled, axis=1), mask=inside)
    tl.store(shift + here, tl.sum(shifted, axis=1), mask=inside)


def normalised_token_sq_norms(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_d (δ·(x - mean)·rstd)² and Σ_d δ² of each row of δ and x (rows, d); mean and rstd (rows,)."""
    count, d = delta.shape
    found = torch.empty((2, count), dtype=torch.float32, device=delta.device)
    scale, shift = found.unbind()
    tile = _tile(d)
    launch(
        _normalised_token_sq_norms, (blocks_of(count, tile["rows"]), 1, 1),
        (delta, x, mean.contiguous(), rstd.contiguous(), scale, shift), (count, d, delta.stride(0), x.stride(0)),
        tile, 4,
    )  # fmt: skip
    return scale, shift
