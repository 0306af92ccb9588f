"""Kernels that take many layers in one launch, alone and in a whole backward."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from kernel_inputs import DEVICE, close, in_all, kernels, made
from modules import Using
from unsum.errors import UnsupportedError
from unsum.kernels import fused, grouped, twins

LAYERS = {  # n, t, (i, o) of each
    "one number": (1, 1, [(1, 1)]),
    "one position": (4, 1, [(33, 20), (5, 64)]),
    "widths that are no multiples": (3, 70, [(33, 20), (7, 130), (64, 1)]),
    "aligned": (2, 64, [(16, 32), (128, 64)]),
    "several tiles, several programs": (2, 100, [(16, 600), (530, 8), (3, 5)]),
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
@pytest.mark.parametrize("kept", [True, False], ids=["", "as in a CUDA graph"])
@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_many_layers(name, kept, dtype, monkeypatch):
    for constant, small in (("CHUNK", 256), ("PARTS", 2)):  # so that several programs share layers of few columns
        monkeypatch.setattr(f"unsum.kernels.triton_kernels.grouped.{constant}", small)
    n, t, a, delta, x, mean, rstd = layers(name, dtype)
    outer = [d.double().mT @ b.double().view(n, t, -1) for b, d in zip(a, delta, strict=True)]
    each = zip(delta, x, mean, rstd, strict=True)
    scale = [(d.double() * ((v.double() - m.double()) * r.double())).sum(1) for d, v, m, r in each]
    shift = [d.double().sum(1) for d in delta]
    of = lambda values: torch.stack([value.flatten(1).square().sum(1) for value in values])
    for way in (kernels, twins):
        close(way.grouped_gram_sq_norms(a, delta, n, t, kept), of(outer), dtype)
        close(way.grouped_shift_sq_norms(delta, n, t, kept), of(shift), dtype)
        found = way.grouped_norm_sq_norms(delta, x, mean, rstd, n, t, kept)
        for ours, wanted in zip(found, (scale, shift), strict=True):
            close(ours, of(wanted), dtype)
    again = kernels.grouped_gram_sq_norms(a, delta, n, t)
    assert torch.equal(again, kernels.grouped_gram_sq_norms(a, delta, n, t))  # no order is left to chance


def test_what_is_written_for_a_cuda_graph_is_kept_nowhere(monkeypatch):
    n, t, a, delta, x, mean, rstd = layers("aligned", torch.float32)
    tables = {}
    monkeypatch.setattr("unsum.kernels.triton_kernels.grouped._tables", tables)
    kernels.grouped_gram_sq_norms(a, delta, n, t, False)
    kernels.grouped_norm_sq_norms(delta, x, mean, rstd, n, t, False)
    assert not tables
    kernels.grouped_gram_sq_norms(a, delta, n, t)
    assert len(tables) == 1


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


class Branches(nn.Module):
    """Layers whose results are added up: all of them receive the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))

    def forward(self, x):
        return sum((layer(x) for layer in (*self.linears, *self.norms)), x)


def test_branches_that_share_a_gradient(as_on_a_gpu):
    torch.manual_seed(0)
    model, x = nn.Sequential(Branches(), nn.Tanh(), Branches()).to(DEVICE), torch.randn(4, 6).to(DEVICE)
    truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
    for _ in range(3):
        found = norms_and_gradients(model, x)
        for name, each in truth.items():
            close(found[name], each.flatten(1).square().sum(1), torch.float32)
    assert {name for name, _ in as_on_a_gpu} == {f"grouped_{way}_sq_norms" for way in ("gram", "norm", "shift")}


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
