"""Which of the tensors that a model is given has the samples, and which rows of memory are whose: sizes, positions in
memory and earlier steps are no answer. Each program here was answered wrongly once, or refused at some step of a loop
that went well before."""

import pytest
import torch
from reference import each_of
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_both
from unsum.errors import InteractionError, UnsumError

D = 4
pytestmark = pytest.mark.usefixtures("doubles")


def cross(scores, labels):
    return F.cross_entropy(scores, labels, reduction="sum")


# ---- batches of one, and arguments that all samples share ---------------------------------------------------------


class Placed(nn.Module):
    """Tokens with positions that the caller gives."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(9, D), nn.Embedding(9, D), nn.Linear(D, 9)

    def forward(self, ids, places):
        return self.out(torch.tanh(self.tokens(ids) + self.places(places)))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sizes", [[(3, 5), (3, 4), (1, 5), (1, 4), (2, 5)], [(1, 5), (1, 5), (3, 5)]])
def test_one_sample_beside_positions(sizes, first):
    model = Placed()
    for n, t in sizes:
        ids, places = torch.randint(9, (n, t)), first + torch.arange(t)
        run = lambda ids=ids, places=places: model(ids, places).square().sum()
        assert_both(model, run, lambda i, ids=ids, p=places: model(ids[i : i + 1], p).square().sum(), n)


class Prototypes(nn.Module):
    """Samples against classes that all of them share."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, D), nn.Linear(5, D)

    def forward(self, x, classes):
        return self.image(x) @ self.text(classes).t()


@pytest.mark.parametrize("order", ["samples first", "classes first"])
@pytest.mark.parametrize("sizes", [(4, 4, 1, 5), (1, 4), (5, 6, 2)])
def test_classes_that_all_samples_share(sizes, order):
    model = Prototypes()
    for n in sizes:
        x, classes, y = torch.randn(n, 6), torch.randn(3, 5), torch.randint(3, (n,))
        names = ("x", "classes") if order == "samples first" else ("classes", "x")

        def scores(x, classes=classes, names=names):
            given = {"x": x, "classes": classes}
            return model(**{name: given[name] for name in names})

        run = lambda x=x, y=y: cross(scores(x), y)
        assert_both(model, run, lambda i, x=x, y=y: cross(scores(x[i : i + 1]), y[i : i + 1]), n)


def test_as_many_classes_as_samples_interact_whatever_the_model_returns():
    """Both have n rows, and each row of the one meets each row of the other."""

    class Alone(Prototypes):
        def forward(self, x, classes):
            return super().forward(x, classes).logsumexp(1).sum()

    for model in (Prototypes(), Alone()):
        with pytest.raises(InteractionError):
            with unsum.gradients(model):
                model(torch.randn(3, 6), torch.randn(3, 5)).sum().backward()


def test_tables_of_tokens_that_all_samples_share():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.tokens, self.text = nn.Linear(6, D), nn.Embedding(9, D), nn.Linear(D, D)

        def forward(self, pixels, ids, mask):
            return self.image(pixels) @ self.text((self.tokens(ids) * mask[..., None]).sum(1)).t()

    for sizes in ((4, 4, 6), (6, 6), (1, 6)):
        model = Net()
        for n in sizes:
            x, y = torch.randn(n, 6), torch.randint(3, (n,))
            ids, mask = torch.randint(9, (3, 5)), torch.ones(3, 5, dtype=torch.long)
            run = lambda x=x, y=y, ids=ids, mask=mask: cross(model(x, ids, mask), y)  # noqa: B023
            alone = lambda i, x=x, y=y, ids=ids, mask=mask: cross(model(x[i : i + 1], ids, mask), y[i : i + 1])  # noqa: B023
            assert_both(model, run, alone, n)


def test_one_sample_beside_a_mask_and_beside_states():
    encoder = nn.TransformerEncoderLayer(D, 2, 8, dropout=0, batch_first=True)
    cells = nn.LSTM(D, D, 2, batch_first=True)
    for n in (3, 3, 1, 2):
        x, mask = torch.randn(n, 5, D), torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        run = lambda x=x, mask=mask: encoder(x, src_mask=mask).square().sum()
        assert_both(encoder, run, lambda i, x=x, m=mask: encoder(x[i : i + 1], src_mask=m).square().sum(), n)
        h = torch.randn(2, n, D), torch.randn(2, n, D)
        own = lambda i, h=h: tuple(state[:, i : i + 1].contiguous() for state in h)
        run = lambda x=x, h=h: cells(x, h)[0].square().sum()
        assert_both(cells, run, lambda i, x=x, own=own: cells(x[i : i + 1], own(i))[0].square().sum(), n)


def test_lists_of_vectors_are_refused_and_never_taken_for_features():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, D)

        def forward(self, vectors):
            return self.a(torch.stack(vectors))

    model = Net()
    for n in (5, 1, 5, 2):
        with pytest.raises(UnsumError, match="samples"):
            with unsum.gradients(model, unsum.Norms()):
                model([torch.randn(D) for _ in range(n)]).square().sum().backward()


# ---- ids ----------------------------------------------------------------------------------------------------------


def test_ids_that_happen_to_count():
    model = nn.Sequential(nn.Embedding(9, D), nn.Tanh(), nn.Linear(D, 2))
    for ids in ([3, 1, 2], [2], [0], [1, 0], [0, 1], [0, 1, 2], [[3, 1], [1, 1]], [[0, 2, 1]], [[0, 1, 2]], [[0]]):
        x = torch.tensor(ids)
        run = lambda x=x: model(x).square().sum()
        assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), len(x))


def test_empty_batches_of_ids_among_others():
    model = nn.Sequential(nn.Embedding(9, D), nn.Flatten(), nn.Linear(3 * D, 2))
    for n in (3, 4, 0, 3, 0, 0, 2):
        with unsum.gradients(model, unsum.Norms()) as g:
            model(torch.randint(9, (n, 3))).square().sum().backward()
        assert g[unsum.Norms].norms().shape == (n,)


def test_labels_before_tokens_where_lengths_are_as_many_as_samples():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.out = nn.Embedding(9, D), nn.Linear(D, 9)

        def forward(self, labels, ids):
            return cross(self.out(torch.tanh(self.tokens(ids))).flatten(0, 1), labels.flatten())

    model = Net()
    for n, t in ((3, 5), (5, 5), (5, 5), (2, 3)):
        ids, labels = torch.randint(9, (2, n, t))
        run = lambda ids=ids, labels=labels: model(labels, ids)
        assert_both(model, run, lambda i, x=ids, y=labels: model(y[i : i + 1], x[i : i + 1]), n)


# ---- memory -------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two inputs, and the loss alone. Where the first is frozen, only the second meets parameters."""

    def __init__(self, both):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, D), nn.Linear(2, D), nn.Linear(D, 2)
        self.a.requires_grad_(both)
        self.head.requires_grad_(both)

    def forward(self, x, z):
        return self.head(torch.tanh(self.a(x) + self.b(z))).square().sum()


@pytest.mark.parametrize("both", [True, False])
def test_inputs_that_are_columns_of_one_table(both):
    model, table = Two(both), torch.randn(20, 5)
    for rows, copied in ((4, False), (4, True), (5, False), (3, True), (4, True), (4, False)):
        x, z = table[:rows, :3], table[:rows, 3:]
        x, z = (x.clone(), z.clone()) if copied else (x, z)
        assert_both(model, lambda x=x, z=z: model(x, z), lambda i, x=x, z=z: model(x[i : i + 1], z[i : i + 1]), rows)


def test_inputs_that_are_shifted_against_each_other():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.out = nn.Embedding(9, D), nn.Linear(D, 3)

        def forward(self, ids, targets):
            return self.out(torch.tanh(self.tokens(targets))).square().sum()

    model = Net()
    for n, t in ((3, 6), (3, 6), (2, 5), (5, 6)):
        tokens = torch.randint(9, (n, t))
        x, y = tokens[:, :-1], tokens[:, 1:]
        assert_both(model, lambda x=x, y=y: model(x, y), lambda i, x=x, y=y: model(x[i : i + 1], y[i : i + 1]), n)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("frame", range(5))
def test_windows_that_overlap(frame, alone):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 3)

        def forward(self, x):
            out = torch.tanh(self.a(x[:, frame]))
            return out.square().sum() if alone else out

    model, windows = Net(), torch.randn(40, 2).unfold(0, 5, 1).transpose(1, 2)
    loss = model if alone else lambda x: model(x).square().sum()
    for x in (windows[:4], windows[2:5], windows[:4].clone(memory_format=torch.contiguous_format), windows[3:9]):
        try:
            assert_both(model, lambda x=x: loss(x), lambda i, x=x: loss(x[i : i + 1]), len(x))
        except UnsumError:  # whose a part of memory is that several samples share cannot be told: refused
            assert alone and not x.is_contiguous()


@pytest.mark.parametrize("way", ["one after the other", "all first", "windows"])
def test_a_later_call_on_memory_of_an_earlier_one(way):
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), torch.randn(6, D)
    parts = list(x.split(2)) if way != "windows" else [x[:3], x[1:4], x[3:]]
    rows = torch.cat(parts)
    each = each_of(model, (model(row[None]).square().sum() for row in rows))
    for _ in range(3):
        with unsum.gradients(model) as g:
            if way == "all first":
                with torch.no_grad():
                    model(x)
            for part in parts:
                model(part).square().sum().backward()
        for name, wanted in each.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


# ---- a new structure in a loop ------------------------------------------------------------------------------------

CHANGED = {
    "divided": lambda x: x / 255,
    "padded": lambda x: F.pad(x, (0, 0, 1, 1)),
    "normalised": lambda x: (x - 0.4) / 0.2,
    "turned over": lambda x: x.flip(1),
    "as it is": lambda x: x,
}


@pytest.mark.parametrize("change", CHANGED)
def test_layers_that_are_left_out_in_some_steps(change):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.out, self.is_on = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2), True

        def forward(self, x):
            z = self.first(CHANGED[change](x))
            return self.out(z + torch.tanh(self.inner(z)) if self.is_on else z)

    model = Net()
    for model.is_on in (True, True, True, False, False, True, False, True):
        x = torch.randn(4, 3, D)
        run = lambda x=x: model(x).square().sum()
        assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), 4)


def test_packed_sequences_of_new_lengths():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.out = nn.LSTM(D, D, batch_first=True), nn.Linear(D, 3)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            padded = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])
            return self.out(padded[0])

    model = Net()
    for lengths in ([5, 3, 2], [5, 3, 2], [5, 5, 1], [5, 2, 2], [4, 4, 1], [1, 5, 2]):
        x, lengths = torch.randn(3, 5, D), torch.tensor(lengths)
        run = lambda x=x, many=lengths: model(x, many).square().sum()
        assert_both(model, run, lambda i, x=x, many=lengths: model(x[i : i + 1], many[i : i + 1]).square().sum(), 3)


def test_states_that_are_written_into_a_buffer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.out = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x):
            kept, h = x.new_zeros(x.shape), x.new_zeros(len(x), D)
            for t in range(x.shape[1]):
                h = torch.tanh(self.a(x[:, t] + h))
                kept[:, t] = h
            return self.out(kept)

    model = Net()
    for n, t in ((3, 4), (3, 4), (2, 4), (3, 3), (3, 5), (3, 6)):
        x = torch.randn(n, t, D)
        run = lambda x=x: model(x).square().sum()
        assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), n)


# ---- what earlier calls have told ---------------------------------------------------------------------------------


class Conditioned(nn.Module):
    """A condition first: one for each sample, or one for all."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner, self.out = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, condition, x):
        return self.out(torch.tanh(self.inner(x)) * self.scale(condition))


def test_a_condition_that_is_for_all_samples_in_some_steps():
    model = Conditioned()
    for n, shared in ((3, False), (3, False), (4, True), (3, True), (1, False), (5, False), (2, True), (1, True)):
        x, condition = torch.randn(n, D), torch.randn(1 if shared else n, 3)
        own = lambda i, c=condition, shared=shared: c if shared else c[i : i + 1]
        run = lambda x=x, c=condition: model(c, x).square().sum()
        assert_both(model, run, lambda i, x=x, own=own: model(own(i), x[i : i + 1]).square().sum(), n)


def test_arguments_by_name_have_roles_of_their_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places, self.out = nn.Embedding(9, D), nn.Embedding(9, D), nn.Linear(D, 3)

        def forward(self, ids=None, places=None):
            return self.out(torch.tanh(self.tokens(ids) + self.places(places)))

    model = Net()
    for k, (n, t) in enumerate(((3, 5), (3, 5), (2, 4), (4, 5), (1, 5), (3, 4))):
        ids, places = torch.randint(9, (n, t)), torch.arange(t)[None]
        given = {"ids": ids, "places": places} if k % 2 else {"places": places, "ids": ids}
        run = lambda given=given: model(**given).square().sum()
        assert_both(model, run, lambda i, x=ids, p=places: model(x[i : i + 1], p).square().sum(), n)


@pytest.mark.parametrize("chosen", [1, 2])
def test_experts_whose_rows_are_written_by_a_mask(chosen):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.out = nn.Linear(D, 3), nn.Linear(D, 2)
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

        def forward(self, x):
            rows = x.reshape(-1, D)
            weights, which = self.gate(rows).softmax(-1).topk(chosen, -1)
            total = 0
            for k, expert in enumerate(self.experts):
                own = (which == k).any(-1)
                found = torch.zeros_like(rows)
                found[own] = expert(rows[own])  # one row, many, or none
                total = total + found * (weights * (which == k)).sum(-1, keepdim=True)
            return self.out(total).view(*x.shape[:-1], 2)

    for seed in range(6):
        torch.manual_seed(seed)
        model = Experts()
        for n, t in ((3, 4), (3, 4), (2, 1), (4, 2)):
            x = torch.randn(n, t, D)
            run = lambda x=x: model(x).square().sum()  # noqa: B023
            assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), n)  # noqa: B023
