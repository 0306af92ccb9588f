"""Compiled models run compiled in a `gradients` block, and give what one sample at a time gives."""

import gc

import pytest
import torch
import torch.utils.checkpoint
from reference import per_sample_gradients
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import unsum
from compiled_nets import MODELS, assert_norms, build, loss, norms_of
from unsum.errors import UnsupportedError


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_the_gradient(name, compiled_calls):
    model, compiled, batch = build(name)
    for k in range(5):
        x = batch(4, seed=k)
        truth = per_sample_gradients(model, loss, x)
        assert_norms(norms_of(model, compiled, x), truth)
        for key, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grad, truth[key].sum(0), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) == 3  # learnt, rehearsed, then compiled


REDUCERS = {
    "tokens": (lambda: unsum.TokenNorms(), lambda r: {"norms": r.norms(), **dict.fromkeys(r.left_out, torch.ones(1))}),
    "projections": (lambda: unsum.Project(k=3, seed=5), lambda r: r.by_parameter()),
    "weighted sum": (lambda: unsum.WeightedSum(torch.tensor([0.5, 2.0, 0.0, -1.0])), lambda r: r.sum()),
}


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
@pytest.mark.parametrize("what", REDUCERS)
@pytest.mark.parametrize("name", ["attention", "tied", "images"])
def test_other_reducers_give_what_they_give_eagerly(name, what, grad, compiled_calls):
    if (name, what) == ("images", "tokens"):
        pytest.skip("an image tells no positions")
    model, compiled, batch = build(name)
    make, read = REDUCERS[what]
    for k in range(4):
        x, found, grads = batch(4, seed=k), {}, {}
        for which in (compiled, model):
            model.zero_grad()
            reducer = make()
            with unsum.gradients(which, reducer, grad=grad):
                loss(which, x).backward()
            found[which] = read(reducer)
            grads[which] = {n: p.grad for n, p in model.named_parameters()}
        assert found[compiled].keys() == found[model].keys()
        for key, value in found[model].items():
            torch.testing.assert_close(found[compiled][key], value, rtol=1e-8, atol=1e-10)
        if not grad:
            assert all(value is None for value in grads[compiled].values())
        else:
            for key, value in grads[model].items():
                torch.testing.assert_close(grads[compiled][key], value, rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) == 2


def test_several_reducers_at_once_and_chosen_parameters(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(3):
        x = batch(3, seed=k)
        norms, project = unsum.Norms(), unsum.Project(k=2)
        model.zero_grad()
        with unsum.gradients(compiled, norms, project, params="*.weight"):
            loss(compiled, x).backward()
        truth = per_sample_gradients(model, loss, x)
        assert_norms(norms, {name: each for name, each in truth.items() if name.endswith("weight")})
        torch.testing.assert_close(model.gate.grad, truth["gate"].sum(0))
        assert project.matrix().shape == (3, 4 * 6)
    assert len(compiled_calls) == 1


def test_one_compilation_for_all_batch_sizes(compiled_calls):
    counter = CompileCounterWithBackend("aot_eager")
    model, compiled, batch = build("attention", backend=counter)
    counts = []
    for n in (4, 4, 4, 5, 5, 6, 7, 9, 3, 12):
        x = batch(n, seed=n)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[4] <= 2  # one for the first size, one for all others
    assert len(compiled_calls) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "images"])
def test_inductor(name, compiled_calls):
    model, compiled, batch = build(name, backend="inductor")
    model.float()
    make = (lambda n, k: batch(n, seed=k)) if name == "attention" else (lambda n, k: batch(n, seed=k).float())
    for k, n in enumerate((4, 4, 4, 5, 5, 6)):
        x = make(n, k)
        truth = per_sample_gradients(model, loss, x)
        found = norms_of(model, compiled, x).by_parameter()
        for key, each in truth.items():
            torch.testing.assert_close(found[key].double(), each.flatten(1).square().sum(1), rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(model.get_parameter(key).grad.double(), each.sum(0), rtol=1e-3, atol=1e-3)
    assert len(compiled_calls) >= 2


@pytest.mark.parametrize("how", ["called before", "model.compile()", "dynamic"])
def test_ways_to_compile(how, compiled_calls):
    model, compiled, batch = build("attention", dynamic=True if how == "dynamic" else None)
    if how == "model.compile()":
        model.compile(backend="aot_eager", fullgraph=True)
        compiled = model
    if how == "called before":
        loss(compiled, batch(4)).backward()
    for k in range(3):
        x = batch(4, seed=k)
        found = norms_of(model, compiled, x)
        plain = MODELS["attention"][0]().double()
        plain.load_state_dict({key.removeprefix("_orig_mod."): v for key, v in model.state_dict().items()})
        assert_norms(found, per_sample_gradients(plain, loss, x))
    assert len(compiled_calls) == 1


def test_training_goes_on_and_micro_batches_are_appended(compiled_calls):
    model, compiled, batch = build("attention")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for k in range(4):
        first, second = batch(3, seed=2 * k), batch(3, seed=2 * k + 1)
        truth = per_sample_gradients(model, loss, torch.cat([first, second]))
        weighted = unsum.WeightedSum(w := torch.rand(6, dtype=torch.float64))
        norms = unsum.Norms()
        optimizer.zero_grad()
        with unsum.gradients(compiled, norms, weighted):
            for x in (first, second):
                loss(compiled, x).backward()
        assert_norms(norms, truth)
        for name, value in weighted.sum().items():
            torch.testing.assert_close(value, torch.einsum("n,n...->...", w, truth[name]), rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(model.get_parameter(name).grad, truth[name].sum(0), rtol=1e-8, atol=1e-10)
        optimizer.step()
    assert len(compiled_calls) == 6


def test_weights_of_one_long_block_are_in_the_order_of_its_forwards(compiled_calls):
    """The first batches run eagerly, later ones compiled: each gets its own weights."""
    model, compiled, batch = build("attention")
    batches = [batch(3, seed=k) for k in range(5)]
    weighted = unsum.WeightedSum(w := torch.rand(15, dtype=torch.float64))
    with unsum.gradients(compiled, weighted):
        for x in batches[:3]:
            loss(compiled, x).backward()
        first, second = loss(compiled, batches[3]), loss(compiled, batches[4])
        first.backward()
        second.backward()
    truth = per_sample_gradients(model, loss, torch.cat(batches))
    for name, value in weighted.sum().items():
        torch.testing.assert_close(value, torch.einsum("n,n...->...", w, truth[name]), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) == 3


def test_a_forward_without_a_backward_does_not_move_the_weights(compiled_calls):
    model, compiled, batch = build("attention")
    for _ in range(2):
        with unsum.gradients(compiled, unsum.WeightedSum(torch.ones(3))):
            loss(compiled, batch(3)).backward()
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="order of the forwards"):
        with unsum.gradients(compiled, unsum.WeightedSum(torch.rand(6))):
            held = compiled(batch(3))  # noqa: F841
            loss(compiled, batch(3)).backward()
    assert len(compiled_calls) == 2 and all(p.grad is None for p in model.parameters())


def test_scales(compiled_calls):
    model, compiled, batch = build("attention")
    x = batch(4)
    truth = {name: each * 4 for name, each in per_sample_gradients(model, lambda m, x: loss(m, x) / 4, x).items()}
    for _ in range(3):
        model.zero_grad()
        norms, project = unsum.Norms(), unsum.Project(k=2)
        with unsum.gradients(compiled, norms, project, loss_reduction="mean"):
            (loss(compiled, x) / 4).backward()
        assert_norms(norms, truth)
    eager = unsum.Project(k=2)
    with unsum.gradients(model, eager, loss_reduction="mean"):
        (loss(model, x) / 4).backward()
    torch.testing.assert_close(project.matrix(), eager.matrix())
    assert len(compiled_calls) == 1


def test_autograd_grad_reads_the_taps_too(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(3):
        x = batch(4, seed=k)
        norms = unsum.Norms()
        with unsum.gradients(compiled, norms):
            found = torch.autograd.grad(loss(compiled, x), [model.head.weight])
        truth = per_sample_gradients(model, loss, x)
        torch.testing.assert_close(found[0], truth["head.weight"].sum(0))
        if len(compiled_calls):  # all of them leave at once
            assert_norms(norms, truth)
    assert len(compiled_calls) == 1 and model.head.weight.grad is None


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)

    def forward(self, x):
        y = self.first(x)
        return y[:, :3], y.T


def test_an_output_beside_those_with_samples_may_be_used_as_it_was_when_learnt(compiled_calls):
    model = Views().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    both = lambda model, x: sum(out.square().sum() for out in model(x))
    for k in range(4):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        with unsum.gradients(compiled, unsum.Norms()) as g:
            both(compiled, x).backward()
        assert_norms(g[unsum.Norms], per_sample_gradients(model, both, x))
    assert len(compiled_calls) == 2


class Toggles(nn.Module):
    """Another operation in other steps; slices of all there is, which torch keeps where sizes are symbols."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.bends = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x):
        h = self.first(x)[:, slice(0, None)]
        return self.last(h.tanh().sin() if self.bends else h.tanh())


def test_a_model_that_changes_its_ways_runs_compiled_in_each(compiled_calls):
    model = Toggles().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    counts = []
    for k, (n, bends) in enumerate([(5, False)] * 4 + [(5, True)] * 4 + [(5, False)] * 2 + [(6, False)] * 3):
        model.bends = bends
        x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
        counts.append(len(compiled_calls))
    assert counts[3] == 2 and counts[7] > counts[4] and counts[9] == counts[7] + 2 and counts[-1] > counts[9]


def test_dropout_is_the_same_for_taps_and_gradients(compiled_calls):
    """Which numbers are dropped differs from the eager run: the norm of the one sample is that of its gradient."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for k in range(4):
        x = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        found = norms_of(model, compiled, x).by_parameter()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][0], parameter.grad.square().sum())
    assert len(compiled_calls) == 2


def test_outside_the_block_everything_is_as_before(compiled_calls):
    counter = CompileCounterWithBackend("aot_eager")
    model, compiled, batch = build("attention", backend=counter)
    call = nn.Module.__call__
    wanted = loss(compiled, batch(4))
    before = counter.frame_count
    for _ in range(4):
        norms_of(model, compiled, batch(4))
    with_taps = counter.frame_count
    assert nn.Module.__call__ is call and with_taps == before + 1
    torch.testing.assert_close(loss(compiled, batch(4)), wanted)
    assert counter.frame_count == with_taps  # the user's own compilation is still there


def test_nothing_piles_up_over_many_steps_of_one_block(compiled_calls):
    model, compiled, batch = build("attention")
    live = []
    with unsum.gradients(compiled, unsum.Project(k=2), grad=False) as g:
        for k in range(30):
            loss(compiled, batch(4, seed=k)).backward()
            if k in (9, 29):
                gc.collect()
                live.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    held = sum(1 for _ in model.parameters())  # of each batch, what was asked for
    assert live[1] - live[0] <= 20 * (held + 2) + 20 and len(compiled_calls) == 28
    assert g[unsum.Project].matrix().shape[0] == 120


def test_another_block_beside_it_sees_everything(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(4):
        x = batch(4, seed=k)
        with unsum.capture(compiled, "head:input") as got, unsum.gradients(compiled, unsum.Norms()) as g:
            loss(compiled, x).backward()
        assert got["head:input"].shape == (4, 6, 8)
        assert_norms(g[unsum.Norms], per_sample_gradients(model, loss, x))
    assert not compiled_calls


def test_an_error_of_the_callers_does_not_end_compiled_calls(compiled_calls):
    """An input of a wrong width, which the caller catches."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(8):
        x = torch.randn(5, 4, dtype=torch.float64)
        if step in (1, 4):
            with pytest.raises(RuntimeError), unsum.gradients(compiled, unsum.Norms()):
                compiled(torch.randn(5, 3, dtype=torch.float64))
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert len(compiled_calls) == 6
