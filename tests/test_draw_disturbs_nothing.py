"""Drawing runs no hook, no checkpoint and no function of the user, changes no state and holds no graph."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsum
from drawn import article, draw, in_graph, norms_at
from unsum.errors import OptionError


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn_like(grad)


def test_a_custom_function_is_never_called_by_drawing():
    x = torch.randn(3, requires_grad=True)
    loss = Noisy.apply(x.exp()).sum()
    state = torch.get_rng_state()
    for flow in (None, True):
        drawn = draw(loss, data={"x": x}, flow=flow)
        assert torch.equal(torch.get_rng_state(), state)
    assert "custom function" in drawn.all(direction="backward", gradient="stored")[0].get("aria-label")
    assert [name for name, _ in norms_at(drawn)] == ["sum"]


def test_no_hook_fires_no_grad_moves_no_random_number_is_drawn_and_the_backward_follows():
    model, x, y, loss = article(relu=True)
    fired = []
    model.fc1.register_forward_hook(lambda *_: fired.append("forward"))
    model.fc1.weight.register_hook(lambda grad: fired.append("gradient"))
    loss.register_hook(lambda grad: fired.append("loss"))
    loss.grad_fn.register_prehook(lambda grads: fired.append("node"))
    state = torch.get_rng_state()
    for flow in (None, True, False):
        unsum.draw(loss, model, {"x": x, "y": y}, flow=flow).save
    assert not fired and model.fc1.weight.grad is None and torch.equal(torch.get_rng_state(), state)
    loss.backward(retain_graph=True)
    fired.clear()
    grad = model.fc1.weight.grad.clone()
    unsum.draw(loss, model, {"x": x, "y": y})
    assert not fired and torch.equal(model.fc1.weight.grad, grad)
    loss.backward()
    assert torch.allclose(model.fc1.weight.grad, 2 * grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_drawn_without_computing_it_again(reentrant):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 4, requires_grad=True)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
    calls.clear()
    drawn = draw(loss, model, {"x": x})
    assert not calls
    if not reentrant:
        assert set(drawn.tensors("parameter")) == set(dict(model.named_parameters()))
        with pytest.raises(OptionError, match="checkpoint"):
            unsum.draw(loss, model, flow=True)
    loss.backward()
    expected = torch.autograd.grad(model(x.detach()).square().sum(), model[0].weight)[0]
    assert torch.allclose(model[0].weight.grad, expected)
    unsum.draw(loss, model, {"x": x})


def test_a_picture_holds_no_graph():
    model, x, y, loss = article()
    picture = unsum.draw(loss, model, {"x": x, "y": y})
    node = in_graph(loss)
    there = weakref.ref(x)
    del loss, x, y
    gc.collect()
    assert node() is None and there() is None and picture.svg


def test_a_model_with_dropout_draws_the_same_picture_twice():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(5, 4)
    loss = model(x).sum()
    assert unsum.draw(loss, model, {"x": x}).svg == unsum.draw(loss, model, {"x": x}).svg


class Inside(nn.Module):
    """A layer within a reentrant checkpoint, and one after it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(checkpoint(lambda h: torch.tanh(self.a(h)), x, use_reentrant=True))


@pytest.mark.parametrize("retained", [False, True])
def test_a_reentrant_checkpoint_is_not_run_by_drawing(retained):
    model, x, fired = Inside(), torch.randn(3, 4, requires_grad=True), []
    loss = model(x).sum()
    if retained:
        loss.backward(retain_graph=True)
        model.zero_grad()
        x.grad = None
    model.a.weight.register_hook(lambda grad: fired.append("hook"))
    model.a.register_forward_hook(lambda *_: fired.append("forward"))
    drawn = draw(loss, model, {"x": x}, flow=True)
    assert not fired and model.a.weight.grad is None
    assert "custom function" in next(
        g.get("aria-label") for g in drawn.all(direction="backward", gradient="stored") if " x " in g.get("aria-label")
    )
    assert any(g.get("data-norm") for g in drawn.all(direction="backward"))  # before the checkpoint it is known


def test_a_reentrant_checkpoint_hides_what_is_inside_and_says_so():
    model, x = Inside(), torch.randn(3, 4, requires_grad=True)
    notes = draw(model(x).sum(), model, {"x": x}).notes()
    assert "reentrant checkpoint" in notes and "not reached" not in notes and "may use them" in notes
