"""State belongs to the graph under differentiation: not to the thread, the last forward, or another model."""

import copy

import pytest
import torch
from reference import alone, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from changing_nets import WAYS, Last, both, token_norms
from one_by_one import assert_same, random, same, squares, step
from small_nets import D, mlp
from unsum.errors import InteractionError


def with_batch_norm(inputs):
    return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double().train()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_batch_norm_of_another_model_in_the_loss_forbids_nothing(frozen):
    """A discriminator, a perceptual network: samples mix in the loss, and each has its share."""
    model, x = mlp(), random(4, D)
    critic = with_batch_norm(4).requires_grad_(not frozen)
    out = model(x)
    (at,) = torch.autograd.grad(F.softplus(-critic(out)).mean(), out)
    each = alone(model, lambda m: (m(x) * at).sum(1))
    both(model, lambda: F.softplus(-critic(model(x))).mean(), each)


def test_batch_norm_of_another_model_that_sees_the_output_and_the_data():
    model, x = mlp(), random(4, D)
    eyes = with_batch_norm(4).requires_grad_(False)
    wanted = random(4, 4)
    loss = lambda out: (eyes(out) - eyes(wanted)).square().sum() + (out - wanted).square().sum()
    out = model(x)
    (at,) = torch.autograd.grad(loss(out), out)
    each = alone(model, lambda m: (m(x) * at).sum(1))
    both(model, lambda: loss(model(x)), each)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("same_model", [False, True], ids=["another model", "a copy of this model"])
def test_batch_norm_of_a_teacher_without_gradients_forbids_nothing(same_model, when):
    model = mlp(nn.BatchNorm1d(6)).eval() if same_model else mlp()
    teacher = (
        copy.deepcopy(model).train() if same_model else nn.Sequential(with_batch_norm(D), nn.Linear(1, 4).double())
    )
    x = random(4, D)
    with torch.no_grad():
        taught = teacher(x)

    def run():
        with torch.no_grad():
            first = teacher(x) if when == "before" else None
        out = model(x)
        with torch.no_grad():
            wanted = teacher(x) if first is None else first
        return F.mse_loss(out, wanted, reduction="sum")

    each = alone(model, lambda m: (m(x) - taught).square().sum(1))
    both(model, run, each)


@pytest.mark.parametrize("model_first", [False, True])
def test_batch_norm_of_this_model_is_refused_though_another_has_it_too(model_first):
    model, critic, x = mlp(nn.BatchNorm1d(6)), with_batch_norm(4), random(4, D)
    for reducers in ((), (unsum.Norms(),)) * 2:
        with pytest.raises(InteractionError):
            with unsum.gradients(model, *reducers):
                out = model(x) if model_first else None
                other = critic(random(4, 4)).sum()
                out = model(x) if out is None else out
                (out.square().sum() + other).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("part", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False), nn.LazyBatchNorm1d()])
def test_batch_norm_of_this_model_is_refused_in_training_and_right_in_evaluation(part):
    torch.manual_seed(0)
    x = random(4, D)
    model = nn.Sequential(nn.Linear(D, 6), part, nn.Linear(6, 4)).double()
    model(x)
    for training in (True, False, True, False):
        model.train(training)
        model.zero_grad()
        if training:
            with pytest.raises(InteractionError):
                with unsum.gradients(model):
                    squares(model, x).backward()
        else:
            both(model, lambda: squares(model, x), per_sample_gradients(model, squares, x))


def test_a_parameter_in_front_of_the_only_batch_norm_is_refused_and_one_behind_it_too():
    model, x = mlp(nn.BatchNorm1d(6)), random(4, D)
    for params in ("0.*", "1.*", "3.*"):
        with pytest.raises(InteractionError):
            with unsum.gradients(model, params=params):
                squares(model, x).backward()


def made(kind):
    torch.manual_seed(0)
    return mlp() if kind == "mlp" else Last().double()


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last forward first"])
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_two_forwards_and_then_two_backwards_give_the_samples_of_both(model, turned):
    model = made(model)
    for shapes in (((4, 3), (2, 5)), ((4, 3), (2, 5)), ((3, 3), (3, 3)), ((1, 1), (4, 2))):
        one, two = (random(*shape, D) for shape in shapes)
        first, second = (per_sample_gradients(model, squares, x) for x in (one, two))
        each = {name: torch.cat([first[name], second[name]]) for name in first}
        for reducer in (None, unsum.Norms()):
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                losses = [squares(model, one), squares(model, two)]
                for loss in reversed(losses) if turned else losses:
                    loss.backward()
            assert_same(g, each, reducer=reducer)


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "last forward first"])
@pytest.mark.parametrize("kind", [(unsum.TokenNorms,), (unsum.Norms, unsum.TokenNorms)], ids=["alone", "with norms"])
def test_two_forwards_and_then_two_backwards_give_the_tokens_of_both(kind, turned):
    model = mlp()
    for shapes in (((4, 3), (2, 5)), ((2, 5), (4, 3)), ((4, 3), (3, 3)), ((1, 1), (4, 2))):
        one, two = (random(*shape, D) for shape in shapes)
        longest = max(one.shape[1], two.shape[1])
        wanted = torch.cat(
            [F.pad(part, (0, longest - part.shape[1])) for part in map(token_norms, [model] * 2, (one, two))]
        )
        with unsum.gradients(model, *(k() for k in kind)) as g:
            losses = [squares(model, one), squares(model, two)]
            for loss in reversed(losses) if turned else losses:
                loss.backward()
        found = g[unsum.TokenNorms]
        assert not found.left_out
        same(found.norms(), wanted, 1e-9 * float(wanted.max()), "TokenNorms")


def ask_grad(loss, x):
    return torch.autograd.grad(loss, x)[0]


def ask_backward(loss, x):
    loss.backward(inputs=[x])
    found, x.grad = x.grad, None
    return found


@WAYS
@pytest.mark.parametrize("ask", [ask_grad, ask_backward])
@pytest.mark.parametrize("n", [4, 3], ids=["as many rows", "fewer rows"])
def test_gradients_for_the_inputs_alone_bring_no_samples(n, ask, kind):
    """Adversarial examples, Langevin dynamics: steps on the input, then one on the parameters."""
    model, x = mlp(), random(4, D)

    def moved(x):
        for _ in range(3):
            x = x.detach().requires_grad_()
            x = x + 0.1 * ask(squares(model, x), x).sign()
        return x.detach()

    run = lambda: (moved(x[:n]), squares(model, moved(x)))[1]
    each = per_sample_gradients(model, squares, moved(x))
    model.zero_grad()
    for _ in range(3):
        step(model, run, each, kind)


@WAYS
def test_gradients_for_inputs_that_stay_in_the_graph_bring_no_samples(kind):
    model, x = mlp(), random(4, D)

    def run():
        given = x.clone().requires_grad_()
        loss = squares(model, given)
        torch.autograd.grad(loss, given, retain_graph=True)
        return loss

    for _ in range(3):
        step(model, run, per_sample_gradients(model, squares, x), kind)


@WAYS
def test_a_backward_that_reaches_no_chosen_parameter_brings_no_samples(kind):
    model, x, other = mlp(), random(4, D), random(3, D)
    each = {name: part for name, part in per_sample_gradients(model, squares, x).items() if name.startswith("2.")}

    def run():
        squares(model[0], other).backward()  # of '0.*' alone
        torch.autograd.grad(squares(model, other), model[0].weight)
        return squares(model, x)

    reducer = unsum.Norms() if kind == "norms" else None
    for _ in range(3):
        with unsum.gradients(model, *([reducer] if reducer else []), params="2.*") as g:
            run().backward()
        assert_same(g, each, reducer=reducer)


@WAYS
def test_a_backward_of_another_model_brings_no_samples(kind):
    model, other, x = mlp(), with_batch_norm(D), random(4, D)

    def run():
        squares(other, random(3, D)).backward()
        return squares(model, x)

    for _ in range(3):
        step(model, run, per_sample_gradients(model, squares, x), kind)
