"""Samples that interact are refused by name, before the backward, and exact on request; what only looks like it
is not."""

import pytest
import torch
from torch import nn

import unsum
from nets import IDS, SEQUENCES, Centred, D, Hypernetwork, N, T, compare, in_float64, mlp, scalar, truth_of
from unsum.errors import InteractionError


class MeanFed(Hypernetwork):
    def forward(self, x):
        return torch.tanh(x @ self.maker(self.code + x.mean()).view(D, D))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T)),
        Centred,
        MeanFed,
        lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0),
    ],
    ids=["batch norm", "centring", "hypernetwork fed by the batch", "attention over the batch"],
)
def test_interacting_samples_are_refused_and_exact_on_request(make):
    torch.manual_seed(0)
    model = make().double()
    with pytest.raises(InteractionError, match="interact"):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    assert all(p.grad is None for p in model.parameters())  # refused before the user's backward
    with unsum.gradients(model, interacting="exact") as g:
        out = model(SEQUENCES)
        losses = out.flatten(1).square().sum(1)
        losses.sum().backward(retain_graph=True)
    for name, parameter in model.named_parameters():
        wanted = torch.stack([torch.autograd.grad(loss, parameter, retain_graph=True)[0] for loss in losses])
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_a_loss_on_the_diagonal_of_similarities_does_not_make_samples_interact():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(D, 5), nn.Linear(D, 5)

        def forward(self, x):
            h = x.mean(1)
            return self.one(h) @ self.two(h).T

    torch.manual_seed(0)
    model = Towers().double()
    truth = truth_of(model, SEQUENCES, lambda m, x: m(x).diagonal().square().sum())
    with unsum.gradients(model) as g:
        model(SEQUENCES).diagonal().square().sum().backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    with pytest.raises(InteractionError, match="interact"):
        with unsum.gradients(model):
            model(SEQUENCES).logsumexp(1).sum().backward()


def test_ids_carry_data_and_choices_do_not():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, D)

        def forward(self, ids):
            e = self.table(ids)
            return torch.tanh(e - e.mean(0))

    centred = Centred().double()
    with pytest.raises(InteractionError):
        with unsum.gradients(centred):
            scalar(centred, IDS).backward()

    class Chosen(nn.Module):
        """All samples together choose one of the weights: it is a weight all the same."""

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, D, D))

        def forward(self, x):
            return torch.tanh(x @ self.w[x.mean((0, 1))[:3].argmax()])

    torch.manual_seed(0)
    chosen = Chosen().double()
    with unsum.gradients(chosen) as g:
        losses = chosen(SEQUENCES).flatten(1).square().sum(1)
        losses.sum().backward(retain_graph=True)
    wanted = torch.stack([torch.autograd.grad(loss, chosen.w, retain_graph=True)[0] for loss in losses])
    torch.testing.assert_close(g["w"].per_sample(), wanted)


@in_float64()
def test_a_matrix_without_gradient_that_mixes_samples():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(3, 3)

        def forward(self, x, adjacency):
            return torch.tanh(adjacency @ self.q(x))

    model, x = Graph(), torch.randn(N, 3)
    for adjacency in (torch.eye(N), torch.eye(N), torch.eye(N)[[1, 0, 3, 2]]):
        compare(model, lambda: model(x, adjacency), interacting="exact")  # noqa: B023
    with pytest.raises(InteractionError):
        with unsum.gradients(model):
            model(x, torch.ones(N, N) / N).square().sum().backward()


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(D, D), nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(self.fc(x))
        return h / h.detach().std()


class Mixup(Detached):
    def forward(self, x):
        return self.fc(self.drop(0.5 * x + 0.5 * x[torch.randperm(len(x))]))


class Innocent(Detached):
    def forward(self, x):
        return self.drop(torch.tanh(self.fc(x)))


@pytest.mark.parametrize("make", [Detached, Mixup, Innocent])
def test_the_probe_sees_what_mixes_without_a_trace(make):
    torch.manual_seed(0)
    model = make().double()
    calls = []
    model.fc.register_forward_hook(lambda *a: calls.append("fc"))
    losses = lambda m, x: m(x).flatten(1).square().sum(1)
    if make is Innocent:
        with unsum.gradients(model, verify=True) as g:
            losses(model, SEQUENCES).sum().backward()
        assert (g.norms() > 0).all() and calls == ["fc"]  # the user's hooks hear nothing of the probe
        ids = torch.arange(N * T).view(N, T) // 5
        with unsum.gradients(model, samples=ids, verify=True) as g:
            model(SEQUENCES).square().sum().backward()
        assert len(g.norms()) == 5
        assert unsum.check(model, losses, SEQUENCES).ok
        return
    with pytest.raises(InteractionError, match="interact"):
        with unsum.gradients(model, verify=True):
            losses(model, SEQUENCES).sum().backward()
    assert not unsum.check(model, losses, SEQUENCES).ok


def test_a_nan_in_one_sample_is_no_interaction():
    model = mlp()
    x = SEQUENCES.clone()
    x[2, 1, 3] = torch.nan
    with unsum.gradients(model, engine="graph") as g:
        model(x).square().sum().backward()
    assert g.norms()[2].isnan()


def test_interaction_names_the_operation_and_its_module():
    model = nn.Sequential(nn.Linear(D, D), Centred()).double()
    with pytest.raises(InteractionError, match=r"SubBackward0 in module '1'.*what it hands to MeanBackward1"):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(T)).double()
    with pytest.raises(InteractionError, match="batch_norm in training in module '1'"):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward()
    bag = nn.Sequential(nn.EmbeddingBag(20, D, mode="sum", scale_grad_by_freq=True))
    with pytest.raises(InteractionError, match="embedding_bag with scale_grad_by_freq"):
        with unsum.gradients(bag):
            bag(IDS).sum().backward()


def test_batch_norm_of_the_inputs_is_named_by_its_own_module():
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    with pytest.raises(InteractionError, match="in module '0'"), unsum.gradients(model):
        model(torch.randn(5, 4)).square().sum().backward()
