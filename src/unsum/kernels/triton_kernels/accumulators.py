"""Norms and sums of Σ over places of δ ⊗ window, straight from the image: no window is unfolded, no sample's gradient
stored. A linear layer is the case of windows of one place in an image of one line.

The *product* loops over samples with two accumulators: this sample's tile, squared into its norm, then added to the
total. The *Gram* way multiplies ⟨window, window'⟩ with ⟨δ, δ'⟩ for pairs of places.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch, power_of_two

ENOUGH = 264  # programs: two for each multiprocessor of a large GPU
PLACES = 64  # of one step of a product


@triton.jit
def _windows(
    x, rows, is_row, first, columns, channels, out_w, in_h, in_w, kernel_w, x_h, x_w, x_c,
    step_h, step_w, pad_h, pad_w, apart_h, apart_w,
    pointwise: tl.constexpr, whole: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """(rows, width): the windows at these places of the output, from column `first` on; zero outside the image."""
    if pointwise:
        column = (first + tl.arange(0, width))[None, :]
        inside = is_row[:, None] & (column < columns)
        at = rows[:, None] * x_w + column * x_c
    else:
        if whole:  # all columns are of one tap: what is computed of it is a number, and loads stay wide
            tap = first // channels
            channel = (first % channels + tl.arange(0, width))[None, :]
            inside = is_row[:, None]
        else:
            column = (first + tl.arange(0, width))[None, :]
            tap = column // channels
            channel = column % channels
            inside = is_row[:, None] & (column < columns)
        h = (rows // out_w * step_h)[:, None] + (tap // kernel_w * apart_h - pad_h)
        w = (rows % out_w * step_w)[:, None] + (tap % kernel_w * apart_w - pad_w)
        inside = inside & (h >= 0) & (h < in_h) & (w >= 0) & (w < in_w)
        at = h * x_h + w * x_w + channel * x_c
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _products(
    x, delta, total, squares, shift, n, each, places, o, columns, channels, out_w, in_h, in_w, kernel_w,
    x_n, x_h, x_w, x_c, delta_n, delta_t, delta_o, step_h, step_w, pad_h, pad_w, apart_h, apart_w,
    pointwise: tl.constexpr, whole: tl.constexpr, long: tl.constexpr, with_shift: tl.constexpr,
    high: tl.constexpr, width: tl.constexpr, deep: tl.constexpr, is_interpreted: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(columns, width)
    top, left = tile // across * high, tile % across * width
    out = top + tl.arange(0, high)
    is_out = out < o
    column = left + tl.arange(0, width)
    summed = tl.zeros((high, width), dtype=tl.float32)
    before = split.to(tl.int64) * each  # samples of the splits before
    x, delta, shift, squares = x + before * x_n, delta + before * delta_n, shift + before * o, squares + before
    squares += tile.to(tl.int64) * n
    for _ in range(split * each, min((split + 1) * each, n)):
        own = tl.zeros((high, width), dtype=tl.float32)
        shifted = tl.zeros((high,), dtype=tl.float32)
        for start in range(0, places, deep):
            rows = start + tl.arange(0, deep)
            is_row = rows < places
            if long:
                rows = rows.to(tl.int64)
            gradient = tl.load(
                delta + rows[:, None] * delta_t + out[None, :] * delta_o,
                mask=is_row[:, None] & is_out[None, :], other=0.0,
            )  # fmt: skip
            window = _windows(
                x, rows, is_row, left, columns, channels, out_w, in_h, in_w, kernel_w, x_h, x_w, x_c,
                step_h, step_w, pad_h, pad_w, apart_h, apart_w, pointwise, whole, width,
            )  # fmt: skip
            if is_interpreted:
                gradient, window = gradient.to(tl.float32), window.to(tl.float32)
            own = tl.dot(tl.trans(gradient), window, own, input_precision="ieee")
            if with_shift:
                shifted += tl.sum(gradient.to(tl.float32), axis=0)
        tl.store(squares, tl.sum(tl.sum(own * own, axis=1), axis=0))
        if with_shift:
            tl.store(shift + out, shifted, mask=out < tl.where(left == 0, o, 0))
            shift += o
        summed += own
        x += x_n
        delta += delta_n
        squares += 1
    at = (split.to(tl.int64) * o + out[:, None]) * columns + column[None, :]
    tl.store(total + at, summed, mask=is_out[:, None] & (column < columns)[None, :])


@triton.jit
def _gram(
    x, delta, squares, n, places, o, columns, channels, out_w, in_h, in_w, kernel_w,
    x_n, x_h, x_w, x_c, delta_n, delta_t, delta_o, step_h, step_w, pad_h, pad_w, apart_h, apart_w,
    pointwise: tl.constexpr, whole: tl.constexpr, long: tl.constexpr, deep: tl.constexpr, width: tl.constexpr,
    is_interpreted: tl.constexpr,
):  # fmt: skip
    sample, pair = tl.program_id(0) % n, tl.program_id(0) // n
    tiles = tl.cdiv(places, deep)
    one, other = pair // tiles, pair % tiles
    is_counted = one <= other  # the others are the same, mirrored
    x, delta = x + sample.to(tl.int64) * x_n, delta + sample.to(tl.int64) * delta_n
    rows, others = one * deep + tl.arange(0, deep), other * deep + tl.arange(0, deep)
    is_row, is_other = rows < places, others < places
    if long:
        rows, others = rows.to(tl.int64), others.to(tl.int64)
    of_x = tl.zeros((deep, deep), dtype=tl.float32)
    for first in range(0, tl.where(is_counted, columns, 0), width):
        window = _windows(
            x, rows, is_row, first, columns, channels, out_w, in_h, in_w, kernel_w, x_h, x_w, x_c,
            step_h, step_w, pad_h, pad_w, apart_h, apart_w, pointwise, whole, width,
        )  # fmt: skip
        facing = _windows(
            x, others, is_other, first, columns, channels, out_w, in_h, in_w, kernel_w, x_h, x_w, x_c,
            step_h, step_w, pad_h, pad_w, apart_h, apart_w, pointwise, whole, width,
        )  # fmt: skip
        if is_interpreted:
            window, facing = window.to(tl.float32), facing.to(tl.float32)
        of_x = tl.dot(window, tl.trans(facing), of_x, input_precision="ieee")
    of_delta = tl.zeros((deep, deep), dtype=tl.float32)
    for first in range(0, tl.where(is_counted, o, 0), width):
        out = (first + tl.arange(0, width))[None, :]
        at, facing_at = rows[:, None] * delta_t + out * delta_o, others[:, None] * delta_t + out * delta_o
        gradient = tl.load(delta + at, mask=is_row[:, None] & (out < o), other=0.0)
        facing = tl.load(delta + facing_at, mask=is_other[:, None] & (out < o), other=0.0)
        if is_interpreted:
            gradient, facing = gradient.to(tl.float32), facing.to(tl.float32)
        of_delta = tl.dot(gradient, tl.trans(facing), of_delta, input_precision="ieee")
    counted = tl.where(one == other, 1.0, 2.0)
    tl.store(squares + pair.to(tl.int64) * n + sample, tl.sum(tl.sum(of_x * of_delta, axis=1), axis=0) * counted)


IS_INTERPRETED = not isinstance(_products, triton.runtime.JITFunction)  # its product of bfloat16 reads them as integers


@dataclass(frozen=True)
class _Lie:
    """How windows lie in the image, as the kernels take it."""

    places: int
    columns: int
    numbers: tuple[int, ...]  # for a kernel, from `channels` on
    pointwise: bool
    long: bool  # whether places of one sample need 64 bits


def _lie(
    x: Tensor, delta: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> _Lie:  # fmt: skip
    (_, in_h, in_w, channels), (_, out_h, out_w, _) = x.shape, delta.shape
    alone = all(k == 1 for k in (*kernel, *stride)) and not any(padding)
    pointwise = alone and (in_h == 1 or x.stride(1) == in_w * x.stride(2))
    span = max(
        sum((size - 1) * step for size, step in zip(t.shape[1:], t.stride()[1:], strict=True)) for t in (x, delta)
    )
    delta_t = delta.stride(2) if out_w > 1 else delta.stride(1)
    numbers = (
        channels, out_w, in_h, in_w, kernel[1], *x.stride(), delta.stride(0), delta_t, delta.stride(3),
        *stride, *padding, *dilation,
    )  # fmt: skip
    return _Lie(out_h * out_w, prod(kernel) * channels, numbers, pointwise, span >= 2**31)


def _wide(channels: int, columns: int, *, most: int, pointwise: bool) -> tuple[int, bool]:
    """How many columns at once, and whether they are all of one tap."""
    if not pointwise:
        for width in (128, 64, 32):
            if width <= most and channels % width == 0:
                return width, True
        most = min(most, 64)
    return max(16, min(most, power_of_two(columns))), False


def products(
    x: Tensor, delta: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], with_shift: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(n,) squared norms, the sum over samples (o, taps·channels), and, `with_shift`, (n, o): Σ δ over places. Of x
    (n, h, w, channels) and δ (n, places down, places right, o); δ's places lie evenly, strides are any otherwise."""
    n, o, lie = x.shape[0], delta.shape[3], _lie(x, delta, kernel, stride, padding, dilation)
    wide = x.dtype == torch.float32
    high = max(16, min(64 if wide else 128, power_of_two(o)))
    width, whole = _wide(x.shape[3], lie.columns, most=64 if wide else 128, pointwise=lie.pointwise)
    tiles = blocks_of(o, high) * blocks_of(lie.columns, width)
    each = blocks_of(n, min(n, blocks_of(ENOUGH, tiles)))
    splits = blocks_of(n, each)
    make = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)
    total = make(splits, o, lie.columns, dtype=x.dtype if splits == 1 else torch.float32)
    squares, shift = make(tiles, n), make(n, o) if with_shift else make(0)
    constants = {
        "pointwise": lie.pointwise, "whole": whole, "long": lie.long, "with_shift": with_shift, "high": high,
        "width": width, "deep": max(16, min(PLACES // 2 if wide else PLACES, power_of_two(lie.places))),
        "is_interpreted": IS_INTERPRETED,
    }  # fmt: skip
    numbers = (n, each, lie.places, o, lie.columns, *lie.numbers)
    warps = 8 if high * width > 8192 else 4
    launch(_products, (tiles, splits, 1), (x, delta, total, squares, shift), numbers, constants, warps, num_stages=3)
    return squares.sum(0), total[0] if splits == 1 else total.sum(0).to(x.dtype), shift


def gram_sq_norms(
    x: Tensor, delta: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """(n,) squared norms, by pairs of places; arguments as `products` has them."""
    n, o, lie = x.shape[0], delta.shape[3], _lie(x, delta, kernel, stride, padding, dilation)
    width, whole = _wide(x.shape[3], lie.columns, most=64, pointwise=lie.pointwise)
    deep = max(16, min(64, power_of_two(lie.places)))
    tiles = blocks_of(lie.places, deep)
    squares = torch.empty((tiles * tiles, n), dtype=torch.float32, device=x.device)
    constants = {
        "pointwise": lie.pointwise, "whole": whole, "long": lie.long, "deep": deep, "width": width,
        "is_interpreted": IS_INTERPRETED,
    }  # fmt: skip
    numbers = (n, lie.places, o, lie.columns, *lie.numbers)
    launch(_gram, (n * tiles * tiles, 1, 1), (x, delta, squares), numbers, constants, 4, num_stages=3)
    return squares.sum(0)
