"""A compiled model runs compiled with every shape of its batches, also where shapes come back, and where what leaves it
is in another order."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from compiled_nets import assert_norms, build, loss, norms_of
from unsum.compiled.remembered import KEPT, memory_of
from unsum.kernels import grouped


def ids(n, t, seed=0):
    return torch.randint(11, (n, t), generator=torch.Generator().manual_seed(seed))


SHAPES = [(4, 6), (4, 5), (3, 6), (2, 4)]
LEARNT = [shape for shape in SHAPES for _ in range(3)]
AGAIN = [*SHAPES, *reversed(SHAPES), (4, 6), (2, 4)]


@pytest.mark.parametrize(
    ("name", "dynamic"), [("attention", None), ("attention", True), ("attention", False), ("tied", None)]
)
def test_four_shapes_back_and_forth(name, dynamic, compiled_calls):
    model, compiled, _ = build(name, dynamic=dynamic)
    for k, (n, t) in enumerate(LEARNT + AGAIN):
        before = len(compiled_calls)
        x = ids(n, t, seed=k)
        truth = per_sample_gradients(model, loss, x)
        assert_norms(norms_of(model, compiled, x), truth)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, truth[key].sum(0), rtol=1e-8, atol=1e-10)
        assert k < len(LEARNT) or len(compiled_calls) == before + 1
    assert len(compiled_calls) >= len(AGAIN) + len(SHAPES)


@pytest.mark.parametrize("dynamic", [None, False])
def test_several_reducers_over_several_shapes(dynamic, compiled_calls):
    model, compiled, _ = build("attention", dynamic=dynamic)
    for k, (n, t) in enumerate(LEARNT + AGAIN):
        x, w = ids(n, t, seed=k), torch.rand(n, dtype=torch.float64)
        made = {}
        for which in (compiled, model):
            norms, tokens, project = made[which] = unsum.Norms(), unsum.TokenNorms(), unsum.Project(k=2)
            weighted = unsum.WeightedSum(w)
            with unsum.gradients(which, norms, tokens, project, weighted, grad=False):
                loss(which, x).backward()
            truth = per_sample_gradients(model, loss, x)
            assert_norms(norms, truth)
            for name, value in weighted.sum().items():
                wanted = torch.einsum("n,n...->...", w, truth[name])
                torch.testing.assert_close(value, wanted, rtol=1e-8, atol=1e-10)
        for found, wanted in zip(made[compiled][1:], made[model][1:], strict=True):
            read = (lambda r: r.norms()) if isinstance(found, unsum.TokenNorms) else (lambda r: r.matrix())
            torch.testing.assert_close(read(found), read(wanted), rtol=1e-8, atol=1e-10)
            assert sorted(found.left_out) == sorted(wanted.left_out)
    assert len(compiled_calls) >= len(AGAIN) + len(SHAPES)


def test_more_shapes_than_torch_compiles_one_function_for(compiled_calls):
    model, compiled, _ = build("attention", dynamic=False)
    shapes = [(n, t) for t in (4, 6) for n in range(2, 7)]
    assert len(shapes) > torch._dynamo.config.recompile_limit
    for k, (n, t) in enumerate([*(shape for shape in shapes for _ in range(3)), *shapes]):
        before = len(compiled_calls)
        x = ids(n, t, seed=k)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
        assert k < 3 * len(shapes) or len(compiled_calls) == before + 1


def test_small_and_large_shapes_whose_norms_leave_in_another_order(compiled_calls, monkeypatch):
    """Layers share operators, as on a GPU, where a batch has few positions: their norms then leave side by side."""
    monkeypatch.setitem(grouped.ROWS, "cpu", 16)
    monkeypatch.setitem(grouped.HELD, "cpu", 1 << 20)
    monkeypatch.setattr(grouped, "is_ready", lambda device, dtype: True)
    model, compiled, _ = build("attention", dynamic=False)
    model.float()
    shapes = [(2, 6), (5, 6), (3, 5)]
    for k, (n, t) in enumerate([*(shape for shape in shapes for _ in range(3)), *shapes, *reversed(shapes)]):
        before = len(compiled_calls)
        x = ids(n, t, seed=k)
        found, truth = norms_of(model, compiled, x).by_parameter(), per_sample_gradients(model, loss, x)
        assert found.keys() == truth.keys()
        for name, each in truth.items():
            torch.testing.assert_close(found[name].double(), each.flatten(1).square().sum(1), rtol=1e-3, atol=1e-6)
        assert k < 3 * len(shapes) or len(compiled_calls) == before + 1


class Latents(nn.Module):
    """Three latents beside a sequence: with three tokens, the layer that reads latents has the input's positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.latents, self.read = nn.Embedding(11, 4), nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 5)

    def forward(self, ids):
        h = self.tokens(ids)
        mixed = F.softmax(self.latents @ h.transpose(1, 2), -1) @ h
        return self.read(mixed)


@pytest.mark.parametrize("dynamic", [None, False])
def test_what_is_left_out_differs_by_shape(dynamic, compiled_calls):
    torch.manual_seed(0)
    model = Latents().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    left = {}
    for k, t in enumerate([5, 5, 5, 3, 3, 3, 5, 3, 5, 4, 4, 3]):
        x = ids(2, t, seed=k)
        found, wanted = unsum.TokenNorms(), unsum.TokenNorms()
        for which, reducer in ((compiled, found), (model, wanted)):
            with unsum.gradients(which, reducer):
                loss(which, x).backward()
        torch.testing.assert_close(found.norms(), wanted.norms(), rtol=1e-8, atol=1e-10)
        assert sorted(found.left_out) == sorted(wanted.left_out)
        left[t] = sorted(found.left_out)
    assert left[3] == [] and left[5] == ["read.bias", "read.weight"]
    assert len(compiled_calls) >= 6


class Pooled(nn.Module):
    """Half as many positions, rounded, and the samples between two other dimensions: two lengths have one layout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):  # (n, t, 4)
        h = F.avg_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
        return self.layer(torch.stack([h, h.sin(), h.cos()])).tanh().sum(0)


class Halved(Pooled):
    def forward(self, x):
        h = x[:, : (x.shape[1] + 1) // 2]
        return self.layer(torch.stack([h, h.sin(), h.cos()])).tanh().sum(0)


@pytest.mark.parametrize("dynamic", [None, True], ids=["as it comes", "dynamic"])
@pytest.mark.parametrize("make", [Pooled, Halved])
def test_lengths_that_are_rounded_inside(make, dynamic, compiled_calls):
    torch.manual_seed(0)
    model = make().double()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    clip = unsum.WeightedSum(lambda norms: (1 / norms).clamp(max=1))
    for n, t in [(6, 4)] * 3 + [(6, 5)] * 3 + [(6, 8)] * 3 + [(6, 9)] * 2 + [(5, 12), (6, 4), (6, 6), (6, 7)]:
        x = torch.randn(n, t, 4, dtype=torch.float64)
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in truth.values()]).norm(dim=0)
        with unsum.gradients(compiled, unsum.Norms(), clip, grad=False) as g:
            compiled(x).square().sum().backward()
        torch.testing.assert_close(g.norms(), norms)
        weights = (1 / norms).clamp(max=1)
        for name, value in g[clip].sum().items():
            torch.testing.assert_close(value, torch.einsum("n,n...->...", weights, truth[name]))
    assert compiled_calls


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = self.first(x)
        return self.last(self.attention(h, h, h, need_weights=False)[0])


def test_a_second_batch_size_of_attention_runs_compiled(compiled_calls):
    torch.manual_seed(0)
    model = Attending().double()
    compiled = torch.compile(model, backend="aot_eager")
    counts = []
    for n in [4] * 4 + [5] * 4 + [4, 6]:
        x = torch.randn(n, 4, 4, dtype=torch.float64) if n != 4 else torch.randn(n, 7, 4, dtype=torch.float64)
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        with unsum.gradients(compiled, unsum.Norms()) as g:
            compiled(x).square().sum().backward()
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in truth.values()]).norm(dim=0)
        torch.testing.assert_close(g.norms(), norms)
        counts.append(len(compiled_calls))
    assert counts[7] > counts[5] > counts[3], counts  # of the second size, too


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
def test_data_that_asks_for_a_gradient_gets_it_in_every_step(grad, compiled_calls):
    torch.manual_seed(0)
    model = Attending().double()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(4):
        x = torch.randn(5, 7, 4, dtype=torch.float64, requires_grad=True)
        (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
        model.zero_grad()
        with unsum.gradients(compiled, unsum.Norms(), grad=grad):
            compiled(x).square().sum().backward()
        torch.testing.assert_close(x.grad, wanted)
        assert (model.first.weight.grad is not None) == grad
    assert compiled_calls


def test_a_number_that_changes_in_every_call_piles_nothing_up():
    class Scaled(Attending):
        def forward(self, x, by):
            return super().forward(x) * by

    torch.manual_seed(0)
    model = Scaled()
    compiled = torch.compile(model, backend="aot_eager")
    for k in range(KEPT + 10):
        with unsum.gradients(compiled, unsum.Norms()):
            compiled(torch.randn(3, 2, 4), 1 + k / 7).sum().backward()
    assert len(memory_of(model).rehearsed) <= KEPT
