"""Convolutions with channels last: the gradient is laid out once, for unsum and for torch, and nothing else changes."""

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn

import unsum
from unsum.step import channels_last


class ChannelsFirst(torch.autograd.Function):
    """Nothing; its gradient has channels first, as that of a GPU's batch norm in evaluation has."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


class Turn(nn.Module):
    def forward(self, x):
        return ChannelsFirst.apply(x)


def net(dims):
    conv, turned, norm = (
        (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d)
        if dims == 2
        else (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d)
    )
    return nn.Sequential(
        conv(3, 4, 3, padding=1), Turn(), norm(4), nn.ReLU(), conv(4, 6, 2, 2, groups=2, bias=False), Turn(), nn.Tanh(),
        turned(6, 4, 2), Turn(), conv(4, 5, 1), Turn(), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


def loss(model, x):
    return model(x).square().sum()


@pytest.fixture
def laid(monkeypatch):
    """As on a GPU. Of each gradient that came to a convolution: whether it was laid out anew."""
    found, real = [], channels_last._as_image

    def noted(node, delta):
        given = real(node, delta)
        found.append(given is not delta)
        return given

    monkeypatch.setattr(channels_last, "DEVICES", {"cpu"})
    monkeypatch.setattr(channels_last, "_as_image", noted)
    return found


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("dims", [2, 3])
def test_gradients_are_those_of_one_sample_at_a_time(dims, last, laid):
    torch.manual_seed(0)
    model, x = net(dims).double(), torch.randn(3, 3, *(6,) * dims, dtype=torch.float64)
    model(x)
    model.eval()
    wanted = per_sample_gradients(model, loss, x)
    if last:
        form = torch.channels_last if dims == 2 else torch.channels_last_3d
        model, x = model.to(memory_format=form), x.to(memory_format=form)
    norms = norms_of_all(wanted)
    clip = lambda norms: (0.5 * norms.mean() / norms).clamp(max=1)
    for k in range(6):
        model.zero_grad()
        laid.clear()
        reducers = [[], [unsum.Norms()], [unsum.WeightedSum(clip)]][k % 3]
        with unsum.gradients(model, *reducers) as g:
            loss(model, x).backward()
        assert (
            (laid.count(True) == 4 if dims == 2 else any(laid)) if last else not any(laid)
        )  # a CPU has 3-D as it likes
        for name, value in wanted.items():
            torch.testing.assert_close(model.get_parameter(name).grad, value.sum(0))
            if not reducers:
                torch.testing.assert_close(g[name].per_sample(), value)
        if reducers:
            torch.testing.assert_close(reducers[0].norms(), norms)
        if k % 3 == 2:
            for name, value in reducers[0].sum().items():
                torch.testing.assert_close(value, torch.einsum("n,n...->...", clip(norms), wanted[name]))


def test_torch_gets_what_was_laid_out(laid):
    """The convolution's own backward sees the copy, so that it makes none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Turn()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution_backward.default:
                seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
            return func(*args, **(kwargs or {}))

    for _ in range(2):  # learned, and again
        with unsum.gradients(model, unsum.Norms()):
            out = loss(model, x)
            with Mode():
                out.backward()
    assert seen[-1] and laid[-1]


def test_a_capture_beside_it_sees_what_flows(laid):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Turn()).double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    for _ in range(2):
        with unsum.capture(model, "0:grad_output") as got, unsum.gradients(model, unsum.Norms()):
            out = model(x)
            out.square().sum().backward()
        torch.testing.assert_close(got["0:grad_output"], 2 * out.detach())
