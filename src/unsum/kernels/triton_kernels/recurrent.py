"""The backward of an LSTM through time, up to the gradient at its gates."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unsum.kernels.launch import blocks_of, launch
from unsum.kernels.recurrence import block_of
from unsum.kernels.triton_kernels.accumulators import IS_INTERPRETED

UNITS = 256  # that one program goes through time with


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _lstm_cells(
    gates, first, cells, times, count, hidden, between_times, between_rows, reverse: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """What goes into the gates turns into the gates (T, B, 4, H), whose strides are given. The cells before and after
    each time t are written as `cells[t]` and `cells[t + 1]`, or the other way round in reverse."""
    unit = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = unit < count
    cell = tl.load(first + unit, mask=inside, other=0.0).to(tl.float32)
    at = gates + (unit // hidden) * between_rows + unit % hidden
    size = tl.full((), 1, tl.int64) * count
    tl.store(cells + size * (times if reverse else 0) + unit, cell, mask=inside)
    for step in range(times):
        time, ended = step, step + 1
        if reverse:
            time, ended = times - 1 - step, times - 1 - step
        here = at + tl.full((), 1, tl.int64) * between_times * time
        i = tl.sigmoid(tl.load(here, mask=inside, other=0.0).to(tl.float32))
        f = tl.sigmoid(tl.load(here + hidden, mask=inside, other=0.0).to(tl.float32))
        g = _tanh(tl.load(here + 2 * hidden, mask=inside, other=0.0).to(tl.float32))
        o = tl.sigmoid(tl.load(here + 3 * hidden, mask=inside, other=0.0).to(tl.float32))
        cell = f * cell + i * g
        tl.store(here, i, mask=inside)
        tl.store(here + hidden, f, mask=inside)
        tl.store(here + 2 * hidden, g, mask=inside)
        tl.store(here + 3 * hidden, o, mask=inside)
        tl.store(cells + size * ended + unit, cell, mask=inside)


@triton.jit
def _all_are_here(arrived, expected):
    """Go on when so many programs have come here, in this round and those before."""
    tl.debug_barrier()  # what this program has written is there
    here = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while here < expected:
        here = tl.atomic_add(arrived, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _lstm_backward(
    gates, cells, d_states, d_last, d_cell, weight, arrived, times, batch, hidden,
    between_times, between_rows, d_between_times, d_between_rows,
    reverse: tl.constexpr, rows: tl.constexpr, units: tl.constexpr, deep: tl.constexpr, precision: tl.constexpr,
    is_interpreted: tl.constexpr,
):  # fmt: skip
    """The gates (T, B, 4, H) turn into their gradients, from the last time to the first. Each program has some units of
    some sequences, and keeps the gradients of their state and cell. What all programs have written at one time is what
    each reads to go to the time before: they wait for each other, so all of them have to run at once."""
    columns = tl.cdiv(hidden, units)
    row = tl.program_id(0) // columns * rows + tl.arange(0, rows)
    unit = tl.program_id(0) % columns * units + tl.arange(0, units)
    is_row, is_unit = row < batch, unit < hidden
    inside = is_row[:, None] & is_unit[None, :]
    own = row[:, None] * hidden + unit[None, :]
    wide, rows_at = tl.full((), 1, tl.int64), row.to(tl.int64)[:, None]
    at = rows_at * between_rows + unit[None, :]
    given = d_states + rows_at * d_between_rows + unit[None, :]
    size = wide * batch * hidden
    state = tl.load(d_last + own, mask=inside, other=0.0).to(tl.float32)
    cell = tl.load(d_cell + own, mask=inside, other=0.0).to(tl.float32)
    inner = tl.arange(0, deep)
    for step in range(times):
        time, ended, began = times - 1 - step, times - step, times - 1 - step
        if reverse:
            time, ended, began = step, step, step + 1
        now = gates + wide * between_times * time
        i = tl.load(now + at, mask=inside, other=0.0).to(tl.float32)
        f = tl.load(now + at + hidden, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(now + at + 2 * hidden, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(now + at + 3 * hidden, mask=inside, other=0.0).to(tl.float32)
        seen = _tanh(tl.load(cells + size * ended + own, mask=inside, other=0.0).to(tl.float32))
        before = tl.load(cells + size * began + own, mask=inside, other=0.0).to(tl.float32)
        state += tl.load(given + wide * d_between_times * time, mask=inside, other=0.0).to(tl.float32)
        cell += state * o * (1.0 - seen * seen)
        tl.store(now + at, cell * g * i * (1.0 - i), mask=inside)
        tl.store(now + at + hidden, cell * before * f * (1.0 - f), mask=inside)
        tl.store(now + at + 2 * hidden, cell * i * (1.0 - g * g), mask=inside)
        tl.store(now + at + 3 * hidden, state * seen * o * (1.0 - o), mask=inside)
        cell *= f
        if step < times - 1:
            if not is_interpreted:  # where there is one program
                _all_are_here(arrived, (step + 1) * tl.num_programs(0))
            state = tl.zeros((rows, units), dtype=tl.float32)
            for left in range(0, 4 * hidden, deep):
                gate = left + inner
                is_gate = gate < 4 * hidden
                # Past the first cache, which does not know what others have written.
                there = now + rows_at * between_rows + gate[None, :]
                found = tl.load(there, mask=is_row[:, None] & is_gate[None, :], other=0.0, cache_modifier=".cg")
                by = tl.load(
                    weight + gate[:, None] * hidden + unit[None, :], mask=is_gate[:, None] & is_unit[None, :], other=0.0
                )
                if is_interpreted:
                    found, by = found.to(tl.float32), by.to(tl.float32)
                state = tl.dot(found, by, state, input_precision=precision)


def lstm_gates(
    x: Tensor, before: Tensor, of_inputs: Tensor, of_states: Tensor, bias: Tensor, cell: Tensor,
    d_states: Tensor, d_last: Tensor, d_cell: Tensor, reverse: bool,
) -> Tensor:  # fmt: skip
    """(T, B, 4H): the gradient at the gates, in memory as `x` lies there: time by time, or sequence by sequence. Two
    launches for all times; gates and their gradients are rounded to the dtype of the layer, gradients of states and
    cells are kept in float32."""
    times, batch, hidden = before.shape
    by_sequence = not x.is_contiguous() and x.transpose(0, 1).is_contiguous()
    flat = lambda tensor: (tensor.transpose(0, 1) if by_sequence else tensor).reshape(times * batch, -1)
    gates = torch.addmm(bias, flat(x), of_inputs.T).addmm_(flat(before), of_states.T)
    gates = gates.view(batch, times, -1).transpose(0, 1) if by_sequence else gates.view(times, batch, -1)
    cells, count = before.new_empty((times + 1, batch, hidden)), batch * hidden
    tensors = gates, cell.contiguous(), cells
    numbers, flags = (times, count, hidden, *gates.stride()[:2]), {"reverse": int(reverse), "block": UNITS}
    launch(_lstm_cells, (blocks_of(count, UNITS), 1, 1), tensors, numbers, flags, 4)
    rows, units = block_of(batch, hidden, before.device) or (0, 0)
    d_states = d_states if d_states.stride(2) == 1 else d_states.contiguous()
    arrived = torch.zeros(1, dtype=torch.int32, device=before.device)
    constants = {
        "reverse": int(reverse), "rows": rows, "units": units, "deep": 32 if before.dtype == torch.float32 else DEEP,
        "precision": "ieee" if IS_INTERPRETED else "tf32x3", "is_interpreted": IS_INTERPRETED,
    }  # fmt: skip
    tile = (rows + units) * constants["deep"] * before.element_size()
    stages = max(1, min(4, room(before.device) // tile))
    options = {} if IS_INTERPRETED else {"launch_cooperative_grid": True, "num_stages": stages}
    launch(
        _lstm_backward, (blocks_of(batch, rows) * blocks_of(hidden, units), 1, 1),
        (gates, cells, d_states, *(t.contiguous() for t in (d_last, d_cell, of_states)), arrived),
        (times, batch, hidden, *gates.stride()[:2], *d_states.stride()[:2]), constants,
        4 if rows * units <= 1024 else 8, **options,
    )  # fmt: skip
    return gates


DEEP = 128  # gates that are multiplied at once


def room(device: torch.device) -> int:
    """Bytes of shared memory that the tiles of a program may take."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(known, "shared_memory_per_block_optin", 1 << 16) * 3 // 4
