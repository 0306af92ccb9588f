"""Sums of squares and Kronecker factors leave compiled models, and are what plain autograd and hooks give."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from compiled_nets import MODELS, build, loss


def kronecker_by_hooks(model, x):
    """{weight: (A, G)} of every linear layer and convolution without groups, from torch's own hooks."""
    met, handles = {}, []

    def keep(name):
        def hook(module, args, output):
            output.register_hook(lambda grad: met.__setitem__(name, (module, args[0].detach(), grad)))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
            handles.append(module.register_forward_hook(keep(f"{name}.weight")))
    torch.autograd.grad(loss(model, x), list(model.parameters()), allow_unused=True)
    for handle in handles:
        handle.remove()
    found = {}
    for name, (module, a, delta) in met.items():
        if isinstance(module, nn.Conv2d):
            a = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride).mT
            delta = delta.flatten(2).mT
        a, delta = a.flatten(0, -2), delta.flatten(0, -2)
        found[name] = a.T @ a, delta.T @ delta
    return found


def assert_sums(moments, kronecker, model, x):
    for name, each in per_sample_gradients(model, loss, x).items():
        torch.testing.assert_close(moments.sum_squares()[name], each.square().sum(0), rtol=1e-8, atol=1e-10)
    wanted = kronecker_by_hooks(model, x)
    names = {name for name, _ in model.named_parameters()}
    wanted = {name: both for name, both in wanted.items() if name in names and name not in tied(model)}
    assert kronecker.factors().keys() == wanted.keys() and set(kronecker.left_out) == names - wanted.keys()
    for name, both in wanted.items():
        for ours, theirs in zip(kronecker.factors()[name], both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def tied(model):
    """Of two modules: one module under two names is one layer."""
    every = [id(p) for module in model.modules() for p in module.parameters(recurse=False)]
    return {name for name, p in model.named_parameters() if every.count(id(p)) > 1}


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
@pytest.mark.parametrize("name", MODELS)
def test_second_moments_and_kronecker_factors(name, grad, compiled_calls):
    model, compiled, batch = build(name)
    for k in range(4):
        x = batch(4, seed=k)
        model.zero_grad()
        moments, kronecker = unsum.SecondMoment(), unsum.Kronecker()
        with unsum.gradients(compiled, moments, kronecker, grad=grad):
            loss(compiled, x).backward()
        assert_sums(moments, kronecker, model, x)
        truth = per_sample_gradients(model, loss, x)
        for key, parameter in model.named_parameters():
            if grad and parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, truth[key].sum(0), rtol=1e-8, atol=1e-10)
            else:
                assert parameter.grad is None
    assert len(compiled_calls) == 2


@pytest.mark.parametrize("what", [unsum.SecondMoment, unsum.Kronecker])
def test_each_alone_over_micro_batches_and_other_sizes(what, compiled_calls):
    model, compiled, batch = build("attention")
    for sizes in [(4, 4)] * 3 + [(5, 5), (6, 3), (7, 12)]:
        xs = [batch(n, seed=n + k) for k, n in enumerate(sizes)]
        both = [unsum.SecondMoment(), unsum.Kronecker()]
        with unsum.gradients(compiled, reducer := what()):
            for x in xs:
                loss(compiled, x).backward()
        with unsum.gradients(model, *both):
            loss(model, torch.cat(xs)).backward()
        assert_sums(*both, model, torch.cat(xs))
        other = both[what is unsum.Kronecker]
        read = (
            (lambda r: r.factors())
            if what is unsum.Kronecker
            else (lambda r: {k: (v,) for k, v in r.sum_squares().items()})
        )
        assert read(reducer).keys() == read(other).keys()
        for name, values in read(other).items():
            for ours, theirs in zip(read(reducer)[name], values, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) >= 8


def test_scales(compiled_calls):
    model, compiled, batch = build("images")
    for k in range(4):
        x = batch(4, seed=k)
        moments, kronecker = unsum.SecondMoment(), unsum.Kronecker()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + k))
        with unsum.gradients(compiled, moments, kronecker, scaler=scaler, loss_reduction="mean", grad=False):
            scaler.scale(loss(compiled, x) / 4).backward()
        assert_sums(moments, kronecker, model, x)
    assert len(compiled_calls) == 2


def test_positions_without_a_gradient_are_no_positions(compiled_calls):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for k in range(4):
        x = torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        kronecker = unsum.Kronecker()
        with unsum.gradients(compiled, kronecker):
            compiled(x)[:, :2].square().sum().backward()
        rows = x[:, :2].flatten(0, 1)
        torch.testing.assert_close(kronecker.factors()["0.weight"][0], rows.T @ rows)
    assert len(compiled_calls) == 2


@pytest.mark.slow
def test_inductor(compiled_calls):
    model, compiled, batch = build("attention", backend="inductor")
    for k, n in enumerate((4, 4, 4, 5, 5, 6)):
        moments, kronecker = unsum.SecondMoment(), unsum.Kronecker()
        x = batch(n, seed=k)
        with unsum.gradients(compiled, moments, kronecker):
            loss(compiled, x).backward()
        assert_sums(moments, kronecker, model, x)
    assert len(compiled_calls) >= 2
