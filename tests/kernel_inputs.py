"""Inputs of kernels, and comparisons of kernels and their plain torch twins with float64."""

import pytest
import torch

from unsum.kernels import fused, twins

kernels = pytest.importorskip("unsum.kernels.triton_kernels", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
in_all = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(DEVICE, dtype)


def close(ours, exact, dtype):
    loose = 1e-5 if dtype == torch.float32 else 2e-2
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(ours.double(), exact, rtol=loose, atol=loose * largest)


def ways(name):
    """The kernel, its twin, and what chooses between them."""
    return getattr(kernels, name), getattr(twins, name), getattr(fused, name)


def spread(tensor):
    """The same numbers, with other numbers between them."""
    wider = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), dtype=tensor.dtype, device=DEVICE)
    wider[..., ::2] = tensor
    return wider[..., ::2]
