"""Gradients inside the loss or the model (forces, penalties, inner steps): right, or an error of unsum's own."""

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn

import unsum
from one_by_one import random as noise
from one_by_one import right_or_refused, squares
from unsum.errors import UnsumError
from verify_blocks import D, N, mlp


class Energy(nn.Module):
    """Forces are the derivatives of an energy, taken inside forward."""

    def __init__(self, give="forces", summed=True):
        super().__init__()
        self.a, self.b, self.give, self.summed = nn.Linear(3, 6), nn.Linear(6, 1), give, summed

    def forward(self, positions):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.b(torch.tanh(self.a(positions)).sum(1))[:, 0]
            ones = None if self.summed else torch.ones_like(energy)
            (slope,) = torch.autograd.grad(energy.sum() if self.summed else energy, positions, ones, create_graph=True)
        return {"forces": -slope, "both": (energy, -slope), "energy": energy}[self.give]


def energy_loss(model, positions):
    out = model(positions)
    return sum(part.sin().sum() for part in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("n", [4, 3, 5], ids=["no sizes coincide", "n = dimensions", "n = atoms"])
@pytest.mark.parametrize("summed", [True, False], ids=["of the sum", "of each energy"])
@pytest.mark.parametrize("give", ["forces", "both", "energy"])
def test_forces_are_right_or_refused(give, summed, n):
    torch.manual_seed(0)
    model, x = Energy(give, summed).double(), noise(n, 5, 3)
    right_or_refused(model, lambda: energy_loss(model, x), per_sample_gradients(model, energy_loss, x))


def penalised(model, x, of=lambda out: out.sum()):
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(of(out), x, create_graph=True)
    return out, (slope.flatten(1).norm(dim=1) - 1).square()


@pytest.mark.parametrize("alone", [False, True], ids=["with the loss", "alone"])
@pytest.mark.parametrize("n", [4, 3, 5], ids=["no sizes coincide", "n = outputs", "n = features"])
def test_a_penalty_on_gradients_in_the_loss_is_right_or_refused(n, alone):
    model, x = mlp(), noise(n, D)

    def loss(m, x):
        out, penalty = penalised(m, x)
        return penalty.sum() + (0 if alone else out.square().sum())

    right_or_refused(model, lambda: loss(model, x), per_sample_gradients(model, loss, x))


def test_a_penalty_on_gradients_that_is_marked_is_right_or_refused():
    model, x = mlp(), noise(N, D)
    loss = lambda m, x: penalised(m, x)[1]
    each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
    right_or_refused(model, lambda: unsum.mark_samples(loss(model, x)).sum(), each)


@pytest.mark.parametrize(
    "of", [lambda out: out.square().mean(), lambda out: out.logsumexp(0).sum()], ids=["mean", "mixed"]
)
def test_a_penalty_on_gradients_inside_the_model_is_right_or_refused(of):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return penalised(self.net, x, of)[1]

    model, x = Inside(), noise(N, D)
    each = each_of(model, model(x))  # each entry's derivative, also where `of` mixes samples
    right_or_refused(model, lambda: model(x).sum(), each)


def test_a_step_of_learning_inside_the_model_is_right_or_refused():
    class Learning(nn.Module):
        """The weight that is used has taken a step on the batch."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, D))

        def forward(self, x):
            (slope,) = torch.autograd.grad((x @ self.weight.T).sin().sum(), self.weight, create_graph=True)
            return torch.tanh(x @ (self.weight - 0.1 * slope).T)

    torch.manual_seed(0)
    model, x = Learning().double(), noise(N, D)
    each = each_of(model, model(x).square().sum(1))
    right_or_refused(model, lambda: squares(model, x), each)
    with pytest.raises(UnsumError):  # the step mixes samples
        with unsum.gradients(model):
            squares(model, x).backward()
