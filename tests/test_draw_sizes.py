"""Sizes of gradients in a picture are those of autograd, and there is none where a size cannot be known."""

import pytest
import torch
from torch import nn

import unsum
from drawn import article, draw, norms_at
from unsum.errors import OptionError


def test_sizes_of_what_flows_are_those_of_autograd():
    model, x, y, loss = article(relu=True)
    loss.backward(retain_graph=True)
    drawn = draw(loss, model, {"x": x, "y": y})
    out = model(x)
    out.retain_grad()
    (0.5 * ((out - y) ** 2).sum()).backward()
    sizes = {
        (g.get("data-tensor"), g.get("data-operation")): float(g.get("data-norm"))
        for g in drawn.all(direction="backward")
    }
    by_name = {name: g.get("data-key") for name, g in drawn.tensors().items()}
    sub = next(g for g in drawn.all(role="operation") if g.get("data-name") == "sub").get("data-key")
    (at_sub,) = [size for (tensor, op), size in sizes.items() if op == sub]
    assert at_sub == pytest.approx(float(out.grad.norm()), rel=1e-4)
    for name in ("fc1.weight", "fc2.weight"):
        (size,) = [size for (tensor, _), size in sizes.items() if tensor == by_name[name]]
        assert size == pytest.approx(float(dict(model.named_parameters())[name].grad.norm()) / 2, rel=1e-4)


def test_the_size_at_a_tensor_is_that_of_what_has_come_through_the_views():
    w, x = torch.randn(3, requires_grad=True), torch.randn(5, 3)
    loss = (w.expand(5, 3) * x).sum()
    (arrow,) = draw(loss, data={"w": w, "x": x}, flow=True).all(direction="backward", gradient="stored")
    assert float(arrow.get("data-norm")) == pytest.approx(float(x.sum(0).norm()))


def test_sizes_before_a_backward_only_if_asked_for_and_never_if_freed():
    model, x, y, loss = article()
    assert not draw(loss, model, {"x": x, "y": y}).root.findall(".//*[@data-norm]")
    asked = draw(loss, model, {"x": x, "y": y}, flow=True)
    assert all(g.get("data-norm") for g in asked.all(direction="backward"))
    loss.backward()
    freed = draw(loss, model, {"x": x, "y": y})
    assert [g.get("data-norm") is not None for g in freed.all(direction="backward", gradient="stored")] == [True, True]
    thrown = freed.all(direction="backward", gradient="thrown-away")
    assert all(g.get("data-norm") is None and "freed" in g.get("aria-label") for g in thrown)
    with pytest.raises(OptionError, match="freed"):
        unsum.draw(loss, model, flow=True)


def test_a_view_that_is_used_twice_gives_each_use_its_own_size():
    model, x = nn.Linear(4, 6), torch.randn(2, 4)
    h = model(x).transpose(0, 1)
    one, other = (h.relu() * 10).sum(), h.tanh().sum()
    parts = [float(torch.autograd.grad(part, h, retain_graph=True)[0].norm()) for part in (one, other)]
    found = dict(norms_at(draw(one + other, model, flow=True)))
    assert found["relu"] == pytest.approx(parts[0], rel=1e-4) and found["tanh"] == pytest.approx(parts[1], rel=1e-4)


def test_a_broadcast_that_is_used_twice_gives_no_number_that_is_not_its_own():
    w, x = torch.randn(3, requires_grad=True), torch.randn(5, 3)
    wide = (w * 2).expand(5, 3)
    drawn = draw((wide * x).sum() + wide.exp().sum(), data={"x": x}, flow=True)
    labels = [g.get("aria-label") for g in drawn.all(direction="backward") if "added to others" in g.get("aria-label")]
    assert len(labels) == 2


def test_sizes_of_complex_gradients_are_whole():
    w, x = torch.randn(3, 4, dtype=torch.cfloat, requires_grad=True), torch.randn(4, dtype=torch.cfloat)
    z = (w @ x) * 1j
    loss = z.abs().square().sum()
    (wanted,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert dict(norms_at(draw(loss, data={"x": x}, flow=True)))["abs"] == pytest.approx(float(wanted.norm()), rel=1e-4)


@pytest.mark.parametrize("by", ["edit", "hook"])
def test_behind_a_gradient_that_is_changed_there_is_no_number(by):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(2, 4)
    if by == "edit":
        with unsum.edit(model, {"1:grad_output": unsum.zero()}) as edited:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
        drawn = draw(loss, model, {"x": x}, show=[edited])
    else:
        h = model[1](model[0](x))
        h.register_hook(torch.zeros_like)
        loss = model[2](h).sum()
        loss.backward(retain_graph=True)
        drawn = draw(loss, model, {"x": x})
    names = [name for name, _ in norms_at(drawn)]
    assert "relu" not in names and "sum" in names
    labels = [g.get("aria-label") for g in drawn.all(direction="backward", gradient="thrown-away")]
    assert sum("has changed the gradient" in label for label in labels) == 1


def test_a_jagged_tensor_is_drawn_without_sizes():
    model = nn.Linear(4, 6)
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(4, 4)], layout=torch.jagged)
    loss = model(ragged).values().sum()
    loss.backward(retain_graph=True)
    drawn = draw(loss, model)
    assert set(drawn.tensors("parameter")) == {"weight", "bias"}
    assert any("cannot be called by hand" in g.get("aria-label") for g in drawn.all(direction="backward"))
