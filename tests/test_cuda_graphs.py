"""Inside the capture of a CUDA graph, blocks are refused before anything changes; nothing of it needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import UnsupportedError


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)


class Capturing:
    """In the place of `torch.cuda.graph`: within it, torch says that the stream is captured."""

    def __init__(self, patch):
        self.patch, self.now, self.asked = patch, False, 0
        patch.setattr(torch.cuda, "_initialized", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", self.ask)

    def ask(self):
        self.asked += 1
        return self.now

    def __enter__(self):
        self.now = True

    def __exit__(self, *error):
        self.now = False


@pytest.fixture
def capturing(monkeypatch):
    return Capturing(monkeypatch)


BLOCKS = {
    "unsum.gradients": lambda model: unsum.gradients(model, unsum.Norms()),
    "unsum.capture": lambda model: unsum.capture(model, "0:output", "2:grad_output"),
    "unsum.edit": lambda model: unsum.edit(model, {"0:output": unsum.zero()}),
    "unsum.watch": lambda model: unsum.watch(model, every=1),
    "unsum.clip_per_sample": lambda model: unsum.clip_per_sample(model, max_norm=1.0),
    "unsum.private": lambda model: unsum.private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        max_norm=1.0,
        noise_multiplier=1.0,
        expected_batch=5,
        sample_rate=0.1,
    ),
}
KINDS = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)


def hooks_of(model):
    return [
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ] + [len(p._backward_hooks or ()) for p in model.parameters()]


@KINDS
def test_a_block_is_not_opened_inside_a_capture(net, capturing, make):
    model, x = net
    engine, block = torch.autograd._engine_run_backward, make(model)
    with capturing, pytest.raises(UnsupportedError, match="CUDA graph") as error:
        block.__enter__()
    assert "write: " in str(error.value) and "reduce-overhead" in str(error.value)
    assert hooks_of(model) == [0] * len(hooks_of(model))
    assert torch.autograd._engine_run_backward is engine
    with block:  # outside the capture the same block opens
        model(x).square().sum().backward()
    assert hooks_of(model) == [0] * len(hooks_of(model))


@KINDS
def test_a_forward_inside_a_capture_is_refused(net, capturing, make):
    model, x = net
    with pytest.raises(UnsupportedError, match="CUDA graph"), make(model), capturing:
        model(x)
    assert hooks_of(model) == [0] * len(hooks_of(model))
    assert all(p.grad is None for p in model.parameters())


@KINDS
def test_a_backward_inside_a_capture_is_refused_and_grad_is_untouched(net, capturing, make):
    model, x = net
    before = [torch.ones_like(p) for p in model.parameters()]
    block = make(model)
    if make is not BLOCKS["unsum.private"]:  # which refuses a .grad from outside
        for p, grad in zip(model.parameters(), before, strict=True):
            p.grad = grad
    with pytest.raises(UnsupportedError, match="CUDA graph"), block:
        loss = model(x).square().sum()
        with capturing:
            loss.backward()
    assert hooks_of(model) == [0] * len(hooks_of(model))
    for p, grad in zip(model.parameters(), before, strict=True):
        assert p.grad is None or (p.grad is grad and bool((grad == 1).all()))


def test_without_a_block_a_capture_is_as_ever(net, capturing):
    model, x = net
    with capturing:
        model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_where_cuda_was_never_used_torch_is_not_asked(net, capturing, monkeypatch):
    model, x = net
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    for make in (BLOCKS["unsum.gradients"], BLOCKS["unsum.capture"]):
        with make(model):
            model(x).square().sum().backward()
    assert capturing.asked == 0


def graphed(layer, n):
    """A layer as `torch.cuda.make_graphed_callables` makes it: gradients in the same memory each time."""
    o, i = layer.weight.shape
    given, out, grads = torch.empty(n, i), torch.empty(n, o), (torch.empty(n, i), torch.empty(o, i), torch.empty(o))

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            torch.addmm(bias, given.copy_(x), weight.t(), out=out)
            return out.detach()

        @staticmethod
        def backward(ctx, grad):
            torch.mm(grad, layer.weight.detach(), out=grads[0])
            torch.mm(grad.t(), given, out=grads[1])
            torch.sum(grad, 0, out=grads[2])
            return tuple(each.detach() for each in grads)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return Graphed.apply(x, self.layer.weight, self.layer.bias)

    return Layer()


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("interacting", ["error", "exact"])
def test_graphed_callables_are_refused_by_name(net, place, interacting):
    model, x = net
    model[place] = graphed(model[place], 5)
    with pytest.raises(UnsupportedError, match="GraphedBackward.*same memory"):
        with unsum.gradients(model, interacting=interacting):
            model(x).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
