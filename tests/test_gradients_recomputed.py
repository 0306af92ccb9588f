"""Gradients by sample where a forward runs again inside the backward: under checkpoints, and in functions that hide a
backward of their own."""

import copy

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsum
from nets import SEQUENCES, Centred, D, N, in_float64, scalar, truth_of
from unsum.errors import InteractionError, UnsupportedError


class Checkpointed(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.norm, self.reentrant = nn.LayerNorm(D), reentrant

    def part(self, h):
        return torch.tanh(self.b(self.norm(torch.tanh(self.b(h)))))

    def forward(self, x):
        h = self.a(x)
        for _ in range(2):
            h = self.part(h) if self.reentrant is None else checkpoint(self.part, h, use_reentrant=self.reentrant)
        return self.c(h)


def test_checkpoints():
    torch.manual_seed(0)
    model = Checkpointed().double()
    truth = truth_of(model, SEQUENCES)
    scalar(model, SEQUENCES).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.reentrant = False
    with unsum.gradients(model) as g:
        for _ in range(2):
            scalar(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), torch.cat([wanted, wanted]))
    for p, wanted in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, 2 * wanted)


def test_reentrant_checkpoints():
    torch.manual_seed(0)
    model = Checkpointed().double()
    truth = truth_of(model, SEQUENCES)
    model.reentrant = True
    twin = copy.deepcopy(model)
    scalar(twin, SEQUENCES).backward()
    with unsum.gradients(model) as g:
        scalar(model, SEQUENCES).backward()
    for name, wanted in truth.items():
        torch.testing.assert_close(g[name].per_sample(), wanted)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_forward_hooks_fire_as_often_as_without_also_under_a_checkpoint():
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False).double()
    calls = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, out, name=name: calls.append(name))
    scalar(model, SEQUENCES).backward()
    without = calls.copy()
    calls.clear()
    with unsum.gradients(model):
        scalar(model, SEQUENCES).backward()
    assert sorted(calls) == sorted(without)
    square = nn.Linear(N, N).double()  # sizes coincide: the model is tried, and nobody hears it
    holder = nn.Sequential(square)
    square.register_forward_hook(lambda *a: heard.append(1))
    heard = []
    with unsum.gradients(holder):
        holder(SEQUENCES[:, 0, :N]).square().sum().backward()
    assert heard == [1]


@in_float64()
def test_a_checkpoint_that_is_switched_on_in_a_loop_works_after_one_refusal():
    inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    class Model(nn.Module):
        checkpointed = False

        def __init__(self):
            super().__init__()
            self.inner, self.last = inner, nn.Linear(4, 2)

        def forward(self, x):
            x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
            return self.last(x)

    model, failed = Model(), 0
    for k in range(8):
        model.checkpointed = k > 3
        x = torch.randn(N, 4)
        try:
            with unsum.gradients(model, unsum.Norms()) as g:
                losses = model(x).square().sum(1)
                losses.sum().backward()
        except UnsupportedError as error:
            failed += "under a checkpoint now" in str(error)
            continue
        truth = each_of(model, model(x).square().sum(1))
        wanted = sum(each.flatten(1).square().sum(1) for each in truth.values())
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), wanted)
    assert failed == 1


class Hidden(torch.autograd.Function):
    """Computes its layer again in backward, and lets a backward of its own bring the layer its gradient."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.layer(x)
        torch.autograd.backward(out, grad)
        return x.grad, None


class Hiding(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), inner

    def forward(self, x):
        return Hidden.apply(self.first(x), self.inner)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(D, D), lambda: Hiding(nn.Linear(D, D)), lambda: Centred()],
    ids=["a layer", "one inside another", "samples that interact"],
)  # fmt: skip
def test_a_backward_hidden_inside_a_backward(make):
    torch.manual_seed(0)
    model = Hiding(make()).double()
    if isinstance(model.inner, Centred):
        with pytest.raises(InteractionError, match="interact"):
            with unsum.gradients(model):
                scalar(model, SEQUENCES).backward()
        return
    twin = copy.deepcopy(model)
    x = SEQUENCES.clone().requires_grad_()
    fired = []
    model.first.weight.register_hook(lambda g: fired.append("first"))
    for _ in range(2):
        with unsum.gradients(model) as g:
            scalar(model, x).backward()
    for _ in range(2):
        scalar(twin, SEQUENCES.clone().requires_grad_()).backward()
    assert fired == ["first"] * 2
    for n in range(N):
        twin_one = copy.deepcopy(twin)
        twin_one.zero_grad()
        (scalar(twin_one, SEQUENCES[n : n + 1].clone().requires_grad_())).backward()
        for name, parameter in twin_one.named_parameters():
            torch.testing.assert_close(g[name].per_sample()[n], parameter.grad)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


class Sine(torch.autograd.Function):
    """w · sin(x): needs what it has saved, as most custom Functions do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return w * x.sin()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w * x.cos(), (grad * x.sin()).sum(0)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(5))

    def forward(self, x):
        return Sine.apply(x, self.w)


class WavesInACheckpoint(nn.Module):
    """`bare`: the checkpoint is given a function that calls the Function itself, in no module."""

    def __init__(self, *, bare=False, checkpointed=True):
        super().__init__()
        self.first, self.waves, self.last = nn.Linear(4, 5), Waves(), nn.Linear(5, 3)
        self.bare, self.checkpointed = bare, checkpointed

    def part(self, h):
        return Sine.apply(h, self.waves.w) if self.bare else self.waves(h)

    def forward(self, x):
        h = self.first(x)
        return self.last(checkpoint(self.part, h, use_reentrant=False) if self.checkpointed else self.part(h))


def test_a_custom_function_in_a_module_inside_a_checkpoint():
    torch.manual_seed(0)
    model = WavesInACheckpoint().double()
    for n in (3, 3, 6):  # learnt, remembered, derived
        x = torch.randn(n, 4, dtype=torch.float64)
        model.checkpointed = True
        with unsum.gradients(model) as g:
            model(x).square().sum().backward()
        model.checkpointed = False
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        for name, wanted in truth.items():
            torch.testing.assert_close(g[name].per_sample(), wanted)


def test_a_custom_function_outside_any_module_inside_a_checkpoint_is_refused_by_name():
    model = WavesInACheckpoint(bare=True)
    with pytest.raises(UnsupportedError, match="SineBackward is called inside a checkpoint"), unsum.gradients(model):
        model(torch.randn(3, 4)).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())


class Adapted(nn.Module):
    """Trained parameters are inside reentrant checkpoints alone, as LoRA's are: the graph of a backward has none."""

    def __init__(self, reentrant=True):
        super().__init__()
        self.frozen, self.body, self.reentrant = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, 11), reentrant

    def forward(self, x):
        h = self.frozen(x).requires_grad_()
        return checkpoint(self.body, h, use_reentrant=True) if self.reentrant else self.body(h)


def test_parameters_that_only_reentrant_checkpoints_hold():
    torch.manual_seed(0)
    model = Adapted().double()
    x = torch.randn(N, D, dtype=torch.float64)
    loss = lambda m, x: m(x).square().sum()
    model.reentrant = False
    truth = per_sample_gradients(model, loss, x)
    model.reentrant = True
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in truth.values()]).norm(dim=0)
    for rows in (N, N, N - 1):
        model.zero_grad()
        with unsum.gradients(model) as g:
            loss(model, x[:rows]).backward()
        for name, value in truth.items():
            torch.testing.assert_close(g[name].per_sample(), value[:rows])
            torch.testing.assert_close(model.get_parameter(name).grad, value[:rows].sum(0))
        with unsum.gradients(model, unsum.Norms()) as g:
            loss(model, x[:rows]).backward()
        torch.testing.assert_close(g.norms(), norms[:rows])
    model.zero_grad()
    bound = float(norms.median())
    with unsum.clip_per_sample(model, max_norm=bound) as clipped:
        loss(model, x).backward()
    torch.testing.assert_close(clipped.norms, norms)
    weights = (bound / norms).clamp(max=1)
    for name, value in truth.items():
        torch.testing.assert_close(model.get_parameter(name).grad, torch.einsum("n,n...->...", weights, value))


class Hides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, body):
        ctx.body = body
        ctx.save_for_backward(x)
        return body(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.body(x), grad)
        return x.grad, None


@pytest.mark.parametrize("block", [unsum.gradients, unsum.clip_per_sample, unsum.watch])
def test_parameters_that_only_a_function_of_the_users_reaches_are_refused(block):
    class Net(Adapted):
        def forward(self, x):
            return Hides.apply(self.frozen(x).requires_grad_(), self.body)

    model = Net()
    with pytest.raises(UnsupportedError, match="HidesBackward: runs a backward of its own"):
        with block(model):
            model(torch.randn(N, D)).square().sum().backward()
    assert model.body.weight.grad is None
    model(torch.randn(N, D)).square().sum().backward()  # outside of blocks it does as it did
    assert model.body.weight.grad is not None
