"""Rows, lengths, masks, orders and documents that change in every step."""

import itertools

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

import unsum
from changing_nets import ENDS, WAYS, Last
from one_by_one import random, squares, step
from small_nets import D, gpt2, mlp
from unsum.errors import InteractionError

SHAPES = [(1, 1), (4, 6), (4, 6), (6, 4), (3, 3), (3, 3), (5, 2), (2, 7), (4, 6), (1, 5)]  # rows, positions


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1, groups=2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.relu(self.a(x)))).mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to one expert, chosen by the largest weight."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, 4) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights = self.gate(flat).softmax(1)
        chosen, out = weights.argmax(1), flat.new_zeros(len(flat), 4)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat.index_select(0, rows)) * weights[rows, e, None])
        return out.unflatten(0, x.shape[:2])


class Recurrent(nn.Module):
    """Sequences of different lengths, in any order."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(D, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def lengths_up_to(n, t):
    return torch.randint(1, t + 1, (n,))


def masked_text(n, t):
    mask = (torch.arange(t) < lengths_up_to(n, t)[:, None]).long()
    return torch.randint(20, (n, t)), mask if n % 2 else mask.flip(1)  # padded on the right, or on the left


def text_loss(model, ids, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits
    return (logits.logsumexp(-1).square() * mask).sum()


CHANGING = {
    "mlp": (mlp, lambda n, t: (random(n, D),), squares),
    "mlp on tokens": (mlp, lambda n, t: (random(n, t, D),), squares),
    "convolutions": (Convolutions, lambda n, t: (random(n, 2, t, t + 1),), squares),
    "lstm": (Last, lambda n, t: (random(n, t, D),), squares),
    "experts": (Experts, lambda n, t: (random(n, t, D),), squares),
    "gpt2": (gpt2, masked_text, text_loss),
}


@WAYS
@pytest.mark.parametrize("name", CHANGING)
def test_rows_positions_masks_and_routes_change_in_every_step(name, kind):
    torch.manual_seed(1)
    make, batch, loss = CHANGING[name]
    model = make().double()
    for shape in SHAPES:
        given = batch(*shape)
        step(model, lambda given=given: loss(model, *given), per_sample_gradients(model, loss, *given), kind)


@WAYS
def test_lengths_change_in_every_step(kind):
    torch.manual_seed(1)
    model = Recurrent().double()
    for n, t in SHAPES:
        x, lengths = random(n, t, D), lengths_up_to(n, t)
        loss = lambda m, x, lengths: sum(row[:k].square().sum() for row, k in zip(m(x, lengths), lengths, strict=True))
        each = per_sample_gradients(model, loss, x, lengths)
        step(model, lambda loss=loss, x=x, lengths=lengths: loss(model, x, lengths), each, kind)


class Ordered(nn.Module):
    """Rows are put in another order and back; with `sort`, by a number that is computed."""

    def __init__(self, sort):
        super().__init__()
        self.a, self.b, self.sort = nn.Linear(D, 6), nn.Linear(6, 4), sort

    def forward(self, x, order):
        h = torch.tanh(self.a(x))
        order = h.sum(1).argsort() if self.sort else order
        return self.b(h[order])[order.argsort()]


@WAYS
@pytest.mark.parametrize("sort", [False, True], ids=["given", "sorted"])
def test_the_order_of_rows_inside_the_model_changes_in_every_step(sort, kind):
    torch.manual_seed(1)
    model = Ordered(sort).double()
    for n in (1, 4, 4, 4, 6, 4, 3, 3):
        x, order = random(n, D), torch.randperm(n)
        each = alone(model, lambda m, x=x, order=order: m(x, order).square().sum(1))
        step(model, lambda x=x, order=order: model(x, order).square().sum(), each, kind)


@WAYS
@pytest.mark.parametrize("rows", [True, False], ids=["one row", "no rows"])
def test_packed_documents_change_in_every_step(rows, kind):
    torch.manual_seed(1)
    model = mlp()
    for ends in ENDS:
        x = random(ends[-1], D)
        each = alone(model, lambda m, x=x, ends=ends: (squares(m, x[a:b]) for a, b in itertools.pairwise(ends)))
        given = x[None] if rows else x
        packed = unsum.packed(torch.tensor(ends))
        step(model, lambda given=given: squares(model, given), each, kind, samples=packed)


class Attending(nn.Module):
    """Attention inside each document, by a mask."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, 3)

    def forward(self, x, of):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = (of[:, :, None] == of[:, None, :]) & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@WAYS
def test_packed_documents_that_a_mask_keeps_apart_change_in_every_step(kind):
    torch.manual_seed(1)
    model = Attending().double()
    for ends in ENDS:
        x, cu = random(1, ends[-1], D), torch.tensor(ends)
        of = torch.repeat_interleave(torch.arange(len(ends) - 1), cu.diff())[None]
        loss = lambda m, x=x, of=of: m(x, of).square().sum(-1)[0]
        each = alone(model, lambda m, ends=ends, loss=loss: (loss(m)[a:b].sum() for a, b in itertools.pairwise(ends)))
        step(model, lambda loss=loss: loss(model).sum(), each, kind, samples=unsum.packed(cu))


@WAYS
def test_ids_of_rows_change_in_every_step(kind):
    torch.manual_seed(1)
    model = mlp()
    for ids in ([3], [7, 7, 3, 7], [7, 3, 3, 7], [0, 1, 2, 3], [5, 5, 5, 5], [2, 9, 2], [1, 0, 1, 0, 4, 0]):
        x, given = random(len(ids), 2, D), torch.tensor(ids)
        each = alone(model, lambda m, x=x, given=given: (squares(m, x[given == i]) for i in given.unique()))
        step(model, lambda x=x: squares(model, x), each, kind, samples=given)


@WAYS
def test_ids_of_positions_change_in_every_step(kind):
    torch.manual_seed(1)
    model = mlp()
    for n, t in SHAPES:
        x, ids = random(n, t, D), torch.randint(0, 4, (n, t))
        each = alone(model, lambda m, x=x, ids=ids: (squares(m, x[ids == i]) for i in ids.unique()))
        step(model, lambda x=x: squares(model, x), each, kind, samples=ids)


@WAYS
@pytest.mark.parametrize("name", ["mlp", "convolutions"])
@pytest.mark.parametrize("first", [True, False], ids=["the first batch", "a later batch"])
def test_a_batch_without_samples(first, name, kind):
    torch.manual_seed(1)
    make, batch, loss = CHANGING[name]
    model = make().double()
    for n in ([] if first else [4, 4, 4]) + [0, 3, 0, 0, 3]:
        given = batch(n, 3)
        if n:
            step(model, lambda given=given: loss(model, *given), per_sample_gradients(model, loss, *given), kind)
            continue
        reducer = unsum.Norms()
        with unsum.gradients(model, *([reducer] if kind == "norms" else [])) as g:
            loss(model, *given).backward()
        assert (g[reducer].norms() if kind == "norms" else g.norms()).shape == (0,)
        if kind == "kept":
            assert all(g[name].per_sample().shape == (0, *p.shape) for name, p in model.named_parameters())


class Rolled(nn.Module):
    """`back`: rows are rolled along the samples and back; else the rolled rows are added to the others."""

    def __init__(self, back):
        super().__init__()
        self.a, self.b, self.shift, self.back = nn.Linear(D, 6), nn.Linear(6, 4), 0, back

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h.roll(self.shift, 0)).roll(-self.shift, 0) if self.back else self.b(h + h.roll(self.shift, 0))


@WAYS
def test_a_roll_along_the_samples_and_back_by_another_shift_in_every_step(kind):
    torch.manual_seed(1)
    model, x = Rolled(True).double(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    for shift in (0, 0, 1, 2, 1, -1, 3, 0, 4):
        model.shift = shift
        step(model, lambda: squares(model, x), each, kind)


@WAYS
@pytest.mark.parametrize("shifts", [(0, 0, 0, 1, 0, 2, 4, 3), (1, 0, 0, 0, 0, 1)], ids=["apart first", "mixed first"])
def test_a_roll_that_makes_samples_interact_is_refused_in_the_steps_in_which_it_does(shifts, kind):
    torch.manual_seed(1)
    model, x = Rolled(False).double(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    for shift in shifts:
        model.shift = shift
        if shift % 4:
            with pytest.raises(InteractionError):
                with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                    squares(model, x).backward()
        else:
            step(model, lambda: squares(model, x), each, kind)


class Aside(nn.Module):
    """An auxiliary branch of some of the rows. `give` decides what becomes of it."""

    def __init__(self, give):
        super().__init__()
        self.a, self.b, self.aside, self.give = nn.Linear(D, 6), nn.Linear(6, 4), nn.Linear(6, 4), give
        self.rows = (0, 0)

    def forward(self, x):
        h, (begin, end) = torch.tanh(self.a(x)), self.rows
        return self.give(self.b(h), self.aside(h[begin:end]).exp(), begin, end)


def padded(out, aside, begin, end):
    return out + F.pad(aside, (0, 0, begin, len(out) - end))


def joined(out, aside, begin, end):
    return torch.cat([out[:begin], out[begin:end] + aside, out[end:]])


def written(out, aside, begin, end):
    out = out.clone()
    out[begin:end] += aside
    return out


def inside(out, aside, begin, end):
    return out.square().sum() + aside.sum()


def apart(out, aside, begin, end):
    return out, aside


def aside_losses(model, x):
    """(n,), whatever the model gives."""
    h, (begin, end) = torch.tanh(model.a(x)), model.rows
    if model.give in (inside, apart):
        each = model.b(h).square().sum(1)
        return each + F.pad(model.aside(h[begin:end]).exp().sum(1), (begin, len(x) - end))
    return padded(model.b(h), model.aside(h[begin:end]).exp(), begin, end).square().sum(1)


SLICES = {
    "the first rows": [(0, 2), (0, 2), (0, 2), (0, 3), (0, 1), (0, 4), (0, 2), (0, 0)],
    "two rows anywhere": [(0, 2), (0, 2), (1, 3), (2, 4), (1, 3), (0, 2), (2, 4)],
}


@WAYS
@pytest.mark.parametrize("give", [padded, joined, written, inside, apart])
@pytest.mark.parametrize("slices", SLICES)
def test_a_branch_of_other_rows_in_every_step(slices, give, kind):
    torch.manual_seed(1)
    model, x = Aside(give).double(), random(4, D)

    def run():
        out = model(x)
        return out if give is inside else out[0].square().sum() + out[1].sum() if give is apart else out.square().sum()

    for rows in SLICES[slices]:
        model.rows = rows
        step(model, run, alone(model, lambda m: aside_losses(m, x)), kind)
