"""Recordings: what a meeting calls, written down once and called again. They must give what the usual way gives, on
other numbers too, or not be used."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import unsum
from lane_nets import Words, batch, loss, stages, step
from unsum.errors import SamplesError
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
