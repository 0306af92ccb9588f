"""Factors of chosen parameters leave compiled models, and are what one sample at a time gives."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from compiled_nets import build, loss
from unsum.compiled import kept_factors
from unsum.errors import UnsupportedError

CHOSEN = {
    "attention": ["head.*", "tokens.*", "qkv.*", "norm.*", "gate"],
    "tied": ["tokens.*", "out.*", "places.*"],
    "images": ["layers.0.*", "layers.1.*", "layers.3.*", "layers.4.*"],
    "checkpointed": ["out.*", "norm.*"],
}


def assert_factors(g, each, names):
    assert set(g.keys()) == set(names)
    for name in names:
        close = {"rtol": 1e-8, "atol": 1e-10}
        torch.testing.assert_close(g[name].per_sample(), each[name], **close)
        torch.testing.assert_close(g[name].sq_norms(), each[name].flatten(1).square().sum(1), **close)
        torch.testing.assert_close(g[name].sum(), each[name].sum(0), **close)
        assert not g[name].shared().any()


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
@pytest.mark.parametrize("name", CHOSEN)
def test_factors_of_chosen_parameters(name, grad, compiled_calls):
    model, compiled, batch = build(name)
    for k in range(4):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        model.zero_grad()
        with unsum.gradients(compiled, params=CHOSEN[name], grad=grad) as g:
            loss(compiled, x).backward()
        with unsum.gradients(model, params=CHOSEN[name], grad=False) as eager:
            loss(model, x).backward()
        assert_factors(g, each, eager.keys())
        assert len(g.coverage_rows()[0]) >= len(eager.keys())
        for key in eager:
            assert str(g[key]) == str(eager[key])
            try:
                tokens = eager[key].token_sq_norms()
            except unsum.errors.UnsumError as error:
                with pytest.raises(type(error)):
                    g[key].token_sq_norms()
            else:
                torch.testing.assert_close(g[key].token_sq_norms(), tokens)
            torch.testing.assert_close(g[key].dot(eager[key]), eager[key].dot(eager[key]))
        for key, parameter in model.named_parameters():
            if grad and parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, each[key].sum(0), rtol=1e-8, atol=1e-10)
            else:
                assert parameter.grad is None
    assert len(compiled_calls) == 2


def test_micro_batches_other_sizes_and_factors_that_outlive_the_step(compiled_calls):
    model, compiled, batch = build("attention")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept = []
    for sizes in [(4, 4), (4, 4), (5, 5), (6, 3), (7, 12)]:
        xs = [batch(n, seed=n + k) for k, n in enumerate(sizes)]
        each = per_sample_gradients(model, loss, torch.cat(xs))
        with unsum.gradients(compiled, params="head.*") as g:
            if sizes[0] > 5:
                first, second = (loss(compiled, x) for x in xs)
                second.backward()
                first.backward()
            else:
                for x in xs:
                    loss(compiled, x).backward()
        kept.append((g, each))
        optimizer.step()
        optimizer.zero_grad()
    for g, each in kept:
        assert_factors(g, each, ["head.weight", "head.bias"])
    assert len(compiled_calls) >= 6


def test_two_backwards_of_the_same_samples_add_up(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(4):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        with unsum.gradients(compiled, params="head.*", grad=False) as g:
            value = loss(compiled, x)
            value.backward(retain_graph=True)
            (2 * value).backward()
        assert_factors(g, {name: 3 * v for name, v in each.items()}, ["head.weight", "head.bias"])
    assert len(compiled_calls) >= 1


def test_beside_reducers_and_scaled(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(4):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + k))
        norms, clipped = unsum.Norms(), unsum.WeightedSum(lambda norms: 1 / norms)
        with unsum.gradients(compiled, norms, clipped, params="head.*", keep=True, scaler=scaler, grad=False) as g:
            scaler.scale(loss(compiled, x)).backward()
        assert_factors(g, each, ["head.weight", "head.bias"])
        squares = sum(each[name].flatten(1).square().sum(1) for name in ("head.weight", "head.bias"))
        torch.testing.assert_close(norms.sq_norms(), squares)
        wanted = torch.einsum("n,n...->...", squares.rsqrt(), each["head.bias"])
        torch.testing.assert_close(clipped.sum()["head.bias"], wanted)
    assert len(compiled_calls) == 2


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.used, self.unused = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(self.first(x).tanh())


def test_a_parameter_that_nothing_reached_is_there_with_zeros(compiled_calls):
    model = Unused().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        with unsum.gradients(compiled, params=["*used.*"]) as g:
            compiled(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
        assert g["unused.weight"].per_sample().shape == (5, 3, 4) and not g["unused.weight"].per_sample().any()
        assert g["used.weight"].per_sample().any()
    assert len(compiled_calls) == 2


def test_factors_that_did_not_come_are_an_error(compiled_calls, monkeypatch):
    _, compiled, batch = build("attention")
    for k in range(4):
        if k == 3:
            monkeypatch.setattr(kept_factors.KeptTap, "take_in", lambda self, place, tensors: None)
        with unsum.gradients(compiled, params="head.*") as g:
            if k < 3:
                loss(compiled, batch(4)).backward()
            else:
                with pytest.raises(UnsupportedError, match="did not come out"):
                    loss(compiled, batch(4)).backward()
    with pytest.raises(unsum.errors.SamplesError, match="no samples"):
        g["head.weight"]
    assert len(compiled_calls) == 2


def test_a_backward_after_the_block_is_plain(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(4):
        model.zero_grad()
        with unsum.gradients(compiled, params="head.*") as g:
            value = loss(compiled, x := batch(4, seed=k))
            if k < 3:
                value.backward()
    value.backward()
    with pytest.raises(unsum.errors.SamplesError, match="no backward"):
        g["head.weight"]
    for name, each in per_sample_gradients(model, loss, x).items():
        torch.testing.assert_close(model.get_parameter(name).grad, each.sum(0), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) == 2


@pytest.mark.slow
def test_inductor(compiled_calls):
    model, compiled, batch = build("attention", backend="inductor")
    for k, n in enumerate((4, 4, 4, 5, 5, 6)):
        x = batch(n, seed=k)
        with unsum.gradients(compiled, params=CHOSEN["attention"]) as g:
            loss(compiled, x).backward()
        assert_factors(g, per_sample_gradients(model, loss, x), g.keys())
    assert len(compiled_calls) >= 2


def test_kronecker_factors_of_some_parameters_and_of_all_in_turn(compiled_calls):
    """What was learnt for some parameters is not taken for what was learnt for others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for k in range(14):
        x = torch.randn(5 + k % 4 // 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        found, wanted = unsum.Kronecker(), unsum.Kronecker()
        for which, reducer in ((compiled, found), (model, wanted)):
            before = len(compiled_calls)
            with unsum.gradients(which, reducer, params="2.*" if k % 2 else "*", grad=False):
                loss(which, x).backward()
            assert which is model or k < 8 or len(compiled_calls) == before + 1
        assert found.factors().keys() == wanted.factors().keys()
        for name, both in wanted.factors().items():
            torch.testing.assert_close(found.factors()[name], both, rtol=1e-8, atol=1e-10)
