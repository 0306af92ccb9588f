"""Experts that get no rows in a batch: numbers as torch has them, and `.grad` where torch stores zeros."""

import copy

import pytest
import torch
from reference import each_of
from torch import nn

import unsum

D, H = 6, 8


def taken_by(rows, where, expert):
    """What the rows with these numbers become, at their places."""
    return torch.zeros_like(rows).index_add(0, where, expert(rows[where]))


class Experts(nn.Module):
    """Rows go to one of three experts with a norm each."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), norm(), nn.Linear(H, D)) for _ in range(3))

    def forward(self, x, chosen):
        rows, chosen = self.first(x).flatten(0, 1), chosen.flatten()
        found = [taken_by(rows, (chosen == k).nonzero()[:, 0], expert) for k, expert in enumerate(self.experts)]
        return sum(found, rows).view_as(x)


class Nested(nn.Module):
    """Two experts, inside each of which rows go to one of two others."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x, chosen):
        def expert(k, h):
            found = []
            for j in range(2):
                where = ((h[:, 0] > 0).long() == j).nonzero()[:, 0]
                found.append(taken_by(h, where, lambda rows, j=j: self.inner[2 * k + j](rows).tanh()))
            return sum(found)

        rows, chosen = self.first(x).flatten(0, 1), chosen.flatten() % 2
        found = [taken_by(rows, (chosen == k).nonzero()[:, 0], lambda h, k=k: expert(k, h)) for k in range(2)]
        return sum(found, rows).view_as(x)


MODELS = {
    "no norm": lambda: Experts(nn.Identity),
    "layer norm": lambda: Experts(lambda: nn.LayerNorm(H)),
    "group norm": lambda: Experts(lambda: nn.GroupNorm(2, H)),
    "RMS norm": lambda: Experts(lambda: nn.RMSNorm(H)),
    "batch norm": lambda: Experts(lambda: nn.BatchNorm1d(H)).eval(),
    "nested": Nested,
}
CHOSEN = {  # of (2, 4) rows, in turn
    "none for the last": lambda: torch.randint(2, (2, 4)),
    "all for one": lambda: torch.full((2, 4), 1),
    "whatever": lambda: torch.randint(3, (2, 4)),
}


def batches():
    generator = torch.Generator().manual_seed(0)
    for k, choose in enumerate([*CHOSEN.values(), *reversed(CHOSEN.values())]):
        torch.manual_seed(k)
        yield torch.randn(2, 4, D, generator=generator, dtype=torch.float64), choose()


def losses_of(model, x, chosen):
    return model(x, chosen).square().flatten(1).sum(1)


@pytest.mark.parametrize("reduced", [False, True], ids=["factors", "norms"])
@pytest.mark.parametrize("name", MODELS)
def test_batches_in_which_experts_get_no_rows(name, reduced):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for x, chosen in batches():
        truth = each_of(model, losses_of(model, x, chosen).unbind())
        with unsum.gradients(model, *([unsum.Norms()] if reduced else [])) as g:
            losses_of(model, x, chosen).sum().backward()
        for parameter, each in truth.items() if not reduced else ():
            torch.testing.assert_close(g[parameter].per_sample(), each)
        squares = sum(each.flatten(1).square().sum(1) for each in truth.values())
        torch.testing.assert_close(g.norms(), squares.sqrt())


@pytest.mark.parametrize("name", MODELS)
def test_clipping_stores_zeros_where_torch_does(name):
    """Optimizers with momentum tell zeros from no gradient."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for x, chosen in batches():
        other = copy.deepcopy(model)
        other.zero_grad()
        losses_of(other, x, chosen).sum().backward()
        model.zero_grad()
        with unsum.clip_per_sample(model, max_norm=1e9, verify=False):
            losses_of(model, x, chosen).sum().backward()
        for parameter, wanted in other.named_parameters():
            found = model.get_parameter(parameter).grad
            assert (found is None) == (wanted.grad is None), parameter
            if found is not None:
                torch.testing.assert_close(found, wanted.grad)


@pytest.mark.parametrize("seed", [*range(4), 42, 47, 49, 56])  # some of which begin with all rows at one expert
def test_experts_inside_experts_in_many_batches(seed):
    torch.manual_seed(seed)
    model = Nested().double()
    for _ in range(8):
        chosen = torch.randint(2, (1, 1) if torch.rand(()) < 0.5 else (2, 4)).expand(2, 4)
        x = torch.randn(2, 4, D, dtype=torch.float64)
        truth = each_of(model, losses_of(model, x, chosen).unbind())
        with unsum.gradients(model, unsum.Norms()) as g:
            losses_of(model, x, chosen).sum().backward()
        squares = sum(each.flatten(1).square().sum(1) for each in truth.values())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), squares)
