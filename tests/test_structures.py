"""What is remembered of a structure is not taken for what another step does with the same kinds of nodes: each program
here was answered wrongly once, from some step on."""

import pytest
import torch
from reference import each_of
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import InteractionError, UnsumError

D = 4
pytestmark = pytest.mark.usefixtures("doubles")


def assert_step(model, loss, *batch, run=None):
    """One block, against each row run alone. `loss(*batch)` is a sum over rows; a step with more to it than that has a
    loss of its own, `run()`."""
    model.zero_grad()
    with unsum.gradients(model) as g:
        (run() if run else loss(*batch)).backward()
    each = each_of(model, (loss(*(t[i : i + 1] for t in batch)) for i in range(len(batch[0]))))
    for name, wanted in each.items():
        torch.testing.assert_close(g[name].per_sample(), wanted, msg=name)
    return g


class TimeFirst(nn.Module):
    """Batch first outside, time first inside; the loss alone comes out."""

    def __init__(self, states=False):
        super().__init__()
        self.inner, self.head, self.states = nn.GRU(D, D, 2), nn.Linear(D, 3), states

    def forward(self, x):
        out, last = self.inner(x.transpose(0, 1))
        return self.head(last if self.states else out).square().sum()


@pytest.mark.parametrize("states", [False, True])
def test_sizes_inside_a_model_that_returns_its_loss_alone_decide_nothing(states):
    model = TimeFirst(states)
    for n, t in ((4, 4), (2, 6), (2, 5), (3, 5), (4, 3)):
        assert_step(model, model, torch.randn(n, t, D))


def test_a_loss_alone_of_inputs_that_were_scaled():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x / 255))).square().sum()

    model = Net()
    for n, t in ((1, 5), (1, 5), (1, 6), (4, 6), (4, 4), (1, 3), (5, 1)):
        assert_step(model, model, 100 * torch.randn(n, t, D))


def test_tokens_that_are_time_first():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(9, D), nn.Linear(D, 2)

        def forward(self, ids):
            return self.head(self.tokens(ids.t()).tanh()).square().sum()

    model = Net()
    for n, t in ((3, 5), (4, 4), (2, 3)):
        assert_step(model, model, torch.randint(9, (n, t)))


def refused(model, run):
    with pytest.raises(InteractionError), unsum.gradients(model):
        run().backward()


def test_batch_norm_of_the_input_that_begins_to_train():
    model = nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 2)).eval()
    loss = lambda x: model(x).square().sum()
    for n in (4, 5, 3):
        assert_step(model, loss, torch.randn(n, D))
    model.train()
    for n in (4, 5):
        refused(model, lambda n=n: loss(torch.randn(n, D)))


@pytest.mark.parametrize("kind", [F.embedding, F.embedding_bag])
def test_counts_over_the_batch_that_begin_later(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head, self.counts = nn.Parameter(torch.randn(5, D)), nn.Linear(D, 2), False

        def forward(self, ids):
            return self.head(kind(ids, self.table, scale_grad_by_freq=self.counts).flatten(1)[:, :D])

    model = Net()
    loss = lambda ids: model(ids).square().sum()
    for n in (4, 4, 3):
        assert_step(model, loss, torch.randint(5, (n, 3)))
    model.counts = True
    refused(model, lambda: loss(torch.zeros(4, 3, dtype=torch.long)))


def test_a_parameter_that_goes_through_the_same_module_as_data():
    model = nn.ModuleDict({"a": nn.Linear(D, D), "h": nn.Linear(D, D)})
    model.q = nn.Parameter(torch.randn(D, D))
    loss = lambda x: model["h"](torch.tanh(model["a"](x))).square().sum()
    for _ in range(5):
        x = torch.randn(D, D)
        g = assert_step(model, loss, x, run=lambda x=x: loss(x) + model["h"](model.q * 1.0).square().sum())
        torch.testing.assert_close(g["q"].shared(), model.q.grad)


def test_prototypes_beside_the_classes_of_samples():
    model = nn.ModuleDict({"a": nn.Linear(D, D), "e": nn.Embedding(4, D)})

    def loss(x, y):
        prototypes = model["e"](torch.arange(4))
        losses = F.cross_entropy((torch.tanh(model["a"](x)) + model["e"](y)) @ prototypes.t(), y, reduction="none")
        return losses.sum()

    for n in (4, 4, 4, 3, 4, 5):
        assert_step(model, loss, torch.randn(n, D), torch.randint(4, (n,)))


def test_outputs_that_change_places():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x, swap):
            out, weight = self.b(torch.tanh(self.a(x))), self.a.weight * 1.0
            return (weight, out) if swap else (out, weight)

    model = Net()
    for swap in (0, 0, 0, 1, 0, 1):
        x = torch.randn(D, D)

        def run(x=x, swap=swap):
            one, other = model(x, swap)
            return one.square().sum() + other.square().sum()

        g = assert_step(model, lambda x: model(x, 0)[0].square().sum(), x, run=run)
        torch.testing.assert_close(g["a.weight"].shared(), 2 * model.a.weight.detach())


def test_a_layer_that_is_frozen_inside_the_block():
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), torch.randn(3, D)
    for step in range(4):
        model.requires_grad_(True)
        with unsum.gradients(model) as g:
            model[0].requires_grad_(step % 2 == 0)
            model(x).square().sum().backward()
        assert g["2.weight"].per_sample().shape == (3, 2, D)


def test_an_auxiliary_output_that_has_as_many_numbers_as_there_are_samples():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.head = nn.Linear(D, 4), nn.Linear(4, 2)

        def forward(self, x):
            p = self.gate(x).softmax(-1)
            return self.head(p), p.mean(0)

    model = Net()
    for n in (3, 4, 4, 5):
        with unsum.gradients(model) as g:
            out, load = model(torch.randn(n, D))
            (out.square().sum() + load.square().sum()).backward()
        assert g["gate.weight"].per_sample().shape == (n, 4, D)


def test_errors_are_unsums_own():
    model = TimeFirst(states=True)
    for n in (2, 6, 2, 1, 6):
        right_or_refused(model, model, torch.randn(n, 3, D))


# ---- a second reading ------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    """Time first, and flattened: (T·n, D), from which n cannot be told."""

    def __init__(self, gives="loss"):
        super().__init__()
        self.a, self.b, self.c, self.gives, self.more = nn.Linear(D, D), nn.Linear(D, 2), nn.Linear(D, 2), gives, False

    def forward(self, x):
        out = self.b(torch.tanh(self.a(x.transpose(0, 1).reshape(-1, D))))
        loss = out.square().sum()
        if self.more:
            loss = loss + torch.tanh(self.c(x * 2)).square().sum()
        return out if self.gives == "rows" else loss


def right_or_refused(model, loss, *batch):
    try:
        assert_step(model, loss, *batch)
    except UnsumError:
        return False
    return True


@pytest.mark.parametrize("gives", ["loss", "rows"])
@pytest.mark.parametrize(
    "sizes", [[(6, 2), (4, 3), (2, 6)], [(2, 5), (5, 2)], [(4, 1), (4, 4), (3, 2)], [(2, 3)] * 3 + [(3, 2)]]
)
def test_as_many_rows_in_all_are_not_as_many_samples(sizes, gives):
    model = Flat(gives)
    loss = lambda x: model(x).square().sum() if gives == "rows" else model(x)
    done = 0
    for n, t in sizes:
        done += right_or_refused(model, loss, torch.randn(n, t, D))
    assert done


@pytest.mark.parametrize("steps", [(0, 0, 0, 1, 1, 0, 1), (0, 0, 1, 1)])
def test_a_branch_on_the_inputs_that_appears_later_is_right_or_refused(steps):
    model = Flat()
    done = []
    for more in steps:
        model.more = bool(more)
        done.append(right_or_refused(model, model, torch.randn(3, 2, D)))
    assert done[0] and done[-1]


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx, grad):
        return grad.transpose(0, 1)


def test_inputs_that_a_custom_function_turns_in_some_steps():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.turns = nn.Linear(D, D), False

        def forward(self, x):
            return torch.tanh(self.a(Turned.apply(x) if self.turns else x)).square().sum()

    model = Net()
    for n, t, turns in ((2, 2, 0), (1, 1, 1), (2, 2, 1), (3, 2, 0), (3, 2, 1), (2, 3, 1), (2, 2, 0), (2, 2, 1)):
        model.turns = bool(turns)
        right_or_refused(model, model, torch.randn(n, t, D))


def test_a_part_of_the_model_that_is_called_on_the_turned_input():
    model = nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Linear(D, 2)})
    loss = lambda x: model["b"](torch.tanh(model["a"](x))).square().sum() + model["b"](x.transpose(0, 1)).square().sum()
    for n, t in ((3, 3), (2, 2), (3, 2)):
        right_or_refused(model, loss, torch.randn(n, t, D))


def test_positions_as_the_first_argument():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.a = nn.Embedding(9, D), nn.Linear(D, 2)

        def forward(self, places, x):
            return self.a(torch.tanh(x + self.places(places))).square().sum()

    model = Net()
    for n, t in ((3, 2), (1, 2), (3, 2), (4, 5)):
        x, places = torch.randn(n, t, D), torch.arange(t)[None]
        right_or_refused(model, lambda x, places=places: model(places, x), x)


LYING = {
    "dense": lambda x: x.clone(),
    "expanded": lambda x: x[:1].expand_as(x),
    "turned": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "a part": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "backwards": lambda x: x.flip(0),
}


@pytest.mark.parametrize("head", ["scores", "loss"])
@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_inputs_that_lie_otherwise_in_memory(kind, head):
    """What was learnt of dense inputs, whose rows are found again in the graph, is asked of others without any."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Embedding(9, D) if kind == "tokens" else nn.Linear(D, D)
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x):
            scores = self.out(torch.tanh(self.inner(self.read(x))))
            return scores if head == "scores" else scores.square().sum()

    model, generator = Net(), torch.Generator().manual_seed(0)
    for way in ["dense"] * 3 + ["expanded", "dense", "turned", "expanded", "a part", "turned", "backwards", *LYING] * 2:
        n, t = (int(k) for k in torch.randint(2, 6, (2,), generator=generator))
        x = torch.randint(9, (n, t)) if kind == "tokens" else torch.randn(n, t, D)
        x = LYING[way](x)
        assert_step(model, (lambda x: model(x).square().sum()) if head == "scores" else model, x)
