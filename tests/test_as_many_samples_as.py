"""Samples are told apart where the batch has as many samples as there are states, labels, classes, rows or latents."""

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_right, assert_rows, random, right_or_refused, same
from small_nets import D, mlp

STATES = {"GRU": (nn.GRU, lambda out: out[1]), "LSTM": (nn.LSTM, lambda out: out[1][0])}
READS = {
    "the output": lambda out, last: out,
    "the last state": lambda out, last: last.transpose(0, 1),
    "the last state of one layer": lambda out, last: last[-1],
    "both": lambda out, last: torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1),
}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("t", [3, 4], ids=["n = states", "n = states = T"])
@pytest.mark.parametrize("whole", [Wrapped, lambda inner: inner], ids=["inside a module", "by itself"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", STATES)
def test_as_many_samples_as_a_recurrent_network_has_states(kind, read, whole, t):
    torch.manual_seed(0)
    make, last = STATES[kind]
    model, x = whole(make(D, 3, 2, batch_first=True, bidirectional=True)).double(), random(4, t, D)

    def loss(m, x):
        out = m(x)
        return READS[read](out[0], last(out)).square().sum()

    assert_rows(model, loss, x)


@pytest.mark.parametrize("layers", [1, 4])
def test_as_many_samples_as_states_of_one_direction(layers):
    torch.manual_seed(0)
    model, x = nn.GRU(D, 3, layers, batch_first=True).double(), random(layers, 3, D)
    assert_rows(model, lambda m, x: m(x)[0].square().sum(), x)


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
def test_as_many_samples_as_labels(inside):
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            out = self.net(x)
            return F.binary_cross_entropy_with_logits(out, y) if inside else out

    model, x, y = Labelled(), random(4, D), torch.rand(4, 4).double().round()
    loss = lambda m, x, y: m(x, y) if inside else F.binary_cross_entropy_with_logits(m(x, y), y)
    each = alone(model, lambda m: (loss(m, x[i : i + 1], y[i : i + 1]) / 4 for i in range(4)))
    assert_right(model, lambda: loss(model, x, y), each)


def test_as_many_samples_as_classes_that_come_first_is_right_or_refused():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x).T

    model, x, y = Turned(), random(4, D), torch.tensor([2, 0, 3, 1])
    loss = lambda m, x, y: F.cross_entropy(m(x).T, y, reduction="sum")
    right_or_refused(model, lambda: loss(model, x, y), per_sample_gradients(model, loss, x, y))


@pytest.mark.parametrize("penalised", ["2.bias", "2.weight", "0.weight"])
@pytest.mark.parametrize("inside", [False, True], ids=["penalty outside", "penalty inside"])
def test_as_many_samples_as_a_penalised_parameter_has_rows(inside, penalised):
    class Penalised(nn.Sequential):
        def forward(self, x):
            loss = super().forward(x).square().sum()
            return loss + self.get_parameter(penalised).square().sum() if inside else loss

    model = Penalised(*mlp())
    wanted = model.get_parameter(penalised)
    x = random(len(wanted), D)
    each = per_sample_gradients(model, lambda m, x: nn.Sequential.forward(m, x).square().sum(), x)
    run = lambda: model(x) if inside else model(x) + wanted.square().sum()
    assert_right(model, run, each, shared={penalised: 2 * wanted.detach()})
    with unsum.gradients(model) as g:
        run().backward()
    same(g[penalised].shared(), 2 * wanted.detach(), 1e-9, "shared")


@pytest.mark.parametrize("inside", [False, True], ids=["penalty outside", "penalty inside"])
def test_as_many_samples_as_rows_in_a_penalty_on_a_product_of_weights(inside):
    class Orthogonal(nn.Sequential):
        def penalty(self):
            w = self[2].weight
            return (w @ w.T - torch.eye(len(w)).double()).square().sum(1)  # as many as there are samples

        def forward(self, x):
            out = super().forward(x)
            return out.square().sum() + self.penalty().sum() if inside else out

    model, x = Orthogonal(*mlp()), random(4, D)
    each = per_sample_gradients(model, lambda m, x: nn.Sequential.forward(m, x).square().sum(), x)
    shared = {"2.weight": torch.autograd.grad(model.penalty().sum(), model[2].weight)[0]}
    run = lambda: model(x) if inside else model(x).square().sum() + model.penalty().sum()
    assert_right(model, run, each, shared=shared)


class Vae(nn.Module):
    """`reduce`: how the terms of samples and latents, (n, latents), become one number."""

    def __init__(self, reduce=None, latents=4):
        super().__init__()
        self.encode, self.decode = nn.Linear(D, 2 * latents), nn.Linear(latents, D)
        self.reduce = reduce

    def forward(self, x, noise):
        mean, log_variance = self.encode(x).chunk(2, 1)
        out = self.decode(mean + noise * (log_variance / 2).exp())
        return self.loss(x, out, mean, log_variance) if self.reduce else (out, mean, log_variance)

    def loss(self, x, out, mean, log_variance, reduce=None):
        far = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
        return (reduce or self.reduce)(far) + (out - x).square().sum()


REDUCED = {
    "all at once": lambda far: far.sum(),
    "latents, then samples": lambda far: far.sum(1).sum(),
    "samples, then latents": lambda far: far.sum(0).sum(),
    "means of latents": lambda far: far.mean(0).sum() * len(far),
}


@pytest.mark.parametrize("inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("reduced", REDUCED)
def test_as_many_samples_as_latents(reduced, inside):
    torch.manual_seed(0)
    reduce = REDUCED[reduced]
    model, x, noise = Vae(reduce if inside else None).double(), random(4, D), random(4, 4)
    loss = lambda m, x, noise: m(x, noise) if inside else m.loss(x, *m(x, noise), reduce)
    assert_rows(model, loss, x, noise)


UNUSED = {
    "the mean of the batch": lambda self, h: h.mean(0),
    "the mean of the batch, as many features as samples": lambda self, h: h[:, :4].mean(0),
    "similarities of all pairs": lambda self, h: h @ h.T,
    "a sorted batch": lambda self, h: h.sort(0).values,
    "a number": lambda self, h: h.mean(),
    "batch norm": lambda self, h: F.batch_norm(h, None, None, training=True),
    "a weight": lambda self, h: self.b.weight,
    "the norm of a weight's rows": lambda self, h: self.b.weight.norm(dim=1),
    "time first": lambda self, h: h.view(4, 3, 2).transpose(0, 1),
    "half of the batch": lambda self, h: h[:2],
    "nothing": lambda self, h: h[:0],
}


@pytest.mark.parametrize("first", [False, True], ids=["used first", "unused first"])
@pytest.mark.parametrize("unused", UNUSED)
def test_an_output_that_is_not_used_cannot_forbid_one_that_is(unused, first):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, 6), nn.Linear(6, 4)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            given = [self.b(h), UNUSED[unused](self, h)]
            return tuple(reversed(given)) if first else tuple(given)

    torch.manual_seed(0)
    model, x = Two().double(), random(4, D)
    each = alone(model, lambda m: m(x)[int(first)].square().sum(1))
    assert_right(model, lambda: model(x)[int(first)].square().sum(), each)


SUMMED = {
    "sums of classes": lambda out: out.sum(0),
    "means of classes": lambda out: out.mean(0) * len(out),
    "a product with ones": lambda out: torch.ones(len(out)).double() @ out,
    "squares": lambda out: out.square().sum(0),
}


class Returning(nn.Module):
    """What is made of the outputs inside the model, if anything is."""

    def __init__(self, finish):
        super().__init__()
        self.net, self.finish = mlp(), finish

    def forward(self, x):
        return self.finish(self.net(x))


@pytest.mark.parametrize("inside", [False, True], ids=["summed outside", "summed inside"])
@pytest.mark.parametrize("summed", SUMMED)
def test_sums_of_as_many_classes_as_there_are_samples_are_not_their_losses(summed, inside):
    sums = SUMMED[summed]
    model = Returning((lambda out: sums(out).sum()) if inside else (lambda out: out))
    x = random(4, D)
    assert_rows(model, (lambda m, x: m(x)) if inside else (lambda m, x: sums(m(x)).sum()), x)


def shares(rows, loss):
    """(n,): that part of the loss which enters at each row, as a function of the row alone."""
    (at,) = torch.autograd.grad(loss(rows), rows, retain_graph=True)
    return (rows * at).flatten(1).sum(1)


MIXED = {
    "squares of class sums": lambda out: out.sum(0).square(),
    "logarithms of class means": lambda out: -(out.softmax(1).mean(0)).log(),
    "variances of classes": lambda out: out.var(0),
    "all pairs": lambda out: (out @ out.T).logsumexp(0),
}


@pytest.mark.parametrize("place", ["all outside", "vector returned", "all inside"])
@pytest.mark.parametrize("mixed", MIXED)
def test_a_loss_that_mixes_samples_in_as_many_numbers_is_shared_out_or_refused(mixed, place):
    mix = MIXED[mixed]
    finish = {"all outside": lambda out: out, "vector returned": mix, "all inside": lambda out: mix(out).sum()}[place]
    model, x = Returning(finish), random(4, D)
    each = alone(model, lambda m: shares(m.net(x), lambda out: mix(out).sum()))
    run = lambda: (mix(model(x)) if place == "all outside" else model(x)).sum()
    right_or_refused(model, run, each)
