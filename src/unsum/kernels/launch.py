"""Launching a Triton kernel again. Triton looks at every argument of every launch, to find what was compiled for such
ones, which takes longer than many kernels do. Where all that it looks at is as it was, the compiled kernel is launched
by itself."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.kernels import recorded
from unsum.seams.operators import current_stream, is_stand_in, launcher

_KEPT = 4096

again = True  # whether compiled kernels are launched by themselves; `fused.is_on` tries it
_compiled: dict[Any, Any] = {}


def blocks_of(count: int, size: int) -> int:
    """How many blocks of this size hold so many. (Triton's own takes ten times as long.)"""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest that is not less."""
    return 1 << (count - 1).bit_length()


def launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: tuple[int, ...],
    constants: dict[str, int], warps: int, **options: int,
) -> None:  # fmt: skip
    """Run `kernel` with these tensors, whole numbers and constants, which are its arguments in this order."""
    if is_stand_in(tensors[0]):  # the compiler launches it as its own
        torch.library.wrap_triton(kernel)[grid](*tensors, *numbers, **constants, num_warps=warps, **options)
        return
    tape = recorded.tape()
    if tape is not None:
        with recorded.unwritten():
            tape.launched(_launch(kernel, grid, tensors, numbers, constants, warps, options), tensors)
        return
    _launch(kernel, grid, tensors, numbers, constants, warps, options)


def _launch(
    kernel: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: tuple[int, ...],
    constants: dict[str, int], warps: int, options: dict[str, int],
) -> Any:  # fmt: skip
    """Returns what does so again, with other tensors like these."""
    key = None
    index = tensors[0].device.index
    if tensors[0].is_cuda and index != torch.cuda.current_device():
        with torch.cuda.device(index):  # Triton launches on the device of the moment
            return _launch(kernel, grid, tensors, numbers, constants, warps, options)
    if again and tensors[0].is_cuda:
        # What Triton compiles for: types, whether addresses are multiples of 16, and (more than it asks) the numbers.
        found = [t.dtype for t in tensors if not t.data_ptr() % 16]
        if len(found) == len(tensors):
            key = (kernel, grid, *found, numbers, *constants.values(), index)
            ready = _compiled.get(key)
            if ready is not None:
                ready(*tensors)
                return ready
    made = kernel[grid](*tensors, *numbers, **constants, num_warps=warps, **options)
    if key is not None and hasattr(made, "launch_metadata"):
        if len(_compiled) >= _KEPT:
            _compiled.clear()
        _compiled[key] = _by_itself(made, grid, (*numbers, *constants.values()), index)
        return _compiled[key]
    return lambda *given: kernel[grid](*given, *numbers, **constants, num_warps=warps, **options)


def _by_itself(made: Any, grid: tuple[int, int, int], rest: tuple[Any, ...], index: int) -> Any:
    """What launches a compiled kernel on the stream of the moment."""
    run, function, metadata = launcher(made)
    stream = current_stream
    x, y, z = grid

    def start(*tensors: Tensor | int) -> None:
        run(x, y, z, stream(index), function, metadata, None, None, None, *tensors, *rest)

    start.takes_addresses = True
    return start
