"""Squared norms of many layers in one launch. Nothing is put side by side: a table holds the addresses of the layers'
tensors and how wide their rows are, and a program finds its own there. All layers have the same samples and positions.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch, power_of_two
from unsum.kernels.triton_kernels.accumulators import IS_INTERPRETED

CHUNK = 4096  # columns that one program reads of the wider factor
PARTS = 16  # programs that share the columns of a layer's sums
TILE = 4096  # numbers that a program holds of each sum
KEPT = 64  # tables

_tables: dict[tuple[int, ...], tuple[Tensor, bool]] = {}


@triton.jit
def _row_pairs(
    start, one, other, t, d, first, last, deep: tl.constexpr, width: tl.constexpr, is_interpreted: tl.constexpr
):  # fmt: skip
    """(deep, deep): ⟨row, row'⟩ of the positions of two tiles, over columns `first` to `last`."""
    rows, others = one * deep + tl.arange(0, deep), other * deep + tl.arange(0, deep)
    is_row, is_other = (rows < t)[:, None], (others < t)[:, None]
    found = tl.zeros((deep, deep), dtype=tl.float32)
    for left in range(first, last, width):
        column = (left + tl.arange(0, width))[None, :]
        inside = column < last
        values = tl.load(start + rows[:, None] * d + column, mask=is_row & inside, other=0.0)
        facing = tl.load(start + others[:, None] * d + column, mask=is_other & inside, other=0.0)
        if is_interpreted:
            values, facing = values.to(tl.float32), facing.to(tl.float32)
        found = tl.dot(values, tl.trans(facing), found, input_precision="ieee")
    return found


@triton.jit
def _grouped_gram(
    table, squares, like_a, like_delta, layers, n, t, tiles, splits,
    chunk: tl.constexpr, deep: tl.constexpr, width: tl.constexpr, aligned: tl.constexpr, is_interpreted: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, rest = program % n, program // n
    pair, rest = rest % (tiles * tiles), rest // (tiles * tiles)
    split, layer = rest % splits, rest // splits
    one, other = pair // tiles, pair % tiles
    a, delta = tl.load(table + layer).to(like_a.dtype), tl.load(table + layers + layer).to(like_delta.dtype)
    i, o = tl.load(table + 2 * layers + layer).to(tl.int32), tl.load(table + 3 * layers + layer).to(tl.int32)
    if aligned:  # else numbers would be loaded one by one
        a, delta, i, o = tl.multiple_of(a, 16), tl.multiple_of(delta, 16), tl.multiple_of(i, 16), tl.multiple_of(o, 16)
    a += sample.to(tl.int64) * t * i
    delta += sample.to(tl.int64) * t * o
    # The wider factor's columns are shared by programs: what they find adds up. Mirrored pairs are the same.
    begin = split * chunk
    is_counted = (one <= other) & (begin < tl.maximum(i, o))
    a_first, o_first = tl.where(i > o, begin, 0), tl.where(i > o, 0, begin)
    a_last, o_last = tl.where(i > o, tl.minimum(begin + chunk, i), i), tl.where(i > o, o, tl.minimum(begin + chunk, o))
    a_last, o_last = tl.where(is_counted, a_last, 0), tl.where(is_counted, o_last, 0)
    of_a = _row_pairs(a, one, other, t, i, a_first, a_last, deep, width, is_interpreted)
    of_delta = _row_pairs(delta, one, other, t, o, o_first, o_last, deep, width, is_interpreted)
    counted = tl.where(one == other, 1.0, 2.0)
    tl.store(squares + program, tl.sum(tl.sum(of_a * of_delta, axis=1), axis=0) * counted)


def grouped_gram_sq_norms(a: Sequence[Tensor], delta: Sequence[Tensor], n: int, t: int, kept: bool = True) -> Tensor:
    """(layers, n): |δᵀa|² of each sample and layer, by pairs of positions; of rows (n·t, …) in any shape."""
    a, delta = list(map(Tensor.contiguous, a)), list(map(Tensor.contiguous, delta))
    table, widest, aligned = _table(n * t, a, delta, kept=kept)
    layers, deep = len(a), max(16, min(64, power_of_two(t)))
    width = max(16, min(64, power_of_two(widest)))
    tiles, splits = blocks_of(t, deep), blocks_of(widest, CHUNK)
    squares = torch.empty((layers, splits * tiles * tiles, n), dtype=torch.float32, device=table.device)
    constants = {
        "chunk": CHUNK, "deep": deep, "width": width, "aligned": aligned, "is_interpreted": IS_INTERPRETED
    }  # fmt: skip
    numbers = (layers, n, t, tiles, splits)
    launch(
        _grouped_gram, (squares.numel(), 1, 1), (table, squares, a[0], delta[0]), numbers, constants, 4, num_stages=3
    )
    return squares.sum(1) if squares.shape[1] > 1 else squares[:, 0]


@triton.jit
def _grouped_sums(
    table, squares, like, like_mean, layers, n, t, parts,
    normalised: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, rest = program % n, program // n
    part, layer = rest % parts, rest // parts
    delta = tl.load(table + layer).to(like.dtype)
    if normalised:
        x = tl.load(table + layers + layer).to(like.dtype)
        mean = tl.load(table + 2 * layers + layer).to(like_mean.dtype) + sample * t
        rstd = tl.load(table + 3 * layers + layer).to(like_mean.dtype) + sample * t
        d = tl.load(table + 4 * layers + layer).to(tl.int32)
        if aligned:
            x = tl.multiple_of(x, 16)
    else:
        d = tl.load(table + layers + layer).to(tl.int32)
    if aligned:
        delta, d = tl.multiple_of(delta, 16), tl.multiple_of(d, 16)
    start = sample.to(tl.int64) * t * d
    of_scale, of_shift = 0.0, 0.0
    for left in range(part * width, d, parts * width):
        column = left + tl.arange(0, width)
        inside = column < d
        scaled = tl.zeros((rows, width), dtype=tl.float32)
        shifted = tl.zeros((rows, width), dtype=tl.float32)
        for first in range(0, t, rows):
            position = first + tl.arange(0, rows)
            is_row = position < t
            mask = is_row[:, None] & inside[None, :]
            at = start + position[:, None] * d + column[None, :]
            gradient = tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
            shifted += gradient
            if normalised:
                value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
                centre = tl.load(mean + position, mask=is_row, other=0.0).to(tl.float32)[:, None]
                by = tl.load(rstd + position, mask=is_row, other=0.0).to(tl.float32)[:, None]
                scaled += gradient * ((value - centre) * by)
        summed = tl.sum(shifted, axis=0)
        of_shift += tl.sum(summed * summed, axis=0)
        if normalised:
            summed = tl.sum(scaled, axis=0)
            of_scale += tl.sum(summed * summed, axis=0)
    tl.store(squares + program, of_shift)
    if normalised:
        tl.store(squares + tl.num_programs(0) + program, of_scale)


def _sums(n: int, t: int, kept: bool, *columns: Sequence[Tensor]) -> Tensor:
    """(1 or 2, layers, n): of shifts, then of scales."""
    columns = [list(map(Tensor.contiguous, column)) for column in columns]
    table, widest, aligned = _table(n * t, *columns, widths_of=1, kept=kept)
    layers, normalised = len(columns[0]), len(columns) > 1
    width = min(256, power_of_two(widest))
    parts, rows = min(PARTS, blocks_of(widest, width)), max(1, min(TILE // width, power_of_two(t)))
    squares = torch.empty((1 + normalised, layers, parts, n), dtype=torch.float32, device=table.device)
    constants = {"normalised": normalised, "rows": rows, "width": width, "aligned": aligned}
    tensors = (table, squares, columns[0][0], columns[-1][0])
    launch(_grouped_sums, (layers * parts * n, 1, 1), tensors, (layers, n, t, parts), constants, 4)
    return squares.sum(2) if parts > 1 else squares[:, :, 0]


def grouped_shift_sq_norms(delta: Sequence[Tensor], n: int, t: int, kept: bool = True) -> Tensor:
    """(layers, n): |Σ_t δ|² of each sample and layer, of rows (n·t, …) in any shape."""
    return _sums(n, t, kept, delta)[0]


def grouped_norm_sq_norms(
    delta: Sequence[Tensor], x: Sequence[Tensor], mean: Sequence[Tensor], rstd: Sequence[Tensor], n: int, t: int,
    kept: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(layers, n) twice: |Σ_t δ·(x - mean)·rstd|² and |Σ_t δ|²; of rows (n·t, …), mean and rstd with n·t numbers."""
    shift, scale = _sums(n, t, kept, delta, x, mean, rstd).unbind()
    return scale, shift


def _table(rows: int, *columns: Sequence[Tensor], widths_of: int = 2, kept: bool = True) -> tuple[Tensor, int, bool]:
    """Addresses, column by column, then how many numbers a row of the first columns has; the most of them; whether
    all are multiples of 16. Tensors are often where they were the last time: then a `kept` table is there already."""
    device = columns[0][0].device
    addresses = [address for column in columns for address in map(Tensor.data_ptr, column)]
    widths = [numel // rows for column in columns[:widths_of] for numel in map(Tensor.numel, column)]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (len(columns), stream, *addresses, *widths)
    known = _tables.get(key) if kept else None
    if known is None:
        known = _written(addresses, widths, device, kept), not any(number % 16 for number in key[2:])
    if kept and key not in _tables:
        if len(_tables) >= KEPT:
            _tables.clear()
        _tables[key] = known
    return known[0], max(widths), known[1]


def _written(addresses: list[int], widths: list[int], device: torch.device, kept: bool) -> Tensor:
    """These numbers on the device. What is not kept is written by a kernel, which a CUDA graph can record: its
    arguments are in the graph, and nothing is read from the host when the graph is replayed."""
    if kept:
        host = torch.tensor(addresses + widths, dtype=torch.int64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)
    table = torch.empty(len(addresses) + len(widths), dtype=torch.int64, device=device)
    at = 0
    for numbers in (addresses, widths):  # apart: Triton compiles for numbers of 64 bits, and for those of 32
        for first in range(0, len(numbers), WORDS):
            words = numbers[first : first + WORDS]
            _write[(1,)](table, at, len(words), *words, *words[:1] * (WORDS - len(words)))
            at += len(words)
    return table


WORDS = 16  # numbers that one launch writes into a table


@triton.jit(do_not_specialize=["at", "count", *(f"n{k}" for k in range(WORDS))])
def _write(
    table, at, count, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15,
):  # fmt: skip
    """The first `count` of these numbers, from place `at` on."""
    tl.store(table + at, n0)
    tl.store(table + at + 1, n1, mask=count > 1)
    tl.store(table + at + 2, n2, mask=count > 2)
    tl.store(table + at + 3, n3, mask=count > 3)
    tl.store(table + at + 4, n4, mask=count > 4)
    tl.store(table + at + 5, n5, mask=count > 5)
    tl.store(table + at + 6, n6, mask=count > 6)
    tl.store(table + at + 7, n7, mask=count > 7)
    tl.store(table + at + 8, n8, mask=count > 8)
    tl.store(table + at + 9, n9, mask=count > 9)
    tl.store(table + at + 10, n10, mask=count > 10)
    tl.store(table + at + 11, n11, mask=count > 11)
    tl.store(table + at + 12, n12, mask=count > 12)
    tl.store(table + at + 13, n13, mask=count > 13)
    tl.store(table + at + 14, n14, mask=count > 14)
    tl.store(table + at + 15, n15, mask=count > 15)
