"""Small layers of a compiled model share operators for their norms, where steps are as small as on a GPU."""

import pytest
import torch
import torch.utils.checkpoint
from reference import per_sample_gradients
from torch._dynamo.testing import CompileCounterWithBackend

import unsum
from compiled_nets import assert_norms, build, loss, norms_of
from unsum.kernels import fused, grouped
from unsum.step.launches import Launches


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

    def noted(self, **options):
        graphs.append([])
        for names, found in norms(self, **options):
            graphs[-1].append(sorted(names))
            yield names, found

    monkeypatch.setattr(Launches, "norms", noted)
    return graphs


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_small_layers_share_operators(backend, few_operators, compiled_calls):
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
    assert len(compiled_calls) >= 4 and counts[-1] == counts[4] <= 2  # as ever, for all batch sizes
    weights, biases = (sorted(f"{name}.{what}" for name in ("qkv", "out", "head")) for what in ("weight", "bias"))
    assert len(few_operators) == 2
    assert all(sorted(graph) == sorted([weights, ["norm.weight"], ["norm.bias"], biases]) for graph in few_operators)


def test_what_is_set_aside_is_bounded(few_operators, compiled_calls, monkeypatch):
    model, compiled, batch = build("attention")
    model.float()
    monkeypatch.setitem(grouped.HELD, "cpu", 4 * 6 * (11 + 8))  # δ of the head and of what comes before it
    for k in range(3):
        x = batch(4, seed=k)
        found = norms_of(model, compiled, x).by_parameter()
        for key, each in per_sample_gradients(model, loss, x).items():
            torch.testing.assert_close(found[key].double(), each.flatten(1).square().sum(1), rtol=1e-3, atol=1e-6)
    assert [sorted(graph) for graph in few_operators] == [[["head.bias", "out.bias"], ["head.weight", "out.weight"]]]


def test_operators_are_shared_only_where_layers_are_small_and_norms_alone_are_wanted(few_operators, compiled_calls):
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
