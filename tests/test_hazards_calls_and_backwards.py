"""Calls, threads, backwards and graphs: a record belongs to its own call, and a site that never fired says why."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from hazard_nets import Residual, close
from unsum.errors import SiteError, UnsupportedError

torch.manual_seed(0)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(4, 4)

    def forward(self, a, b):
        return self.enc(a).sum() + 2 * self.enc(b).sum()


def test_every_call_of_a_module_has_its_own_record():
    net, a, b = Twice(), torch.randn(2, 4), torch.randn(3, 4)
    with unsum.capture(net, "enc:input", "enc:grad_output") as got:
        with torch.no_grad():
            net.enc(torch.zeros(1, 4))
        net(a, b).backward()
    assert [t.shape[0] for t in got.calls("enc:input")] == [1, 2, 3]
    none, first, second = got.calls("enc:grad_output")
    assert none is None
    assert (first == 1).all() and (second == 2).all()
    assert torch.equal(got["enc:input@2"], b)
    with pytest.raises(SiteError, match="3 calls"):
        got["enc:input"]


def test_calls_of_other_threads_are_not_seen():
    net, x = Twice(), torch.randn(2, 4)
    barrier = threading.Barrier(2)
    results = {}

    def work(name, value):
        with unsum.capture(net, "enc:input", "enc:grad_output", "enc.weight:grad") as got:
            barrier.wait()
            for _ in range(20):
                net(value, value).backward()
            barrier.wait()
        results[name] = got

    threads = [threading.Thread(target=work, args=(k, x + k)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in (0, 1):
        calls = results[k].calls("enc:input")
        assert len(calls) == 40
        assert all(torch.equal(call, x + k) for call in calls)
        assert len(results[k].calls("enc.weight:grad")) == 20


def test_two_backwards_over_one_graph_are_kept_apart():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:grad_output", "fc.weight:grad") as got:
        out = net(x)
        out.sum().backward(retain_graph=True)
        first = net.fc.weight.grad.clone()
        (10 * out).sum().backward()
    one, two = got.calls("fc:grad_output")
    assert (one == 3).all() and (two == 30).all()
    w1, w2 = got.calls("fc.weight:grad")  # this backward's, not the accumulated one
    assert torch.equal(w1, first)
    close(w2, 10 * first)
    close(net.fc.weight.grad, 11 * first)
    with pytest.raises(SiteError, match="calls"):
        got["fc:grad_output"]


def test_a_second_backward_where_nothing_was_saved_needs_no_retain_graph():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x + self.by

    net, p = nn.Sequential(Shift()), torch.ones(4, requires_grad=True)
    with unsum.capture(net, "0:grad_output", "0:grad_input") as got:
        h = net(p)
        (h * 3).sum().backward()
        (h * 5).sum().backward()
    for site in ("0:grad_output", "0:grad_input"):
        assert [g[0].item() for g in got.calls(site)] == [3, 5]
    for site in ("0:grad_output", "0:grad_input"):
        p.grad = None
        with unsum.edit(net, {site: unsum.zero()}):
            h = net(p)
            (h * 3).sum().backward()
            (h * 5).sum().backward()
        assert (p.grad == 0).all()


def in_another_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_graphs_made_by_several_threads():
    class Two(nn.Module):
        def forward(self, a, b):
            return a * 2 + b * 3

    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    a, b = (in_another_thread(lambda: layer(x)) for _ in range(2))  # their nodes have the same names and numbers
    net = nn.ModuleDict({"two": Two(), "same": nn.Identity()})
    with unsum.capture(net, "two:grad_input[0]", "two:grad_input[1]") as got:
        net["two"](a, b).sum().backward()
    assert (got["two:grad_input[0]"] == 2).all() and (got["two:grad_input[1]"] == 3).all()

    def far_ahead():
        for _ in range(3000):
            t = layer(x)
        return t

    ahead = in_another_thread(far_ahead)
    with unsum.capture(net, "same:grad_output") as got:
        (net["same"](ahead) * 2 + ahead * 5).sum().backward()
    assert (got["same:grad_output"] == 2).all()

    class Helped(nn.Module):
        def forward(self, x):
            return x * 2 + in_another_thread(lambda: x * 3)

    net = nn.Sequential(Helped())
    with pytest.raises(SiteError, match="0:grad_input.*another thread"):
        with unsum.capture(net, "0:grad_input"):
            net(layer(x)).sum().backward()


def test_a_gradient_that_somebody_takes_inside_a_backward_is_not_counted():
    class Guided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, x, *parameters):
            ctx.run, ctx.parameters = run, parameters
            ctx.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                out = ctx.run(x)
            return (None, *torch.autograd.grad(out, [x, *ctx.parameters], grad))

    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    net = nn.Sequential(layer)
    with unsum.capture(net, "0.weight:grad", "0:output", "0:grad_output") as got:
        Guided.apply(layer, x, *layer.parameters()).square().sum().backward()
    assert torch.equal(got["0.weight:grad"], layer.weight.grad)
    close(got["0:grad_output"], 2 * got["0:output"])
    plain = layer.weight.grad.clone()
    layer.zero_grad()
    with unsum.edit(net, {"0.weight:grad": unsum.scale(2.0)}):
        Guided.apply(layer, x, *layer.parameters()).square().sum().backward()
    close(layer.weight.grad, 2 * plain)


def test_micro_batches_in_any_order():
    net = Residual()
    xs = [torch.randn(2, 4), torch.randn(3, 4)]
    with unsum.capture(net, "fc:input", "fc:grad_output") as got:
        losses = [net(x).sum() * k for k, x in enumerate(xs, 1)]
        losses[1].backward()
        losses[0].backward()
    assert [g.shape[0] for g in got.calls("fc:grad_output")] == [2, 3]
    assert (got["fc:grad_output@0"] == 3).all() and (got["fc:grad_output@1"] == 6).all()


def test_double_backward_is_a_pass_of_its_own():
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4, requires_grad=True)
    with unsum.capture(net, "0:grad_output") as got:
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        g.square().sum().backward()
    first, second = got.calls("0:grad_output")
    h = F.linear(x, net[0].weight, net[0].bias).detach()
    close(first, ((1 - torch.tanh(h) ** 2) * net[2].weight).detach())
    assert not torch.allclose(first, second)


def test_torch_autograd_grad_towards_the_very_tensor():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:output", "fc:grad_output", keep="graph") as got:
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), [got["fc:output"]])
    assert torch.equal(got["fc:grad_output"], g)


def test_a_batched_backward_is_refused_by_name():
    net, x = Residual(), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UnsupportedError, match="fc:grad_output.*is_grads_batched"):
        with unsum.capture(net, "fc:grad_output"):
            out = net(x)
            torch.autograd.grad(out, x, torch.eye(8).view(8, 2, 4), is_grads_batched=True)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda net, x: net(x).sum(), "no backward ran"),
        (lambda net, x: (net(x), net.fc(x).sum().backward()), None),
        (lambda net, x: x.sum(), "not called"),
    ],
    ids=["no backward", "backward elsewhere", "not called"],
)
def test_a_site_that_never_fired_is_an_error_that_says_why(run, says):
    net, x = Residual(), torch.randn(2, 4)
    site = "fc:grad_output" if says else "same:grad_output"
    with pytest.raises(SiteError, match=f"{site}: never fired.*{says or 'no gradient'}"):
        with unsum.capture(net, site):
            run(net, x)
    with unsum.capture(net, site, missing="ignore") as got:
        run(net, x)
    assert site not in got


def test_why_a_gradient_never_came_unused_frozen_no_grad_detached():
    net, x = Residual(), torch.randn(2, 4)

    def never(site, run, says):
        with pytest.raises(SiteError, match=f"{site}.*{says}"):
            with unsum.capture(net, site):
                run()

    unused = lambda: (net.fc(x), (net.same(x) * net.fc.weight.sum()).sum().backward())
    never("fc:grad_output", unused, "no gradient reached it")

    def no_grad():
        with torch.no_grad():
            net(x)

    never("fc:grad_output", no_grad, "no_grad")

    def inference():
        with torch.inference_mode():
            net(x)

    never("fc:grad_output", inference, "inference_mode")
    net.fc.requires_grad_(False)
    scale = torch.ones((), requires_grad=True)
    never("fc:grad_output", lambda: (net(x).sum() * scale).backward(), "frozen")
    never("fc.weight:grad", lambda: (net(x).sum() * scale).backward(), "frozen")


def test_a_hook_that_outlives_its_block_does_nothing():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:output", "fc:grad_output", missing="ignore") as got:
        loss = net(x).sum()
    loss.backward()
    assert got.calls("fc:grad_output") == [None]


def test_what_was_captured_is_freed_as_soon_as_it_is_dropped():
    net, x = Residual(), torch.randn(2, 4)
    gc.collect()
    gc.disable()
    try:
        with unsum.capture(net, "fc:output", "fc:grad_output", "fc:grad_input") as got:
            net(x.requires_grad_()).sum().backward()
        kept = [weakref.ref(value) for _, value in got.items()]
        assert all(ref() is not None for ref in kept)
        del got
        assert [ref() for ref in kept] == [None] * 3
    finally:
        gc.enable()


def test_no_memory_is_kept_by_a_block_that_was_left():
    net, x = Residual(), torch.randn(64, 4)

    def step():
        with unsum.capture(net, "fc:output", "fc:grad_output", "same:grad_input", missing="ignore"):
            net(x).sum().backward()

    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    step()
    before = tensors()
    for _ in range(20):
        step()
    assert tensors() <= before
