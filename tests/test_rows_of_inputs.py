"""Models that return their loss alone, or scale, sort and turn their inputs first: whose a row is follows from what the
model does with its inputs in this very step, never from sums that agree or from the step before."""

import math
import random

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_each_row, norms_of
from unsum.errors import InteractionError, UnknownSamples, UnsumError
from unsum.graph.layout import Regular
from unsum.learn.rows import Rows

D = 4
pytestmark = pytest.mark.usefixtures("doubles")


def test_owners_of_views_by_where_they_lie():
    """Random views of random tensors, against the same views of the owners themselves."""
    pick = random.Random(0)
    for _ in range(1500):
        shape = [pick.randint(1, 4) for _ in range(pick.randint(1, 4))]
        x = torch.arange(1000.0)[pick.randint(0, 5) :][: math.prod(shape)].view(shape)
        x = x.permute(*pick.sample(range(x.dim()), x.dim()))
        x = x.narrow(0, 0, pick.randint(1, x.shape[0]))
        dim = pick.randrange(x.dim())
        layout = Regular(tuple(x.shape), x.shape[dim], dim, 1)
        owners, view = layout.owner().expand(x.shape), x
        for _ in range(pick.randint(1, 4)):
            k = pick.randrange(view.dim()) if view.dim() else 0
            at = pick.randrange(view.shape[k]) if view.dim() else 0
            change = pick.choice(
                [
                    lambda t, k=k: t.unsqueeze(k),
                    lambda t, k=k: t.movedim(k, 0) if t.dim() else t,
                    lambda t, k=k, at=at: t.narrow(k, at, t.shape[k] - at) if t.dim() else t,
                    lambda t, k=k, at=at: t.select(k, at) if t.dim() > 1 else t,
                    lambda t, k=k: t.movedim(k, 0)[::2].movedim(0, k) if t.dim() else t,
                ]
            )
            view, owners = change(view), change(owners)
        rows = Rows()
        rows.remember(x, layout, layout.n, 0)
        (place,) = next(iter(rows._extents.values()))
        torch.testing.assert_close(place.owners_of(view).long(), owners.long())


class Alone(nn.Module):
    """A loss alone, of inputs that were changed by a function of the caller's choice."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(D, D), nn.Linear(D, 2), change

    def forward(self, *given):
        return self.b(torch.tanh(self.a(self.change(*given)))).square().sum()


@pytest.mark.parametrize("engine", ["auto", "graph"])
@pytest.mark.parametrize("first", [[5, 5, 5], [2, 5, 3]])
def test_samples_that_are_sorted_inside(first, engine):
    class Sorted(Alone):
        def forward(self, x, lengths):
            order = lengths.argsort(descending=True, stable=True)
            scores = self.b(torch.tanh(self.a(self.change(x[order]))))
            return (scores.square().sum(-1) * (torch.arange(x.shape[1]) < lengths[order][:, None])).sum()

    for change in (lambda x: x, lambda x: x / 2, lambda x: x.clone()):
        model = Sorted(change)
        for lengths in (first, [2, 5, 3], [1, 2, 5], [5, 5, 5], [3, 2, 1]):
            assert_each_row(model, model, torch.randn(3, 5, D), torch.tensor(lengths), engine=engine)


CHANGED = {
    "sine": torch.sin,
    "softmax": lambda x: x.softmax(-1),
    "sums along time": lambda x: x.cumsum(1),
    "a mask": lambda x: (x > 0).double(),
    "scaled to length one": lambda x: F.normalize(x, dim=-1),
    "gelu, then turned": lambda x: F.gelu(x).flip(0)[torch.arange(len(x)).flip(0)],
    "rounded": lambda x: (4 * x).round() / 4,
}


@pytest.mark.parametrize("change", CHANGED)
def test_inputs_that_are_changed_number_by_number_or_within_a_sample(change):
    model = Alone(CHANGED[change])
    for n, t in ((3, 5), (3, 5), (4, 4), (2, 3), (1, 5), (5, 3)):
        assert_each_row(model, model, torch.randn(n, t, D))


@pytest.mark.parametrize("inputs", ["one-hot", "equal rows", "zeros and ones"])
def test_rows_that_look_alike_are_not_told_by_their_looks(inputs):
    order = torch.tensor([2, 0, 1])
    model = Alone(lambda x: x[order] if len(x) == 3 else x)
    for _ in range(4):
        x = {
            "one-hot": F.one_hot(torch.randperm(D)[:3], D).double(),
            "equal rows": torch.randn(1, D).repeat(3, 1),
            "zeros and ones": torch.randint(2, (3, D)).double(),
        }[inputs]
        assert_each_row(model, model, x)


TURNS = {
    "as it is": lambda x, k: x / 2,
    "other rows": lambda x, k: (x / 2)[torch.arange(len(x)).roll(k)],
    "turned over": lambda x, k: (x / 2).transpose(0, 1).contiguous(),
    "flipped": lambda x, k: x.flip(0) * 2,
    "twice": lambda x, k: torch.cat([x, x]) if k % 2 else torch.cat([x, -x], 1),
    "padded": lambda x, k: F.pad(x, (0, 0, 1, k)),
    "stacked": lambda x, k: torch.stack([x, x + 1], 1 + k % 2),
}


@pytest.mark.parametrize("square", [True, False])
def test_what_is_done_with_inputs_changes_from_step_to_step(square):
    """Without a node in the graph, whatever is done to them; n is the length, or it is not."""
    ways = list(TURNS.values())

    class Changing(Alone):
        def forward(self, x):
            return super().forward(x)

    current = [ways[0]]
    model = Changing(lambda x: current[0](x, 1))
    for k in range(30):
        current[0] = ways[(3 * k) % len(ways)]
        model.change = lambda x, k=k: current[0](x, k)
        n, t = (4, 4) if square else (3, 5)
        assert_each_row(model, model, torch.randn(n, t, D))


class Classes(nn.Module):
    """Samples against classes that all of them share, of inputs that are scaled; a branch may appear."""

    def __init__(self):
        super().__init__()
        self.a, self.inner, self.text, self.is_on = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(2, D), False

    def forward(self, x, classes):
        h = torch.tanh(self.a(x / 2))
        return (self.inner(h) if self.is_on else h) @ self.text(classes).t()


def test_a_branch_that_appears_where_as_many_classes_are_shared_as_there_are_samples():
    model, refused = Classes(), 0
    for n, model.is_on in ((4, False), (4, False), (5, False), (3, False), (3, True), (3, True), (4, True), (3, True)):
        x, classes = torch.randn(n, D), torch.randn(3, 2)
        loss = lambda x, classes=classes: model(x, classes).square().sum()
        try:
            assert_each_row(model, loss, x)
        except UnsumError:  # in the step in which it appears, nobody was watching
            refused += 1
    assert refused <= 1


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.tokens, self.text = nn.Linear(6, D), nn.Embedding(9, D), nn.Linear(D, D)

    def forward(self, pixels, ids, mask):
        image, text = self.image(pixels), self.text((self.tokens(ids) * mask[..., None]).sum(1))
        return {"scores": image @ text.t(), "text": text}


@pytest.mark.parametrize("order", [("pixels", "ids", "mask"), ("ids", "mask", "pixels")])
@pytest.mark.parametrize("sizes", [(1, 4, 5), (4, 1, 5), (3, 3), (5, 3, 1)])
def test_outputs_with_rows_of_both_kinds(sizes, order):
    """The loss goes through the scores: their rows are the samples, whichever came first, and whichever is returned
    beside them."""
    model = Clip()
    for n in sizes:
        shared = {"ids": torch.randint(9, (3, 5)), "mask": torch.ones(3, 5, dtype=torch.long)}

        def loss(x, y, shared=shared):
            given = {"pixels": x, **shared}
            return F.cross_entropy(model(**{name: given[name] for name in order})["scores"], y, reduction="sum")

        try:
            assert_each_row(model, loss, torch.randn(n, 6), torch.randint(3, (n,)))
        except InteractionError:
            assert n == 3 and n == sizes[0]  # as many texts as images, at first sight: these may be pairs


def test_a_loss_beside_what_all_samples_share():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Linear(D, D), nn.Linear(2, D)

        def forward(self, x, y, classes):
            text = self.text(classes)
            return F.cross_entropy(self.image(x) @ text.t(), y, reduction="sum"), text

    model = Net()
    for n in (4, 4, 5, 3, 1):
        classes = torch.randn(3, 2)
        loss = lambda x, y, classes=classes: model(x, y, classes)[0]
        assert_each_row(model, loss, torch.randn(n, D), torch.randint(3, (n,)))


MIXED = {
    "mixup": lambda h: 0.7 * h + 0.3 * h.roll(1, 0),
    "centred": lambda h: h - h.mean(0),
    "attention": lambda h: (h @ h.t()).softmax(-1) @ h,
    "largest": lambda h: h - h.amax(0),
}


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x / 255, lambda x: (x - 0.4) / 0.2, lambda x: x.softmax(-1)])
@pytest.mark.parametrize("mix", MIXED)
def test_interaction_that_appears_at_some_step_is_refused_in_it(mix, change):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.out, self.is_on = nn.Linear(D, D), nn.Linear(D, 2), False

        def forward(self, x):
            h = torch.tanh(self.a(change(x)))
            return self.out(MIXED[mix](h) if self.is_on else h)

    model = Net()
    for model.is_on in (False, False, False, True, False, True, True, False):
        x = torch.randn(4, D)
        if model.is_on:
            with pytest.raises(InteractionError):
                with unsum.gradients(model):
                    model(x).square().sum().backward()
        else:
            assert_each_row(model, lambda x: model(x).square().sum(), x)


@pytest.mark.parametrize("kind", ["statistics of the input", "of what was made of it"])
def test_interaction_is_refused_at_once_where_shared_inputs_come_first(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.context = nn.Linear(6, D), nn.Linear(5, D), nn.Linear(6, D)

        def forward(self, classes, x):
            if kind == "statistics of the input":
                h = self.image(x) + self.context(x.mean(0, keepdim=True))
            else:
                h = torch.tanh(self.image(x / 2))
                h = h - h.mean(0)
            return h @ self.text(classes).t()

    model = Net()
    for _ in range(3):
        with pytest.raises(InteractionError):
            with unsum.gradients(model):
                model(torch.randn(3, 5), torch.randn(4, 6)).square().sum().backward()


def test_shuffled_negatives_are_inputs_like_others():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, D), nn.Linear(2, D), nn.Linear(D, 1)

        def forward(self, x, y):
            return self.out(torch.tanh(self.a(x) + self.b(y)))[:, 0]

    model = Net()
    for _ in range(3):
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        assert_each_row(model, lambda x, y, z: (model(x, y) - model(x, z).exp()).sum(), x, y, y[torch.randperm(5)])


def test_an_expert_that_gets_all_rows_and_then_none():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.expert, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x):
            h, chosen = torch.tanh(self.a(x)), x[:, 0] > 0
            return self.out(torch.zeros_like(h).index_add(0, chosen.nonzero()[:, 0], self.expert(h[chosen])))

    model = Net()
    for sign in (1, -1, 1, -1, -1):
        x = torch.randn(4, D)
        x[:, 0] = sign
        assert_each_row(model, lambda x: model(x).square().sum(), x)


IN_PLACE, MOVED = torch.arange(D), torch.tensor([1, 2, 3, 0])
MOVES = {  # of the rows of a raw input, from some step on
    "flipped": lambda x, on: x.flip(0) if on else x,
    "rolled": lambda x, on: x.roll(1, 0) if on else x,
    "put together otherwise": lambda x, on: torch.cat([x[2:], x[:2]]) if on else x,
    "stacked otherwise": lambda x, on: torch.stack([x[3], x[2], x[1], x[0]]) if on else x,
    "flipped and scaled": lambda x, on: x.flip(0) * 2 if on else x,
    "in random order": lambda x, on: x[torch.randperm(len(x))] if on else x,
    "by another index": lambda x, on: x[MOVED if on else IN_PLACE],
    "by another list": lambda x, on: x[[1, 2, 3, 0] if on else [0, 1, 2, 3]],
    "by another index_select": lambda x, on: x.index_select(0, MOVED if on else IN_PLACE),
    "gathered": lambda x, on: x.gather(0, (MOVED if on else IN_PLACE)[:, None].expand(D, D)),
    "sorted": lambda x, on: x[x[:, 0].argsort(descending=on)],
}


class Moving(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.a, self.b, self.move, self.on = nn.Linear(D, D), nn.Linear(D, 2), move, False

    def forward(self, x):
        return self.b(torch.tanh(self.a(self.move(x, self.on))))


def norms_in(model, x, **options):
    with unsum.gradients(model, unsum.Norms(), **options) as g:
        model(x).square().sum().backward()
    return g[unsum.Norms].norms()


def norms_of_rows(model, x):
    """One row at a time, wherever the model puts it."""
    return norms_of(per_sample_gradients(model, lambda m, x: m.b(torch.tanh(m.a(x))).square().sum(), x))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("move", MOVES)
def test_rows_of_raw_inputs_that_are_moved_from_some_step_on_are_refused(move, is_compiled, compiled_calls):
    """Though this leaves no node, and the loop is so well known that its forward is no longer watched."""
    model = Moving(MOVES[move])
    called = torch.compile(model, backend="aot_eager") if is_compiled else model
    for step in range(9):
        model.on, x = step >= 5, torch.randn(D, D)
        x = x[x[:, 0].argsort()] if move == "sorted" and not model.on else x
        if model.on:
            with pytest.raises(UnknownSamples):
                norms_in(called, x)
        else:
            torch.testing.assert_close(norms_in(called, x), norms_of_rows(model, x))


def test_raw_inputs_that_are_changed_within_samples_from_some_step_on():
    """The step in which it begins is refused, since nobody watched it. That the dimension was said does not say that
    the rows are in their order."""
    mirrored = lambda x, on: x.flip(1) if on else x
    for said in ({}, {"samples": unsum.dim(0)}):
        model, refused = Moving(mirrored), []
        for step in range(9):
            model.on, x = step >= 5, torch.randn(D, D)
            try:
                found = norms_in(model, x, **said)
            except UnknownSamples:
                refused.append(step)
                continue
            torch.testing.assert_close(found, norms_of_rows(model, mirrored(x, model.on)))
        assert refused == [5]


class MovingIn(Moving):
    def forward(self, x):
        x = self.move(x, self.on)
        torch._dynamo.graph_break()
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("move", ["flipped", "rolled", "by another index"])
def test_rows_of_raw_inputs_that_are_moved_before_a_graph_break(move, compiled_calls):
    model = MovingIn(MOVES[move])
    called = torch.compile(model, backend="aot_eager")
    for step in range(9):
        model.on, x = step >= 5, torch.randn(D, D)
        if model.on:
            with pytest.raises(UnknownSamples):
                norms_in(called, x)
        else:
            torch.testing.assert_close(norms_in(called, x), norms_of_rows(model, x))
