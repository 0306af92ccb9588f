"""What a `gradients` block answers when it is read: norms, products, sums, parameters by name; and what it refuses."""

import functools

import pytest
import torch
from torch import nn

import unsum
from nets import SEQUENCES, N, in_float64, mlp, scalar, truth_of
from unsum.errors import OptionError, SamplesError


def test_reads():
    model = mlp()
    model[2].bias.requires_grad_(False)
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model, loss_reduction="mean") as g:
        scalar(model, SEQUENCES).backward()
    flat = torch.cat([N * t.flatten(1) for t in truth.values()], 1)
    torch.testing.assert_close(g.dot(g), flat @ flat.T)
    torch.testing.assert_close(g.sq_norms(), flat.square().sum(1))
    w = torch.randn(N).double()
    for name, weighted in g.weighted_sum(w).items():
        torch.testing.assert_close(weighted, torch.einsum("n,n...->...", w, N * truth[name]))
    assert list(g.per_sample()) == list(g.sum()) == list(truth)
    assert "0.weight" in g and "2.bias" not in g
    with pytest.raises(KeyError, match="frozen"):
        g["2.bias"]
    with pytest.raises(KeyError, match="no such parameter"):
        g["nothing"]
    with pytest.raises(SamplesError, match="weights"):
        g.weighted_sum(torch.ones(3))
    with unsum.gradients(model, params="0.*") as g:
        scalar(model, SEQUENCES).backward()
    assert list(g) == ["0.weight", "0.bias"]
    with unsum.gradients(model, params=["0.w*", "0.bias"]) as g:
        scalar(model, SEQUENCES).backward()
    assert list(g) == ["0.weight", "0.bias"]
    for wrong in ([], 3, ["0.*", 3]):
        with pytest.raises(OptionError, match="glob"), unsum.gradients(model, params=wrong):
            pass
    with (
        pytest.raises(OptionError, match="'nothing' fits no parameter"),
        unsum.gradients(model, params=["*", "nothing"]),
    ):
        pass


@in_float64()
def test_small_things():
    table = nn.Embedding(5, 3)
    with unsum.gradients(table) as g:
        table(torch.randint(0, 5, (4, 2)).T).sum().backward()
    assert g["weight"].per_token().shape == (2, 4, 5, 3)
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with unsum.gradients(frozen) as g:
        frozen(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert g.norms().tolist() == [0] * 4
    model = nn.Linear(3, 2)
    with pytest.raises(SamplesError, match="no samples"):
        unsum.check(model, lambda m, x: m(x).sum(1), torch.randn(0, 3))
    for params in (["0.*"], "zzz"):
        with pytest.raises(OptionError, match="params"):
            with unsum.gradients(model, params=params):
                pass
    with unsum.gradients(model, loss_reduction="mean") as g:
        (model(torch.randn(5, 3)).square().sum(1).mean() + model.weight.square().sum()).backward()
    torch.testing.assert_close(g["weight"].shared(), 2 * model.weight.detach())


@in_float64()
def test_what_is_read_belongs_to_the_reader():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.PReLU(4), nn.Linear(4, 2))
    norms, x = unsum.Norms(), torch.randn(5, 3)
    for _ in range(3):
        with unsum.gradients(model, norms, keep=True) as g:
            (model(x).square().sum() + model[0].weight.square().sum()).backward()
        of_each = lambda f: (f.per_sample(), f.sq_norms(), f.shared(), f.sum())
        reads = {name: functools.partial(of_each, g[name]) for name, _ in model.named_parameters()}
        reads["all"] = lambda g=g: (g.norms(), g.sq_norms(), norms.norms(), *norms.by_parameter().values())
        before = {name: [each.clone() for each in read()] for name, read in reads.items()}
        for read in reads.values():
            for each in read():
                each.mul_(0.5).add_(1)
        for name, read in reads.items():
            for now, then in zip(read(), before[name], strict=True):
                assert torch.equal(now, then)


@in_float64()
def test_factors_of_a_tensor_that_was_changed_since():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with unsum.gradients(model) as g:
        model(x).sum().backward()
    before = g.norms()
    x.zero_()
    with pytest.raises(SamplesError, match="changed in place"):
        g.norms()
    assert (before > 0).all()
