"""Recordings: what a meeting calls, written down once and called again. They must give what the usual way gives, on
other numbers too, or not be used."""

import contextlib

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch.nn import functional as F

import unsum
from lane_nets import Pictures, Words, batch, loss, stages, step
from unsum.errors import SamplesError, UnsupportedError
from unsum.kernels import constants, recorded
from unsum.step import lanes
from unsum.step.recordings import Digests

TABLE = torch.randn(5, 3)


def recording(function, *given):
    with recorded.Tape(list(given)) as tape:
        found = function(*given)
    return recorded.record(tape, found)


def rows_and_sums(a, b):
    left = a.movedim(1, -1).reshape(-1, a.shape[1])
    total = torch.zeros(a.shape[1])
    total += left.sum(0)
    top, bottom = (left @ b).unflatten(0, (2, -1)).unbind()
    return [total, top[:, 1:].square().sum(1), bottom.sort(1).values, torch.cat([top, bottom])[1]]


def test_a_recording_gives_the_same_on_other_numbers():
    torch.manual_seed(0)
    program = recording(rows_and_sums, torch.randn(2, 3, 4), torch.randn(3, 5))
    for _ in range(3):
        a, b = torch.randn(2, 3, 4), torch.randn(3, 5)
        for ours, wanted in zip(program(a, b), rows_and_sums(a, b), strict=True):
            assert torch.equal(ours, wanted) and ours.stride() == wanted.stride()


def test_a_recording_reads_a_tensor_wherever_it_begins_in_memory():
    torch.manual_seed(0)
    program = recording(lambda x: [x[1:].sum(1)], torch.randn(4, 6)[:, :3])
    x = torch.randn(20, 6)[7:11, :3]
    assert torch.equal(program(x)[0], x[1:].sum(1))


def test_a_recording_does_not_take_tensors_of_another_kind():
    program = recording(lambda x: [x.view(12) * 2], torch.randn(3, 4))
    assert program(torch.randn(3, 4)) is not None
    for other in (torch.randn(4, 3), torch.randn(4, 3).T, torch.randn(3, 4).double()):
        assert program(other) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x * float(x.sum())],
        lambda x: [x[x > 0]],
        lambda x: [x * TABLE[0, 0]],
        lambda x: [x + torch.rand(3)],
        lambda x: [F.dropout(x)],
        lambda x: [x.nonzero()],
        lambda x: [x.add_(1)],
        lambda x: [x * x.tolist()[0]],
        lambda x: [x * float(x.numpy().sum())],
    ],
    ids=[
        "a number",
        "a mask",
        "a tensor from elsewhere",
        "random numbers",
        "dropout",
        "nonzero",
        "writing",
        "a list",
        "numpy",
    ],
)
def test_what_depends_on_more_than_its_tensors_is_not_recorded(function):
    with contextlib.suppress(recorded.NotRecordable):
        assert recording(function, torch.randn(3)) is None


def test_what_is_known_never_to_change_may_be_read():
    matrix = constants.constant(torch.randn(3, 2))
    program = recording(lambda x: [x @ matrix], torch.randn(4, 3))
    x = torch.randn(4, 3)
    assert torch.equal(program(x)[0], x @ matrix)


def test_kernels_are_launched_again():
    kernels = pytest.importorskip("unsum.kernels.triton_kernels")
    if torch.cuda.is_available():
        pytest.skip("through the interpreter")
    program = recording(lambda each: list(kernels.norms_and_sum(each)), torch.randn(3, 70, 33))
    each = torch.randn(3, 70, 33)
    for ours, wanted in zip(program(each), kernels.norms_and_sum(each), strict=True):
        assert torch.equal(ours, wanted)


# ---- meetings -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Layers do not wait for others of their shape: every meeting is taken by itself."""
    monkeypatch.setattr(lanes, "SMALL", {"cpu": 40, "cuda": 40})


def test_a_recording_that_gives_something_else_is_not_used(monkeypatch):
    torch.manual_seed(0)
    model = Words().double()
    real = recorded.record

    def wrong(tape, found):
        program = real(tape, found)
        calls = []

        def spoilt(*given):
            calls.append(None)
            return tuple(value + (len(calls) > 0) for value in program(*given))

        return program and spoilt

    monkeypatch.setattr(recorded, "record", wrong)
    for _ in range(5):
        x = batch(Words)
        norms = step(model, x, unsum.Norms())[unsum.Norms].sq_norms()
        torch.testing.assert_close(norms, step(model, x).sq_norms(), rtol=1e-10, atol=1e-12)
    assert -1 in stages(model) and 3 not in stages(model)


def test_a_backward_that_fails_in_a_recording_leaves_nothing(monkeypatch):
    torch.manual_seed(0)
    model = Words().double()
    for _ in range(5):
        step(model, batch(Words), unsum.Norms())
    take, x = Digests.take, batch(Words)
    with pytest.raises(RuntimeError, match="on purpose"), unsum.gradients(model, unsum.Norms()) as g:
        monkeypatch.setattr(Digests, "take", lambda *given: (_ for _ in ()).throw(RuntimeError("on purpose")))
        loss(model, x).sum().backward()
    monkeypatch.setattr(Digests, "take", take)
    assert step(model, x, unsum.Norms())[unsum.Norms].sq_norms().shape == (3,)
    with pytest.raises(SamplesError):
        g[unsum.Norms].sq_norms()


@pytest.mark.parametrize("held", ["gradients", "factors"])
@pytest.mark.parametrize("kind", [Words, Pictures])
@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
def test_clipping_by_recordings(kind, held, grad, monkeypatch):
    """What is held comes from recordings, and sums are those of one sample at a time, also with a scaler."""
    monkeypatch.setattr("unsum.reducers.holding.FAR", {"cpu": -1e9 if held == "gradients" else 1e9})
    torch.manual_seed(0)
    model, clip = kind().double().eval(), lambda norms: (0.5 * norms.mean() / norms).clamp(max=1)
    for k in range(6):
        x = batch(kind)
        x = x.double() if x.is_floating_point() else x
        each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
        norms = norms_of_all(each)
        reducer = unsum.WeightedSum(clip)
        model.zero_grad()
        with unsum.gradients(model, reducer, grad=grad, scaler=8.0 if k > 3 else None):
            (loss(model, x).sum() * (8.0 if k > 3 else 1)).backward()
        torch.testing.assert_close(reducer.norms(), norms)
        for name, value in reducer.sum().items():
            torch.testing.assert_close(value, torch.einsum("n,n...->...", clip(norms), each[name]))
        for name, parameter in model.named_parameters():
            if grad:
                torch.testing.assert_close(parameter.grad, each[name].sum(0) * (8.0 if k > 3 else 1))
            else:
                assert parameter.grad is None
    assert stages(model).count(3) >= 6


def test_what_is_held_by_a_recording_may_not_change():
    torch.manual_seed(0)
    model, clip = Words().double(), lambda norms: (1 / norms).clamp(max=1)
    for _ in range(4):
        step(model, batch(Words), unsum.WeightedSum(clip))
    assert 3 in stages(model)
    seen = []
    model.layers[3].register_forward_hook(
        lambda module, given, out: out.register_hook(lambda g: seen.append(g)) and None
    )
    model.layers[2].register_forward_hook(
        lambda module, given, out: out.register_hook(lambda g: [seen[-1].mul_(2), None][1]) and None
    )
    with pytest.raises(UnsupportedError, match="changed in place"):
        step(model, batch(Words), unsum.WeightedSum(clip))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("small", [40, 1 << 16], ids=["alone", "together"])
def test_sums_carry_no_graph(small, dtype, monkeypatch):
    """What is held is the node's own tensors, which lead back to the graph; in low precision torch refuses to mix them
    with what is written in place."""
    monkeypatch.setattr(lanes, "SMALL", {"cpu": small, "cuda": small})
    torch.manual_seed(0)
    model = Words().to(dtype)
    for _ in range(7):
        model.zero_grad()
        reducer = unsum.WeightedSum(lambda norms: (0.1 / norms).clamp(max=1))
        with unsum.gradients(model, reducer):
            loss(model, batch(Words)).sum().backward()
        found = [*reducer.sum().values(), reducer.norms(), *(p.grad for p in model.parameters())]
        assert not any(value.requires_grad for value in found)
    with unsum.clip_per_sample(model):
        loss(model, batch(Words)).sum().backward()
    assert not any(p.grad.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    "reducer", [unsum.Norms, lambda: unsum.Project(k=2), lambda: unsum.WeightedSum(lambda norms: 1 / norms)]
)
def test_a_gradient_that_was_the_layers_own_input_for_some_steps(reducer):
    """Then nothing tells which of the two was read where."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False).double()
    for k in range(8):
        x = torch.randn(5, 4, dtype=torch.float64)
        v = x if k < 5 else torch.randn(5, 4, dtype=torch.float64)
        own = reducer()
        with unsum.gradients(model, own):
            model(x).backward(v)
        with unsum.gradients(model) as kept:
            model(x).backward(v)
        wanted = torch.einsum("no,ni->noi", v, x)
        torch.testing.assert_close(kept["weight"].per_sample(), wanted)
        if isinstance(own, unsum.Project):
            torch.testing.assert_close(own.matrix(), kept["weight"].project(2))
        else:
            torch.testing.assert_close(own.norms(), wanted.flatten(1).norm(dim=1))
        if isinstance(own, unsum.WeightedSum):
            sums = torch.einsum("n,noi->oi", 1 / wanted.flatten(1).norm(dim=1), wanted)
            torch.testing.assert_close(own.sum()["weight"], sums)


@pytest.mark.parametrize("reducer", [unsum.Norms, lambda: unsum.WeightedSum(lambda norms: (1 / norms).clamp(max=1))])
@pytest.mark.parametrize("small", [40, 1 << 16], ids=["alone", "together"])
def test_what_autocast_wrote_down_is_not_used_without_it(small, reducer, monkeypatch):
    monkeypatch.setattr(lanes, "SMALL", {"cpu": small, "cuda": small})
    torch.manual_seed(0)
    model = Words()
    for k in range(9):
        x, own = batch(Words), reducer()
        with unsum.gradients(model, own, grad=False):
            total = loss(model, x).sum()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=k < 5):
                total.backward()
    each = per_sample_gradients(model, lambda m, x: loss(m, x).sum(), x)
    wanted = norms_of_all(each)
    torch.testing.assert_close(own.norms().double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("small", [40, 1 << 16], ids=["alone", "together"])
def test_a_subclass_with_its_own_take_is_called_in_every_step(small, monkeypatch):
    monkeypatch.setattr(lanes, "SMALL", {"cpu": small, "cuda": small})
    seen = []

    class Noting(unsum.WeightedSum):
        def take(self, name, factors):
            seen.append(name)
            super().take(name, factors)

        def take_layers(self, layers):
            seen.extend(layers.names)
            super().take_layers(layers)

    torch.manual_seed(0)
    model = Words().double()
    for _ in range(6):
        seen.clear()
        step(model, batch(Words), Noting(lambda norms: 1 / norms))
        assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
