"""What is remembered of a step is not taken for a later one, where a mask, an order, a view, a shape or a failure
differs."""

import contextlib
import copy

import pytest
import torch
from reference import each_of
from torch import nn

import unsum
from nets import N, compare, in_float64
from unsum.errors import SamplesError


class Joined(nn.Module):
    """Two branches, in one of which samples change places; a mask or a weight decides."""

    def __init__(self, join):
        super().__init__()
        self.a, self.b, self.join = nn.Linear(3, 3), nn.Linear(3, 2), join

    def forward(self, x, k):
        h = self.join(self.a(x), k)
        return self.join(self.b(torch.tanh(h)), k)


JOINS = {
    "where": lambda h, k: torch.where(k, h, h.flip(0)),
    "weights": lambda h, k: k.double() * h + (1 - k.double()) * h.flip(0),
    "rolls": lambda h, k: sum(h.roll(j, 0).masked_fill(k if j else ~k, 0) for j in (0, 2)),
    "stacked": lambda h, k: (torch.stack([h, h.flip(0)]) * torch.stack([k, ~k])).sum(0),
}


@pytest.mark.parametrize("name", JOINS)
@in_float64()
def test_zeros_that_keep_samples_apart_are_not_remembered(name):
    model, x = Joined(JOINS[name]), torch.randn(N, 3)
    for k in (True, True, False, True):
        compare(model, lambda: model(x, torch.full((N, 1), k)))  # noqa: B023


MOVES = {
    "indexed": lambda h, order: h[order],
    "selected": lambda h, order: h.index_select(0, order),
    "gathered": lambda h, order: h.gather(0, order[:, None].expand_as(h)),
    "scattered": lambda h, order: torch.zeros_like(h).scatter(0, order[:, None].expand_as(h), h),
}


@pytest.mark.parametrize("name", MOVES)
@in_float64()
def test_numbers_that_move_samples_are_part_of_what_is_remembered(name):
    """They say nothing at first: every sample stays where it is."""
    model, x, move = Joined(MOVES[name]), torch.randn(N, 3), MOVES[name]
    still, turned = torch.arange(N), torch.tensor([2, 0, 3, 1])
    for order in (still, still, still, turned, still):
        back = order.argsort()

        def call(order=order, back=back):
            h = move(model.a(x), order)
            return move(model.b(torch.tanh(h)), back)

        model.forward = lambda *_, call=call: call()
        compare(model, lambda: model(x))


class Viewed(nn.Module):
    """A weight that is seen as another matrix, turned, and seen as a third."""

    def __init__(self):
        super().__init__()
        self.inner, self.p = nn.Linear(4, 6), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return torch.tanh(self.inner(x) @ self.p.view(2, 12).t().reshape(6, 4))


@in_float64()
def test_a_view_of_a_weight_is_not_turned_as_the_weight_is():
    model = Viewed()
    for _ in range(6):
        x = torch.randn(N, 5, 4)
        compare(model, lambda x=x: model(x))
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()):
            losses = model(x).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        torch.testing.assert_close(model.p.grad, each_of(model, losses)["p"].sum(0))


@in_float64()
def test_a_plan_that_was_refused_is_not_remembered(monkeypatch):
    """What the first batch refuses, later ones refuse."""
    from unsum.step.arrived import Arrived

    model, x, asked = nn.Linear(3, 2), torch.randn(N, 3), []

    def refuse(self, found):
        asked.append(None)
        raise SamplesError("on purpose")

    monkeypatch.setattr(Arrived, "check", refuse)
    for _ in range(5):
        with pytest.raises(SamplesError, match="on purpose"), unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()
    assert len(asked) == 5
    monkeypatch.undo()
    compare(model, lambda: model(x))


@in_float64()
def test_a_first_backward_that_fails_proves_no_plan(monkeypatch):
    from unsum.step.arrived import Arrived

    model, x, checks = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(N, 3), []
    check = Arrived.check
    monkeypatch.setattr(Arrived, "check", lambda self, found: checks.append(None) or check(self, found))
    for fails in (True, True, False, False):

        def hook(grad, fails=fails):
            if fails:
                raise RuntimeError("on purpose")

        expected = pytest.raises(RuntimeError, match="on purpose") if fails else contextlib.nullcontext()
        with expected, unsum.gradients(model, unsum.Norms()):
            hidden = model[0](x)
            hidden.register_hook(hook)
            model[2](model[1](hidden)).square().sum().backward()
    assert len(checks) == 1  # of the first that came to its end


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.p = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return torch.tanh(x * self.p)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("model", "change", "shape"),
    [
        (Scaled(4), lambda m: setattr(m, "p", nn.Parameter(torch.randn(1))), (4,)),
        (Scaled(1), lambda m: setattr(m, "p", nn.Parameter(torch.randn(4))), (4,)),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 2)),
            lambda m: m.__setitem__(0, nn.Conv2d(1, 4, 2, stride=2)),
            (1, 5, 5),
        ),
        (
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)),
            lambda m: setattr(m[0], "bias", nn.Parameter(torch.randn(1))),
            (4,),
        ),
    ],
    ids=["fewer", "more", "a kernel", "a bias"],
)
@in_float64()
def test_a_parameter_of_the_same_name_and_another_shape(model, change, shape, grad):
    model = copy.deepcopy(model).double()
    for k in range(8):
        if k == 4:
            change(model)
        x = torch.randn(N, *shape)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms(), grad=grad) as g:
            losses = model(x).flatten(1).square().sum(1)
            losses.sum().backward(retain_graph=True)
        norms = g[unsum.Norms].by_parameter()
        for name, wanted in each_of(model, losses).items():
            torch.testing.assert_close(norms[name], wanted.flatten(1).square().sum(1), msg=name)


@in_float64()
def test_a_sum_over_samples_is_not_taken_for_parts_of_norms():
    """A bias whose gradients are too many to wait for others."""
    model = nn.Sequential(nn.Linear(16, 3072), nn.ReLU(), nn.Linear(3072, 4)).float()
    for _ in range(7):
        x = torch.randn(32, 16, dtype=torch.float32)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()) as g:
            losses = model(x).square().sum(1)
            losses.sum().backward(retain_graph=True)
        truth = each_of(model, losses)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, truth[name].sum(0), rtol=1e-4, atol=1e-5)
            norms = g[unsum.Norms].by_parameter()[name]
            torch.testing.assert_close(norms, truth[name].flatten(1).square().sum(1), rtol=1e-4, atol=1e-6)
