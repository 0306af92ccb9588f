"""L G R of every sample's gradient G = Σ_t rows_t ⊗ columns_t: both factors are read once, no gradient is formed."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch, power_of_two

WIDTH = 128  # features at a time


@triton.jit
def _reduced(
    x, matrix, position, is_row, d, k, x_t, x_d, matrix_d, matrix_k,
    rows: tl.constexpr, width: tl.constexpr, deep: tl.constexpr, is_interpreted: tl.constexpr,
):  # fmt: skip
    """(rows, deep): positions of one sample times a matrix (d, k)."""
    found = tl.zeros((rows, deep), dtype=tl.float32)
    numbers = tl.arange(0, deep)
    for first in range(0, d, width):
        feature = first + tl.arange(0, width)
        inside = feature < d
        values = tl.load(
            x + position[:, None] * x_t + feature[None, :] * x_d, mask=is_row[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(
            matrix + feature[:, None] * matrix_d + numbers[None, :] * matrix_k,
            mask=inside[:, None] & (numbers < k)[None, :], other=0.0,
        )  # fmt: skip
        if is_interpreted:
            values, weights = values.to(tl.float32), weights.to(tl.float32)
        found = tl.dot(values, weights, found, input_precision="ieee")
    return found


@triton.jit
def _two_sided(
    rows_of, columns_of, left, right, out, t, r, c, k, m, rows_n, rows_t, rows_d, columns_n, columns_t, columns_d,
    left_k, left_d, right_d, right_m,
    rows: tl.constexpr, width: tl.constexpr, deep_k: tl.constexpr, deep_m: tl.constexpr, is_interpreted: tl.constexpr,
):  # fmt: skip
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = part * rows + tl.arange(0, rows)
    is_row = position < t
    long = position.to(tl.int64)
    of_rows = _reduced(
        rows_of + sample * rows_n, left, long, is_row, r, k, rows_t, rows_d, left_d, left_k,
        rows, width, deep_k, is_interpreted,
    )  # fmt: skip
    of_columns = _reduced(
        columns_of + sample * columns_n, right, long, is_row, c, m, columns_t, columns_d, right_d, right_m,
        rows, width, deep_m, is_interpreted,
    )  # fmt: skip
    found = tl.dot(tl.trans(of_rows), of_columns, input_precision="ieee")
    down, across = tl.arange(0, deep_k), tl.arange(0, deep_m)
    at = ((sample * tl.num_programs(1) + part) * k + down[:, None]) * m + across[None, :]
    tl.store(out + at, found, mask=(down < k)[:, None] & (across < m)[None, :])


IS_INTERPRETED = not isinstance(_two_sided, triton.runtime.JITFunction)  # its product of bfloat16 reads integers


def two_sided(rows: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """(n, k, m) of rows (n, t, r) and columns (n, t, c), by left (k, r) and right (c, m); in float32."""
    (n, t, r), c, k, m = rows.shape, columns.shape[2], left.shape[0], right.shape[1]
    some = max(16, min(64, power_of_two(t)))
    parts = blocks_of(t, some)
    out = torch.empty((n, parts, k, m), dtype=torch.float32, device=rows.device)
    deep = {"deep_k": max(16, power_of_two(k)), "deep_m": max(16, power_of_two(m))}
    constants = {"rows": some, "width": WIDTH, **deep, "is_interpreted": IS_INTERPRETED}
    numbers = (t, r, c, k, m, *rows.stride(), *columns.stride(), *left.stride(), *right.stride())
    launch(_two_sided, (n, parts, 1), (rows, columns, left, right, out), numbers, constants, 4, num_stages=3)
    return out[:, 0] if parts == 1 else out.sum(1)
