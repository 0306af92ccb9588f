"""Where weights come from the norms, compiled models run compiled and give what one sample at a time gives."""

import gc
import math

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from compiled_nets import MODELS, build, loss
from unsum.compiled import tapping
from unsum.compiled.compile import calls_python
from unsum.errors import NotFinite, OptionError, SamplesError, UnsupportedError
from unsum.kernels import product
from unsum.reducers import clipping, holding


class Limit:
    """Clips to a bound that may be another in every step."""

    def __init__(self, bound=1.0):
        self.bound, self.seen = bound, []

    def __call__(self, norms):
        self.seen.append(norms)
        return (self.bound / norms).clamp(max=1)


def by_group(each, groups=None):
    """(groups, n): norms of one sample at a time."""
    groups = groups or dict.fromkeys(each, 0)
    rows = torch.zeros(max(groups.values()) + 1, len(next(iter(each.values()))), dtype=torch.float64)
    for name, values in each.items():
        rows[groups[name]] += values.flatten(1).square().sum(1)
    return rows.sqrt()


def clipped_sums(each, bound, groups=None):
    weights = (bound / by_group(each, groups)).clamp(max=1)
    return {k: torch.einsum("n,n...->...", weights[(groups or {}).get(k, 0)], v) for k, v in each.items()}


def assert_sums(found, each, bound, groups=None, **tolerance):
    wanted = clipped_sums(each, bound, groups)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value, **({"rtol": 1e-8, "atol": 1e-10} | tolerance))


def bound_between(each):
    """A bound that some norms exceed, and others do not."""
    norms = by_group(each)[0].sort().values
    return float(norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2


def by_layer(model):
    modules = {}
    return {name: modules.setdefault(name.rpartition(".")[0], len(modules)) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("grouped", [False, True], ids=["all", "by layer"])
@pytest.mark.parametrize("grad", [True, False], ids=["with .grad", "without"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_by_a_function_that_changes_in_every_step(name, grad, grouped, compiled_calls):
    model, compiled, batch = build(name)
    limit, groups = Limit(), by_layer(model) if grouped else None
    for k in range(5):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        limit.bound = (0.5 + k / 10) * bound_between(each) / (3 if grouped else 1)
        assert (by_group(each, groups) > limit.bound).any()
        model.zero_grad()
        reducer = unsum.WeightedSum(limit, groups=groups)
        with unsum.gradients(compiled, reducer, grad=grad):
            loss(compiled, x).backward()
        assert_sums(reducer.sum(), each, limit.bound, groups)
        torch.testing.assert_close(reducer.norms(), by_group(each)[0])
        torch.testing.assert_close(limit.seen[-1], by_group(each, groups) if grouped else by_group(each)[0])
        for key, parameter in model.named_parameters():
            if grad and parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, each[key].sum(0), rtol=1e-8, atol=1e-10)
            else:
                assert parameter.grad is None
    assert len(compiled_calls) == 3 and len(limit.seen) == 5


@pytest.mark.parametrize(("memory", "held"), [(None, 3), (80_000, 2), (0, 0)])
def test_what_is_held_fits_the_budget_and_changes_no_sum(memory, held, compiled_calls, monkeypatch):
    monkeypatch.setattr(holding, "FAR", {"cpu": -1e6})  # here all is small: as if it were worth holding
    monkeypatch.setattr(product, "choose", lambda a, delta, want_sum: "product")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3))).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n in (4, 4, 4, 4, 3, 3, 3):
        x = torch.randn(n, 2, 32, dtype=torch.float64)
        each = per_sample_gradients(model, loss, x)
        ways = []
        for which in (compiled, model):
            reducer = unsum.WeightedSum(limit := Limit(bound_between(each)), memory=memory)
            with unsum.gradients(which, reducer, grad=which is model):
                loss(which, x).backward()
            assert_sums(reducer.sum(), each, limit.bound)
            ways.append(list(reducer.chosen.items()))
        assert ways[0] == ways[1] or n == 3  # fewer samples than were compiled for: what is held takes less
        assert [way for _, way in ways[0]].count("gradients") in ({held} if n == 4 else {held, 3 if memory else held})
    assert len(compiled_calls) >= 3


def test_batch_sizes_change_and_nothing_is_compiled_for_each(compiled_calls):
    model, compiled, batch = build("attention")
    for n in (4, 4, 4, 5, 5, 6, 7, 9, 3, 12):
        x = batch(n, seed=n)
        each = per_sample_gradients(model, loss, x)
        reducer = unsum.WeightedSum(limit := Limit(bound_between(each)), memory=1e6)
        with unsum.gradients(compiled, reducer):
            loss(compiled, x).backward()
        assert_sums(reducer.sum(), each, limit.bound)
    assert len(compiled_calls) >= 6


def test_micro_batches_and_forwards_that_wait(compiled_calls):
    model, compiled, batch = build("tied")
    batches = [batch(3, seed=k) for k in range(5)]
    each = per_sample_gradients(model, loss, torch.cat(batches))
    reducer, norms = unsum.WeightedSum(limit := Limit(bound_between(each))), unsum.Norms()
    with unsum.gradients(compiled, reducer, norms):
        for x in batches[:3]:
            loss(compiled, x).backward()
        first, second = loss(compiled, batches[3]), loss(compiled, batches[4])
        second.backward()  # the function knows norms by backward, results are in the order of forwards
        first.backward()
    assert_sums(reducer.sum(), each, limit.bound)
    torch.testing.assert_close(reducer.norms(), by_group(each)[0])
    torch.testing.assert_close(norms.norms(), by_group(each)[0])
    for name, value in each.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value.sum(0), rtol=1e-8, atol=1e-10)
    assert len(compiled_calls) == 3


def test_two_functions_and_chosen_parameters(compiled_calls):
    model, compiled, batch = build("attention")
    for k in range(3):
        x = batch(4, seed=k)
        each = {name: v for name, v in per_sample_gradients(model, loss, x).items() if name.endswith("weight")}
        one, other = (unsum.WeightedSum(Limit(factor * bound_between(each))) for factor in (1, 0.5))
        with unsum.gradients(compiled, one, other, params="*.weight", grad=False):
            loss(compiled, x).backward()
        assert_sums(one.sum(), each, bound_between(each))
        assert_sums(other.sum(), each, 0.5 * bound_between(each))
    assert len(compiled_calls) == 1


@pytest.mark.parametrize("how", ["mean", "scaler"])
def test_the_function_is_given_unscaled_norms(how, compiled_calls):
    model, compiled, batch = build("attention")
    x = batch(4)
    each = per_sample_gradients(model, loss, x)
    for k in range(4):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + k))
        options = {"loss_reduction": "mean"} if how == "mean" else {"scaler": scaler}
        reducer = unsum.WeightedSum(limit := Limit(bound_between(each)))
        with unsum.gradients(compiled, reducer, grad=False, **options):
            (loss(compiled, x) / 4 if how == "mean" else scaler.scale(loss(compiled, x))).backward()
        assert_sums(reducer.sum(), each, limit.bound)
        torch.testing.assert_close(limit.seen[-1], by_group(each)[0])
    assert len(compiled_calls) == 2


def test_samples_along_another_dimension(compiled_calls):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for k in range(4):
        x = torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        each = per_sample_gradients(model, loss_at_1 := lambda m, x: m(x).square().sum(), x.transpose(0, 1))
        reducer = unsum.WeightedSum(limit := Limit(bound_between(each)))
        with unsum.gradients(compiled, reducer, samples=unsum.dim(1)):
            loss_at_1(compiled, x).backward()
        assert_sums(reducer.sum(), each, limit.bound)
    assert len(compiled_calls) == 2


# ---- clip_per_sample and private -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flat", "layer", "automatic"])
@pytest.mark.parametrize("name", ["attention", "tied", "images"])
def test_clip_per_sample_adds_to_grad(name, how, compiled_calls):
    model, compiled, batch = build(name)
    groups = by_layer(model) if how == "layer" else None
    for k in range(5):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        bound, kept = bound_between(each), {key: torch.randn_like(p) for key, p in model.named_parameters()}
        for key, parameter in model.named_parameters():
            parameter.grad = kept[key].clone()
        with unsum.clip_per_sample(compiled, max_norm=bound, how=how) as clipped:
            loss(compiled, x).backward()
        torch.testing.assert_close(clipped.norms, by_group(each)[0])
        if how == "automatic":
            w = bound / (by_group(each)[0] + 0.01)
            wanted = {key: torch.einsum("n,n...->...", w, v) for key, v in each.items()}
        else:
            wanted = clipped_sums(each, bound / math.sqrt(max(groups.values()) + 1) if groups else bound, groups)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, kept[key] + wanted[key], rtol=1e-8, atol=1e-9)
    assert len(compiled_calls) == 2  # the first step asks whether samples interact


def test_clip_per_sample_with_a_scaler_and_micro_batches(compiled_calls):
    model, compiled, batch = build("attention")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for k in range(4):
        xs = [batch(3, seed=2 * k + part) for part in (0, 1)]
        each = per_sample_gradients(model, loss, torch.cat(xs))
        model.zero_grad()
        with unsum.clip_per_sample(compiled, max_norm=bound_between(each), scaler=scaler) as clipped:
            for x in xs:
                scaler.scale(loss(compiled, x)).backward()
        torch.testing.assert_close(clipped.norms, by_group(each)[0])
        grads = {name: p.grad / 256 for name, p in model.named_parameters()}
        assert_sums(grads, each, bound_between(each))
    assert len(compiled_calls) >= 4


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


def test_a_parameter_that_nothing_reached_keeps_its_grad(compiled_calls):
    model = Unused().double()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(5):
        with unsum.clip_per_sample(compiled):
            compiled(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
        assert model.unused.weight.grad is None and model.used.weight.grad is not None
    assert len(compiled_calls) >= 2


def test_a_sample_that_is_not_finite_is_refused_and_grad_is_as_it_was(compiled_calls):
    model, compiled, batch = build("images")
    for _ in range(4):
        with unsum.clip_per_sample(compiled):
            loss(compiled, batch(4)).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    x = batch(4)
    x[2] = torch.inf
    with pytest.raises(NotFinite, match="sample 2"), unsum.clip_per_sample(compiled) as clipped:
        loss(compiled, x).backward()
    assert clipped.samples == 0 and len(compiled_calls) == 2
    assert all(torch.equal(before[name], p.grad) for name, p in model.named_parameters())


def test_private_steps_without_noise_are_sums_of_clipped_gradients(compiled_calls):
    model, compiled, batch = build("attention")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dp = unsum.private(compiled, optimizer, max_norm=2.0, noise_multiplier=0.0, expected_batch=4, sample_rate=0.1)
    for k in range(5):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with dp:
            loss(compiled, x).backward()
        dp.step()
        moved = {name: 4 * (before[name] - p.detach()) for name, p in model.named_parameters()}
        assert_sums(moved, each, 2.0)
    assert len(compiled_calls) == 2


# ---- functions that misbehave ----------------------------------------------------------------------------------------


def test_a_function_may_keep_what_it_is_given_and_return_what_it_keeps(compiled_calls):
    model, compiled, batch = build("attention")
    weights, kept = torch.rand(4, dtype=torch.float64), []
    before = weights.clone()

    def given(norms):
        kept.append(norms)
        return weights

    for k in range(4):
        x = batch(4, seed=k)
        each = per_sample_gradients(model, loss, x)
        reducer = unsum.WeightedSum(given)
        with unsum.gradients(compiled, reducer):
            loss(compiled, x).backward()
        gc.collect()
        torch.testing.assert_close(kept[-1], by_group(each)[0])
        torch.testing.assert_close(reducer.sum()["gate"], torch.einsum("n,n...->...", before, each["gate"]))
        assert torch.equal(weights, before) and reducer.weights is weights
    assert len(compiled_calls) == 2


@pytest.mark.parametrize("what", ["raises", "another shape"])
def test_a_function_that_fails_leaves_everything_as_it_was(what, compiled_calls):
    model, compiled, batch = build("attention")
    fails = False

    def weights(norms):
        return (1 / 0 if what == "raises" else norms[:2]) if fails else 1 / norms

    for k in range(4):
        fails = k == 3
        model.zero_grad()
        reducer = unsum.WeightedSum(weights)
        with unsum.gradients(compiled, reducer):
            if fails:
                with pytest.raises(ZeroDivisionError if what == "raises" else OptionError):
                    loss(compiled, batch(4)).backward()
                with pytest.raises(SamplesError, match="no backward"):
                    reducer.sum()
                assert all(p.grad is None for p in model.parameters())
                fails = False
            loss(compiled, batch(4)).backward()
        assert set(reducer.sum()) == {name for name, _ in model.named_parameters()}
    assert len(compiled_calls) == 3


def test_a_function_that_did_not_run_is_an_error(compiled_calls, monkeypatch):
    """As where a backend replays what it has recorded: old weights would be used."""
    _, compiled, batch = build("attention")
    for _ in range(3):
        with unsum.gradients(compiled, unsum.WeightedSum(Limit())):
            loss(compiled, batch(4)).backward()
    monkeypatch.setattr(clipping.ClippedTap, "weigh", lambda self, sq_norms: torch.ones_like(sq_norms))
    with pytest.raises(UnsupportedError, match="called 0 times"):
        with unsum.gradients(compiled, unsum.WeightedSum(Limit())):
            loss(compiled, batch(4)).backward()
    assert len(compiled_calls) == 2


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_backward_after_the_block_is_plain(is_gone, compiled_calls):
    model, compiled, batch = build("attention")
    limit = Limit()
    for k in range(4):
        model.zero_grad()
        with unsum.gradients(compiled, unsum.WeightedSum(limit)) as g:
            value = loss(compiled, x := batch(4, seed=k))
            if k < 3:
                value.backward()
    if is_gone:
        del g
        gc.collect()
    value.backward()
    assert len(compiled_calls) == 2 and len(limit.seen) == 3
    for name, each in per_sample_gradients(model, loss, x).items():
        torch.testing.assert_close(model.get_parameter(name).grad, each.sum(0), rtol=1e-8, atol=1e-10)


def test_a_second_backward_of_the_same_samples_is_refused(compiled_calls):
    _, compiled, batch = build("attention")
    for k in range(3):
        reducer = unsum.WeightedSum(Limit())
        with unsum.gradients(compiled, reducer):
            value = loss(compiled, batch(4))
            value.backward(retain_graph=k == 2)
            if k == 2:
                with pytest.raises(SamplesError, match="second backward"):
                    value.backward()
    assert len(compiled_calls) == 1 and reducer.norms().shape == (4,)


@pytest.mark.parametrize("cut", [False, True])
def test_cuda_graphs_run_eagerly_unless_inductor_cuts_them_at_the_function(cut, compiled_calls, caplog, monkeypatch):
    monkeypatch.setattr(tapping, "reuses_memory", lambda module: True)
    monkeypatch.setattr(tapping, "calls_python", lambda module: cut)
    model, compiled, batch = build("attention")
    for _ in range(3):
        x = batch(4)
        reducer = unsum.WeightedSum(limit := Limit())
        with unsum.gradients(compiled, reducer):
            loss(compiled, x).backward()
        assert_sums(reducer.sum(), per_sample_gradients(model, loss, x), limit.bound)
    said = "CUDA graph" in " ".join(record.getMessage() for record in caplog.records)
    assert (len(compiled_calls), said) == ((1, False) if cut else (0, True))


def test_where_python_can_run_between_cuda_graphs():
    model = torch.nn.Linear(2, 2)
    with_graphs = {"triton.cudagraphs": True}
    assert calls_python(torch.compile(model))
    assert calls_python(torch.compile(model, options=with_graphs)), "inductor cuts graphs at our operators"
    assert not calls_python(torch.compile(model, options={**with_graphs, "graph_partition": False}))
    assert not calls_python(torch.compile(model, backend="cudagraphs"))
    for operator in (torch.ops.unsum.weights_of_norms.default, torch.ops.unsum.take_in_factors.default):
        assert torch.Tag.cudagraph_unsafe in operator.tags


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "images"])
def test_inductor(name, compiled_calls):
    model, compiled, batch = build(name, backend="inductor")
    model.float()
    for k, n in enumerate((4, 4, 4, 5, 5, 6)):
        x = batch(n, seed=k) if name == "attention" else batch(n, seed=k).float()
        each = per_sample_gradients(model, loss, x)
        reducer = unsum.WeightedSum(limit := Limit(bound_between(each)), groups=by_layer(model) if k % 2 else None)
        model.zero_grad()
        with unsum.gradients(compiled, reducer):
            loss(compiled, x).backward()
        assert_sums(reducer.sum(), each, limit.bound, by_layer(model) if k % 2 else None, rtol=1e-3, atol=1e-4)
    assert len(compiled_calls) >= 2


# ---- backwards towards something else than all parameters -----------------------------------------------------------


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.compile(model, backend="aot_eager", fullgraph=True)


def rows_of(n, seed):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("again", [True, False], ids=["the same forward", "another forward"])
def test_gradients_of_inputs_add_nothing_to_grad(again, compiled_calls):
    """As for adversarial examples: `.grad` must not have the clipped sum of that backward, too."""
    model, compiled = network()
    for k in range(5):
        x = rows_of(5, seed=k).requires_grad_()
        each = per_sample_gradients(model, loss, x.detach())
        model.zero_grad()
        with unsum.clip_per_sample(compiled, max_norm=bound_between(each)) as clipped:
            value = loss(compiled, x)
            (towards,) = torch.autograd.grad(value, x, retain_graph=again)
            assert all(p.grad is None for p in model.parameters()) and clipped.samples == 0
            (value if again else loss(compiled, x.detach().requires_grad_())).backward()
        torch.testing.assert_close(towards, torch.autograd.grad(loss(model, x), x)[0])
        torch.testing.assert_close(clipped.norms, by_group(each)[0])
        assert_sums({name: p.grad for name, p in model.named_parameters()}, each, bound_between(each))
    assert len(compiled_calls) >= 2


def test_gradients_of_inputs_do_not_count_as_a_backward(compiled_calls):
    model, compiled = network()
    for k in range(5):
        x = rows_of(5, seed=k).requires_grad_()
        each = per_sample_gradients(model, loss, x.detach())
        reducers = norms, moment, project = unsum.Norms(), unsum.SecondMoment(), unsum.Project(k=2)
        with unsum.gradients(compiled, *reducers):
            value = loss(compiled, x)
            torch.autograd.grad(value, x, retain_graph=True)
            assert [reducer.samples() for reducer in reducers] == [0, 0, 0]
            value.backward()
        with unsum.gradients(model, eager := unsum.Project(k=2)):
            loss(model, x).backward()
        torch.testing.assert_close(norms.norms(), by_group(each)[0])
        torch.testing.assert_close(project.matrix(), eager.matrix())
        for name, value in moment.sum_squares().items():
            torch.testing.assert_close(value, each[name].square().sum(0))
    assert len(compiled_calls) == 3


def test_no_function_is_called_for_gradients_of_inputs_after_one_that_failed(compiled_calls):
    _, compiled = network()
    for k in range(4):
        calls = []

        def fails(norms, calls=calls):
            calls.append(norms)
            raise ZeroDivisionError

        x = rows_of(5, seed=k).requires_grad_()
        with unsum.gradients(compiled, unsum.WeightedSum(fails)):
            with pytest.raises(ZeroDivisionError):
                loss(compiled, x).backward()
            torch.autograd.grad(loss(compiled, x), x)
        assert len(calls) == 1
    assert len(compiled_calls) >= 3


@pytest.mark.parametrize("how", ["gradients", "clip_per_sample"])
def test_a_backward_towards_some_parameters_is_refused_once_and_then_eager(how, compiled_calls):
    """The norms that weights come from are those of the parameters that are asked for, as in eager models."""
    model, compiled = network()
    chosen, refused = {"2.weight": model[2].weight, "2.bias": model[2].bias}, 0
    for k in range(6):
        x = rows_of(5, seed=k)
        each = {name: v for name, v in per_sample_gradients(model, loss, x).items() if name in chosen}
        reducer, bound = unsum.WeightedSum(limit := Limit(bound_between(each))), bound_between(each)
        model.zero_grad()
        is_clip = how == "clip_per_sample"
        with unsum.clip_per_sample(compiled, bound) if is_clip else unsum.gradients(compiled, reducer):
            value = loss(compiled, x)
            if len(compiled_calls) > refused:
                with pytest.raises(UnsupportedError, match="towards some parameters"):
                    value.backward(inputs=list(chosen.values()))
                assert all(p.grad is None for p in model.parameters()) and not limit.seen
                refused += 1
                value = loss(compiled, x)
            value.backward(inputs=list(chosen.values()))
        found = {name: p.grad if is_clip else reducer.sum()[name] for name, p in chosen.items()}
        assert_sums(found, each, bound)
        assert model[0].weight.grad is None
    assert refused == 1 and len(compiled_calls) == 1


def test_an_attribute_chooses_the_layer_whose_gradient_is_clipped(compiled_calls):
    model, compiled, batch = build("choosing")
    for step in range(16):
        model.active = (model.a, model.b)[step // 4 % 2]
        x = batch(4, step)
        each = per_sample_gradients(model, loss, x)
        bound = bound_between(each)
        model.zero_grad()
        with unsum.clip_per_sample(compiled, max_norm=bound):
            loss(compiled, x).backward()
        for name, sums in clipped_sums(each, bound, None).items():
            grad = model.get_parameter(name).grad
            found = torch.zeros_like(sums) if grad is None else grad
            torch.testing.assert_close(found, sums, rtol=1e-8, atol=1e-9)
    assert compiled_calls
