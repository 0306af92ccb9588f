"""Several small passes over memory as one: Triton kernels for CUDA, each with a plain torch twin that is always there.

`UNSUM_KERNELS=off` turns them off. A kernel is used where Triton is installed, the tensors are on a GPU and contiguous,
and the first use on a device has given what the twin gives.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.kernels import launch


def norms_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) squared norms and the sum over samples (o, i), from gradients (n, o, i) in one pass."""
    if serves(each):
        return _kernels().norms_and_sum(each)  # type: ignore[no-any-return]
    return norms_and_sum_twin(each)


def parts_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """The same with squared norms (n,), or (parts, n) that are still to be added up: for many layers at once."""
    if each.numel() <= PARTS and serves(each):
        return _kernels().parts_and_sum(each)  # type: ignore[no-any-return]
    return norms_and_sum(each)


def norms_and_sum_twin(each: Tensor) -> tuple[Tensor, Tensor]:
    """The same in two passes."""
    norms = torch.linalg.vector_norm(each.flatten(1), dim=1, dtype=_wide(each))
    return norms.square(), torch.sum(each, 0)  # torch adds up in float32 at least


def scale_and_shift(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(n, d) twice: Σ_t δ·(x - mean)·rstd and Σ_t δ, of δ and x (n, t, d), mean and rstd with one number for each
    position, in one pass."""
    if serves(delta, x):
        return _kernels().scale_and_shift(delta, x, mean, rstd)  # type: ignore[no-any-return]
    return scale_and_shift_twin(delta, x, mean, rstd)


def scale_and_shift_twin(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The same, pass by pass."""
    mean, rstd = (each.reshape(*x.shape[:2], 1) for each in (mean, rstd))
    normalised = ((x - mean) * rstd).to(x.dtype)
    return (delta * normalised).sum(1, dtype=_wide(delta)), delta.sum(1, dtype=_wide(delta))


def _wide(tensor: Tensor) -> torch.dtype:
    return _widened(tensor.dtype)


@functools.cache
def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def serves(*tensors: Tensor) -> bool:
    """Whether there is a kernel for these tensors."""
    return all(
        t.is_cuda and t.dtype in _DTYPES and t.is_contiguous() and bool(t.numel()) and is_on(t.device) for t in tensors
    )


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = 1 << 28  # gradients of more numbers leave parts that are worth adding up at once


@functools.cache
def is_on(device: torch.device) -> bool:
    """Whether there are kernels for this device, and they give there what their twins give."""
    if os.environ.get("UNSUM_KERNELS", "").lower() == "off" or importlib.util.find_spec("triton") is None:
        return False
    generator = torch.Generator(device).manual_seed(0)
    make = lambda *shape: torch.randn(shape, device=device, generator=generator)
    sequences, numbers = [make(3, 70, 33) for _ in range(2)], [make(3, 70) for _ in range(2)]
    cases: list[tuple[str, Callable[..., Any], Sequence[Tensor]]] = [
        ("norms_and_sum", norms_and_sum_twin, sequences[:1]),
        ("scale_and_shift", scale_and_shift_twin, [*sequences, *numbers]),
    ]
    for launch.again in (True, False):  # by themselves the second time; by Triton's own way if that does not go
        try:
            for name, twin, given in cases * 2:
                kernel = getattr(_kernels(), name)
                for ours, wanted in zip(kernel(*given), twin(*given), strict=True):
                    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
        except Exception as error:  # no compiler, another Triton, an old GPU: the twins are always there
            why = f"unsum: Triton kernels are not used on {device}: {str(error).splitlines()[0]}"
        else:
            return True
    warnings.warn(why, stacklevel=2)
    return False


@functools.cache
def _kernels() -> Any:
    from unsum.kernels import triton_kernels

    return triton_kernels
