"""The gradient of every sample: against plain autograd, one sample at a time, in float64."""

import copy
import dataclasses
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import unsum
from unsum.errors import InteractionError, OptionError, SamplesError, UnsupportedError

N, T, D = 4, 6, 8
SEQUENCES = torch.randn(N, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(N, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 20, (N, T), generator=torch.Generator().manual_seed(2))


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, D, padding_idx=0), nn.Embedding(T, D)
        self.head = nn.Linear(D, 20)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))


class Experts(nn.Module):
    """Routing: a weight that data has chosen; an expert may get no token at all."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 5), nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x):
        flat = x.reshape(-1, D)
        weights = self.gate(flat).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, e, None])
        return out.view_as(x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gain, self.cls = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        h = torch.cat([self.cls.expand(len(x), -1, -1), self.fc(x)], 1)
        h[:, 0] += 1
        h.mul_(self.gain)
        return F.relu_(h)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x**2 * w * factor

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return 2 * x * w * ctx.factor * grad, (x**2 * ctx.factor * grad).sum((0, 1)), None


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return Squared.apply(x, self.w, 3.0)


class Spectral(nn.Module):
    """Complex gradients for real parameters."""

    def __init__(self):
        super().__init__()
        self.filter, self.phase = nn.Parameter(torch.randn(D // 2 + 1)), nn.Parameter(torch.randn(T, 1))

    def forward(self, x):
        waves = torch.fft.rfft(x) * torch.polar(self.filter.abs() + 1, self.filter)
        return torch.fft.irfft(waves, n=D) * self.phase


class Hypernetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.maker = nn.Parameter(torch.randn(3)), nn.Linear(3, D * D)

    def forward(self, x):
        return torch.tanh(x @ self.maker(self.code).view(D, D))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(D, 5, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.rnn(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        return self.attn(x, x, x, attn_mask=mask)[0]


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)), SEQUENCES),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, groups=2, dilation=2), nn.ConvTranspose2d(4, 2, 3, 2), nn.Flatten(), nn.Linear(162, 3)
        ),
        IMAGES,
    ),
    "batch norm in eval mode": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), IMAGES),
    "tied embedding, positions": (TiedEmbedding, IDS),
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(20, D, sparse=True), nn.Linear(D, 2)), IDS),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(20, D), nn.Linear(D, 2)), IDS),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCES),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCES),
    "causal attention": (Attention, SEQUENCES),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True), SEQUENCES),
    "experts": (Experts, SEQUENCES),
    "in place, class token": (InPlace, SEQUENCES),
    "custom function": (Custom, SEQUENCES),
    "complex": (Spectral, SEQUENCES),
    "hypernetwork": (Hypernetwork, SEQUENCES),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(D, 3))), SEQUENCES),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, 3))).eval(), SEQUENCES),
}  # fmt: skip


def scalar(model, x):
    out = model(x)
    return out.reshape(len(out), -1).square().sum() / N


@pytest.mark.parametrize("name", NETS)
def test_every_sample_has_the_gradient_that_it_has_alone(name):
    make, x = NETS[name]
    torch.manual_seed(0)
    model = make().double()
    truth = per_sample_gradients(model, scalar, x)
    for engine in ("graph", "auto", "auto"):  # the last time remembered, where it can be
        with unsum.gradients(model, engine=engine) as g:
            model.zero_grad()
            scalar(model, x).backward()
        compare(g, model, truth)


def compare(g, model, truth):
    largest = sum(t.flatten(1).square().sum(1) for t in truth.values()).max().sqrt()
    assert largest > 1e-3
    for parameter, wanted in truth.items():
        ours = g[parameter].per_sample()
        assert (ours - wanted).flatten(1).norm(dim=1).max() <= 1e-9 * largest, parameter
        if (wanted - wanted.roll(1, 0)).norm() > 1e-6:  # and no other sample's
            assert (ours - wanted.roll(1, 0)).norm() > 1e-9 * largest, parameter
        torch.testing.assert_close(
            g[parameter].sum() + g[parameter].shared(), _dense(model.get_parameter(parameter).grad)
        )
    torch.testing.assert_close(g.norms(), sum(t.flatten(1).square().sum(1) for t in truth.values()).sqrt())


def _dense(grad):
    return grad.to_dense() if grad.layout != torch.strided else grad


def hf(name, **small):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(name, **small)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    kind = transformers.AutoModelForMaskedLM if name in ("bert", "roberta") else transformers.AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="eager").eval()


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40, "intermediate_size": 24
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 1}
ARCHITECTURES = {
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40},
    "llama": GROUPED,
    "gpt_neox": SMALL,
    "qwen3": GROUPED | {"head_dim": 8},
    "bert": SMALL,
    "roberta": SMALL,
    "mamba": {"num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 40, "state_size": 4},
    "gemma2": GROUPED | {"head_dim": 8},
    "phi": SMALL,
    "bloom": {"n_layer": 2, "hidden_size": 16, "n_head": 2, "vocab_size": 40},
    "falcon": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_language_models(name):
    torch.manual_seed(0)
    model = hf(name, **ARCHITECTURES[name]).double()
    run = lambda m, ids: m(input_ids=ids).logits.logsumexp(-1).square().sum() / N
    truth = per_sample_gradients(model, run, IDS)
    with unsum.gradients(model) as g:
        run(model, IDS).backward()
    largest = sum(t.flatten(1).square().sum(1) for t in truth.values()).max().sqrt()
    # Some of them compute parts in float32.
    tolerance = 1e-6 if name in ("mamba", "gemma2", "llama", "qwen3") else 1e-9
    for parameter, wanted in truth.items():
        assert (g[parameter].per_sample() - wanted).flatten(1).norm(dim=1).max() <= tolerance * largest, parameter
    assert "by rule: 100" in g.coverage() or tolerance > 1e-9


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def truth_of(model, x, run=scalar):
    return per_sample_gradients(model, run, x)


# ---- interaction --------------------------------------------------------------------------------------------------


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        h = self.fc(x)
        return torch.tanh(h - h.mean(0))


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


# ---- samples ------------------------------------------------------------------------------------------------------


def test_samples_along_another_dimension():
    model = nn.LSTM(D, 5).double()
    run = lambda m, x: m(x.transpose(0, 1))[0].square().sum()
    truth = truth_of(model, SEQUENCES, run)
    with unsum.gradients(model, samples=unsum.dim(1)) as g:
        run(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_packed_documents_groups_and_nobodys_positions():
    model, x = mlp(), SEQUENCES
    per_token = per_sample_gradients(model, lambda m, t: m(t).square().sum(), x.reshape(-1, D))
    packed = x.reshape(1, -1, D)
    ends = torch.tensor([0, 5, 6, 17, 24])
    for given in (packed, packed[0]):
        with unsum.gradients(model, samples=unsum.packed(ends)) as g:
            model(given).square().sum().backward()
        for name, tokens in per_token.items():
            wanted = torch.stack([tokens[a:b].sum(0) for a, b in itertools.pairwise(ends.tolist())])
            torch.testing.assert_close(g[name].per_sample(), wanted)
    users = torch.tensor([7, 3, 7, -1])
    with unsum.gradients(model, samples=users) as g:
        model(x).square().sum().backward()
    assert g.ids.tolist() == [3, 7]
    for name, tokens in per_token.items():
        rows = tokens.view(N, T, *tokens.shape[1:]).sum(1)
        torch.testing.assert_close(g[name].per_sample(), torch.stack([rows[1], rows[0] + rows[2]]))
        torch.testing.assert_close(g[name].shared(), rows[3])
    documents = torch.randint(0, 3, (N, T), generator=torch.Generator().manual_seed(0))
    with unsum.gradients(model, samples=documents) as g:
        model(x).square().sum().backward()
    for name, tokens in per_token.items():
        wanted = torch.stack([tokens[documents.flatten() == k].sum(0) for k in range(3)])
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_micro_batches_in_any_order_and_several_backwards():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as g:
        losses = [scalar(model, SEQUENCES[:1]), scalar(model, SEQUENCES[1:])]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    factor = torch.tensor([1.0] + [2.0] * (N - 1)).double()
    for name, wanted in truth.items():
        ours = g[name].per_sample()
        torch.testing.assert_close(ours, wanted * factor.view(-1, *(1 for _ in wanted.shape[1:])))
    assert g.ids.tolist() == [0, 1, 2, 3]


def test_two_towers_share_their_samples():
    model = mlp()
    run = lambda m, x: (m(x) * m(x + 1)).sum()
    truth = truth_of(model, SEQUENCES, run)
    with unsum.gradients(model) as g:
        run(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    with pytest.raises(SamplesError, match="samples"):
        with unsum.gradients(model):
            (model(SEQUENCES).sum() + model(SEQUENCES[:2]).sum()).backward()


def test_submodules_called_one_after_another():
    model = nn.ModuleDict({"encoder": nn.Linear(D, 5), "decoder": nn.Linear(5, 3)}).double()
    run = lambda m, x: m["decoder"](torch.tanh(m["encoder"](x))).square().sum()
    truth = truth_of(model, SEQUENCES, run)
    with unsum.gradients(model) as g:
        run(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


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


def test_what_cannot_be_known_is_an_error_before_backward():
    model = mlp()
    loss = scalar(model, SEQUENCES)  # before the block
    with pytest.raises(SamplesError, match="samples"):
        with unsum.gradients(model):
            loss.backward()
    assert model[0].weight.grad is None
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES)
    with pytest.raises(SamplesError, match="no backward"):
        g.norms()
    with pytest.raises(UnsupportedError, match="create_graph"):
        with unsum.gradients(model):
            scalar(model, SEQUENCES).backward(create_graph=True)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        with unsum.gradients(model):
            torch.func.grad(lambda x: scalar(model, x))(SEQUENCES)


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


FLAT = SEQUENCES[:, 0]
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


def test_dimensions_of_the_same_size_are_told_apart_by_trying():
    square = SEQUENCES[:, :N, :N]
    for make, run in (
        (lambda: nn.Linear(N, N), lambda m, x: m(x[:, 0]).square().sum()),
        (lambda: nn.LSTM(N, 5, batch_first=True), lambda m, x: m(x)[0].square().sum()),
    ):
        torch.manual_seed(0)
        model = make().double()
        truth = truth_of(model, square, run)
        with unsum.gradients(model) as g:
            run(model, square).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(N, N)

        def forward(self, x):
            return self.fc(x).transpose(0, 1)

    turned = Turned().double()
    with unsum.gradients(turned) as g:
        turned(square).square().sum().backward()
    for name, wanted in truth_of(turned, square, lambda m, x: m.fc(x).square().sum()).items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    states = nn.LSTM(N, 5, 2, batch_first=True, bidirectional=True).double()
    last = lambda m, x: m(x)[1][0].square().sum()
    with unsum.gradients(states) as g:
        last(states, square).backward()
    for name, wanted in truth_of(states, square, last).items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_positions_are_not_samples_though_there_are_as_many():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places, self.head = nn.Embedding(20, D), nn.Embedding(N, D), nn.Linear(D, 3)

    model = Parts().double()

    def losses(m, ids, positions):
        h = torch.tanh(m.tokens(ids) + m.places(positions))
        return m.head(h).flatten(1).square().sum(1)

    ids = IDS[:, :N]
    truth = truth_of(model, ids, lambda m, x: losses(m, x, torch.arange(N)).sum())
    joined = lambda m, x: (m.tokens(x) + m.places(torch.arange(N))).square().sum()
    with unsum.gradients(model) as g:
        joined(model, ids).backward()
    for name, wanted in truth_of(model, ids, joined).items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    with unsum.gradients(model) as g:
        unsum.mark_samples(losses(model, ids, torch.arange(N))).sum().backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    with unsum.gradients(model) as g:  # the head's outputs are the cut, and the rest lies upstream
        losses(model, ids, torch.arange(N)).sum().backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_weights_that_the_model_returns_are_not_samples():
    class Prototypes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.c = nn.Linear(D, 3), nn.Parameter(torch.randn(N, 3))

        def forward(self, x):
            return self.fc(x), F.normalize(self.c, dim=-1)

    model = Prototypes().double()

    def run(m, x):
        out, c = m(x)
        return (out @ c.T).log_softmax(1).square().sum()

    with unsum.gradients(model) as g:
        run(model, FLAT).backward()
    for name, wanted in truth_of(model, FLAT, run).items():
        torch.testing.assert_close(g[name].per_sample(), wanted)

    def apart(m, x):
        out, c = m(x)
        return (out[:, None] - c).square().sum()

    with unsum.gradients(model) as g:
        apart(model, FLAT).backward()
    for name, wanted in truth_of(model, FLAT, apart).items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_backwards_that_share_a_forward_share_its_samples():
    model = mlp()
    truth = truth_of(model, SEQUENCES, lambda m, x: (m(x) - m(-2 * x)).square().sum() + m(x).square().sum())
    with unsum.gradients(model) as g:
        a, b = model(SEQUENCES), model(-2 * SEQUENCES)
        (a - b).square().sum().backward(retain_graph=True)
        a.square().sum().backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_a_layout_that_is_not_clear_is_not_guessed():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x):
            self.h = self.fc(x.transpose(0, 1))
            return self.head(self.h[torch.tensor([0, 1, 2, 3]), torch.arange(N)])

    torch.manual_seed(0)
    model, x = Last().double(), SEQUENCES[:, :N]
    with pytest.raises((SamplesError, InteractionError)):
        with unsum.gradients(model):
            (model(x).square().sum() + model.h.square().sum()).backward()


def test_weights_of_every_making_are_weights():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, D))

        def forward(self, x):
            return x @ (self.w.T * 2) + x @ self.w.mT.relu() + x @ (self.w @ self.w.T)

    orthogonal = lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(D, D)))
    for make in (Made, orthogonal):
        torch.manual_seed(0)
        model = make().double()
        truth = truth_of(model, SEQUENCES)
        with unsum.gradients(model) as g:
            scalar(model, SEQUENCES).backward()
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


def test_a_function_that_changes_what_it_saved_is_refused_before_backward():
    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.x = x.clone()
            return x * w

        @staticmethod
        def backward(ctx, grad):
            ctx.x.mul_(2)
            return grad, (grad * ctx.x).sum((0, 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(D))

        def forward(self, x):
            return Doubling.apply(x, self.w)

    model = Net().double()
    with pytest.raises(UnsupportedError, match="DoublingBackward"):
        with unsum.gradients(model):
            model(SEQUENCES).sum().backward()
    assert model.w.grad is None


def test_a_users_hook_on_a_parameter_set_before_the_block():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    model[0].weight.register_hook(lambda g: g * 3)
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.weight"].per_sample(), truth["0.weight"])
    torch.testing.assert_close(model[0].weight.grad, 3 * truth["0.weight"].sum(0))


class Hidden(torch.autograd.Function):
    """Computes its layer again in backward, and lets a backward of its own bring the layer its gradient."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.layer(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


class Hiding(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), inner

    def forward(self, x):
        return Hidden.apply(self.first(x), self.inner)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(D, D), lambda: Hiding(nn.Linear(D, D)), lambda: Centred()],
    ids=["a layer", "one inside another", "samples that interact"],
)  # fmt: skip
def test_a_backward_hidden_inside_a_backward(make):
    torch.manual_seed(0)
    model = Hiding(make()).double()
    if isinstance(model.inner, Centred):
        with pytest.raises(InteractionError, match="interact"):
            with unsum.gradients(model):
                scalar(model, SEQUENCES).backward()
        return
    twin = copy.deepcopy(model)
    x = SEQUENCES.clone().requires_grad_()
    fired = []
    model.first.weight.register_hook(lambda g: fired.append("first"))
    for _ in range(2):
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
    for _ in range(2):
        scalar(twin, SEQUENCES.clone().requires_grad_()).backward()
    assert fired == ["first"] * 2
    for n in range(N):
        twin_one = copy.deepcopy(twin)
        twin_one.zero_grad()
        (scalar(twin_one, SEQUENCES[n : n + 1].clone().requires_grad_())).backward()
        for name, parameter in twin_one.named_parameters():
            torch.testing.assert_close(g[name].per_sample()[n], parameter.grad)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


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


def test_an_empty_batch_and_a_bad_dimension():
    model = mlp()
    with unsum.gradients(model) as g:
        model(SEQUENCES[:0]).sum().backward()
    assert g.norms().shape == (0,)
    with pytest.raises(SamplesError, match="dim"):
        unsum.dim(-1)


# ---- works with ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.norm, self.reentrant = nn.LayerNorm(D), reentrant

    def part(self, h):
        return torch.tanh(self.b(self.norm(torch.tanh(self.b(h)))))

    def forward(self, x):
        h = self.a(x)
        for _ in range(2):
            h = self.part(h) if self.reentrant is None else checkpoint(self.part, h, use_reentrant=self.reentrant)
        return self.c(h)


def test_checkpoints():
    torch.manual_seed(0)
    model = Checkpointed().double()
    truth = truth_of(model, SEQUENCES)
    scalar(model, SEQUENCES).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.reentrant = False
    with unsum.gradients(model) as g:
        for _ in range(2):
            scalar(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), torch.cat([wanted, wanted]))
    for p, wanted in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, 2 * wanted)


def test_reentrant_checkpoints():
    torch.manual_seed(0)
    model = Checkpointed().double()
    truth = truth_of(model, SEQUENCES)
    model.reentrant = True
    twin = copy.deepcopy(model)
    scalar(twin, SEQUENCES).backward()
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_forward_hooks_fire_as_often_as_without_also_under_a_checkpoint():
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False).double()
    calls = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, out, name=name: calls.append(name))
    scalar(model, SEQUENCES).backward()
    without = calls.copy()
    calls.clear()
    with unsum.gradients(model):
        scalar(model, SEQUENCES).backward()
    assert sorted(calls) == sorted(without)
    square = nn.Linear(N, N).double()  # sizes coincide: the model is tried, and nobody hears it
    holder = nn.Sequential(square)
    square.register_forward_hook(lambda *a: heard.append(1))
    heard = []
    with unsum.gradients(holder):
        holder(SEQUENCES[:, 0, :N]).square().sum().backward()
    assert heard == [1]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, whose second matrix begins at zero."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(D, D), nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def test_adapters_before_and_after_they_have_learnt():
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted()).double()
    for _ in range(3):
        truth = truth_of(model, SEQUENCES)
        with unsum.gradients(model) as g:
            scalar(model, SEQUENCES).backward()
        assert list(g) == [name for name, p in model.named_parameters() if p.requires_grad]
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad if p.grad is not None else 0


def test_copies_pickles_and_threads_inside_a_block():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as g:
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        scalar(twin, SEQUENCES[:2]).backward()
        scalar(loaded, SEQUENCES[:2]).backward()
        own: dict[str, torch.Tensor] = {}

        def work():
            with unsum.gradients(twin) as h:
                scalar(twin, SEQUENCES[:3]).backward()
            own["norms"] = h.norms()

        thread = threading.Thread(target=work)
        thread.start()
        scalar(model, SEQUENCES).backward()
        thread.join()
    assert len(g.ids) == N and len(own["norms"]) == 3
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    torch.testing.assert_close(own["norms"], g.norms()[:3])


def test_parameters_spread_over_processes_are_refused():
    class DTensor(torch.Tensor):  # by its name: making a real one needs a process group
        pass

    model = mlp()
    model[0].weight = nn.Parameter(torch.Tensor._make_subclass(DTensor, torch.ones(5, D)))
    with pytest.raises(UnsupportedError, match="DTensor"):
        unsum.gradients(model)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside the region", "outside"])
def test_autocast(inside):
    model, x = mlp().float(), SEQUENCES.float()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as g:
        with torch.autocast("cpu", torch.bfloat16):
            loss = scalar(model, x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    for name, wanted in truth.items():
        ours = g[name].per_sample()
        assert ours.dtype == torch.float32
        assert (ours - wanted).norm() < 0.03 * wanted.norm()


def test_many_samples_need_two_copies():
    model = mlp()
    x = torch.randn(100, D, dtype=torch.float64)
    run = lambda m, x: m(x).square().sum()
    truth = truth_of(model, x, run)
    with unsum.gradients(model) as g:
        run(model, x).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    x = torch.randn(2500, D, dtype=torch.float64)  # and three
    with unsum.gradients(model, params="2.bias") as g:
        run(model, x).backward()
    torch.testing.assert_close(g["2.bias"].per_sample(), 2 * model(x))


def test_torch_autograd_grad_user_hooks_and_nested_blocks():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model) as outer, unsum.gradients(model, params="0.weight") as inner:
        torch.autograd.grad(scalar(model, SEQUENCES), [model[0].weight])
    for g in (outer, inner):
        torch.testing.assert_close(g["0.weight"].per_sample(), truth["0.weight"])
    assert (outer["2.weight"].per_sample() == 0).all()  # nothing was brought there
    assert model[0].weight.grad is None
    model[1].register_forward_hook(lambda m, a, out: (out, out.register_hook(lambda g: g * 2))[0])
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    torch.testing.assert_close(g["0.weight"].per_sample(), 2 * truth["0.weight"])
    torch.testing.assert_close(g["2.weight"].per_sample(), truth["2.weight"])


def test_a_capture_inside_and_an_edit():
    model = mlp()
    with unsum.edit(model, {"0:grad_output": unsum.scale(3.0)}), unsum.gradients(model) as g:
        with unsum.capture(model, "0:input", "0:grad_output") as got:
            scalar(model, SEQUENCES).backward()
    product = torch.einsum("nto,nti->noi", got["0:grad_output"], got["0:input"])
    torch.testing.assert_close(g["0.weight"].per_sample(), product)
    torch.testing.assert_close(g["0.weight"].sum(), model[0].weight.grad)


# ---- nothing of the user's is changed -----------------------------------------------------------------------------


def test_grad_hooks_and_random_numbers_are_as_without():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 5), nn.Dropout(0.3), nn.GELU(), nn.Linear(5, 3))
    twin, x = copy.deepcopy(model), SEQUENCES.float()
    fired = {"with": [], "without": []}

    def run(net, key):
        torch.manual_seed(1)
        net[0].weight.register_hook(lambda g: fired[key].append("parameter"))

        def hook(module, args, out):
            out.register_hook(lambda g: fired[key].append("tensor"))

        net[3].register_forward_hook(hook)
        net(x).square().mean().backward()
        net(x).square().mean().backward()
        return torch.rand(1)

    without = run(twin, "without")
    with unsum.gradients(model) as g:
        assert torch.equal(run(model, "with"), without)
    assert fired["with"] == fired["without"]
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert len(g.ids) == 2 * N
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks
    assert len(model[0].weight._backward_hooks) == 1


def test_grad_left_alone_and_the_scale_of_a_grad_scaler():
    model = mlp()
    truth = truth_of(model, SEQUENCES)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with unsum.gradients(model, grad=False, scaler=scaler) as g:
        scaler.scale(scalar(model, SEQUENCES)).backward()
    assert (model[0].weight.grad == 1).all() and model[2].weight.grad is None
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


def test_a_long_block_keeps_no_graph():
    model = mlp()
    with unsum.gradients(model) as g:
        refs = []
        for _ in range(200):
            loss = scalar(model, SEQUENCES[:1])
            refs.append(weakref.ref(unsum.seams.nodes.token(loss.grad_fn)))
            loss.backward()
            del loss
        gc.collect()
        assert sum(ref() is not None for ref in refs) <= 1
    assert len(g.ids) == 200


def test_reads():
    model = mlp()
    model[2].bias.requires_grad_(False)
    truth = truth_of(model, SEQUENCES)
    with unsum.gradients(model, loss_reduction="mean") as g:
        scalar(model, SEQUENCES).backward()
    flat = torch.cat([N * t.flatten(1) for t in truth.values()], 1)
    torch.testing.assert_close(g.dot(g), flat @ flat.T)
    torch.testing.assert_close(g.sq_norms(), flat.square().sum(1))
    w = torch.randn(N).double()
    for name, weighted in g.weighted_sum(w).items():
        torch.testing.assert_close(weighted, torch.einsum("n,n...->...", w, N * truth[name]))
    assert list(g.per_sample()) == list(g.sum()) == list(truth)
    assert "0.weight" in g and "2.bias" not in g
    with pytest.raises(KeyError, match="frozen"):
        g["2.bias"]
    with pytest.raises(KeyError, match="no such parameter"):
        g["nothing"]
    with pytest.raises(SamplesError, match="weights"):
        g.weighted_sum(torch.ones(3))
    with unsum.gradients(model, params="0.*") as g:
        scalar(model, SEQUENCES).backward()
    assert list(g) == ["0.weight", "0.bias"]
    with unsum.gradients(model, params=["0.w*", "0.bias"]) as g:
        scalar(model, SEQUENCES).backward()
    assert list(g) == ["0.weight", "0.bias"]
    for wrong in ([], 3, ["0.*", 3]):
        with pytest.raises(OptionError, match="glob"), unsum.gradients(model, params=wrong):
            pass
    with (
        pytest.raises(OptionError, match="'nothing' fits no parameter"),
        unsum.gradients(model, params=["*", "nothing"]),
    ):
        pass


# ---- check --------------------------------------------------------------------------------------------------------


def test_check_is_green_on_what_is_right_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).double().eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = copy.deepcopy(model.state_dict())
    found = unsum.check(model, lambda m, x: m(x).square().sum(1), IMAGES)
    assert found.ok and found.worst.error <= 1e-9
    assert "ok" in str(found) and "0.weight" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert (model[0].weight.grad == 1).all() and model[0].bias.grad is None
    model.train()
    found = unsum.check(model, lambda m, x: m(x).square().sum(1), IMAGES)
    assert not found.ok and "interact" in str(found)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    with pytest.raises(SamplesError, match=r"shape \(n,\)"):
        unsum.check(model, lambda m, x: m(x).sum(), IMAGES)


def test_check_is_red_when_an_owner_is_shifted(monkeypatch):
    from unsum.factors.outer import Outer
    from unsum.step import collect as intake

    real = intake.Intake.meet

    def shifted(self, parameter, meetings, kind):
        if isinstance(kind, Outer):
            kind = dataclasses.replace(kind, a=kind.a.roll(1, 0), delta=kind.delta.roll(1, 0))
        real(self, parameter, meetings, kind)

    monkeypatch.setattr(intake.Intake, "meet", shifted)
    found = unsum.check(mlp(), lambda m, x: m(x).flatten(1).square().sum(1), SEQUENCES)
    assert not found.ok and "WRONG" in str(found)


def test_a_part_that_was_not_seen_is_an_error(monkeypatch):
    from unsum.step import collect as intake

    real = intake.Intake.meet
    monkeypatch.setattr(intake.Intake, "meet", lambda self, p, met, kind: real(self, p, met, kind.times(0.5)))
    for engine in ("auto", "graph"):
        with pytest.raises(SamplesError, match="part of its gradient"):
            with unsum.gradients(mlp(), engine=engine) as g:
                scalar(g.names.model, SEQUENCES).backward()


# ---- mixing without a trace, and numbers that are not finite --------------------------------------------------------


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


def test_float16_with_many_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).half()
    x = torch.randn(60, D).half()
    run = lambda m, x: m(x).square().sum()
    with unsum.gradients(model) as g:
        run(model, x).backward()
    for name, wanted in truth_of(model, x, run).items():
        assert (g[name].per_sample() - wanted).norm() < 2e-3 * wanted.norm()


def test_a_nan_in_one_sample_is_no_interaction():
    model = mlp()
    x = SEQUENCES.clone()
    x[2, 1, 3] = torch.nan
    with unsum.gradients(model, engine="graph") as g:
        model(x).square().sum().backward()
    assert g.norms()[2].isnan()


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


def test_check_takes_samples_and_names_what_is_frozen():
    model = mlp()
    ids = torch.tensor([5, 5, 9, 9])
    losses = lambda m, x: m(x).flatten(1).square().sum(1).view(2, 2).sum(1)
    assert unsum.check(model, losses, SEQUENCES, samples=ids).ok
    with pytest.raises(SamplesError, match="2 losses for 4 samples"):
        unsum.check(model, losses, SEQUENCES)
    with pytest.raises(SamplesError, match="frozen"):
        unsum.check(model.requires_grad_(False), losses, SEQUENCES)


def test_interaction_names_the_operation_and_its_module():
    model = nn.Sequential(nn.Linear(D, D), Centred()).double()
    with pytest.raises(InteractionError, match=r"SubBackward0 in module '1' \(what it hands to MeanBackward1"):
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
