"""Reads of factors against dense gradients, of whole networks, unequal samples and odd numbers."""

import gc

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from modules import Using
from nets import IDS, NETS, SEQUENCES, D, N, T, deep, made, mlp, scalar
from unsum.errors import InteractionError, UnsupportedError
from unsum.kernels import product
from unsum.testing import laws


@pytest.mark.parametrize("name", NETS)
def test_every_read_and_reducer_of_whole_networks(name):
    if name == "complex":
        pytest.skip("reads of complex parameters are formed")
    make, x = NETS[name]
    laws(made(make, x))


@pytest.mark.parametrize(
    "samples",
    [
        unsum.packed(torch.tensor([0, 5, 6, 17, 24])),
        torch.tensor([7, 3, 7, -1]),
        torch.arange(N * T).view(N, T) // 5 - 1,
    ],
    ids=["packed", "groups", "documents"],
)
def test_every_read_of_unequal_samples(samples):
    x = SEQUENCES.reshape(1, -1, D) if isinstance(samples, unsum.samples.Ids) else SEQUENCES
    laws(made(lambda: nn.Sequential(nn.Linear(D, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), x), samples=samples)
    model = mlp()
    with unsum.gradients(model, samples=samples) as g:
        model(x).square().sum().backward()
    f = g["0.weight"]
    assert f.a.shape[:2] == f.delta.shape[:2] == (len(g.ids), int(f.lengths.max()))


def test_the_seeds_example():
    layer = nn.Linear(3, 2, bias=False).double()
    with unsum.gradients(layer) as g:
        out = layer(torch.tensor([[3.0, 4.0, 5.0]]).double())
        out.backward(torch.tensor([[1.0, 2.0]]).double())
    f = g["weight"]
    assert f.delta.tolist() == [[1, 2]] and f.a.tolist() == [[3, 4, 5]]
    assert f.per_sample()[0].flatten().tolist() == torch.kron(f.delta[0], f.a[0]).tolist() == [3, 4, 5, 6, 8, 10]
    torch.testing.assert_close(f.sum(), layer.weight.grad)
    wide = nn.Linear(4096, 4096, bias=False)
    with unsum.gradients(wide) as g:
        wide(torch.randn(2, 4096)).sum().backward()
    assert "8,192 of 16,777,216" in g.coverage()


def test_a_nan_in_one_sample_leaves_the_others_right():
    model, x = mlp(), SEQUENCES.clone()
    truth = per_sample_gradients(model, scalar, x)
    for _ in range(2):
        x[2, 1, 3] = torch.nan
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
        assert g.norms()[2].isnan() and g.norms()[[0, 1, 3]].isfinite().all()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample()[[0, 1, 3]], wanted[[0, 1, 3]])


ODD = {
    "underflow": lambda x, p: torch.exp((x - 760.0) * 1.0) @ p + x @ p,
    "dead rows of a masked softmax": lambda x, p: (
        (x @ p @ x.mT).masked_fill(DEAD, -torch.inf).softmax(-1).masked_fill(DEAD, 0.0) @ x
    ),
    "a maximum over the batch, for stability": lambda x, p: ((s := x @ p @ x.mT) - s.max()).softmax(-1) @ x,
    "gradients that vanish": lambda x, p: torch.tanh(torch.tanh(x @ p) * 1e-100) @ p * 1e-150,
}
DEAD = torch.zeros(N, T, T, dtype=torch.bool)
DEAD[1, 2:] = True


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_odd_numbers_are_no_interaction(name):
    torch.manual_seed(0)
    model = Using((D, D), ODD[name]).double()
    for engine in ("graph", "auto", "auto"):
        with unsum.gradients(model, engine=engine) as g:
            losses = model(SEQUENCES).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        wanted = torch.stack([torch.autograd.grad(loss, model.p, retain_graph=True)[0] for loss in losses])
        assert (g["p"].per_sample() - wanted).norm() <= 1e-9 * wanted.norm()


def test_rows_of_all_samples_after_each_other():
    class Patches(nn.Module):
        def __init__(self, mixes):
            super().__init__()
            self.words, self.patch, self.mixes = nn.Embedding(20, D), nn.Linear(D, D), mixes

        def forward(self, pixels, ids, mask):
            q = self.patch(pixels)
            if self.mixes:
                q = (q @ q.T).softmax(-1) @ q
            return self.words(ids) * mask[..., None] + q.view(N, -1, D).mean(1, keepdim=True)

    pixels, mask = SEQUENCES.reshape(-1, D), torch.ones_like(IDS)
    model = Patches(False).double()
    with unsum.gradients(model) as g:
        losses = model(pixels, IDS, mask).flatten(1).square().sum(1)
        losses.sum().backward(retain_graph=True)
    for name, p in model.named_parameters():
        wanted = torch.stack([torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in losses])
        torch.testing.assert_close(g[name].per_sample(), wanted)
    model = Patches(True).double()
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            model(pixels, IDS, mask).square().sum().backward()


def test_nested_tensors_are_refused_by_name():
    model = nn.Linear(D, D)
    holder = Using(
        (1,),
        lambda x, p: (
            torch.nested.to_padded_tensor(model(torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)), 0.0)
            * p
        ),
    )
    holder.inner = model
    with pytest.raises(UnsupportedError, match="nested tensor"):
        with unsum.gradients(holder):
            holder(torch.randn(2, T, D)).square().sum().backward()


def test_costs_that_were_measured_are_used(tmp_path, monkeypatch):
    from unsum.kernels import costs

    monkeypatch.setenv("UNSUM_CACHE", str(tmp_path))
    costs.weights.cache_clear()
    shape = (128, 256, 768, "cpu")
    assert costs.cheaper(*shape, want_sum=True) == "product"
    costs.tuned().parent.mkdir(parents=True)
    costs.tuned().write_text('{"cpu": {"product": 9.0, "pass": 1.0, "gram": 0.1, "plain": 1.0}}')
    costs.weights.cache_clear()
    assert costs.cheaper(*shape, want_sum=True) == "gram"
    costs.weights.cache_clear()


@pytest.mark.parametrize("reducers", [(), (unsum.Norms,), (unsum.Norms, unsum.Project)], ids=len)
def test_nothing_waits_for_the_garbage_collector(reducers):
    """A circle of references would hold the graph of a step, and its memory, into the next."""
    model, x = made(deep(lambda: nn.Linear(D, D)), SEQUENCES)()

    def step():
        with unsum.gradients(model, *(kind() for kind in reducers)) as g:
            model(x).square().sum().backward()
        g.sq_norms() if not reducers else g[unsum.Norms].sq_norms()

    for _ in range(4):
        step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        left = [type(thing).__name__ for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("n", "o", "i"), [(3, 40, 50), (5, 300, 900), (9, 700, 800), (3, 1100, 1000)])
def test_gradients_of_all_sizes_on_a_processor(n, o, i, threads):
    """All at once, some at once, one by one."""
    generator = torch.Generator().manual_seed(0)
    a, delta = (torch.randn(n, 3, size, dtype=torch.float64, generator=generator) for size in (i, o))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        squares, total = product.norms_and_sum(a, delta, want_sum=True)
    finally:
        torch.set_num_threads(before)
    each = torch.einsum("nto,nti->noi", delta, a)
    torch.testing.assert_close(squares, each.square().sum((1, 2)))
    torch.testing.assert_close(total, each.sum(0))
