"""Kernels against their plain torch twins and float64: through Triton's interpreter on a CPU, compiled where there is a
GPU."""

from types import SimpleNamespace

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import unsum
from modules import Using
from unsum.errors import UnsupportedError
from unsum.factors.windows import Geometry, Windows
from unsum.kernels import costs, fused, grouped, launch, product, twins
from unsum.plan.memory import forget
from unsum.seams.operators import is_stand_in

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
    ("n", "t", "r", "c", "k"), [(1, 1, 1, 1, 1), (3, 70, 33, 150, 5), (2, 19, 300, 16, 16), (2, 64, 8, 9, 40)]
)
def test_two_sided(n, t, r, c, k, dtype):
    rows, columns = made(n, t, 2 * r, dtype=dtype)[..., ::2], made(n, c, t, dtype=dtype, seed=1).mT
    left, right = made(k, r, dtype=dtype, seed=2), made(c, k, dtype=dtype, seed=3)
    exact = left.double() @ (rows.double().mT @ columns.double()) @ right.double()
    for way in ways("two_sided"):
        found = way(rows, columns, left, right)
        close(found, exact, dtype)
        assert found.dtype == torch.float32


# ---- many layers in one launch ------------------------------------------------------------------------

LAYERS = {  # n, t, (i, o) of each
    "one number": (1, 1, [(1, 1)]),
    "one position": (4, 1, [(33, 20), (5, 64)]),
    "widths that are no multiples": (3, 70, [(33, 20), (7, 130), (64, 1)]),
    "aligned": (2, 64, [(16, 32), (128, 64)]),
    "several tiles, several programs": (2, 130, [(16, 4500), (4200, 8), (3, 5)]),
}


def layers(name, dtype):
    n, t, shapes = LAYERS[name]
    a = [made(n * t, i, dtype=dtype, seed=k) for k, (i, _) in enumerate(shapes)]
    x = [made(n, t, o, dtype=dtype, seed=9 + k) + 1 for k, (_, o) in enumerate(shapes)]
    delta = [made(n, t, o, dtype=dtype, seed=5 + k) for k, (_, o) in enumerate(shapes)]
    delta[0] = delta[0].mT.contiguous().mT  # wherever it lies
    mean, rstd = ([made(n, t, 1, seed=k + more) for k in range(len(shapes))] for more in (20, 30))
    return n, t, a, delta, x, mean, rstd


@in_all
@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_many_layers(name, dtype):
    n, t, a, delta, x, mean, rstd = layers(name, dtype)
    outer = [d.double().mT @ b.double().view(n, t, -1) for b, d in zip(a, delta, strict=True)]
    each = zip(delta, x, mean, rstd, strict=True)
    scale = [(d.double() * ((v.double() - m.double()) * r.double())).sum(1) for d, v, m, r in each]
    shift = [d.double().sum(1) for d in delta]
    of = lambda values: torch.stack([value.flatten(1).square().sum(1) for value in values])
    for way in (kernels, twins):
        close(way.grouped_gram_sq_norms(a, delta, n, t), of(outer), dtype)
        close(way.grouped_shift_sq_norms(delta, n, t), of(shift), dtype)
        for ours, wanted in zip(way.grouped_norm_sq_norms(delta, x, mean, rstd, n, t), (scale, shift), strict=True):
            close(ours, of(wanted), dtype)
    again = kernels.grouped_gram_sq_norms(a, delta, n, t)
    assert torch.equal(again, kernels.grouped_gram_sq_norms(a, delta, n, t))  # no order is left to chance


def test_a_table_is_made_again_where_a_tensor_lies_elsewhere():
    n, t, a, delta, *_ = layers("aligned", torch.float32)
    before = kernels.grouped_gram_sq_norms(a, delta, n, t)
    moved = [2 * each for each in a]  # while those that the first table names are still there
    close(kernels.grouped_gram_sq_norms(moved, delta, n, t), 4 * before.double(), torch.float32)


class Deep(nn.Module):
    """Layers of several shapes, some of them alone in theirs."""

    def __init__(self, scale_only=False):
        super().__init__()
        self.table = nn.Embedding(7, 12)
        self.norms = nn.ModuleList(nn.LayerNorm(12, bias=not scale_only) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(12, 20) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(20, 12, bias=False) for _ in range(3))
        self.head = nn.Linear(12, 5)

    def forward(self, ids):
        h = self.table(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            h = h + down(torch.tanh(up(norm(h))))
        return self.head(h)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Kernels through the interpreter, and steps as small as they are meant for."""
    monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
    monkeypatch.setitem(grouped.ROWS, DEVICE, 4096)
    monkeypatch.setitem(grouped.HELD, DEVICE, 1 << 20)
    used = []
    launched = grouped.launched
    monkeypatch.setattr(
        grouped,
        "launched",
        lambda name, *columns, **how: used.append((name, len(columns[0]))) or launched(name, *columns, **how),
    )
    return used


def norms_and_gradients(model, x, **options):
    model.zero_grad()
    with unsum.gradients(model, unsum.Norms(), **options) as g:
        model(x).square().sum().backward()
    return g[unsum.Norms].by_parameter()


@pytest.mark.parametrize("scale_only", [False, True])
def test_a_backward_whose_norms_come_from_few_launches(scale_only, as_on_a_gpu):
    torch.manual_seed(0)
    model, ids = Deep(scale_only).to(DEVICE), torch.randint(7, (4, 6)).to(DEVICE)
    truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), ids)
    for step in range(3):
        del as_on_a_gpu[:]
        found = norms_and_gradients(model, ids)
        for name, each in truth.items():
            close(found[name], each.flatten(1).square().sum(1), torch.float32)
            close(model.get_parameter(name).grad, each.sum(0), torch.float32)
        wanted = [("grouped_gram_sq_norms", 7), ("grouped_norm_sq_norms", 3), ("grouped_shift_sq_norms", 4)]
        assert sorted(as_on_a_gpu) == ([] if step == 0 else wanted)  # the first is learnt


def doubled(x, p):
    return torch.addmm(x, x, p, alpha=2)


D, T = 6, 5
OTHERS = {  # layers, and which launches serve them
    "linear, one position each": (lambda: nn.Linear(D, D), (D,), {"gram", "shift"}),
    "linear, more dimensions": (lambda: nn.Linear(D, D), (2, T, D), {"gram", "shift"}),
    "a product from the right": (lambda: Using((D, D), lambda x, p: x @ p), (T, D), {"gram"}),
    "a product times a number": (lambda: Using((D, D), doubled), (D,), set()),
    "layer norm over two dimensions": (lambda: nn.LayerNorm((T, D)), (T, D), {"norm"}),
    "a shift alone": (lambda: Using((D,), lambda x, p: x + p), (T, D), {"shift"}),
    "a shift with a sign": (lambda: Using((D,), lambda x, p: x - p), (T, D), set()),
    "a shift that is broadcast": (lambda: Using((1,), lambda x, p: x + p), (T, D), set()),
    "a shift for each position": (lambda: Using((T, D), lambda x, p: x + p), (T, D), {"shift"}),
    "a gain": (lambda: Using((D,), lambda x, p: x * p), (T, D), set()),
    "group norm": (lambda: nn.GroupNorm(1, T), (T, D), set()),
    "RMS norm": (lambda: nn.RMSNorm(D), (T, D), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_taken_in_groups(name, as_on_a_gpu):
    """Where factors are the tensors that a meeting leaves, and nothing else."""
    torch.manual_seed(0)
    make, shape, ways = OTHERS[name]
    model, x = nn.Sequential(make(), nn.Tanh(), make(), nn.Tanh(), make(), nn.Sigmoid()).to(DEVICE), made(3, *shape)
    truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
    for _ in range(3):
        found = norms_and_gradients(model, x)
        for key, each in truth.items():
            close(found[key], each.flatten(1).square().sum(1), torch.float32)
            close(model.get_parameter(key).grad, each.sum(0), torch.float32)
    assert {name.split("_")[1] for name, _ in as_on_a_gpu} == ways


def test_in_groups_with_few_parameters_and_without_gradients(as_on_a_gpu):
    torch.manual_seed(0)
    model, ids = Deep().to(DEVICE), torch.randint(7, (4, 6)).to(DEVICE)
    model.norms[1].requires_grad_(False)
    truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), ids)
    for options in ({}, {"grad": False}, {"params": "up.*"}, {"loss_reduction": "mean"}) * 2:
        found = norms_and_gradients(model, ids, **options)
        assert len(found) == (6 if "params" in options else len(truth))
        for name, squares in found.items():
            exact = truth[name].flatten(1).square().sum(1)
            close(squares, exact * (16 if "loss_reduction" in options else 1), torch.float32)
            assert (model.get_parameter(name).grad is None) == ("grad" in options)
    assert as_on_a_gpu


def test_what_waits_for_a_launch_is_bounded_and_stays_as_it_was(as_on_a_gpu, monkeypatch):
    torch.manual_seed(0)
    model, ids = Deep().to(DEVICE), torch.randint(7, (4, 6)).to(DEVICE)
    whole = norms_and_gradients(model, ids)
    monkeypatch.setitem(grouped.HELD, DEVICE, 600)
    for name, squares in norms_and_gradients(model, ids).items():
        close(squares, whole[name].double(), torch.float32)
    assert len(as_on_a_gpu) > 3


def test_a_gradient_that_is_changed_while_it_waits_for_a_launch_is_refused(as_on_a_gpu):
    torch.manual_seed(0)
    model, ids, seen = Deep().to(DEVICE), torch.randint(7, (4, 6)).to(DEVICE), []

    def change(module, given, output):
        output.register_hook(lambda grad: seen.append(grad))
        given[0].register_hook(lambda grad: [seen.pop().mul_(2), None][1])  # after its layer has used it

    model.up[1].register_forward_hook(change)
    norms_and_gradients(model, ids)
    with pytest.raises(UnsupportedError, match=r"up.1.weight: a gradient was changed in place"):
        norms_and_gradients(model, ids)


def test_a_launch_that_gives_something_else_than_the_rules_is_found(as_on_a_gpu, monkeypatch):
    torch.manual_seed(0)
    model, ids = Deep().to(DEVICE), torch.randint(7, (4, 6)).to(DEVICE)
    norms_and_gradients(model, ids)
    true = kernels.grouped_shift_sq_norms
    monkeypatch.setattr(kernels, "grouped_shift_sq_norms", lambda *given: 2 * true(*given))
    with pytest.raises(UnsupportedError, match="linear.addmm_bias does not give the same for layers together"):
        norms_and_gradients(model, ids)


def test_long_samples_and_many_rows_are_not_taken_in_groups(as_on_a_gpu, monkeypatch):
    torch.manual_seed(0)
    model, ids = Deep().to(DEVICE), torch.randint(7, (4, 6)).to(DEVICE)
    monkeypatch.setitem(grouped.ROWS, DEVICE, 23)
    for _ in range(2):
        norms_and_gradients(model, ids)
    assert not as_on_a_gpu
    assert grouped.suits(8, 128, 768, 50304, "cuda") and not grouped.suits(1, 513, 8, 8, "cuda")
    assert not grouped.suits(8, 512, 768, 3072, "cuda")


# ---- which is used ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", fused.KERNELS)
def test_a_kernel_that_gives_something_else_is_not_used(name, monkeypatch):
    is_on = lambda: fused.is_on.__wrapped__(name, torch.device(DEVICE), torch.float32)

    def wrong(*given):
        found = getattr(twins, name)(*given)
        return 2 * found if isinstance(found, torch.Tensor) else [2 * t for t in found]

    monkeypatch.setattr(kernels, name, wrong)
    with pytest.warns(UserWarning, match=f"the Triton kernel {name} is not used"):
        assert not is_on()
    monkeypatch.undo()
    assert is_on()
    monkeypatch.setenv("UNSUM_KERNELS", "off")
    assert not is_on()


def test_what_does_not_lie_as_a_kernel_needs_it_goes_to_the_twin(monkeypatch):
    monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
    each = made(3, 4, 5)
    assert fused.serves("norms_and_sum", each) and not fused.serves("norms_and_sum", each.mT)
    assert not fused.serves("norms_and_sum", each.double()) and not fused.serves("norms_and_sum", each[:0])
    assert not fused.serves("token_sq_norms", each[0].mT, each[0])
    assert not fused.serves("products", each[:, None], each[:, None].half())
    monkeypatch.setenv("UNSUM_KERNELS", "off")
    fused.is_on.cache_clear()
    assert not fused.serves("norms_and_sum", each)
    fused.is_on.cache_clear()


# ---- in a whole backward ------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.down, self.deep = nn.Conv2d(8, 4, 1, 2, bias=False), nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.head = nn.Linear(6, 3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.deep(self.down(torch.relu(self.norm(self.stem(x))))).mean((2, 3)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(7, 40), nn.LayerNorm(40), nn.Linear(40, 5)

    def forward(self, ids):
        return self.head(self.norm(self.table(ids)))


def given(net):
    if net is Words:
        return torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return made(4, 3, 12, 10).to(memory_format=torch.channels_last)


def test_a_kernel_is_launched_by_itself_only_where_triton_would_choose_the_same(monkeypatch):
    """Without a GPU: stand-ins count who is launched."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch, "again", True)
    monkeypatch.setattr(launch, "is_stand_in", lambda tensor: False)
    launched = []

    class Compiled:
        launch_metadata = function = packed_metadata = None

        def _init_handles(self): ...

        def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *given):
            launched.append(("by itself", (x, y, z), len(given)))

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: launched.append(("by Triton", grid, len(given))) or Compiled()

    def tensor(dtype=torch.float32, address=1024, index=0):
        return SimpleNamespace(is_cuda=True, dtype=dtype, device=SimpleNamespace(index=index), data_ptr=lambda: address)

    kernel, ordinary = Kernel(), (tensor(), (3, 16))
    others = [
        (tensor(torch.float16), (3, 16)),
        (tensor(address=1028), (3, 16)),
        (tensor(), (1, 16)),
        (tensor(index=1), (3, 16)),
    ]
    run = lambda given, numbers: launch.launch(kernel, (2, 1, 1), (given,), numbers, {"block": 64}, 4)
    for given in (ordinary, ordinary, *others, ordinary):
        run(*given)
    who = [how for how, _, _ in launched]
    assert who == ["by Triton", "by itself", *["by Triton"] * 4, "by itself"]
    assert {(grid, count) for how, grid, count in launched if how == "by itself"} == {((2, 1, 1), 4)}
    monkeypatch.setattr(launch, "again", False)
    run(*ordinary)
    assert launched[-1][0] == "by Triton"


@pytest.mark.parametrize("way", ["product", "gram"])
@pytest.mark.parametrize("net", [Images, Words])
def test_layers_through_kernels(net, way, monkeypatch):
    """The same norms, token norms and gradients with kernels as without."""
    torch.manual_seed(0)
    model, x, found, used = net().eval().to(DEVICE), given(net), [], set()
    monkeypatch.setattr(costs, "cheaper", lambda *shape, **options: way)
    monkeypatch.setattr(costs, "is_fused", lambda *shape: True)
    monkeypatch.setattr(product, "_at_once", lambda n, size: n)
    monkeypatch.setattr("unsum.step.lanes.SMALL", {})
    monkeypatch.setattr("unsum.kernels.grouped.ROWS", {})
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    served = fused.serves
    for on in (False, True):
        forget(model)  # and what was written down without kernels
        if on:
            monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
            monkeypatch.setattr(fused, "serves", lambda name, *given: served(name, *given) and not used.add(name))
        for reducer in (unsum.Norms, unsum.TokenNorms):
            for _ in range(2):
                model.zero_grad()
                with unsum.gradients(model, reducer()) as g:
                    model(x).square().sum().backward()
            norms = g[reducer].by_parameter() if reducer is unsum.Norms else {"tokens": g[reducer].norms()}
            found.append(norms | {f"{n}:grad": p.grad.clone() for n, p in model.named_parameters()})
    for name, each in per_sample_gradients(model, lambda m, x: m(x).square().sum(), x).items():
        close(found[2][name], each.flatten(1).square().sum(1), torch.float32)
        close(found[2][f"{name}:grad"], each.sum(0), torch.float32)
    for ours, wanted in zip(found[2:], found[:2], strict=True):
        assert ours.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(ours[name], wanted[name], rtol=1e-4, atol=1e-4)
    if net is Images:
        assert {"channel_sums", "token_sq_norms", "gram_sq_norms" if way == "gram" else "products"} <= used
    else:
        sums = {"scale_and_shift", "normalised_token_sq_norms", "lookup_sq_norms", "token_sq_norms"}
        assert sums | ({"products"} if way == "product" else set()) <= used


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("way", ["product", "gram"])
def test_convolutions_in_half_precision_unfold_nothing(dims, way, monkeypatch):
    conv, turn = (F.conv1d, F.conv2d)[dims - 1], {1: torch.nn.grad.conv1d_weight, 2: torch.nn.grad.conv2d_weight}[dims]
    x, weight = made(3, 4, *(9,) * dims, dtype=torch.bfloat16), made(5, 4, *(3,) * dims, dtype=torch.bfloat16)
    delta = made(*conv(x, weight, stride=2, padding=1).shape, dtype=torch.bfloat16)
    each = torch.stack(
        [turn(x[k : k + 1].double(), weight.shape, delta[k : k + 1].double(), 2, 1) for k in range(len(x))]
    )
    geometry = Geometry((3,) * dims, (2,) * dims, (1,) * dims, (1,) * dims, 1)
    monkeypatch.setattr(costs, "cheaper", lambda *shape, **options: way)
    monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
    monkeypatch.setattr(Windows, "rows", None)  # which would unfold
    squares, total = Windows(x[:, None], delta[:, None], geometry, tuple(weight.shape)).norms_and_sum()
    close(squares, each.flatten(1).square().sum(1), torch.bfloat16)
    close(total, each.sum(0), torch.bfloat16)


# ---- in compiled graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_kernels_inside_compiled_graphs(backend):
    """One graph for any number of samples; of those that a compiler makes as well itself, the twin is in it."""

    def all_of(each, x, mean):
        found = [*fused.norms_and_sum(each), *fused.scale_and_shift(each, x, mean, mean)]
        found += fused.channel_sums(each, x, mean[0, :1].expand(x.shape[-1]), mean[0, :1].expand(x.shape[-1]) ** 2, 0.1)
        found += fused.token_sq_norms(each[0], x[0])
        found += fused.products(each[:, None], x[:, None], [1, 1], [1, 1], [0, 0], [1, 1], True)
        return [2 * t for t in found]

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(all_of, backend=graphs, fullgraph=True, dynamic=True)
    for n in (3, 5, 4):
        x = made(n, 6, 9), made(n, 6, 9, seed=1), made(n, 6)
        for ours, wanted in zip(compiled(*x), all_of(*x), strict=True):
            torch.testing.assert_close(ours, wanted)
    assert graphs.frame_count == 1
    names = {str(node.target).split(".")[1] for node in graphs.graphs[0].graph.nodes if "unsum." in str(node.target)}
    assert names == {"products"}


@pytest.mark.parametrize("name", fused.KERNELS)
def test_what_an_operator_says_of_its_shapes_is_true(name):
    example = fused.KERNELS[name].example(lambda *shape: made(*shape))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.unsum, name).default, tuple(example), test_utils=tests)


def test_fake_tensors_are_traced():
    from torch._subclasses.fake_tensor import FakeTensorMode

    each = made(2, 3, 4)
    assert not is_stand_in(each)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(each)
        assert is_stand_in(fake)
        squares, total = fused.norms_and_sum(fake)
    assert squares.shape == (2,) and total.shape == (3, 4)
