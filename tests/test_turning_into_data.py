"""The same structure, with other things in it: what belonged to nobody in one batch may be data in the next. What was
learnt of the one may not be taken for the other."""

import pytest
import torch
from torch import nn

import unsum
from one_by_one import assert_both
from unsum.errors import InteractionError, SamplesError, UnsumError

pytestmark = pytest.mark.usefixtures("doubles")
D = 4


class Beside(nn.Module):
    """A branch beside the outputs: of an anchor that all samples share, or of the samples themselves."""

    def __init__(self, change):
        super().__init__()
        self.a, self.k, self.anchor, self.change, self.is_own = nn.Linear(D, D), nn.Linear(D, D), None, change, False
        self.anchor = torch.randn(5, D)

    def forward(self, x):
        self.beside = self.k(self.change(x) if self.is_own else self.anchor).square().sum()
        return self.a(x)

    def loss(self, x):
        return self(x).square().sum() + self.beside


CHANGES = {"as they are": lambda x: x, "halved": lambda x: x / 2, "turned": lambda x: x.flip(1)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_an_anchor_that_turns_into_samples(change, start):
    model = Beside(CHANGES[change])
    right = 0
    for step in range(8):
        model.is_own = step >= start
        x = torch.randn(4, D)
        wanted = [torch.autograd.grad(model.loss(x[i : i + 1]), model.k.weight)[0] for i in range(4)]
        try:
            with unsum.gradients(model) as g:
                model.loss(x).backward()
        except SamplesError:  # once, if at all: from then on the forward is watched
            assert step == start > 1
            continue
        found = g["k.weight"].per_sample()
        right += 1
        torch.testing.assert_close(found, torch.stack(wanted) if model.is_own else torch.zeros_like(found))
    assert right >= 7


class Keys(nn.Module):
    """Keys of the batch itself, of a memory, or of zeros where the context is dropped."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.memory = nn.Linear(D, D), nn.Linear(D, D), torch.randn(4, D)

    def forward(self, x, keys):
        own = {"own": lambda: x, "halved": lambda: x / 2, "memory": lambda: self.memory}
        given = own[keys]() if keys in own else torch.zeros(len(x), D)
        return (self.q(x) @ self.k(given).t()).softmax(-1)


@pytest.mark.parametrize("own", ["own", "halved"])
@pytest.mark.parametrize("other", ["memory", "zeros"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_keys_that_turn_into_those_of_the_batch_are_refused_in_every_step(own, other, before):
    model = Keys()
    for keys in [own] * 2 + [other] * before + [own] * 3 + [other] + [own] * 2:
        x = torch.randn(4, D)
        if keys == own:
            with pytest.raises(UnsumError), unsum.gradients(model, unsum.Norms()):
                model(x, keys).square().sum().backward()
        else:
            run = lambda x=x, keys=keys: model(x, keys).square().sum()
            if other == "memory":
                assert_both(model, run, lambda i, x=x, keys=keys: model(x[i : i + 1], keys).square().sum(), 4)


def test_a_gate_of_a_memory_or_of_the_sample():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.k, self.b = (nn.Linear(D, D) for _ in range(3))
            self.memory, self.is_own = torch.randn(8, D), True

        def forward(self, x):
            return self.b((self.a(x) * self.k(x if self.is_own else self.memory[: len(x)])).tanh())

    model = Gated()
    for model.is_own, n in ((True, 1), (False, 1), (True, 5), (True, 1), (True, 5)):
        x = torch.randn(n, D)
        run = lambda x=x: model(x).square().sum()
        assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), n)


def test_weights_that_are_computed_anew_in_every_step_are_no_data():
    """Also where their sizes are those of the samples."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(D, D)), nn.Linear(D, 2)

        def forward(self, x):
            scale = self.w.detach().norm(dim=1, keepdim=True)
            return self.b(torch.tanh(x @ (self.w / scale * torch.linspace(1, 2, D))))

    model = Drawn()
    for _ in range(5):
        x = torch.randn(D, D)
        run = lambda x=x: model(x).square().sum()
        assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), D)


def test_samples_that_interact_after_a_harmless_step_are_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.is_on = nn.Linear(D, D), nn.Linear(D, 2), False

        def forward(self, x):
            h = self.a(x)
            return self.b(h - (h.mean(0) if self.is_on else self.a.bias))

    model = Centred()
    for model.is_on in (False, False, True, False, True):
        x = torch.randn(4, D)
        if model.is_on:
            with pytest.raises(InteractionError), unsum.gradients(model, unsum.Norms()):
                model(x).square().sum().backward()
        else:
            run = lambda x=x: model(x).square().sum()
            assert_both(model, run, lambda i, x=x: model(x[i : i + 1]).square().sum(), 4)


# ---- branches beside the outputs ----------------------------------------------------------------------------------

ORDERS = {
    "shuffled": lambda x: x[torch.randperm(len(x))],
    "sorted": lambda x: x[x[:, 0].argsort()],
    "chosen": lambda x: x[torch.rand(len(x)).argsort()[: len(x) // 2]],
    "turned by chance": lambda x: x.flip(0) if torch.rand(()) < 0.5 else x + 0.0,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("frozen", [False, True], ids=["raw", "behind a frozen layer"])
def test_rows_that_move_otherwise_in_every_batch_beside_the_outputs(order, frozen):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.a, self.k = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, 2), nn.Linear(D, D)

        def forward(self, x):
            h = self.f(x) if frozen else x
            self.moved = ORDERS[order](h)
            return self.a(h), self.k(self.moved).square().sum()

    model = Two()
    for _ in range(7):
        x = torch.randn(4, D)
        with unsum.gradients(model) as g:
            out, beside = model(x)
            (out.square().sum() + beside).backward()
        h = model.f(x) if frozen else x
        wanted = []
        for row in h:
            own = [moved for moved in model.moved if torch.equal(moved, row)]
            loss = sum((model.k(each).square().sum() for each in own), model.k.weight.sum() * 0)
            wanted.append(torch.autograd.grad(loss, model.k.weight)[0])
        torch.testing.assert_close(g["k.weight"].per_sample(), torch.stack(wanted))


WRITTEN = {
    "an attribute": lambda m, x: setattr(m, "memory", x + 0.1),
    "a buffer that is written to": lambda m, x: m.memory.copy_(x * 2),
    "a part of it": lambda m, x: m.memory.__setitem__(slice(0, 2), x[:2] * 2),
    "its memory": lambda m, x: setattr(m.memory, "data", x * 2),
    "its memory, unseen": lambda m, x: m.memory.set_(x.clone()),
}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_memory_that_is_filled_with_samples_is_right_or_refused(how, start):
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.k, self.is_on, self.memory = nn.Linear(D, 2), nn.Linear(D, D), False, torch.randn(4, D)

        def forward(self, x):
            if self.is_on:
                WRITTEN[how](self, x)
            return self.a(x), self.k(self.memory).square().sum()

    model = Remembering()
    for step in range(7):
        model.is_on = step >= start
        try:
            with unsum.gradients(model) as g:
                out, beside = model(torch.randn(4, D))
                (out.square().sum() + beside).backward()
        except SamplesError:
            assert model.is_on
            continue
        found = g["k.weight"].per_sample()
        if model.is_on and how != "a part of it":
            rows = [torch.autograd.grad(model.k(row).square().sum(), model.k.weight)[0] for row in model.memory]
            torch.testing.assert_close(found, torch.stack(rows))
        else:
            assert not model.is_on and not found.any()


@pytest.mark.parametrize("chosen", [[0, 1], [0], [0, 0, 1, 1], [0, 1, 0, 1], [1, 3]], ids=str)
def test_rows_that_are_chosen_and_changed(chosen):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.k = nn.Linear(D, 2), nn.Linear(D, D)

        def forward(self, x):
            return self.a(x), self.k(x[torch.tensor(chosen)] * 2).square().sum()

    model = Chosen()
    for n in (4, 5):
        x = torch.randn(n, D)
        with unsum.gradients(model) as g:
            out, beside = model(x)
            (out.square().sum() + beside).backward()
        for i, found in enumerate(g["k.weight"].per_sample()):
            loss = model.k(x[i] * 2).square().sum() * chosen.count(i)
            torch.testing.assert_close(found, torch.autograd.grad(loss, model.k.weight)[0])


def test_a_penalty_with_tensors_of_its_own_is_nobodys_if_the_losses_are_marked():
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2))
    stars, seen = [p.detach() + 0.1 for p in model.parameters()], []
    for n in (4, 5, 4, 7):
        x = torch.randn(n, D)
        penalty = lambda: sum((0.3 * (p - star) ** 2).sum() for p, star in zip(model.parameters(), stars, strict=True))
        if n == 4 and not seen:
            with pytest.raises(SamplesError, match="mark_samples"), unsum.gradients(model):
                (model(x).square().sum() + penalty()).backward()
        seen.append(n)
        with unsum.gradients(model) as g:
            losses = unsum.mark_samples(model(x).square().sum(1))
            (losses.sum() + penalty()).backward()
        wanted = torch.autograd.grad(penalty(), list(model.parameters()))
        for (name, _), shared in zip(model.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(g[name].shared(), shared)
        rows = [torch.autograd.grad(model(row[None]).square().sum(), model[0].weight)[0] for row in x]
        torch.testing.assert_close(g["0.weight"].per_sample(), torch.stack(rows))
