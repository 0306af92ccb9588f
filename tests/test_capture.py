"""How captured values are kept: by reference, reduced, sliced, in other dtypes, and for how long."""

import copy
import gc
import pickle
import tracemalloc

import pytest
import torch
from reference import per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from capture_net import X, two_layers
from unsum.errors import OptionError, SiteError


@pytest.fixture
def net():
    return two_layers()


def test_the_two_factors_give_the_gradient_of_each_sample(net):
    """The point of the whole library, in its smallest form: against one sample at a time in float64."""
    y = torch.randn(5, 6, 2)
    truth = per_sample_gradients(net, lambda m, x, y: (m(x) - y).square().sum(), X, y)
    with unsum.capture(net, "*:input", "*:grad_output") as got:
        (net(X) - y).square().sum().backward()
    for name in ("fc1", "fc2"):
        ours = torch.einsum("nto,nti->noi", got[f"{name}:grad_output"], got[f"{name}:input"])
        torch.testing.assert_close(ours.double(), truth[f"{name}.weight"], atol=1e-4, rtol=1e-4)


def test_values_are_readable_inside_the_block_as_soon_as_they_are_there(net):
    with unsum.capture(net, "fc1:output", "fc1:grad_output") as got:
        assert "fc1:output" not in got
        with pytest.raises(KeyError):
            got["fc1:output"]
        out = net(X)
        assert got["fc1:output"].shape == (5, 6, 3)
        with pytest.raises(KeyError, match="no backward has reached it yet"):
            got["fc1:grad_output"]
        out.sum().backward()
        assert got["fc1:grad_output"].shape == (5, 6, 3)
    assert "fc1:output" in got


def test_values_are_detached_and_share_memory_by_reference(net):
    with unsum.capture(net, "fc2:output") as got:
        out = net(X)
    assert not got["fc2:output"].requires_grad
    assert got["fc2:output"].data_ptr() == out.data_ptr()
    with unsum.capture(net, "fc2:output", keep="clone") as got:
        out = net(X)
    assert got["fc2:output"].data_ptr() != out.data_ptr()
    assert torch.equal(got["fc2:output"], out)


def test_a_loss_on_activations(net):
    """Seed 000's regularisers."""
    with unsum.capture(net, "fc1:output", keep="graph") as got:
        out = net(X)
        (out.square().sum() + 0.1 * got["fc1:output"].abs().sum()).backward()
    h = F.linear(X, net.fc1.weight, net.fc1.bias)
    loss = net.fc2(torch.tanh(h)).square().sum() + 0.1 * h.abs().sum()
    (truth,) = torch.autograd.grad(loss, net.fc1.weight)
    torch.testing.assert_close(net.fc1.weight.grad, truth)


def test_dtype_slice_and_device(net):
    with unsum.capture(net, "fc1:output", "fc1:grad_output", dtype=torch.float64, slice=(slice(None), -1)) as got:
        net(X).sum().backward()
    assert got["fc1:output"].dtype == got["fc1:grad_output"].dtype == torch.float64
    assert torch.equal(got["fc1:output"].float(), net.fc1(X)[:, -1])
    with unsum.capture(net, "fc1:output", slice=0) as got:
        net(X)
    assert got["fc1:output"].untyped_storage().nbytes() == 6 * 3 * 4  # the rest is not kept
    with unsum.capture(net, "fc1:output", to="meta") as got:
        net(X)
    assert got["fc1:output"].device.type == "meta"
    with unsum.capture(net, "fc1:output", to="cpu") as got:
        net(X)
    assert torch.equal(got["fc1:output"], net.fc1(X))


def test_reductions_are_computed_at_the_place(net):
    with unsum.capture(net, "fc1:output", "fc1:grad_output", "fc1.weight:grad", reduce="norm") as got:
        net(X).sum().backward()
    torch.testing.assert_close(got["fc1:output"], net.fc1(X).norm().detach())
    torch.testing.assert_close(got["fc1.weight:grad"], net.fc1.weight.grad.norm())
    assert got["fc1:grad_output"].shape == ()
    with unsum.capture(net, "fc1:output", reduce="mean") as got:
        net(X.bfloat16().float())
    assert got["fc1:output"].dtype == torch.float32
    with unsum.capture(net, "fc1:output", reduce=lambda t: t.amax().item()) as got:
        net(X)
    assert got["fc1:output"] == net.fc1(X).amax().item()
    with unsum.capture(net, "fc1:output", reduce=lambda t: t[0, 0]) as got:
        net(X)
    assert got["fc1:output"].untyped_storage().nbytes() == 3 * 4


def test_nan_and_inf_are_counted_not_dropped(net):
    x = X.clone()
    x[0, 0, 0], x[1, 1, 1] = float("nan"), float("inf")
    with unsum.capture(net, "fc1:input", "fc2:input", reduce="finite") as got:
        net(x)
    assert got["fc1:input"] == unsum.flow.keeping.Finite(nan=1, inf=1, total=120)
    assert not got["fc1:input"]
    assert got["fc2:input"].nan >= 3
    with unsum.capture(net, "fc1:input", reduce="mean") as got:
        net(x)
    assert got["fc1:input"].isnan()
    with unsum.capture(net, "fc1:input", reduce="finite") as got:
        net(X)
    assert got["fc1:input"]


def test_half_precision_is_reduced_in_float32():
    big = nn.Sequential(nn.Identity())
    with unsum.capture(big, "0:output", reduce="norm") as got:
        big(torch.full((1000,), 300.0, dtype=torch.float16))
    torch.testing.assert_close(got["0:output"], torch.tensor(300 * 1000**0.5))


def test_a_reduction_owns_what_it_returns_and_may_not_write(net):
    inplace = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True))
    truth = inplace[0](X).detach()
    for reduce in (lambda t: {"a": t}, lambda t: (t.mean(), [t]), lambda t: t.numpy(), lambda t: {"b": t.numpy()}):
        with torch.no_grad(), unsum.capture(inplace, "0:output", reduce=reduce) as got:
            inplace(X)
        value = got["0:output"]
        value = (
            value
            if not isinstance(value, dict | tuple)
            else next(iter(value.values()))
            if isinstance(value, dict)
            else value[1][0]
        )
        assert torch.equal(torch.as_tensor(value), truth)
    with pytest.raises(OptionError, match="fc1:output.*in place"):
        with unsum.capture(net, "fc1:output", reduce=lambda t: t.abs_().mean()):
            net(X)
    with pytest.raises(ZeroDivisionError) as error:
        with unsum.capture(net, "fc1:output", reduce=lambda t: 1 / 0):
            net(X)
    assert "fc1:output" in error.value.__notes__[0]


def test_integers_sparse_and_ragged_tensors():
    embed = nn.Sequential(nn.Embedding(10, 3, sparse=True))
    ids = torch.tensor([1, 1, 2])
    for reduce, truth in (("norm", (9 + 9 + 9 + 3 + 0) ** 0.5), ("mean", 9 / 30), ("finite", None)):
        with unsum.capture(embed, "0.weight:grad", reduce=reduce) as got:
            embed(ids).sum().backward()
        value = got["0.weight:grad"]
        assert (
            bool(value)
            if truth is None
            else value.item() == pytest.approx((4 * 3 + 3) ** 0.5 if reduce == "norm" else truth)
        )
    with unsum.capture(embed, "0:input", reduce="norm") as got:
        embed(ids)
    assert got["0:input"] == pytest.approx(6**0.5)
    with pytest.raises(SiteError, match="0.weight:grad.*sparse"):
        with unsum.edit(embed, {"0.weight:grad": unsum.clip(-1, 1)}):
            embed(ids).sum().backward()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad(), unsum.capture(encoder, "layers.0:output") as got:
        encoder(torch.randn(2, 3, 8), src_key_padding_mask=mask)
    assert "layers.0:output" in str(got.trace())


def test_a_parameters_gradient_survives_with_every_option(net):
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for options in ({"to": "cpu"}, {"dtype": torch.float32}, {"scaler": disabled}, {"keep": "clone"}, {"slice": 0}):
        net.zero_grad()
        with unsum.capture(net, "fc1.weight:grad", **options) as got:
            net(X).sum().backward()
        truth = net.fc1.weight.grad.clone()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        assert torch.equal(got["fc1.weight:grad"], truth[0] if "slice" in options else truth)


def test_what_was_captured_is_not_copied_by_accident(net):
    with unsum.capture(net, "fc1:output") as got:
        net(X)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"dict\(got.items\(\)\)"):
            attempt(got)


def test_the_scale_of_a_grad_scaler_is_taken_out(net):
    with unsum.capture(net, "fc1:grad_output", "fc1.weight:grad") as truth:
        net(X).sum().backward()
    for scaler in (
        torch.amp.GradScaler("cpu", init_scale=2.0**12),
        2.0**12,
        torch.amp.GradScaler("cpu", enabled=False),
    ):
        net.zero_grad()
        with unsum.capture(net, "fc1:grad_output", "fc1.weight:grad", scaler=scaler) as got:
            loss = net(X).sum()
            (loss * scaler if isinstance(scaler, float) else scaler.scale(loss)).backward()
        for site, value in truth.items():
            torch.testing.assert_close(got[site], value)


def test_a_half_precision_gradient_does_not_underflow_when_the_scale_is_taken_out():
    net = nn.Sequential(nn.Identity())
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    with unsum.capture(net, "0:grad_output", scaler=2.0**16) as got:
        (net(x) * 1e-3).sum().backward()
    assert got["0:grad_output"].dtype == torch.float32
    assert (got["0:grad_output"] > 0).all()


def test_a_trace_tells_calls_and_backwards_apart(net):
    with unsum.capture(net, "fc1:output", "fc1:grad_output", "fc1.weight:grad") as got:
        net(X).sum().backward()
        net(X).sum().backward()
    lines = str(got.trace()).splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["fc1:output", "fc1:grad_output", "fc1.weight:grad"] * 2
    assert "call 1" in lines[3] and "backward 2" in lines[4]
    assert got.trace()[1].direction == "backward"
    assert len(got.trace()) == 6
    assert str(unsum.flow.trace.Trace([])) == ""


def grown(steps, count):
    """Bytes by which `count` steps make memory grow: what leaks, leaks in each of three rounds. In a single one a table
    of Python's own may have been enlarged, such as that of all finalizers in the process."""
    rounds = []
    tracemalloc.start()
    for _ in range(3):
        start = tracemalloc.get_traced_memory()[0]
        steps(count)
        gc.collect()
        rounds.append(tracemalloc.get_traced_memory()[0] - start)
    tracemalloc.stop()
    return min(rounds)


def test_no_growth_of_memory_over_200_steps(net):
    def steps(count):
        for _ in range(count):
            with unsum.capture(net, "*:input", "*:grad_output", "*:grad_input", "*:grad", missing="ignore"):
                net(X).sum().backward()

    steps(20)
    assert grown(steps, 200) < 50_000  # bytes; one step's records alone are more than a thousand


def test_no_growth_inside_one_long_block(net):
    with unsum.edit(net, {"fc1:grad_output": unsum.scale(1.0), "fc2:output": unsum.scale(1.0)}):
        for _ in range(20):
            net(X).sum().backward()
        gc.collect()
        tracemalloc.start()
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            net(X).sum().backward()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
        tracemalloc.stop()
    assert grown < 50_000


def test_values_are_those_of_the_items():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with unsum.capture(model, "*:output") as got:
        model(torch.ones(1, 2))
    assert [id(value) for value in got.values()] == [id(value) for _, value in got.items()]
    assert "2 sites" in repr(got)
