"""Custom Functions whose backward is not linear: refused by name where gradients of samples would not add up."""

from __future__ import annotations

import pytest
import torch
from reference import each_of
from torch import nn

import unsum
from unsum.errors import UnsupportedError


def by_the_largest(g):
    """Rounding to int8, with one scale for the batch."""
    scale = g.abs().amax().clamp(min=1e-12) / 127
    return (g / scale).round() * scale


def by_the_norm(g):
    """Clipping by the norm of the whole gradient."""
    return g * (1 / g.norm()).clamp(max=1)


def by_a_bound_not_reached(g):
    """Clipping by a norm that gradients of this test do not reach."""
    return g * (1e4 / g.norm()).clamp(max=1)


def at_random(g):
    """Stochastic rounding."""
    return (g * 100 + torch.rand_like(g)).floor() / 100


def number_by_number(g):
    """Clipping of each number: each sample is as if it were alone."""
    return g.clamp(-0.1, 0.1)


def by_a_small_bound(g):
    """The same, where nearly all numbers are clipped."""
    return g.clamp(-1e-9, 1e-9)


def row_by_row(g):
    """Rounding to int8, with a scale for each row."""
    scale = g.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (g / scale).round() * scale


def product(change):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            g = change(g)
            return g @ w, g.t() @ x

    return Product


def passing(change):
    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return change(g)

    return Passing


class Multiplied(nn.Module):
    def __init__(self, i, o, change):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(o, i) / i**0.5), product(change)

    def forward(self, x):
        return self.function.apply(x, self.weight)


class Passed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.function = passing(change)

    def forward(self, x):
        return self.function.apply(x)


class OnTheWeight(nn.Module):
    def __init__(self, i, o, change):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(o, i) / i**0.5), passing(change)

    def forward(self, x):
        return x @ self.function.apply(self.weight).t()


def net(place, change, dtype=torch.float32):
    torch.manual_seed(0)
    layers = {
        "first": lambda: [Multiplied(8, 16, change), nn.Tanh(), nn.Linear(16, 5)],
        "last": lambda: [nn.Linear(8, 16), nn.Tanh(), Multiplied(16, 5, change)],
        "between": lambda: [nn.Linear(8, 16), Passed(change), nn.Tanh(), nn.Linear(16, 5)],
        "on the weight": lambda: [OnTheWeight(8, 16, change), nn.Tanh(), nn.Linear(16, 5)],
    }
    return nn.Sequential(*layers[place]()).to(dtype), torch.randn(6, 8, dtype=dtype)


def loss_of(model, x):
    return (model(x) - 1).square().sum(1)


PLACES = ["first", "last", "between", "on the weight"]


@pytest.mark.parametrize("interacting", ["error", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change", [by_the_largest, by_the_norm, by_a_bound_not_reached, at_random], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_is_not_additive_is_refused_by_name(place, change, dtype, interacting):
    model, x = net(place, change, dtype)
    model[-1].weight.grad = before = torch.ones_like(model[-1].weight)
    with pytest.raises(UnsupportedError, match=r"(Product|Passing)Backward") as error:
        with unsum.gradients(model, interacting=interacting):
            loss_of(model, x).sum().backward()
    assert "write: " in str(error.value)
    assert model[-1].weight.grad is before and bool((before == 1).all())
    assert all(p.grad is None for name, p in model.named_parameters() if p is not model[-1].weight)
    loss_of(model, x).sum().backward()  # without a block, all is as before


@pytest.mark.parametrize("reducer", [unsum.Norms, lambda: unsum.WeightedSum(torch.ones(6))], ids=["norms", "sum"])
@pytest.mark.parametrize("place", PLACES)
def test_reducers_refuse_it_too(place, reducer):
    model, x = net(place, by_the_largest)
    with pytest.raises(UnsupportedError, match="not linear"), unsum.gradients(model, reducer()):
        loss_of(model, x).sum().backward()


def check_exact(model, x, **options):
    with unsum.gradients(model, **options) as g:
        loss_of(model, x).sum().backward()
    alone = each_of(model, (loss_of(model, x[i : i + 1]).sum() for i in range(len(x))))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(g[name].per_sample(), alone[name], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(g[name].sum() + g[name].shared(), parameter.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("place", ["first", "last", "between"])
def test_rounding_row_by_row_is_right(place):
    check_exact(*net(place, row_by_row, torch.float64))


def test_clipping_number_by_number_is_right_where_no_sample_is_followed_through_it():
    check_exact(*net("first", number_by_number, torch.float64))


@pytest.mark.parametrize(
    "change", [number_by_number, by_a_small_bound, torch.sign], ids=["number by number", "by a small bound", "signs"]
)
@pytest.mark.parametrize("place", ["last", "between"])
def test_clipping_number_by_number_loses_the_samples_and_exact_does_not_follow_them(place, change):
    model, x = net(place, change, torch.float64)
    for samples in (None, torch.tensor([1, -1, 2, 1, 2, 2]), torch.tensor([1, -1, 1, 1, -1, 1])):
        with pytest.raises(UnsupportedError, match='not linear[\\s\\S]*interacting="exact"'):
            with unsum.gradients(model, samples=samples):
                loss_of(model, x).sum().backward()
    model.zero_grad()
    check_exact(model, x, interacting="exact")


def test_clipping_a_weights_gradient_number_by_number_is_refused():
    model, x = net("on the weight", number_by_number)
    with pytest.raises(UnsupportedError, match="not linear"), unsum.gradients(model):
        loss_of(model, x).sum().backward()


@pytest.mark.parametrize("change", [lambda g: g, lambda g: -g, lambda g: 0.1 * g], ids=["straight", "reversed", "less"])
@pytest.mark.parametrize("place", PLACES)
def test_linear_functions_are_served(place, change):
    check_exact(*net(place, change, torch.float64))


@pytest.mark.parametrize("change", [by_the_norm, at_random], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", ["first", "between"])
def test_parameters_after_it_are_served_where_those_before_are_frozen(place, change):
    model, x = net(place, change, torch.float64)
    model[:-1].requires_grad_(False)
    with unsum.gradients(model) as g:
        loss_of(model, x).sum().backward()
    alone = each_of(model[-1], (loss_of(model, x[i : i + 1]).sum() for i in range(len(x))))
    torch.testing.assert_close(g[f"{len(model) - 1}.weight"].per_sample(), alone["weight"])


def test_a_tensor_hook_in_its_place_is_served():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double(), torch.randn(6, 8).double()
    model[0].register_forward_hook(lambda module, args, out: out.register_hook(by_the_norm) and None)
    with unsum.gradients(model) as g:
        loss_of(model, x).sum().backward()
    torch.testing.assert_close(g["0.weight"].sum(), model[0].weight.grad)


def test_a_function_that_computes_in_bfloat16_inside_is_served():
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x.bfloat16(), w.bfloat16())
            return (x.bfloat16() @ w.bfloat16().t()).float()

        @staticmethod
        def backward(ctx, g):
            (x, w), g = ctx.saved_tensors, g.bfloat16()
            return (g @ w).float(), (g.t() @ x).float()

    torch.manual_seed(0)
    model, x = nn.Sequential(Multiplied(32, 64, None), nn.Tanh(), nn.Linear(64, 3)), torch.randn(16, 32)
    model[0].function = Narrow
    with unsum.gradients(model) as g:
        loss_of(model, x).sum().backward()
    alone = each_of(model, (loss_of(model, x[i : i + 1]).sum() for i in range(len(x))))
    for name, wanted in alone.items():
        torch.testing.assert_close(g[name].per_sample(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: unsum.gradients(model),
        lambda model: unsum.gradients(model, unsum.Norms()),
        lambda model: unsum.gradients(model, unsum.Norms(), grad=False),
        lambda model: unsum.clip_per_sample(model, max_norm=0.1),
    ],
    ids=["factors", "norms", "norms alone", "clipped"],
)
@pytest.mark.parametrize("change", [by_the_largest, by_the_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_function_that_begins_to_round_in_a_later_step_is_refused_then(place, change, make):
    begun = False
    model, x = net(place, lambda g: change(g) if begun else g)
    for _ in range(3):
        model.zero_grad()
        with make(model):
            loss_of(model, x).sum().backward()
    begun, before = True, [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match="not linear"), (block := make(model)):
        loss_of(model, x).sum().backward()
    if "clip" in repr(block):  # nothing that is not clipped is left behind
        for p, grad in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.grad, grad)
