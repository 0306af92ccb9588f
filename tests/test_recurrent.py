"""Recurrent layers: per-sample gradients by factors over time, also where states are used, given or learnt."""

from dataclasses import replace

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import Tensor, nn
from torch.nn import functional as F

import unsum
from unsum.kernels import kept_gates as kept_gates_module
from unsum.kernels import recurrence
from unsum.kernels.kept_gates import kept_gates
from unsum.kernels.recurrence import Kept, Recurrence, begun, lstm

N, T, D, H = 4, 6, 3, 5
PARTS = {
    "sequences": lambda y, h, c: y,
    "last states": lambda y, h, c: h.transpose(0, 1),
    "last cells": lambda y, h, c: c.transpose(0, 1).sin(),
    "all of it": lambda y, h, c: torch.cat([y.flatten(1), *(s.transpose(0, 1).flatten(1) for s in (h, c))], 1),
}
LAYERS = {
    "one layer": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no biases": {"bias": False},
}


class Reader(nn.Module):
    """An LSTM, and what is used of it. `begin`: whether it begins with states of its own, which are learnt."""

    def __init__(self, part: str, *, begin: bool = False, **options) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, H, batch_first=True, **options)
        self.part = PARTS[part]
        self.begin = nn.Parameter(torch.randn(2, 1, 1, H)) if begin else None

    def forward(self, x: Tensor) -> Tensor:
        states = None if self.begin is None else tuple(s.expand(1, len(x), H).contiguous() for s in self.begin)
        y, (h, c) = self.rnn(x, states)
        return self.part(y, h, c)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def some(n: int, t: int, seed: int = 0) -> Tensor:
    return torch.randn(n, t, D, generator=torch.Generator().manual_seed(seed))


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], off: float = 2e-5) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert float((found[name].double() - value).norm()) <= off * float(value.norm()), name


def how(g) -> set[str]:
    """How the parameters of the recurrent layer were served."""
    lines = [line for line in str(g.coverage()).splitlines() if line.startswith("rnn.")]
    return {line.split()[-4] for line in lines}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("part", PARTS)
def test_every_sample_of_every_size(part, layers):
    torch.manual_seed(0)
    model = Reader(part, **LAYERS[layers])
    for n, t in [(N, T), (N, T), (N, T + 3), (3, 2), (1, T), (N, 1)]:
        x = some(n, t, seed=t)
        with unsum.gradients(model) as g:
            loss(model, x).backward()
        compare(g.per_sample(), per_sample_gradients(model, loss, x))
        assert all(name.startswith("recurrent.") for name in how(g)), how(g)


class OneByOne(nn.Module):
    """Sequences of unequal lengths, one after the other: each is a batch of its own."""

    def __init__(self, layers, both, part):
        super().__init__()
        self.rnn, self.part = nn.LSTM(3, 4, num_layers=layers, bidirectional=both), part
        self.head = nn.Linear(8 if both else 4, 2)

    def forward(self, x, lengths):
        found = [self.rnn(row[:length]) for row, length in zip(x, lengths.tolist(), strict=True)]
        parts = {"sum": lambda y, h: y.sum(0), "last": lambda y, h: y[-1], "state": lambda y, h: h.flatten()}
        ends = [parts[self.part](y, h)[-self.head.in_features :] for y, (h, _) in found]
        return self.head(torch.stack(ends))


@pytest.mark.parametrize("part", ["sum", "last", "state"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("both", [False, True])
def test_sequences_one_by_one(layers, both, part):
    torch.manual_seed(0)
    model, loss = OneByOne(layers, both, part), lambda m, x, lengths: m(x, lengths).square().sum()
    for _ in range(3):
        x, lengths = torch.randn(4, 5, 3), torch.randint(1, 6, (4,))
        truth = per_sample_gradients(model, loss, x, lengths)
        with unsum.gradients(model) as g:
            loss(model, x, lengths).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample().double(), wanted, rtol=1e-3, atol=1e-5)


def test_states_that_are_learnt():
    torch.manual_seed(0)
    model, x = Reader("sequences", begin=True), some(N, T)
    for _ in range(2):
        with unsum.gradients(model) as g:
            loss(model, x).backward()
        compare(g.per_sample(), per_sample_gradients(model, loss, x))


def test_every_reducer():
    torch.manual_seed(0)
    model, x = Reader("all of it", bidirectional=True), some(N, T)
    wanted = per_sample_gradients(model, loss, x)
    norms = norms_of_all(wanted)
    clip = lambda norms: (0.5 * norms.mean() / norms).clamp(max=1)
    for _ in range(3):
        with unsum.gradients(model, unsum.Norms(), unsum.WeightedSum(clip), unsum.SecondMoment()) as g:
            loss(model, x).backward()
        torch.testing.assert_close(g.norms().double(), norms, rtol=1e-5, atol=0)
        weights = clip(norms)
        compare(g[unsum.WeightedSum].sum(), {k: torch.einsum("n,n...->...", weights, v) for k, v in wanted.items()})
        compare(g[unsum.SecondMoment].sum_squares(), {k: v.square().sum(0) for k, v in wanted.items()})


def test_clipping_goes_on_with_other_sizes():
    torch.manual_seed(0)
    model = Reader("all of it", num_layers=2)
    clip = lambda norms: (0.5 * norms.mean() / norms).clamp(max=1)
    for n, t in ((N, T), (N - 1, T + 1), (N, 1), (1, T)):
        x = some(n, t)
        wanted = per_sample_gradients(model, loss, x)
        norms = norms_of_all(wanted)
        with unsum.gradients(model, unsum.WeightedSum(clip)) as g:
            loss(model, x).backward()
        weighted = {k: torch.einsum("n,n...->...", clip(norms), v) for k, v in wanted.items()}
        compare(g[unsum.WeightedSum].sum(), weighted)


def test_tokens_are_times():
    torch.manual_seed(0)
    model, x = Reader("sequences", bidirectional=True), some(N, T)
    with unsum.gradients(model) as g:
        loss(model, x).backward()
    wanted = per_sample_gradients(model, loss, x)
    for name in ("rnn.weight_ih_l0", "rnn.weight_hh_l0_reverse", "rnn.bias_hh_l0"):
        tokens = g[name].per_token()
        assert tokens.shape[:2] == (N, T)
        compare({name: tokens.sum(1)}, {name: wanted[name]})
    # The last time of a layer that goes backwards begins with zeros, so its state's weight meets nothing there.
    assert not g["rnn.weight_hh_l0_reverse"].per_token()[:, -1].any()
    assert not g["rnn.weight_hh_l0"].per_token()[:, 0].any()


def test_samples_along_the_second_dimension_and_groups():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(D, H)), some(N, T)
    run = lambda m, x: m(x.transpose(0, 1))[0].square().sum()  # (time, batch, features)
    wanted = per_sample_gradients(model, run, x)
    with unsum.gradients(model, samples=unsum.dim(1)) as g:
        run(model, x).backward()
    compare(g.per_sample(), wanted)
    model = Reader("sequences")
    wanted = per_sample_gradients(model, loss, x)
    with unsum.gradients(model, samples=torch.tensor([3, 3, 7, 7])) as g:
        loss(model, x).backward()
    assert g.ids.tolist() == [3, 7]
    compare(g.per_sample(), {k: torch.stack([v[:2].sum(0), v[2:].sum(0)]) for k, v in wanted.items()})


def test_gradients_of_torch_stay_as_they_are():
    torch.manual_seed(0)
    model, x = Reader("all of it", num_layers=2), some(N, T)
    loss(model, x).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    for _ in range(3):
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms()):
            loss(model, x).backward()
        assert all(torch.equal(p.grad, plain[name]) for name, p in model.named_parameters())


def test_bfloat16_is_near():
    torch.manual_seed(0)
    model, x = Reader("sequences").bfloat16(), some(N, T).bfloat16()
    with unsum.gradients(model) as g:
        loss(model, x).backward()
    compare(g.per_sample(), per_sample_gradients(model, loss, x), off=2e-2)


def test_dropout_between_layers():
    """What a layer was given is what it has saved, so dropout needs no care."""
    torch.manual_seed(0)
    model, x = Reader("sequences", num_layers=2, dropout=0.5), some(N, T)
    with unsum.gradients(model) as g:
        loss(model, x).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(g[name].per_sample().sum(0), p.grad, rtol=1e-4, atol=1e-5)
    assert all(name.startswith("recurrent.") for name in how(g))


class Written:
    """An LSTM written out, with the sums that go into its gates as leaves of their own."""

    def __init__(self, *, is_reversed: bool = False, scale: float = 1.0, n: int = N) -> None:
        torch.manual_seed(0)
        x, h, self.cell = (scale * torch.randn(*shape).double() for shape in ((T, n, D), (n, H), (n, H)))
        weights = torch.randn(4 * H, D).double(), torch.randn(4 * H, H).double()
        biases = scale * torch.randn(4 * H).double(), scale * torch.randn(4 * H).double()
        added = torch.zeros(T, n, 4 * H, dtype=torch.float64, requires_grad=True)
        states, gates, state, cell = [], [], h, self.cell
        for t in reversed(range(T)) if is_reversed else range(T):
            sums = F.linear(x[t], weights[0], biases[0]) + F.linear(state, weights[1], biases[1]) + added[t]
            i, f, g, o = sums.chunk(4, 1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            cell = f * cell + i * g
            state = o * cell.tanh()
            states.append(state)
            gates.append(torch.stack([i, f, g, o], 1).detach())
        y = torch.stack(states[::-1] if is_reversed else states)
        self.gates, self.states = torch.stack(gates), y.detach()  # gates in the order in which it went through time
        self.grads = torch.randn_like(y), torch.randn_like(h), torch.randn_like(self.cell)
        (self.wanted,) = torch.autograd.grad([y, state, cell], added, self.grads)
        self.layer = Recurrence(x, begun(self.states, h, is_reversed=is_reversed), weights, biases, is_reversed)

    def found(self, gates: Tensor | None, **options) -> Tensor:
        """The gradient at the gates, if these gates were kept."""
        kept = None if gates is None else Kept(gates, self.states)
        return lstm(replace(self.layer, kept=kept, **options), self.cell, *self.grads)


KEPT = {
    "nothing": lambda gates: None,
    "its gates": lambda gates: gates,
    "gates in another order": lambda gates: gates.flip(2),
    "gates of other times": lambda gates: gates.roll(1, 0),
    "gates of other sequences": lambda gates: gates.roll(1, 1),
    "zeros": lambda gates: gates * 0,
    "no numbers": lambda gates: gates * torch.nan,
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_gradient_at_the_gates_is_autograds(is_reversed, kept):
    layer = Written(is_reversed=is_reversed)
    for _ in range(3):
        found = layer.found(KEPT[kept](layer.gates))
        torch.testing.assert_close(found, layer.wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_gates_that_were_kept_are_not_computed_again(is_reversed):
    layer = Written(is_reversed=is_reversed)
    found = layer.found(layer.gates, inputs=layer.layer.inputs * torch.nan)
    torch.testing.assert_close(found, layer.wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hidden", [1, 5, 16, 32, 64, 128, 300])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_where_onednn_keeps_the_gates(hidden, is_reversed):
    """If it lays its workspace out in another way some day, this test says so; results stay right."""
    torch.manual_seed(0)
    rnn, x = nn.LSTM(D, hidden, bidirectional=True), torch.randn(T, N, D)
    (y, _), at = rnn(x), -1 if is_reversed else 0
    (node,) = [each for each in nodes_of(y) if "MkldnnRnnLayer" in each.name() and each._saved_reverse == is_reversed]
    kept = kept_gates(node._saved_result3, node._saved_result0, is_reversed=is_reversed)
    i, f, g, o = kept.gates.unbind(2)
    cell, states = torch.zeros(N, hidden), y.detach().unflatten(2, (2, -1))[:, :, at]
    for t, state in enumerate(states.flip(0) if is_reversed else states):
        cell = f[t] * cell + i[t] * g[t]
        torch.testing.assert_close(o[t] * cell.tanh(), state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["gates in another order", "zeros", "no numbers"])
def test_gates_that_are_not_where_they_are_looked_for_are_computed(where, dtype, monkeypatch):
    """The input and the biases are zero, so that any gates would lead to the states, which are zero as well."""
    look, module = kept_gates_module.onednn_gates, kept_gates_module
    monkeypatch.setattr(module, "onednn_gates", lambda *given: KEPT[where](look(*given)))
    module._are_there.cache_clear()
    torch.manual_seed(0)
    rnn = nn.LSTM(D, H).to(dtype)
    nn.init.zeros_(rnn.bias_ih_l0)
    nn.init.zeros_(rnn.bias_hh_l0)
    model, x = nn.Sequential(rnn), torch.zeros(T, N, D, dtype=dtype)
    run = lambda m, x: (m(x.transpose(0, 1))[0] - 1).square().sum()
    with unsum.gradients(model, samples=unsum.dim(1)) as g:
        (model(x)[0] - 1).square().sum().backward()
    module._are_there.cache_clear()
    compare(g.per_sample(), per_sample_gradients(model, run, x.transpose(0, 1)), 1e-5)


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_where_the_gates_are_is_seen_whatever_new_tensors_are(default):
    kept_gates_module._are_there.cache_clear()
    torch.manual_seed(0)
    rnn = nn.LSTM(D, H)
    (y, _) = rnn(torch.randn(T, N, D))
    (node,) = [each for each in nodes_of(y) if "MkldnnRnnLayer" in each.name()]
    before = torch.get_default_dtype()
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_default_device("meta")
        assert kept_gates(node._saved_result3, node._saved_result0, is_reversed=False) is not None
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def nodes_of(tensor: Tensor) -> set:
    found, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [below for below, _ in node.next_functions]
    return found


class TimeFirst(nn.Module):
    """A linear layer that is given (time, batch, features): it copies what it is given, since that is no whole view."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.Linear(D, H)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.rnn(x.transpose(0, 1))).transpose(0, 1)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Headed(nn.Module):
    """A linear layer takes the sequences as rows: (batch · time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, H, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * H, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Mixer(nn.Module):
    """A linear layer over time, and one over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.time, self.rnn = nn.LayerNorm(D), nn.Linear(T, T), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, T - x.shape[1]))
        y = self.time(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return y + self.rnn(y.tanh())


class Latents(nn.Module):
    """Learnt vectors attend to the sequences, inside with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.rnn = nn.Parameter(torch.randn(7, D)), nn.MultiheadAttention(D, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.latents.expand(len(x), -1, -1), x, x)[0]


@pytest.mark.parametrize(
    "make",
    [lambda: Reader("sequences"), Gated, TimeFirst, Headed, Mixer, Latents],
    ids=["LSTM", "GRU", "linear", "head", "mixer", "latents"],
)
def test_groups_of_scattered_rows_where_time_comes_first(make):
    torch.manual_seed(0)
    model = make()
    for seed, ids in enumerate(([7, 3, 7, 3], [7, 3, 7, -1], [3, 3, 7, 7], [9, 2, 2, 9], [-1, 5, -1, 5])):
        x = some(N, T - seed % 2, seed)
        wanted = per_sample_gradients(model, loss, x)
        with unsum.gradients(model, samples=torch.tensor(ids)) as g:
            loss(model, x).backward()
        own = sorted({each for each in ids if each >= 0})
        of = lambda each, rows, ids=ids: sum(row for row, its in zip(rows, ids, strict=True) if its == each)
        compare(g.per_sample(), {k: torch.stack([of(each, v) for each in own]) for k, v in wanted.items()})
        if -1 in ids:
            compare({k: g[k].shared() for k in g}, {k: of(-1, v) for k, v in wanted.items()})


def test_layers_whose_gates_are_computed_by_onednn():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LSTM(96, 96, batch_first=True)), torch.randn(8, 16, 96)
    assert x.numel() * 4 * 96 > recurrence.LARGE
    run = lambda m, x: m(x)[0].square().sum()
    with unsum.gradients(model) as g:
        run(model, x).backward()
    compare(g.per_sample(), per_sample_gradients(model, run, x))
