"""Compiled calls of a block that wants no `.grad`: another backward through them, inside or outside of the block,
brings true gradients or is refused. It never finds zeros."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import UnsupportedError


class Net(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(8, 16), nn.Linear(16, 3), breaks

    def forward(self, x):
        h = self.first(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(h)


def build(breaks):
    torch.manual_seed(0)
    model = Net(breaks).double()
    return model, torch.compile(model, backend="aot_eager")


def batch(k):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (4,), generator=generator), torch.rand(4, generator=generator, dtype=torch.float64)


def plain(model, x, y, w):
    loss = (F.cross_entropy(model(x), y, reduction="none") * w).sum()
    return torch.autograd.grad(loss, list(model.parameters()))


REDUCERS = {
    "norms": unsum.Norms,
    "moments": unsum.SecondMoment,
    "projections": lambda: unsum.Project(k=2),
    "clipped": lambda: unsum.WeightedSum(lambda norms: 1 / norms),
}


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two parts"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_weighted_backward_after_the_block(reducer, breaks, compiled_calls):
    model, compiled = build(breaks)
    for k in range(6):
        x, y, w = batch(k)
        model.zero_grad()
        before = len(compiled_calls)
        with unsum.gradients(compiled, REDUCERS[reducer](), grad=False):
            losses = F.cross_entropy(compiled(x), y, reduction="none")
            losses.sum().backward(retain_graph=True)
        ran_compiled = len(compiled_calls) > before
        assert all(p.grad is None for p in model.parameters())
        is_refused = ran_compiled and reducer != "norms"
        with pytest.raises(UnsupportedError, match="another backward") if is_refused else contextlib.nullcontext():
            (losses * w).sum().backward()
        if not is_refused:
            for parameter, wanted in zip(model.parameters(), plain(model, x, y, w), strict=True):
                torch.testing.assert_close(parameter.grad, wanted)
    assert ran_compiled or (breaks and reducer == "clipped")


@pytest.mark.parametrize("asked", ["a parameter", "the input"])
def test_torch_autograd_grad_inside_the_block(asked, compiled_calls):
    model, compiled = build(False)
    for k in range(6):
        x, y, w = batch(k)
        x.requires_grad_()
        before, moments = len(compiled_calls), unsum.SecondMoment()
        with unsum.gradients(compiled, moments, grad=False):
            losses = F.cross_entropy(compiled(x), y, reduction="none")
            given = model.first.weight if asked == "a parameter" else x
            is_refused = len(compiled_calls) > before and asked == "a parameter"
            with pytest.raises(UnsupportedError, match="another backward") if is_refused else contextlib.nullcontext():
                (found,) = torch.autograd.grad((losses * w).sum(), [given], retain_graph=True)
                (wanted,) = torch.autograd.grad((F.cross_entropy(model(x), y, reduction="none") * w).sum(), [given])
                torch.testing.assert_close(found, wanted)
            if asked == "the input":
                losses.sum().backward()
        assert all(p.grad is None for p in model.parameters())


def test_clipping_of_a_forward_whose_backward_comes_too_late(compiled_calls):
    _, compiled = build(False)
    for k in range(5):
        x, y, _ = batch(k)
        late = pytest.warns(UserWarning, match="no backward came") if k == 4 else contextlib.nullcontext()
        with late, unsum.clip_per_sample(compiled, max_norm=0.1):
            loss = F.cross_entropy(compiled(x), y, reduction="sum")
            if k < 4:
                loss.backward()
    assert compiled_calls
    with pytest.raises(UnsupportedError, match="another backward"):
        loss.backward()


@pytest.mark.parametrize("reducer", ["norms", "moments"])
def test_a_block_that_is_opened_between_forward_and_backward_leaves_grad_alone(reducer, compiled_calls):
    model, compiled = build(False)
    critic = nn.Linear(3, 1).double()
    for k in range(6):
        x, _, _ = batch(k)
        before = [torch.full_like(p, 7) for p in model.parameters()]
        for parameter, grad in zip(model.parameters(), before, strict=True):
            parameter.grad = grad
        with unsum.gradients(compiled, REDUCERS[reducer](), grad=False):
            made = compiled(x)
            with unsum.gradients(critic, unsum.Norms()):
                critic(made).square().sum().backward()
        for parameter, grad in zip(model.parameters(), before, strict=True):
            assert parameter.grad is grad
            assert bool((grad == 7).all())
    assert compiled_calls


def test_inputs_that_are_given_leave_grad_alone(compiled_calls):
    model, compiled = build(False)
    before = torch.ones_like(model.first.weight)
    model.first.weight.grad = before
    for k in range(5):
        x, y, _ = batch(k)
        with unsum.gradients(compiled, unsum.SecondMoment(), grad=False):
            F.cross_entropy(compiled(x), y, reduction="sum").backward(inputs=list(model.parameters()))
        assert model.first.weight.grad is before
        assert torch.equal(before, torch.ones_like(before))
        assert model.last.weight.grad is None
    assert compiled_calls
