"""Whose each part of a loss is: marked losses, penalties, auxiliary losses, parameters that the loss uses by itself,
and losses that the model computes."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from nets import FLAT, SEQUENCES, D, Experts, N, T, in_float64, mlp, scalar, truth_of
from unsum.errors import SamplesError


def test_marked_losses_and_a_parameter_of_the_loss():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.temperature = nn.Linear(D, 3), nn.Parameter(torch.tensor(2.0))

    model = Loss().double()

    def run(m, x, mark=lambda t: t):
        out = m.body(x)
        return mark((out * m.temperature).square().flatten(1).sum(1)).sum()

    truth = truth_of(model, SEQUENCES, run)
    for mark in (lambda t: t, unsum.mark_samples):  # unmarked, the rows that the product has saved tell whose it is
        with unsum.gradients(model) as g:
            run(model, SEQUENCES, mark).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


def test_nobodys_part_and_auxiliary_losses():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as g:
        penalty = 0.1 * sum((p**2).sum() for p in model.parameters())
        (scalar(model, SEQUENCES) + penalty).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
        torch.testing.assert_close(g[name].shared(), 0.2 * model.get_parameter(name).detach())


@in_float64()
def test_a_penalty_is_not_lost_where_we_supply_the_gradient():
    model, x = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3)), torch.randn(N, 5, 8)
    plain = copy.deepcopy(model)
    for _ in range(4):
        for net in (model, plain):
            net.zero_grad()
            with unsum.gradients(net, unsum.Norms()) if net is model else contextlib.nullcontext():
                (net(x).square().sum() + sum(p.square().sum() for p in net[2].parameters())).backward()
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad)


class Balanced(Experts):
    """Experts with a loss that balances their load over the whole batch."""

    def forward(self, x):
        flat = x.reshape(-1, D)
        self.probs = self.gate(flat).softmax(-1)
        out, chosen = torch.zeros_like(flat), self.probs.argmax(-1)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]) * self.probs[rows, e, None])
        return out.view_as(x), self.probs.mean(0).square().sum()


def test_an_auxiliary_loss_goes_to_the_owners_of_the_positions_that_it_enters():
    torch.manual_seed(0)
    model = Balanced().double()
    for engine in ("graph", "auto"):
        model.zero_grad()
        with unsum.gradients(model, engine=engine) as g:
            out, balance = model(SEQUENCES)
            model.probs.retain_grad()
            (out.square().sum() + 5 * balance).backward(retain_graph=True)
        owner, delta = torch.arange(N * T)[:, None] // T, model.probs.grad.clone()
        parts = [torch.where(owner == n, delta, 0) for n in range(N)]
        for name in ("gate.weight", "gate.bias"):
            parameter = model.get_parameter(name)
            wanted = [torch.autograd.grad(model.probs, parameter, part, retain_graph=True)[0] for part in parts]
            torch.testing.assert_close(g[name].per_sample(), torch.stack(wanted))
            torch.testing.assert_close(g[name].sum(), parameter.grad)


def test_a_head_that_only_an_auxiliary_loss_uses():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.aux = nn.Linear(D, 3), nn.Linear(D, 2)

        def forward(self, x):
            return self.body(x), self.aux(x).mean()

    model = Headed().double()
    with unsum.gradients(model) as g:
        out, aux = model(SEQUENCES)
        (out.square().sum() + aux).backward()
    each = SEQUENCES.sum(1, keepdim=True).expand(N, 2, D) / (N * T * 2)  # rows of the input tell whose it is
    torch.testing.assert_close(g["aux.weight"].per_sample(), each)
    torch.testing.assert_close(g["aux.weight"].sum(), model.aux.weight.grad)


class Outside(nn.Module):
    """A layer, and parameters that the loss uses by itself."""

    def __init__(self, aux=None):
        super().__init__()
        self.body, self.other = nn.Linear(D, 2), nn.Linear(D, 2)
        self.b, self.w = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(D, 2))
        self.make_aux = aux

    def forward(self, x):
        if self.make_aux is not None:
            self.aux = self.make_aux(self, x)
        return self.body(x)


def written(x):
    buffer = torch.zeros(*x.shape, dtype=x.dtype)
    buffer[:] = x
    return buffer


OUTSIDE = {
    "difference": (None, lambda m, x: (m(x) - m.b).square()),
    "sum": (None, lambda m, x: (m(x) + m.b).square()),
    "cat": (None, lambda m, x: torch.cat([m(x), m.b.expand(len(x), 2)], 1).prod(1, keepdim=True)),
    "stack": (None, lambda m, x: torch.stack([m(x), m.b.expand(len(x), 2)], 1).prod(1)),
    "prototypes": (None, lambda m, x: (m(x)[:, None] - m.w).square().sum(-1).logsumexp(1, keepdim=True)),
    "written data": (None, lambda m, x: m(x).square() + (written(x) @ m.w).square()),
    "a head beside the outputs": (lambda m, x: m.other(x.flip(1).T.contiguous().T), lambda m, x: m(x) ** 2 + m.aux**2),
    "written, then a head": (lambda m, x: m.other(written(x)), lambda m, x: m(x) ** 2 + m.aux**2),
    "noise through a head": (lambda m, x: m.other(torch.ones_like(x)), lambda m, x: m(x) ** 2 + m.aux**2),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_parameter_that_meets_data_outside_the_outputs_is_right_or_refused(name):
    torch.manual_seed(0)
    aux, losses = OUTSIDE[name]
    model = Outside(aux).double()
    run = lambda m, x: losses(m, x).flatten(1).sum()
    truth = truth_of(model, FLAT, run)
    try:
        with unsum.gradients(model) as g:
            run(model, FLAT).backward()
    except SamplesError as error:
        refused = str(error)
        assert "mark_samples" in refused
        assert model.body.weight.grad is None
        with unsum.gradients(model) as g:
            unsum.mark_samples(losses(model, FLAT).flatten(1).sum(1)).sum().backward()
    for parameter, wanted in truth.items():
        torch.testing.assert_close(g[parameter].per_sample(), wanted, msg=parameter)


def test_losses_that_the_model_itself_computes():
    class Losing(nn.Module):
        def __init__(self, reduction):
            super().__init__()
            self.fc, self.reduction = nn.Linear(D, 3), reduction

        def forward(self, x, y):
            return self.reduction(F.cross_entropy(self.fc(x), y, reduction="none"))

    y = torch.tensor([0, 1, 2, 0])
    weights = torch.rand(N, dtype=torch.float64)
    for reduction in (torch.mean, torch.sum, lambda losses: losses @ weights, lambda losses: (losses * weights).mean()):
        model = Losing(reduction).double()
        with unsum.gradients(model) as g:
            model(FLAT, y).backward()
        each = Losing(lambda losses: losses).double()
        each.load_state_dict(model.state_dict())
        losses = each(FLAT, y)
        free = losses.detach().requires_grad_()
        share = torch.autograd.grad(reduction(free), free)[0]
        for name, parameter in each.named_parameters():
            wanted = [torch.autograd.grad(loss, parameter, retain_graph=True)[0] for loss in losses]
            torch.testing.assert_close(
                g[name].per_sample(), torch.stack([s * w for s, w in zip(share, wanted, strict=True)])
            )

    class Blind(Losing):  # a vector of classes, as long as there are samples
        def forward(self, x):
            return self.fc(x).mean(0).square().sum()

    model = Blind(None).double()
    model.fc = nn.Linear(D, N).double()
    with unsum.gradients(model) as g:  # each sample's share, as it leaves the last layer
        model(FLAT).backward()
    share = model.fc(FLAT).detach().mean(0) * 2 / N
    torch.testing.assert_close(g["fc.weight"].per_sample(), share[None, :, None] * FLAT[:, None])
