"""The reducers of unsum against each sample's gradient, and what they leave of `.grad` and of factors."""

import copy

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from nets import IDS, SEQUENCES, D, N, T, mlp, scalar
from unsum.errors import SamplesError


def test_weight_gradients_come_from_the_same_product():
    """With Norms, torch is spared the products of weights; `.grad` and all who listen get them all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    plain, x, heard = copy.deepcopy(model), SEQUENCES.float(), []
    model[2].weight.register_hook(lambda g: heard.append("tensor"))
    model[4].weight.register_post_accumulate_grad_hook(lambda p: heard.append("accumulated"))
    for _ in range(3):
        heard.clear()
        with unsum.gradients(model, unsum.Norms()) as g:
            scalar(model, x).backward()
        scalar(plain, x).backward()  # added to what is there
        assert sorted(heard) == ["accumulated", "tensor"]
        for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-6)
    before = [p.grad.clone() for p in model.parameters()]
    with unsum.gradients(model, unsum.Norms(), grad=False) as h:
        scalar(model, x).backward()
    assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))
    torch.testing.assert_close(h[unsum.Norms].norms(), g[unsum.Norms].norms())


def test_with_reducers_nothing_is_kept_unless_asked():
    model = mlp()
    with unsum.gradients(model, unsum.Norms()) as g:
        scalar(model, SEQUENCES).backward()
    with pytest.raises(SamplesError, match="keep=True"):
        g["0.weight"]
    with pytest.raises(SamplesError, match="keep=True"):
        g.dot(g)
    with pytest.raises(KeyError, match="Norms"):
        g[unsum.Project]
    with unsum.gradients(model, unsum.Norms(), keep=True) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g[unsum.Norms].norms(), g.norms())
    with pytest.raises(unsum.errors.OptionError, match="not a reducer"):
        unsum.gradients(model, unsum.Norms)
    norms = unsum.Norms()
    with unsum.gradients(model, norms):
        loss = scalar(model, SEQUENCES)
        loss.backward(retain_graph=True)
        with pytest.raises(SamplesError, match="second backward"):
            loss.backward()


def test_reducers_over_micro_batches_and_a_reducer_of_ones_own():
    class Largest:
        """The largest entry of each sample's gradient."""

        def begin(self, n, again):
            self.found = torch.zeros(n, dtype=torch.float64)

        def take(self, name, factors):
            self.found = torch.maximum(self.found, factors.per_sample().flatten(1).abs().amax(1))

        def end(self, left):
            self.left = left

    model = mlp()
    truth = per_sample_gradients(model, scalar, SEQUENCES)
    largest, norms, project = Largest(), unsum.Norms(), unsum.Project(2)
    with unsum.gradients(model, norms, project, largest) as g:
        for part in SEQUENCES.split(2):
            scalar(model, part).backward()
    flat = torch.cat([t.flatten(1) for t in truth.values()], 1)
    torch.testing.assert_close(g[norms].norms(), flat.norm(dim=1))
    torch.testing.assert_close(g[largest].found, flat[2:].abs().amax(1))
    assert g[project].matrix().shape == (N, 4 * 3 + 3) and largest.left == []


def test_projections_keep_inner_products_on_average():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    sums = []
    for seed in range(300):
        with unsum.gradients(model, unsum.Project(k=3, seed=seed), keep=True) as g:
            scalar(model, SEQUENCES).backward()
        p = g[unsum.Project].matrix()
        sums.append(p @ p.T)
    mean, wanted = torch.stack(sums).mean(0), g.dot(g)
    assert (mean - wanted).norm() < 0.15 * wanted.norm()


def test_kronecker_and_token_norms_leave_padding_and_odd_positions_out():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc, self.places = nn.Embedding(20, D), nn.Linear(D, 4), nn.Parameter(torch.randn(1, T, D))

        def forward(self, ids):
            return self.fc(self.table(ids) + self.places)

    model = Padded().double()
    mask = torch.arange(T) < torch.tensor([3, 6, 1, 4])[:, None]
    kron, tokens = unsum.Kronecker(), unsum.TokenNorms()
    with (
        unsum.gradients(model, kron, tokens, keep=True),
        unsum.capture(model, "fc:input", "fc:grad_output") as got,
    ):
        (model(IDS).square().sum(-1) * mask).sum().backward()
    a, delta = got["fc:input"][mask], got["fc:grad_output"][mask]
    torch.testing.assert_close(kron.factors()["fc.weight"], (a.T @ a, delta.T @ delta))
    assert set(kron.left_out) == {"table.weight", "places", "fc.bias"}
    assert tokens.left_out == ["places"] and tokens.norms().shape == (N, T)
    assert ((tokens.norms() > 0) == mask).all()
