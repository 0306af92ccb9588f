"""The lanes of a meeting: alone, or stacked with layers of its shape. Both give what plain autograd gives, in every
batch, for every quantity."""

import contextlib
import functools

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn

import unsum
from lane_nets import Pictures, Words, batch, loss, stages, step
from unsum.errors import OptionError, SamplesError, UnsupportedError
from unsum.kernels import recorded
from unsum.reducers import Reading
from unsum.step import lanes

# ---- meetings -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["alone", "stacked"], autouse=True)
def lane(request, monkeypatch):
    """Every meeting by itself, or with others of its shape."""
    if request.param == "alone":
        monkeypatch.setattr(lanes, "SMALL", {"cpu": 40, "cuda": 40})
    return request.param


@pytest.mark.parametrize("kind", [Words, Pictures])
@pytest.mark.parametrize("grad", [True, False])
def test_norms_and_projections_of_every_batch_are_those_of_plain_autograd(kind, grad, lane):
    torch.manual_seed(0)
    model = kind().double().eval()
    for _ in range(7):
        x = batch(kind) if kind is Words else batch(kind).double()
        each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
        norms = step(model, x, unsum.Norms(), grad=grad)[unsum.Norms].by_parameter()
        sums = {name: p.grad for name, p in model.named_parameters()} if grad else {}
        projected = step(model, x, unsum.Project(k=3), grad=grad)[unsum.Project].by_parameter()
        kept = step(model, x)
        for name, values in each.items():
            torch.testing.assert_close(norms[name], values.flatten(1).square().sum(1), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(projected[name], kept[name].project(3), rtol=1e-10, atol=1e-12)
            if grad:
                torch.testing.assert_close(sums[name], values.sum(0), rtol=1e-10, atol=1e-12)
    if lane == "alone":  # by recordings at last
        assert stages(model).count(3) > 0.7 * len(stages(model))


def test_token_norms_of_every_batch_are_those_of_kept_factors(lane):
    torch.manual_seed(0)
    model = Words().double()
    for _ in range(6):
        x = batch(Words)
        tokens, kept = step(model, x, unsum.TokenNorms(), unsum.Norms()), step(model, x)
        once = [name for name, _ in model.named_parameters() if not name.startswith("twice")]
        wanted = sum(kept[name].token_sq_norms() for name in once)
        assert sorted(tokens[unsum.TokenNorms].left_out) == ["twice.bias", "twice.weight"]
        torch.testing.assert_close(tokens[unsum.TokenNorms].sq_norms(), wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(tokens[unsum.Norms].sq_norms(), kept.sq_norms(), rtol=1e-10, atol=1e-12)
    assert lane != "alone" or 3 in stages(model)


def test_other_strides_in_a_later_batch(lane):
    torch.manual_seed(0)
    model = Pictures().double().eval()
    for k in range(12):
        x = batch(Pictures).double()
        x = x.to(memory_format=torch.channels_last) if k % 4 == 3 else x
        norms = step(model, x, unsum.Norms())[unsum.Norms].sq_norms()
        torch.testing.assert_close(norms, step(model, x).sq_norms(), rtol=1e-10, atol=1e-12)
    assert lane != "alone" or 3 in stages(model)


def test_a_parameter_that_is_listened_to_from_some_batch_on():
    torch.manual_seed(0)
    model, heard = Words().double(), []
    for k in range(8):
        if k == 5:
            model.layers[2].weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad.clone()))
        x = batch(Words)
        step(model, x, unsum.Norms())
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        loss(model, x).sum().backward()
        for ours, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-10, atol=1e-12)
    assert heard


def test_a_loss_scale_that_changes():
    torch.manual_seed(0)
    model = Words().double()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x = batch(Words)
    wanted = step(model, x).sq_norms()
    for k in range(8):
        scaler.scale(torch.ones(1))
        scaler._scale.fill_(2.0**k)
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms(), scaler=scaler) as g:
            scaler.scale(loss(model, x).sum()).backward()
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("grad", [True, False])
def test_clipped_sums_of_every_batch_are_those_of_plain_autograd(memory, grad):
    torch.manual_seed(0)
    model = Words().double()
    weights = lambda norms: (3 / norms).clamp(max=1)
    for _ in range(3):
        x = batch(Words)
        each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
        w = weights(sum(values.flatten(1).square().sum(1) for values in each.values()).sqrt())
        assert int((w < 1).sum()) > 0
        reducers = unsum.WeightedSum(weights, memory=memory), unsum.Norms(), unsum.WeightedSum(w)
        step(model, x, *reducers, grad=grad)
        sums = {name: p.grad for name, p in model.named_parameters()}
        clipped, given = reducers[0].sum(), reducers[2].sum()
        for name, values in each.items():
            wanted = torch.einsum("n,n...->...", w, values)
            torch.testing.assert_close(clipped[name], wanted, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(given[name], wanted, rtol=1e-10, atol=1e-12)
            if grad:
                torch.testing.assert_close(sums[name], values.sum(0), rtol=1e-10, atol=1e-12)


class Mean(Reading):
    """Reads over samples, which it may not."""

    wants, power = "mean", 1

    def read(self, factors):
        return factors.per_sample().sum(0)

    def receive(self, names, value):
        pass


def test_a_reducer_that_reads_over_samples_is_refused_by_name(lane, request):
    model = Words().double()
    if "stacked" in request.node.callspec.id:
        with pytest.raises(OptionError, match="Mean: `read` gives"):
            for _ in range(2):
                step(model, batch(Words), Mean())
    else:
        step(model, batch(Words), Mean())


def test_a_gradient_that_is_changed_while_its_layer_waits_is_refused(request):
    torch.manual_seed(0)
    model, changed = Words().double(), []

    def spoil(grad):
        changed.append(grad)
        changed[0].mul_(2)

    x = batch(Words)
    step(model, x, unsum.Norms())
    hidden = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: hidden.append(out))
    waits = "stacked" in request.node.callspec.id
    refused = pytest.raises(UnsupportedError, match="changed in place") if waits else contextlib.nullcontext()
    with refused, unsum.gradients(model, unsum.Norms()):
        out = loss(model, x).sum()
        for each in hidden:
            each.register_hook(spoil)
        out.backward()


@pytest.mark.parametrize("how", ["zeroed", "freed"])
@pytest.mark.parametrize("reducer", [unsum.Norms, lambda: unsum.WeightedSum(lambda norms: 1 / norms)])
def test_an_activation_that_is_changed_while_its_layer_waits_is_refused(reducer, how, request):
    """One that the backward has no more use for: without unsum nobody would notice."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]).double()

    def spoil(grad, served):
        if how == "zeroed":
            served.zero_()
        else:
            served.untyped_storage().resize_(0)

    def attach(module, args, out):
        args[0].register_hook(functools.partial(spoil, served=out.detach()))

    for layer in list(model)[1::2]:
        layer.register_forward_hook(attach)
    waits = "stacked" in request.node.callspec.id
    for k in range(4):
        x, own = torch.randn(4, 6, dtype=torch.float64), reducer()
        truth = per_sample_gradients(model, lambda m, x: m(x).square().sum(), x)
        is_held = (k and waits) or reducer is not unsum.Norms  # when it is learnt, no layer waits
        refused = pytest.raises(UnsupportedError, match="changed") if is_held else contextlib.nullcontext()
        with refused, unsum.gradients(model, own, grad=False):
            model(x).square().sum().backward()
        if not is_held:
            wanted = norms_of_all(truth)
            torch.testing.assert_close(own.norms(), wanted)


def test_a_backward_that_fails_leaves_nothing(monkeypatch):
    torch.manual_seed(0)
    model = Words().double()
    for _ in range(2):
        step(model, batch(Words), unsum.Norms())
    x = batch(Words)

    def fail(grad):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), unsum.gradients(model, unsum.Norms()) as g:
        out = model.table(x)
        handle = model.table.weight.register_hook(fail)
        loss(model, x).sum().backward()
    handle.remove()
    del out
    wanted = step(model, x).sq_norms()
    torch.testing.assert_close(step(model, x, unsum.Norms())[unsum.Norms].sq_norms(), wanted)
    with pytest.raises(SamplesError):
        g[unsum.Norms].sq_norms()


@pytest.mark.parametrize("held", ["gradients", "factors"])
@pytest.mark.parametrize("kind", [Words, Pictures])
@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
def test_clipping_of_layers_together_is_written_down(kind, held, grad, lane, monkeypatch):
    """From the fourth step on, what is held of layers and their sums come from what was written down."""
    monkeypatch.setattr("unsum.reducers.holding.FAR", {"cpu": -1e9 if held == "gradients" else 1e9})
    stages, call = [], recorded.Rehearsed.__call__

    def noted(self, *given):
        found = call(self, *given)
        stages.append(self._stage)
        return found

    monkeypatch.setattr(recorded.Rehearsed, "__call__", noted)
    torch.manual_seed(0)
    model, clip = kind().double().eval(), lambda norms: (0.5 * norms.mean() / norms).clamp(max=1)
    for k in range(8):
        scale = 8.0 if k == 6 else 1.0
        x = batch(kind)[: 2 if k == 5 else 3]
        x = x.double() if x.is_floating_point() else x
        each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
        norms = norms_of_all(each)
        reducer = unsum.WeightedSum(clip)
        model.zero_grad()
        stages.clear()
        with unsum.gradients(model, reducer, grad=grad, scaler=scale):
            (loss(model, x).sum() * scale).backward()
        torch.testing.assert_close(reducer.norms(), norms)
        for name, value in reducer.sum().items():
            torch.testing.assert_close(value, torch.einsum("n,n...->...", clip(norms), each[name]))
        for name, parameter in model.named_parameters():
            if grad:
                torch.testing.assert_close(parameter.grad, each[name].sum(0) * scale)
            else:
                assert parameter.grad is None
        assert lane == "alone" or k != 4 or set(stages) == ({3} if kind is Words else set())  # convolutions do not wait
