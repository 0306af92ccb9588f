"""Who the samples are: along a dimension, by documents and groups, over several forwards and backwards; and sizes that
happen to be those of the samples."""

import itertools

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from nets import FLAT, IDS, SEQUENCES, D, N, T, in_float64, mlp, scalar, truth_of
from unsum.errors import InteractionError, SamplesError, UnsupportedError


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


@pytest.mark.parametrize("ids", [[7, -1, 7, -1], [-1, 7, 7, 7], [7, 7, 7, 7]])
@in_float64()
def test_one_group_beside_nobodys_rows(ids):
    ids, run = torch.tensor(ids), lambda m, x: m(x).square().sum()
    convolution = nn.Sequential(nn.Conv1d(T, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * (D - 1), 2))
    for model in (mlp(), convolution):
        rows = per_sample_gradients(model, run, SEQUENCES)
        with unsum.gradients(model, samples=ids) as g:
            run(model, SEQUENCES).backward()
        assert g.ids.tolist() == [7]
        for name, each in rows.items():
            torch.testing.assert_close(g[name].per_sample(), each[ids == 7].sum(0, keepdim=True))
            torch.testing.assert_close(g[name].shared(), each[ids < 0].sum(0))


@in_float64()
def test_one_group_that_attends_to_nobodys_rows():
    model = nn.TransformerEncoderLayer(D, 2, 4, 0.0)  # time first: attention over the batch
    with unsum.gradients(model, samples=torch.tensor([7, 7, 7, 7])) as g:
        model(SEQUENCES).square().sum().backward()
    torch.testing.assert_close(g["linear1.weight"].per_sample()[0], model.linear1.weight.grad)
    with pytest.raises(InteractionError), unsum.gradients(model, samples=torch.tensor([7, -1, 7, 7])):
        model(SEQUENCES).square().sum().backward()


@in_float64()
def test_labels_of_groups_in_one_row():
    model = nn.Sequential(nn.Embedding(9, D), nn.Linear(D, 9))
    ids, words = torch.tensor([2, 0, -1, 2]), torch.arange(N * T).view(N, T) % 9
    run = lambda m, words: F.cross_entropy(m(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="sum")
    rows = per_sample_gradients(model, run, words)
    with unsum.gradients(model, samples=ids) as g:
        run(model, words).backward()
    for name, each in rows.items():
        torch.testing.assert_close(g[name].per_sample(), torch.stack([each[1], each[0] + each[3]]))


@in_float64()
def test_lengths_and_documents_without_a_position():
    model = nn.Linear(3, 2)
    with unsum.gradients(model, samples=torch.tensor([[0, 0, 1, -1], [2, 2, 2, 1]])) as g:
        model(torch.randn(2, 4, 3)).sum().backward()
    assert g["weight"].lengths.tolist() == [2, 2, 3]
    with unsum.gradients(model, samples=unsum.packed(torch.tensor([0, 3, 3, 4, 7]))) as g:
        model(torch.randn(1, 7, 3)).square().sum().backward()
    assert g.ids.tolist() == [0, 1, 2, 3] and (g.norms() > 0).tolist() == [True, False, True, True]
    with pytest.raises(SamplesError, match=r"positions of shape \(6,\); the model was last given \(1, 7, 3\)"):
        with unsum.gradients(model, samples=unsum.packed(torch.tensor([0, 3, 6]))):
            model(torch.randn(1, 7, 3)).square().sum().backward()


def test_an_empty_batch_and_a_bad_dimension():
    model = mlp()
    with unsum.gradients(model) as g:
        model(SEQUENCES[:0]).sum().backward()
    assert g.norms().shape == (0,)
    with pytest.raises(SamplesError, match="dim"):
        unsum.dim(-1)


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


def test_backwards_that_share_a_forward_share_its_samples():
    model = mlp()
    truth = truth_of(model, SEQUENCES, lambda m, x: (m(x) - m(-2 * x)).square().sum() + m(x).square().sum())
    with unsum.gradients(model) as g:
        a, b = model(SEQUENCES), model(-2 * SEQUENCES)
        (a - b).square().sum().backward(retain_graph=True)
        a.square().sum().backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)


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
