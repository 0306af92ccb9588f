"""Products of float32 matrices from parts in bfloat16."""

import pytest
import torch

from unsum.kernels import split


def made(*shape, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values * 10.0 ** torch.linspace(-3, 3, shape[-1])  # columns of very different sizes


def off(found, wanted, *sizes):
    """The largest error, relative to the sizes of what was multiplied."""
    scale = torch.einsum("i,j->ij", *[size.double().norm(dim=dim) for size, dim in sizes])
    return float(((found.double() - wanted).abs() / scale).max())


def test_three_parts_carry_float32():
    x = made(300, 20)
    parts = split.split(x, 3)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), x.double())


def test_a_gram_matrix_from_parts_is_as_good_as_float32():
    x = made(300, 20)
    wanted = x.double().T @ x.double()
    assert off(split.gram_of_parts(split.split(x, 3)), wanted, (x, 0), (x, 0)) < 1e-6
    assert off(split.gram(x), wanted, (x, 0), (x, 0)) < 1e-6


@pytest.mark.parametrize(("parts", "loose"), [(2, 3e-5), (3, 1e-6)])
def test_a_product_from_parts(parts, loose):
    x, y = made(50, 40), made(30, 40, seed=1).T
    wanted = x.double() @ y.double()
    found = split.product_of_parts(split.split(x, parts), split.split(y, parts))
    assert off(found, wanted, (x, 1), (y, 0)) < loose
    one = split.product_of_parts([x.bfloat16()], split.split(y, parts))  # what is narrow is one part
    assert off(one, x.bfloat16().double() @ y.double(), (x, 1), (y, 0)) < loose


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stacks_and_dtypes(dtype):
    x, y = made(3, 7, 5).to(dtype), made(3, 5, 4, seed=1).to(dtype)
    found = split.product(x, y)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), x.double() @ y.double(), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(split.gram(x).double(), x.double().mT @ x.double(), rtol=1e-4, atol=1e-2)
