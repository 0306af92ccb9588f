"""Recordings: what a meeting calls, written down once and called again. They must give what the usual way gives, on
other numbers too, or not be used."""

import contextlib

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import SamplesError
from unsum.kernels import constants, recorded
from unsum.plan.memory import plans
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


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.twice = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(6))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=k % 2 == 0) for k in range(6))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.twice(self.table(x))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return self.head(self.twice(x))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=1 + k % 2) for k in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(6))
        self.group, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return self.head(self.group(x).mean((2, 3)))


def batch(kind):
    return torch.randint(11, (3, 7)) if kind is Words else torch.randn(3, 4, 6, 5)


def loss(model, x):
    return model(x).square().flatten(1).sum(1)


def step(model, x, *reducers, **options):
    model.zero_grad()
    with unsum.gradients(model, *reducers, **options) as g:
        loss(model, x).sum().backward()
    return g


def stages(model):
    """How far the meetings have come."""
    places = [place for plan in plans(model) for found in plan.recordings.values() for place in found.values()]
    return [place.known.stage for place in places if hasattr(place, "known")]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Layers do not wait for others of their shape: every meeting is taken by itself."""
    monkeypatch.setattr(lanes, "SMALL", {"cpu": 40, "cuda": 40})


@pytest.mark.parametrize("kind", [Words, Pictures])
@pytest.mark.parametrize("grad", [True, False])
def test_norms_and_projections_of_every_batch_are_those_of_plain_autograd(kind, grad):
    torch.manual_seed(0)
    model = kind().double().eval()
    for k in range(7):
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
        if k == 6:
            assert stages(model).count(3) > 0.7 * len(stages(model))


def test_token_norms_of_every_batch_are_those_of_kept_factors():
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
    assert 3 in stages(model)


def test_other_strides_in_a_later_batch():
    torch.manual_seed(0)
    model = Pictures().double().eval()
    for k in range(12):
        x = batch(Pictures).double()
        x = x.to(memory_format=torch.channels_last) if k % 4 == 3 else x
        norms = step(model, x, unsum.Norms())[unsum.Norms].sq_norms()
        torch.testing.assert_close(norms, step(model, x).sq_norms(), rtol=1e-10, atol=1e-12)
    assert 3 in stages(model)


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
