"""Inputs that a model pads, joins, writes into buffers or keeps; and calls whose samples another call or backward must
not settle. Right, or refused; and never is the user's data changed."""

import pytest
import torch
from reference import each_of
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_each_row
from unsum.errors import InteractionError, UnsumError

D = 4
pytestmark = pytest.mark.usefixtures("doubles")


class Alone(nn.Module):
    """A loss alone, of inputs that were changed first."""

    def __init__(self, change, read=None):
        super().__init__()
        self.read, self.out, self.change = read or nn.Linear(D, D), nn.Linear(D, 2), change

    def forward(self, x):
        return self.out(torch.tanh(self.read(self.change(x)))).square().sum()


JOINED = {
    "padded with zeros": lambda x: F.pad(x, (0, 0, 1, 0)),
    "padded with ones": lambda x: F.pad(x, (0, 0, 1, 0), value=1.0),
    "padded with twos": lambda x: F.pad(x, (0, 0, 2, 1), "constant", 2.0),
    "padded by reflection": lambda x: F.pad(x.transpose(1, 2), (1, 1), mode="reflect").transpose(1, 2),
    "joined in front": lambda x: torch.cat([x.new_ones(len(x), 1, D), x], 1),
    "joined with its sine": lambda x: torch.cat([x, x.sin()], 1),
    "stacked with its sums": lambda x: torch.stack([x, x.cumsum(1)], 1),
}


@pytest.mark.parametrize("way", JOINED)
def test_positions_that_are_added_to_a_sample_are_its_own(way):
    model = Alone(JOINED[way])
    for n, t in ((3, 5), (3, 5), (4, 4), (2, 3), (1, 5), (5, 3)):
        assert_each_row(model, model, torch.randn(n, t, D))


@pytest.mark.parametrize("value", [0, 1, 2, 8])
def test_a_first_token_whatever_its_number(value):
    for change in (
        lambda ids: F.pad(ids, (1, 0), value=value),
        lambda ids: torch.cat([torch.full((len(ids), 1), value), ids], 1),
    ):
        model = Alone(change, nn.Embedding(9, D))
        for n, t in ((3, 5), (3, 4), (4, 4), (1, 2)):
            assert_each_row(model, model, torch.randint(9, (n, t)))


def _exchanged(x):
    b = x.clone()
    b[[0, -1]] = b[[-1, 0]]
    return b


WRITTEN = {
    "copied": lambda x: x.clone().copy_(x.flip(0)),
    "put": lambda x: (x / 2).index_copy_(0, torch.arange(len(x)).flip(0), x),
    "selected": lambda x: torch.index_select(x, 0, torch.arange(len(x)).flip(0), out=x.clone()),
    "exchanged": _exchanged,
    "joined into a buffer": lambda x: torch.cat([x.flip(0)[:1], x.flip(0)[1:]], 0, out=torch.empty_like(x)),
    "changed in place": lambda x: x.clone().sub_(0.5).clamp_(-1, 1),
}


@pytest.mark.parametrize("way", WRITTEN)
def test_rows_that_are_written_elsewhere(way):
    model, right = Alone(WRITTEN[way]), 0
    for n, t in ((3, 5), (3, 5), (4, 4), (2, 3)):
        try:
            assert_each_row(model, model, torch.randn(n, t, D))
            right += 1
        except UnsumError:  # of what was written to, nothing is known
            assert way != "changed in place"
    assert way != "changed in place" or right == 4


def test_a_buffer_of_the_users_is_not_written_to_again():
    buffer = torch.zeros(3, 2, D)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(D, 2)

        def forward(self, x, y):
            torch.stack([x, y], 1, out=buffer)
            return self.a(buffer.clone())

    model, x, y = Net(), torch.randn(3, D), torch.randn(3, D)
    for _ in range(3):
        with unsum.gradients(model):
            model(x, y).square().sum().backward()
        torch.testing.assert_close(buffer, torch.stack([x, y], 1))


def test_a_model_that_keeps_what_it_was_given():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.last = nn.Linear(D, 2), None

        def forward(self, x):
            self.last = x
            return self.a(x)

    model, x = Net(), torch.randn(3, D)
    for _ in range(4):
        assert_each_row(model, lambda x: model(x).square().sum(), x)


CHOSEN = {
    "a mask": lambda x: (x > 0).double(),
    "a mask times one": lambda x: (x > 0) * 1.0,
    "a choice": lambda x: F.one_hot(x.argmax(-1), D).double(),
}


@pytest.mark.parametrize("way", CHOSEN)
def test_numbers_from_choices_are_data(way):
    class Net(nn.Module):
        def __init__(self, mixes):
            super().__init__()
            self.a, self.b, self.mixes = nn.Linear(D, D), nn.Linear(D, 2), mixes

        def forward(self, x):
            h = self.a(CHOSEN[way](x))
            return self.b(x) + self.b(h.mean(0) if self.mixes else h)

    model = Net(False)
    for _ in range(3):
        assert_each_row(model, lambda x: model(x).square().sum(), torch.randn(4, D))
    model = Net(True)
    for _ in range(3):
        with pytest.raises(InteractionError):
            with unsum.gradients(model):
                model(torch.randn(4, D)).square().sum().backward()


# ---- calls beside each other --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", ["in order", "reversed"])
def test_losses_of_micro_batches_that_are_computed_first(backwards):
    model, x = Alone(lambda x: x), torch.randn(6, 3, D)
    each = each_of(model, (model(x[i : i + 1]) for i in range(6)))
    for _ in range(3):
        with unsum.gradients(model) as g:
            losses = [model(part) for part in x.split(2)]
            for loss in losses if backwards == "in order" else reversed(losses):
                loss.backward()
        for name, wanted in each.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


class Shared(nn.Module):
    """Classes that all samples share come first, and are returned as well."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(5, D), nn.Linear(6, D)

    def forward(self, classes, x):
        text = self.text(classes)
        return self.image(x) @ text.t(), text


@pytest.mark.parametrize("between", ["nothing", "a look before", "a look after", "another model", "another view"])
def test_what_comes_between_does_not_settle_how_a_call_is_read(between):
    model, other = Shared(), nn.Linear(D, 2)
    for n in (4, 4, 5, 3, 4):
        classes, x = torch.randn(3, 5), torch.randn(n, 6)
        each = each_of(model, (model(classes, x[i : i + 1])[0].square().sum() for i in range(n)))
        try:
            with unsum.gradients(model) as g:
                if between == "a look before":
                    with torch.no_grad():
                        model(classes, x)
                scores = model(classes, x)[0]
                if between == "a look after":
                    with torch.no_grad():
                        model(classes, x)
                if between == "another model":
                    other(torch.randn(2, D)).sum().backward()
                loss = scores.square().sum()
                if between == "another view":
                    loss = loss + 0 * model(classes, x)[0].square().sum()
                loss.backward()
        except UnsumError:
            assert n == 3 or between in ("another view", "a look after")
            continue
        for name, wanted in each.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x / 2, lambda x: x.sin()])
def test_no_other_dimension_without_evidence(change):
    """n is the length: centred along time is right, centred over the batch is refused, also from some step on."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.out, self.dim = nn.Linear(D, D), nn.Linear(D, 2), 1

        def forward(self, x):
            h = torch.tanh(self.a(change(x)))
            return self.out(h - h.mean(self.dim, keepdim=True))

    model = Net()
    for model.dim in (1, 1, 1, 1, 0, 1, 0, 0):
        x = torch.randn(4, 4, D)
        if model.dim:
            assert_each_row(model, lambda x: model(x).square().sum(), x)
        else:
            with pytest.raises(InteractionError):
                with unsum.gradients(model):
                    model(x).square().sum().backward()
