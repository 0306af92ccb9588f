"""Kernels against their plain torch twins and float64: through Triton's interpreter on a CPU, compiled where there is a
GPU."""

import pytest
import torch
from torch.nn import functional as F

from kernel_inputs import DEVICE, close, in_all, kernels, made, spread, ways
from unsum.kernels import product, twins


@in_all
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 33, 70), (11, 64, 65), (2, 2, 2049)])
def test_norms_and_sum(shape, dtype):
    each = made(*shape, dtype=dtype)
    exact = each.double()
    for way in ways("norms_and_sum"):
        squares, total = way(each)
        close(squares, exact.flatten(1).square().sum(1), dtype)
        close(total, exact.sum(0), dtype)
        assert total.dtype == dtype and squares.dtype == torch.float32
    parts, total = kernels.parts_and_sum(each)
    close(parts.sum(0), exact.flatten(1).square().sum(1), dtype)
    close(total, exact.sum(0), dtype)


@in_all
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 33), (2, 129, 64), (2, 3, 1500), (1, 300, 5)])
def test_scale_and_shift(shape, dtype):
    delta, x = made(*shape, dtype=dtype), made(*shape, dtype=dtype, seed=1) + 1
    mean, rstd = made(*shape[:2]), made(*shape[:2]).abs()
    exact = (x.double() - mean.double()[..., None]) * rstd.double()[..., None]
    for way in ways("scale_and_shift"):
        scale, shift = way(delta, x, mean, rstd)
        close(scale, (delta.double() * exact).sum(1), dtype)
        close(shift, delta.double().sum(1), dtype)


@in_all
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 33), (2, 500, 64), (2, 3, 300)])
@pytest.mark.parametrize("lie", ["channels last", "channels first", "one of each", "spread"])
def test_channel_sums(shape, lie, dtype):
    delta, x = made(*shape, dtype=dtype), made(*shape, dtype=dtype, seed=1) + 1
    mean, variance = made(shape[2]), made(shape[2]).abs()
    exact = (x.double() - mean.double()) / (variance.double() + 0.1).sqrt()
    wanted = (delta.double() * exact).sum(1), delta.double().sum(1)
    first = lambda tensor: tensor.mT.contiguous().mT
    delta = first(delta) if lie == "channels first" else spread(delta) if lie == "spread" else delta
    x = first(x) if lie in ("channels first", "one of each") else x
    for way in ways("channel_sums"):
        for ours, theirs in zip(way(delta, x, mean, variance, 0.1), wanted, strict=True):
            close(ours, theirs, dtype)


@in_all
@pytest.mark.parametrize(("rows", "i", "o"), [(1, 1, 1), (7, 33, 600), (9, 512, 70)])
def test_token_sq_norms(rows, i, o, dtype):
    a, delta = made(rows, i, dtype=dtype), made(rows, 2 * o, dtype=dtype)[:, :o]
    alone = delta.double().square().sum(1)
    for way in ways("token_sq_norms"):
        both, of_delta = way(a, delta)
        close(both, a.double().square().sum(1) * alone, dtype)
        close(of_delta, alone, dtype)


@in_all
@pytest.mark.parametrize(("rows", "d"), [(1, 1), (7, 33), (9, 600)])
def test_normalised_token_sq_norms(rows, d, dtype):
    delta, x = made(rows, d, dtype=dtype), made(rows, d, dtype=dtype, seed=1) + 1
    mean, rstd = made(rows), made(rows).abs()
    exact = (x.double() - mean.double()[:, None]) * rstd.double()[:, None]
    for way in ways("normalised_token_sq_norms"):
        scale, shift = way(delta, x, mean, rstd)
        close(scale, (delta.double() * exact).square().sum(1), dtype)
        close(shift, delta.double().square().sum(1), dtype)


@in_all
@pytest.mark.parametrize(("n", "t", "d", "table"), [(1, 1, 1, 1), (3, 21, 33, 5), (2, 19, 300, 1), (2, 6, 8, 1000)])
def test_lookup_sq_norms(n, t, d, table, dtype):
    """Positions that share a row are added first, also where all of them do."""
    ids = torch.randint(table, (n, t), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    delta = made(n, t, d, dtype=dtype)
    tables = torch.zeros(n, table, d, dtype=torch.float64, device=DEVICE)
    for k in range(n):
        tables[k].index_add_(0, ids[k], delta[k].double())
    for way in ways("lookup_sq_norms"):
        for given in (delta, spread(delta)):
            close(way(ids, given), tables.flatten(1).square().sum(1), dtype)


WINDOWS = {  # channels, o, (h, w), kernel, stride, padding, dilation
    "one place": (3, 2, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1)),
    "pointwise": (20, 18, (5, 7), (1, 1), (1, 1), (0, 0), (1, 1)),
    "pointwise, strided": (32, 9, (6, 7), (1, 1), (2, 2), (0, 0), (1, 1)),
    "3x3 of whole taps": (32, 17, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "3x3 of few channels": (3, 20, (6, 5), (3, 3), (2, 1), (1, 0), (1, 1)),
    "apart": (5, 4, (9, 8), (2, 3), (1, 2), (2, 1), (3, 2)),
    "many places": (4, 5, (9, 9), (2, 2), (1, 1), (0, 0), (1, 1)),
    "many rows and columns": (70, 140, (2, 2), (1, 2), (1, 1), (0, 1), (1, 1)),
}


def image(name, n, dtype):
    channels, o, size, *geometry = WINDOWS[name]
    x = made(n, channels, *size, dtype=dtype)
    like = torch.empty(o, channels, *geometry[0], device=DEVICE)
    delta = made(*F.conv2d(x.float(), like, None, *geometry[1:]).shape, dtype=dtype, seed=1)
    each = torch.stack(
        [
            torch.nn.grad.conv2d_weight(x[k : k + 1].double(), like.shape, delta[k : k + 1].double(), *geometry[1:])
            for k in range(n)
        ]
    )
    return x, delta, geometry, each  # (n, o, channels, *kernel)


@in_all
@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format], ids=["channels last", "rows last"])
@pytest.mark.parametrize("name", WINDOWS)
def test_products_and_gram(name, memory, dtype):
    n = 1 if name == "one place" else 3
    x, delta, geometry, each = image(name, n, dtype)
    squares = each.flatten(1).square().sum(1)
    x, delta = (tensor.contiguous(memory_format=memory).movedim(1, -1) for tensor in (x, delta))
    for way in ways("products"):
        found, total, shift = way(x, delta, *geometry, True)
        close(found, squares, dtype)
        close(total, each.sum(0).movedim(1, -1).flatten(1), dtype)
        close(shift, delta.double().sum((1, 2)), dtype)
        assert total.dtype == dtype and found.dtype == shift.dtype == torch.float32
    for way in ways("gram_sq_norms"):
        close(way(x, delta, *geometry), squares, dtype)


def test_products_of_samples_one_after_the_other(monkeypatch):
    """One program for several samples, with and without others beside it."""
    x, delta, geometry, each = image("3x3 of few channels", 5, torch.float32)
    x, delta = x.movedim(1, -1), delta.movedim(1, -1)
    for programs in (1, 6, 1000):
        monkeypatch.setattr("unsum.kernels.triton_kernels.accumulators.ENOUGH", programs)
        found, total, _ = kernels.products(x, delta, *geometry)
        close(found, each.flatten(1).square().sum(1), torch.float32)
        close(total, each.sum(0).movedim(1, -1).flatten(1), torch.float32)


@in_all
@pytest.mark.parametrize(("n", "t", "i", "o"), [(1, 1, 1, 1), (3, 70, 33, 20), (2, 5, 130, 17)])
def test_products_of_a_linear_layer(n, t, i, o, dtype):
    a, delta = made(n, t, i, dtype=dtype), made(n, t, 2 * o, dtype=dtype)[..., :o]
    exact = delta.double().mT @ a.double()
    for way in ways("products"):
        found, total, shift = way(a[:, None], delta[:, None], *product.ONE_PLACE, True)
        close(found, exact.flatten(1).square().sum(1), dtype)
        close(total, exact.sum(0), dtype)
        close(shift, delta.double().sum(1), dtype)
    found = kernels.gram_sq_norms(a[:, None], delta[:, None], *product.ONE_PLACE)
    close(found, exact.flatten(1).square().sum(1), dtype)


@in_all
@pytest.mark.parametrize(
    ("n", "t", "r", "c", "k", "m"),
    [(1, 1, 1, 1, 1, 1), (3, 70, 33, 150, 5, 5), (2, 19, 300, 16, 16, 3), (2, 64, 8, 9, 40, 40), (2, 9, 40, 50, 1, 64)],
)
def test_two_sided(n, t, r, c, k, m, dtype):
    rows, columns = made(n, t, 2 * r, dtype=dtype)[..., ::2], made(n, c, t, dtype=dtype, seed=1).mT
    left, right = made(k, r, dtype=dtype, seed=2), made(c, m, dtype=dtype, seed=3)
    exact = left.double() @ (rows.double().mT @ columns.double()) @ right.double()
    for way in ways("two_sided"):
        found = way(rows, columns, left, right)
        close(found, exact, dtype)
        assert found.dtype == torch.float32


@in_all
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 33, 70), (5, 64, 65), (2, 2, 4096)])
def test_weighted_sum_and_scaled(shape, dtype):
    each, w = made(*shape, dtype=dtype), made(shape[0]) * 1.001
    exact = torch.tensordot(w.double(), each.double(), 1)
    for way in ways("weighted_sum"):
        total = way(each, w)
        close(total, exact, torch.float32)  # whatever the gradients are in: weights and sums are not rounded
        assert total.dtype == torch.float32
    for way in ways("scaled"):
        rows = way(each, w)
        assert rows.dtype == dtype
        torch.testing.assert_close(rows.float(), each.float() * w[:, None, None], rtol=1e-2, atol=1e-6)
    rounded_once = twins.scaled(each, w)  # not weights first, then products
    assert torch.equal(rounded_once, (each.float() * w[:, None, None]).to(dtype))
