"""A step is right, or refused, whatever came before it: refused steps, failed ones, interactions that come and go."""

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from changing_nets import WAYS, Moody, centred, moody
from one_by_one import assert_same, random, squares, step
from small_nets import D, mlp
from unsum.errors import InteractionError


def broken_hook(h):
    h.register_hook(lambda grad: 1 / 0)
    return h


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


def broken_forward(h):
    raise ZeroDivisionError("in forward")


MOODS = {
    "refused": (centred, InteractionError),
    "a hook that fails": (broken_hook, ZeroDivisionError),
    "a node that fails": (Broken.apply, ZeroDivisionError),
    "a forward that fails": (broken_forward, ZeroDivisionError),
}


@WAYS
@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_step_that_failed_leaves_the_next_as_if_it_had_not_been(before, mood, kind):
    model, x = moody(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    bad, error = MOODS[mood]
    for _ in range(before):
        step(model, lambda: squares(model, x), each, kind)
    for _ in range(2):
        model.zero_grad()
        model.mood = bad
        with pytest.raises(error):
            with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                squares(model, x).backward()
        if error is InteractionError:
            assert all(p.grad is None for p in model.parameters())
        model.mood = None
        for _ in range(2):
            step(model, lambda: squares(model, x), each, kind)


@WAYS
@pytest.mark.parametrize("mood", MOODS)
def test_a_backward_that_failed_leaves_the_next_of_the_same_block_as_if_it_had_not_been(mood, kind):
    model, x, bad_x = moody(), random(4, D), random(3, D)
    bad, error = MOODS[mood]
    each = per_sample_gradients(model, squares, x)
    reducer = unsum.Norms() if kind == "norms" else None
    for _ in range(2):
        with unsum.gradients(model, *([reducer] if reducer else [])) as g:
            model.mood = bad
            with pytest.raises(error):
                squares(model, bad_x).backward()
            model.mood = None
            squares(model, x).backward()
        assert_same(g, each, reducer=reducer)


@WAYS
@pytest.mark.parametrize("when", [lambda i: i == 6, lambda i: i % 4 == 3, lambda i: i >= 5], ids=["6", "4th", "from 5"])
def test_a_penalty_that_appears_later_belongs_to_nobody(when, kind):
    model, x = mlp(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    weight, bias = model[2].weight, model[0].bias
    shared = {"2.weight": 0.2 * weight.detach(), "0.bias": 0.4 * bias.detach()}
    penalty = lambda: 0.1 * weight.square().sum() + 0.2 * bias.square().sum()
    for i in range(12):
        run = (lambda: squares(model, x) + penalty()) if when(i) else (lambda: squares(model, x))
        step(model, run, each, kind, shared=shared if when(i) else None)


@WAYS
def test_a_penalty_inside_the_model_that_appears_later_belongs_to_nobody(kind):
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, x):
            self.calls += 1
            return self.net(x), (0.1 * self.net[2].weight.square().sum() if self.calls % 4 == 3 else None)

    model, x = Penalised(), random(4, D)
    each = alone(model, lambda m: m.net(x).square().sum(1))
    shared = {"net.2.weight": 0.2 * model.net[2].weight.detach()}

    def run():
        out, penalty = model(x)
        return out.square().sum() + (0 if penalty is None else penalty)

    for i in range(12):
        step(model, run, each, kind, shared=shared if i % 4 == 2 else None)


MIXING = {
    "centred": centred,
    "scaled by the batch": lambda h: h / h.norm(),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "attention over the batch": lambda h: (h @ h.T).softmax(1) @ h,
}


@WAYS
@pytest.mark.parametrize("mixing", MIXING)
@pytest.mark.parametrize("every", [4, 3])
def test_samples_that_interact_in_every_few_steps_are_refused_in_each_of_these(every, mixing, kind):
    torch.manual_seed(0)
    model, x = moody(), random(4, D)
    each = per_sample_gradients(model, squares, x)
    for counter in range(12):
        model.mood = MIXING[mixing] if counter % every == every - 1 else None
        if model.mood is None:
            step(model, lambda: squares(model, x), each, kind)
            continue
        model.zero_grad()
        with pytest.raises(InteractionError):
            with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                squares(model, x).backward()
        assert all(p.grad is None for p in model.parameters())


@WAYS
def test_samples_that_interact_in_one_step_of_a_long_loop_are_refused_in_that_one(kind):
    class Counting(Moody):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.mood = centred if self.calls == 9 else None
            return super().forward(x)

    torch.manual_seed(0)
    model = Counting().double()
    x = random(4, D)
    each = per_sample_gradients(moody(), squares, x)
    for i in range(12):
        if i == 8:
            with pytest.raises(InteractionError):
                with unsum.gradients(model, *([unsum.Norms()] if kind == "norms" else [])):
                    squares(model, x).backward()
        else:
            step(model, lambda: squares(model, x), each, kind)
