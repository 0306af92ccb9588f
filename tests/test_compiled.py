"""Compiled models: they run compiled in a `gradients` block, and give what one sample at a time gives."""

import gc
import logging

import pytest
import torch
import torch.utils.checkpoint
from reference import per_sample_gradients
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import unsum
from unsum.compiled import tapped, tapping
from unsum.errors import InteractionError, SamplesError, UnsupportedError
from unsum.kernels import fused, grouped
from unsum.step.launches import Launches


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def ran(monkeypatch):
    """One entry for every call that ran compiled, with taps."""
    calls = []
    run = tapping.Tapping._run

    def counted(*args, **kwargs):
        output = run(*args, **kwargs)
        calls.append(output)
        return output

    monkeypatch.setattr(tapping.Tapping, "_run", counted)
    return calls


class Attention(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 11, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        h = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.gate * self.out(mixed.transpose(1, 2).flatten(2)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, groups=2),
            nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip
        self.layers[4].running_var.mul_(1.7)
        self.layers[4].running_mean.add_(0.3)
        self.layers[4].eval()

    def forward(self, x):
        return self.layers(x)


class Checkpointed(Attention):
    def forward(self, ids):
        h = self.tokens(ids)
        part = lambda h: F.gelu(self.out(self.norm(h)))
        return self.head(h + torch.utils.checkpoint.checkpoint(part, h, use_reentrant=False))


def ids(n, seed=0):
    return torch.randint(11, (n, 6), generator=torch.Generator().manual_seed(seed))


def images(n, seed=0):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss(model, x):
    out = model(x)
    return (out.flatten(1).logsumexp(1) + out.flatten(1).square().sum(1)).sum()


MODELS = {
    "attention": (Attention, ids),
    "tied": (lambda: Attention(tied=True), ids),
    "images": (Images, images),
    "checkpointed": (Checkpointed, ids),
}


def build(name, backend="aot_eager", **options):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make().double()
    return model, torch.compile(model, backend=backend, fullgraph=True, **options), batch


def norms_of(model, compiled, x, **options):
    model.zero_grad()
    with unsum.gradients(compiled, unsum.Norms(), **options) as g:
        loss(compiled, x).backward()
    return g[unsum.Norms]


def assert_norms(norms, truth):
    found = norms.by_parameter()
    assert found.keys() == truth.keys()
    for name, each in truth.items():
        torch.testing.assert_close(found[name], each.flatten(1).square().sum(1), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_the_gradient(name, ran):
    model, compiled, batch = build(name)
    for k in range(5):
        x = batch(4, seed=k)
        truth = per_sample_gradients(model, loss, x)
        assert_norms(norms_of(model, compiled, x), truth)
        for key, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grad, truth[key].sum(0), rtol=1e-8, atol=1e-10)
    assert len(ran) == 3  # learnt, rehearsed, then compiled


REDUCERS = {
    "tokens": (lambda: unsum.TokenNorms(), lambda r: {"norms": r.norms(), **dict.fromkeys(r.left_out, torch.ones(1))}),
    "projections": (lambda: unsum.Project(k=3, seed=5), lambda r: r.by_parameter()),
    "weighted sum": (lambda: unsum.WeightedSum(torch.tensor([0.5, 2.0, 0.0, -1.0])), lambda r: r.sum()),
}


@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
@pytest.mark.parametrize("what", REDUCERS)
@pytest.mark.parametrize("name", ["attention", "tied", "images"])
def test_other_reducers_give_what_they_give_eagerly(name, what, grad, ran):
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
    assert len(ran) == 2


def test_several_reducers_at_once_and_chosen_parameters(ran):
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
    assert len(ran) == 1


def test_one_compilation_for_all_batch_sizes(ran):
    counter = CompileCounterWithBackend("aot_eager")
    model, compiled, batch = build("attention", backend=counter)
    counts = []
    for n in (4, 4, 4, 5, 5, 6, 7, 9, 3, 12):
        x = batch(n, seed=n)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[4] <= 2  # one for the first size, one for all others
    assert len(ran) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "images"])
def test_inductor(name, ran):
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
    assert len(ran) >= 2


@pytest.fixture(params=["twins", "kernels"])
def few_operators(request, monkeypatch):
    """Steps as small as on a GPU, where layers share operators; whose norms left so, in each graph."""
    monkeypatch.setitem(grouped.ROWS, "cpu", 64)
    monkeypatch.setitem(grouped.HELD, "cpu", 1 << 20)
    monkeypatch.setattr(grouped, "is_ready", lambda device, dtype: True)
    if request.param == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(fused, "is_on_a_gpu", lambda tensor: True)
    graphs, norms = [], Launches.norms

    def noted(self, *, traced=False):
        if traced:
            graphs.append([])
        for names, found in norms(self, traced=traced):
            if traced:
                graphs[-1].append(sorted(names))
            yield names, found

    monkeypatch.setattr(Launches, "norms", noted)
    return graphs


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_small_layers_share_operators(backend, few_operators, ran):
    counter = CompileCounterWithBackend(backend)
    model, compiled, batch = build("attention", backend=counter)
    model.float()
    counts = []
    for k, n in enumerate((4, 4, 4, 5, 5, 6, 3)):
        x = batch(n, seed=k)
        truth = per_sample_gradients(model, loss, x)
        found = norms_of(model, compiled, x).by_parameter()
        assert found.keys() == truth.keys()
        for key, each in truth.items():
            torch.testing.assert_close(found[key].double(), each.flatten(1).square().sum(1), rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(model.get_parameter(key).grad.double(), each.sum(0), rtol=1e-3, atol=1e-3)
        counts.append(counter.frame_count)
    assert len(ran) >= 4 and counts[-1] == counts[4] <= 2  # as ever, for all batch sizes
    weights, biases = (sorted(f"{name}.{what}" for name in ("qkv", "out", "head")) for what in ("weight", "bias"))
    assert len(few_operators) == 2
    assert all(sorted(graph) == sorted([weights, ["norm.weight"], ["norm.bias"], biases]) for graph in few_operators)


def test_what_is_set_aside_is_bounded(few_operators, ran, monkeypatch):
    model, compiled, batch = build("attention")
    model.float()
    monkeypatch.setitem(grouped.HELD, "cpu", 4 * 6 * (11 + 8))  # δ of the head and of what comes before it
    for k in range(3):
        x = batch(4, seed=k)
        found = norms_of(model, compiled, x).by_parameter()
        for key, each in per_sample_gradients(model, loss, x).items():
            torch.testing.assert_close(found[key].double(), each.flatten(1).square().sum(1), rtol=1e-3, atol=1e-6)
    assert [sorted(graph) for graph in few_operators] == [[["head.bias", "out.bias"], ["head.weight", "out.weight"]]]


def test_operators_are_shared_only_where_layers_are_small_and_norms_alone_are_wanted(few_operators, ran):
    model, compiled, batch = build("attention")
    for k in range(3):
        assert_norms(norms_of(model, compiled, batch(4, seed=k)), per_sample_gradients(model, loss, batch(4, seed=k)))
    assert few_operators == [[]]  # in float64
    model.float()
    for reducers, n, wanted in (((unsum.Norms(), unsum.TokenNorms()), 4, [[]]), ((unsum.Norms(),), 11, [[]])):
        del few_operators[:]
        for k in range(3):
            with unsum.gradients(compiled, *reducers):
                loss(compiled, batch(n, seed=k)).backward()
        assert few_operators == wanted


@pytest.mark.parametrize("how", ["called before", "model.compile()", "dynamic"])
def test_ways_to_compile(how, ran):
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
    assert len(ran) == 1


def test_training_goes_on_and_micro_batches_are_appended(ran):
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
    assert len(ran) == 6


def test_weights_of_one_long_block_are_in_the_order_of_its_forwards(ran):
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
    assert len(ran) == 3


def test_a_forward_without_a_backward_does_not_move_the_weights(ran):
    model, compiled, batch = build("attention")
    for _ in range(2):
        with unsum.gradients(compiled, unsum.WeightedSum(torch.ones(3))):
            loss(compiled, batch(3)).backward()
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="order of the forwards"):
        with unsum.gradients(compiled, unsum.WeightedSum(torch.rand(6))):
            held = compiled(batch(3))  # noqa: F841
            loss(compiled, batch(3)).backward()
    assert len(ran) == 2 and all(p.grad is None for p in model.parameters())


def test_scales(ran):
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
    assert len(ran) == 1


def test_autograd_grad_reads_the_taps_too(ran):
    model, compiled, batch = build("attention")
    for k in range(3):
        x = batch(4, seed=k)
        norms = unsum.Norms()
        with unsum.gradients(compiled, norms):
            found = torch.autograd.grad(loss(compiled, x), [model.head.weight])
        truth = per_sample_gradients(model, loss, x)
        torch.testing.assert_close(found[0], truth["head.weight"].sum(0))
        if len(ran):  # all of them leave at once
            assert_norms(norms, truth)
    assert len(ran) == 1 and model.head.weight.grad is None


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)

    def forward(self, x):
        y = self.first(x)
        return y[:, :3], y.T


def test_an_output_beside_those_with_samples_may_be_used_as_it_was_when_learnt(ran):
    model = Views().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    both = lambda model, x: sum(out.square().sum() for out in model(x))
    for k in range(4):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        with unsum.gradients(compiled, unsum.Norms()) as g:
            both(compiled, x).backward()
        assert_norms(g[unsum.Norms], per_sample_gradients(model, both, x))
    assert len(ran) == 2


class Toggles(nn.Module):
    """Another operation in other steps; slices of all there is, which torch keeps where sizes are symbols."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.bends = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x):
        h = self.first(x)[:, slice(0, None)]
        return self.last(h.tanh().sin() if self.bends else h.tanh())


def test_a_model_that_changes_its_ways_runs_compiled_in_each(ran):
    model = Toggles().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    counts = []
    for k, (n, bends) in enumerate([(5, False)] * 4 + [(5, True)] * 4 + [(5, False)] * 2 + [(6, False)] * 3):
        model.bends = bends
        x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
        counts.append(len(ran))
    assert counts[3] == 2 and counts[7] > counts[4] and counts[9] == counts[7] + 2 and counts[-1] > counts[9]


def test_dropout_is_the_same_for_taps_and_gradients(ran):
    """Which numbers are dropped differs from the eager run: the norm of the one sample is that of its gradient."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for k in range(4):
        x = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        found = norms_of(model, compiled, x).by_parameter()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][0], parameter.grad.square().sum())
    assert len(ran) == 2


# ---- what runs eagerly, and says so ---------------------------------------------------------------------------------


def messages(caplog):
    return " ".join(record.getMessage() for record in caplog.records)


class NoRule(nn.Module):
    """A weight in an operation for which there is no rule."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(6, 4), nn.Parameter(torch.rand(4))

    def forward(self, x):
        return torch.atan2(self.first(x), self.scale)


def test_without_a_rule_it_runs_eagerly(ran, caplog):
    caplog.set_level(logging.INFO, "unsum")
    model = NoRule().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(4):
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert not ran and "Atan2Backward0" in messages(caplog) and "eagerly" in messages(caplog)


def test_factors_and_functions_of_norms_run_eagerly(ran):
    model, compiled, batch = build("attention")
    x = batch(4)
    truth = per_sample_gradients(model, loss, x)
    for _ in range(3):
        with unsum.gradients(compiled) as g:
            loss(compiled, x).backward()
        torch.testing.assert_close(g["gate"].per_sample(), truth["gate"])
        clipped = unsum.WeightedSum(lambda norms: (1 / norms).clamp_max(1))
        with unsum.gradients(compiled, clipped):
            loss(compiled, x).backward()
        norms = torch.stack([each.flatten(1).square().sum(1) for each in truth.values()]).sum(0).sqrt()
        w = (1 / norms).clamp_max(1)
        torch.testing.assert_close(clipped.sum()["gate"], torch.einsum("n,nd->d", w, truth["gate"]))
    assert not ran


class Breaks(Attention):
    def forward(self, ids):
        torch._dynamo.graph_break()
        return super().forward(ids)


def test_a_graph_break_is_no_error(ran, caplog):
    model = Breaks().double()
    compiled = torch.compile(model, backend="aot_eager")
    for k in range(4):
        x = ids(3, seed=k)
        assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert not ran and "eagerly" in messages(caplog)


class Rolls(nn.Module):
    """Samples change places, or not."""

    def __init__(self):
        super().__init__()
        self.shift, self.first, self.last = 0, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh().roll(self.shift, 0))


def test_an_attribute_that_moves_samples_is_not_overlooked(ran):
    """With a roll, sample n of the output is another sample's input."""
    model = Rolls().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 4, dtype=torch.float64)
    for shift in (0, 0, 0, 1, 1, 1, 0):
        model.shift = shift
        if shift:
            with pytest.raises(SamplesError, match="samples of the loss"):
                norms_of(model, compiled, x)
        else:
            assert_norms(norms_of(model, compiled, x), per_sample_gradients(model, loss, x))
    assert ran


def test_modes_are_learnt_apart(ran):
    """A batch norm that trains makes samples interact, compiled or not."""
    model, compiled, batch = build("images")
    x = batch(4)
    for _ in range(3):
        norms_of(model, compiled, x)
    assert len(ran) == 1
    model.train()
    with pytest.raises(InteractionError, match="interact"):
        norms_of(model, compiled, x)


# ---- refusals -------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.one(h), self.other(h)


def two_heads(ran):
    model = TwoHeads().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(3):
        with unsum.gradients(compiled, unsum.Norms()) as g:
            compiled(x)[0].square().sum().backward()
    truth = per_sample_gradients(model, lambda m, x: m(x)[0].square().sum(), x)
    assert_norms(g[unsum.Norms], truth)
    assert len(ran) == 1
    return model, compiled, x


def test_an_output_that_was_not_used_before_is_refused(ran):
    model, compiled, x = two_heads(ran)
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="output of the compiled model"):
        with unsum.gradients(compiled, unsum.Norms()):
            one, other = compiled(x)
            (one.square().sum() + other.square().sum()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_after_a_refusal_it_runs_eagerly(ran):
    model, compiled, x = two_heads(ran)
    both = lambda model, x: sum(out.square().sum() for out in model(x))
    with pytest.raises(UnsupportedError), unsum.gradients(compiled, unsum.Norms()):
        both(compiled, x).backward()
    for _ in range(3):
        with unsum.gradients(compiled, unsum.Norms()) as g:
            both(compiled, x).backward()
        assert_norms(g[unsum.Norms], per_sample_gradients(model, both, x))
    assert len(ran) == 2


def test_a_parameter_beside_the_model_is_refused(ran):
    model, compiled, x = two_heads(ran)
    model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"body\.weight.*compiled"):
        with unsum.gradients(compiled, unsum.Norms()):
            (compiled(x)[0].square().sum() + model.body.weight.square().sum()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_two_calls_in_one_backward_are_refused(ran):
    _, compiled, x = two_heads(ran)
    with pytest.raises(UnsupportedError, match="several calls of a compiled model"):
        with unsum.gradients(compiled, unsum.Norms()):
            (compiled(x)[0].sum() + compiled(x)[0].square().sum()).backward()


def test_marked_samples_are_refused_where_they_were_not_learnt(ran):
    _, compiled, x = two_heads(ran)
    with pytest.raises(UnsupportedError, match="compiled"):
        with unsum.gradients(compiled, unsum.Norms()):
            unsum.mark_samples(compiled(x)[0].square().sum(1)).sum().backward()


def test_a_tap_that_got_nothing_is_an_error(ran, monkeypatch):
    _, compiled, x = two_heads(ran)
    monkeypatch.setattr(tapped.Tapped, "_take", lambda self, results: None)
    norms = unsum.Norms()
    with pytest.raises(UnsupportedError, match="nothing in the tap"):
        with unsum.gradients(compiled, norms):
            compiled(x)[0].square().sum().backward()
    with pytest.raises(SamplesError, match="no backward"):
        norms.norms()


def test_a_failing_backward_is_taken_back(ran):
    _, compiled, x = two_heads(ran)
    norms = unsum.Norms()
    with unsum.gradients(compiled, norms):
        out = compiled(x)[0].square()
        out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        compiled(x)[0].square().sum().backward()
    assert norms.norms().shape == (5,)


# ---- nothing is left ------------------------------------------------------------------------------------------------


def test_outside_the_block_everything_is_as_before(ran):
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


def test_nothing_piles_up_over_many_steps_of_one_block(ran):
    model, compiled, batch = build("attention")
    live = []
    with unsum.gradients(compiled, unsum.Project(k=2), grad=False) as g:
        for k in range(30):
            loss(compiled, batch(4, seed=k)).backward()
            if k in (9, 29):
                gc.collect()
                live.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    held = sum(1 for _ in model.parameters())  # of each batch, what was asked for
    assert live[1] - live[0] <= 20 * (held + 2) + 20 and len(ran) == 28
    assert g[unsum.Project].matrix().shape[0] == 120


def test_another_block_beside_it_sees_everything(ran):
    model, compiled, batch = build("attention")
    for k in range(4):
        x = batch(4, seed=k)
        with unsum.capture(compiled, "head:input") as got, unsum.gradients(compiled, unsum.Norms()) as g:
            loss(compiled, x).backward()
        assert got["head:input"].shape == (4, 6, 8)
        assert_norms(g[unsum.Norms], per_sample_gradients(model, loss, x))
    assert not ran
