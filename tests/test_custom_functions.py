"""Custom Functions that do in their backward what plain ones do not: differentiate, free, write into one buffer."""

from __future__ import annotations

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn

import unsum
from unsum.errors import UnsupportedError


class Differentiates(torch.autograd.Function):
    """Computes p · sin(x) again in its backward, and calls `torch.autograd.grad` there."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x.sin() * p

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, p = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            return torch.autograd.grad(x.sin() * p, (x, p), grad)


class DifferentiatesTwice(torch.autograd.Function):
    """The same, of a graph that holds such a Function itself."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x.sin() * p

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, p = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            return torch.autograd.grad(Differentiates.apply(x, p), (x, p), grad)


class Frees(torch.autograd.Function):
    """Deletes from its context what it has used."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.x, ctx.p = x, p
        return x.sin() * p

    @staticmethod
    def backward(ctx, grad):
        x, p = ctx.x, ctx.p
        del ctx.x, ctx.p
        return grad * x.cos() * p, (grad * x.sin()).sum(0)


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x.sin() * p

    @staticmethod
    def backward(ctx, grad):
        x, p = ctx.saved_tensors
        return grad * x.cos() * p, (grad * x.sin()).sum(0)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.p = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.rand(4) + 0.5)
        self.function = function

    def forward(self, x):
        return self.last(self.function.apply(self.first(x), self.p))


def loss_of(model, x):
    return model(x).square().sum()


@pytest.fixture(params=[Differentiates, DifferentiatesTwice, Frees, Plain], ids=lambda f: f.__name__)
def net(request):
    torch.manual_seed(0)
    model, x = Net(request.param).double(), torch.randn(6, 4, dtype=torch.float64)
    return model, x, per_sample_gradients(model, loss_of, x)


def test_factors_and_norms_in_every_step(net):
    model, x, truth = net
    norms = sum(each.flatten(1).square().sum(1) for each in truth.values()).sqrt()
    for _ in range(3):  # learnt, then remembered: torch computes some weight gradients no longer
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            loss_of(model, x).backward()
        torch.testing.assert_close(g.norms(), norms)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, truth[name].sum(0))
        with unsum.gradients(model) as g:
            loss_of(model, x).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


@pytest.mark.parametrize("only", [["p"], ["first.weight", "p"], ["p", "last.weight"]], ids=" ".join)
def test_a_backward_to_some_parameters_alone(net, only):
    model, x, truth = net
    inputs = [model.get_parameter(name) for name in only]
    for backward in (
        lambda loss: loss.backward(inputs=inputs),
        lambda loss: torch.autograd.grad(loss, inputs),
    ):
        for _ in range(2):
            with unsum.gradients(model) as g:
                backward(loss_of(model, x))
            for name in only:
                torch.testing.assert_close(g[name].per_sample(), truth[name])


def test_clipping(net):
    model, x, truth = net
    norms = sum(each.flatten(1).square().sum(1) for each in truth.values()).sqrt()
    weights = (0.5 / norms).clamp(max=1)
    for _ in range(3):
        model.zero_grad()
        with unsum.clip_per_sample(model, max_norm=0.5):
            loss_of(model, x).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, torch.einsum("n,n...->...", weights, truth[name]))


def test_a_backward_that_writes_into_one_buffer_is_refused_by_name():
    buffer = torch.empty(6, 4, dtype=torch.float64)

    class Buffered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            ctx.save_for_backward(x, p)
            return x * p

        @staticmethod
        def backward(ctx, grad):
            x, p = ctx.saved_tensors
            return torch.mul(grad, p, out=buffer), (grad * x).sum(0)

    model = Net(Buffered).double()
    with pytest.raises(UnsupportedError, match="BufferedBackward.*same memory"), unsum.gradients(model):
        loss_of(model, torch.randn(6, 4, dtype=torch.float64)).backward()


class ConvolutionOfMine(torch.autograd.Function):
    """Named as a layer of torch's, with what it needs on its context instead of saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx._saved_input, ctx._saved_weights = x, [weight]
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx._saved_weights[0], grad.flatten(0, -2).T @ ctx._saved_input.flatten(0, -2)


def test_a_name_like_one_of_torchs_layers_says_nothing():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            return ConvolutionOfMine.apply(x, self.weight)

    torch.manual_seed(0)
    net = Net().double()
    loss = lambda model, x: model(x).sin().sum()
    for n in (3, 3, 5):
        x = torch.randn(n, 2, 4, dtype=torch.float64)
        with unsum.gradients(net) as g:
            loss(net, x).backward()
        torch.testing.assert_close(g["weight"].per_sample(), per_sample_gradients(net, loss, x)["weight"])


class Overwriting(torch.autograd.Function):
    """A leaky ReLU that saves its result, and overwrites it in its backward: once nobody notices."""

    @staticmethod
    def forward(ctx, x, how):
        y = torch.where(x > 0, x, 0.1 * x)
        ctx.save_for_backward(y)
        ctx.how = how
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        slope = torch.where(y > 0, 1.0, 0.1).to(grad)
        if ctx.how == "unseen":
            y.data.div_(slope)
        elif ctx.how == "in place":
            y.div_(slope)
        return grad * slope, None


class Leaky(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return Overwriting.apply(x, self.how)


@pytest.mark.parametrize("how", ["unseen", "in place", "not at all"])
def test_a_function_that_overwrites_what_it_has_saved(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Leaky(how), nn.Linear(6, 6), Leaky(how), nn.Linear(6, 2)).double()
    for _ in range(4):
        x = torch.randn(3, 4, dtype=torch.float64)
        loss = model(x).square().sum()
        plain = torch.autograd.grad(loss, list(model.parameters()))
        norms = unsum.Norms()
        refused = how != "not at all"
        with unsum.gradients(model, norms):
            loss = model(x).square().sum()
            if refused:
                with pytest.raises(unsum.errors.UnsupportedError, match="OverwritingBackward changes what it has"):
                    loss.backward()
            else:
                loss.backward()
        if refused:  # and the graph is as it was
            assert all(p.grad is None for p in model.parameters())
            loss.backward()
        for parameter, grad in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        if not refused:
            each = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
            wanted = norms_of_all(each)
            torch.testing.assert_close(norms.norms(), wanted)
        model.zero_grad()


class Doubling(torch.autograd.Function):
    """Saves a tensor that its backward does not read."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Scratching(torch.autograd.Function):
    """Uses memory of its own, and a counter, in every backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.work, ctx.count, ctx.like = torch.empty_like(x), torch.zeros(()), x.to("meta")
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.count += 1
        torch.mul(grad, 1 - torch.tanh(x) ** 2, out=ctx.work)
        return ctx.work.clone()


class Around(nn.Module):
    def __init__(self, function, overwrites):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.function, self.overwrites = function, overwrites

    def forward(self, x):
        h = self.first(x)
        y = self.function.apply(h)
        if self.overwrites:
            h += 1
        return self.last(y + h)


@pytest.mark.parametrize(("function", "overwrites"), [(Doubling, True), (Doubling, False), (Scratching, False)])
def test_a_function_whose_backward_leaves_what_it_saved_alone(function, overwrites):
    torch.manual_seed(0)
    model = Around(function, overwrites).double()
    for _ in range(4):
        x, norms = torch.randn(3, 4, dtype=torch.float64), unsum.Norms()
        with unsum.gradients(model, norms):
            model(x).square().sum().backward()
        each = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        wanted = norms_of_all(each)
        torch.testing.assert_close(norms.norms(), wanted)
