"""What PyTorch hooks really do: every case that would be silent or wrong with the obvious hook. Each is right here, or
an error that names the site."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from reference import gradient_of
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import SiteError, UnsupportedError

torch.manual_seed(0)


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), atol=1e-6, rtol=1e-5)


class Block(nn.Module):
    """A layer, and something done to its output."""

    def __init__(self, after, layer=None):
        super().__init__()
        self.fc = layer or nn.Linear(4, 4)
        self.after = after

    def forward(self, x):
        return self.after(self.fc(x))


# ---- getting a gradient at a place --------------------------------------------------------------------------------


def add_in_place(y):
    y += 1
    return y.square()


def relu_in_place(y):
    return F.relu_(y).square()


def column_in_place(y):
    y[..., 0] += 1
    return y.square()


def through_an_alias(y):
    alias = y.view(-1)
    alias.mul_(2)
    return y.square()


def used_before_and_after(y):
    before = y * 3
    y.mul_(2)
    return y.square() + before


def flattened_in_place(y):
    flat = y.flatten(1)
    flat.add_(1)
    return flat.square()


@pytest.mark.parametrize("shape", [(5, 4), (5, 6, 4)], ids=["2-D", "3-D, so that the output is a view"])
@pytest.mark.parametrize(
    "after",
    [add_in_place, relu_in_place, column_in_place, through_an_alias, used_before_and_after, flattened_in_place],
    ids=lambda f: f.__name__,
)
def test_the_gradient_of_an_output_that_is_changed_in_place_is_that_of_its_old_value(after, shape):
    block, x = Block(after), torch.randn(shape)
    with unsum.capture(block, "fc:output", "fc:grad_output", keep="clone") as got:
        block(x).sum().backward()
    (truth,) = gradient_of(lambda y: after(y.clone()).sum(), got["fc:output"])
    close(got["fc:grad_output"], truth)


@pytest.mark.parametrize("shape", [(5, 4), (5, 6, 4)], ids=["2-D", "3-D"])
def test_an_edit_of_the_gradient_of_an_output_that_is_changed_in_place_is_not_lost(shape):
    block, x = Block(column_in_place), torch.randn(shape)
    block(x).sum().backward()
    plain = block.fc.weight.grad.clone()
    block.zero_grad()
    with unsum.edit(block, {"fc:grad_output": unsum.scale(2.0)}):
        block(x).sum().backward()
    close(block.fc.weight.grad, 2 * plain)


def test_a_gradient_that_cannot_be_told_from_others_is_refused_at_backward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.flat = nn.Linear(4, 4), nn.Flatten(0)

        def forward(self, x):
            h = self.fc(x) * 1
            y = self.flat(h)
            other = h * 2  # uses the old value, beside the module's output
            y += 1
            return y.square().sum() + other.sum()

    net = Net()
    with pytest.raises(SiteError, match="flat:grad_output.*changed in place"):
        with unsum.capture(net, "flat:grad_output"):
            loss = net(torch.randn(5, 4))
            loss.backward()
    assert net.fc.weight.grad is None  # the refusal came before the user's backward


def test_a_part_of_a_tensor_changed_in_place_is_refused_at_backward():
    class Half(nn.Module):
        def forward(self, x):
            return (x * 2)[:, :2]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Half()

        def forward(self, x):
            y = self.part(x)
            y += 1
            return y.square().sum()

    net = Net()
    with pytest.raises(SiteError, match="part:grad_output"):
        with unsum.capture(net, "part:grad_output"):
            net(torch.randn(3, 4, requires_grad=True)).backward()


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Flatten(0, 1), nn.MultiheadAttention(4, 2, batch_first=True)])
def test_a_view_changed_through_an_alias_does_not_crash(layer):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            x = x * 1
            out = self.layer(x, x, x)[0] if isinstance(layer, nn.MultiheadAttention) else self.layer(x)
            out[:, 0] += 1
            return out.square().sum()

    site = "layer:grad_output[0]" if isinstance(layer, nn.MultiheadAttention) else "layer:grad_output"
    net, x = Net(), torch.randn(2, 3, 4, requires_grad=True)
    with unsum.capture(net, site) as got:
        net(x).backward()
    assert got[site].abs().sum() > 0


def test_batch_first_lstm_whose_output_is_changed_in_place():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x):
            out, _ = self.rnn(x)
            out += 1
            return out.square().sum()

    net, x = Net().double(), torch.randn(2, 5, 4).double()
    with unsum.capture(net, "rnn:output[0]", "rnn:grad_output[0]", keep="clone") as got:
        net(x).backward()
    close(got["rnn:grad_output[0]"], 2 * (got["rnn:output[0]"] + 1))


def test_no_warning_when_no_input_requires_a_gradient_or_all_are_keywords():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(input=x)

    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unsum.capture(net, "fc:input", "fc:grad_output") as got:
            net(torch.randn(2, 4)).sum().backward()
    assert torch.equal(got["fc:grad_output"], torch.ones(2, 4))


Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    hidden: torch.Tensor
    extra: dict
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor


class Boxing(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.fc, self.box = nn.Linear(4, 4), box

    def forward(self, x):
        return self.box(self.fc(x))


BOXES = {
    "tuple": (lambda y: (y, 3), "[0]", lambda o: o[0]),
    "list": (lambda y: [None, y], "[1]", lambda o: o[1]),
    "dict": (lambda y: {"a b": y}, "['a b']", lambda o: o["a b"]),
    "ordered dict": (lambda y: OrderedDict(h=y), ".h", lambda o: o["h"]),
    "named tuple": (lambda y: Pair(y, y * 2), ".second", lambda o: o.second),
    "dataclass": (lambda y: Record(y * 1, {"deep": [y]}), ".extra.deep[0]", lambda o: o.extra["deep"][0]),
    "frozen dataclass": (Frozen, ".hidden", lambda o: o.hidden),
    "torch's own named tuple": (lambda y: torch.max(y, dim=1), "[0]", lambda o: o.values),
    "nested tuples": (lambda y: ((y,), (y * 2,)), "[1][0]", lambda o: o[1][0]),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES.keys())
def test_nested_outputs_of_every_kind(box):
    make, path, take = box

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Boxing(make)

        def forward(self, x):
            self.out = self.inner(x)
            return (take(self.out).square()).sum()

    net, x = Net(), torch.randn(3, 4)
    value, grad = f"inner:output{path}", f"inner:grad_output{path}"
    with unsum.capture(net, value, grad) as got:
        net(x).backward()
    close(got[grad], 2 * got[value])
    plain = type(net.out)
    with unsum.edit(net, {value: unsum.zero()}):
        assert net(x) == 0
    assert type(net.out) is plain
    if isinstance(net.out, Record):
        assert net.out.note == "kept"


def test_several_inputs_of_which_one_needs_no_gradient():
    bilinear = nn.Bilinear(3, 4, 2)
    x, z = torch.randn(5, 3), torch.randn(5, 4, requires_grad=True)
    net = nn.ModuleDict({"b": bilinear})
    with unsum.capture(net, "b:grad_input[0]", "b:grad_input[1]", missing="ignore") as got:
        bilinear(x, z).sum().backward()
    assert got.calls("b:grad_input[0]") == [None]
    close(got["b:grad_input[1]"], z.grad)
    with pytest.raises(KeyError, match="needs no gradient"):
        got["b:grad_input[0]"]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.same = nn.Linear(4, 4), nn.Identity()

    def forward(self, x):
        x = x * 2
        return x + self.fc(x) * 3 + self.same(x) * 5


def test_the_gradient_of_an_input_is_the_modules_share():
    net, x = Residual(), torch.randn(2, 4, requires_grad=True)
    with unsum.capture(net, "fc:grad_input", ":grad_input") as got:
        net(x).sum().backward()
    close(got["fc:grad_input"], (torch.full((2, 4), 3.0) @ net.fc.weight).detach())
    close(got[":grad_input"], x.grad)


@pytest.mark.parametrize("same", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Sequential()], ids=str)
def test_a_module_that_returns_its_input_has_its_own_share_of_the_gradient(same):
    net, x = Residual(), torch.randn(2, 4, requires_grad=True)
    net.same = same
    with unsum.capture(net, "same:grad_output", "same:grad_input") as got:
        net(x).sum().backward()
    assert torch.equal(got["same:grad_output"], torch.full((2, 4), 5.0))
    assert torch.equal(got["same:grad_input"], torch.full((2, 4), 5.0))


def test_an_in_place_activation_after_a_module_that_returns_its_input():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5).eval(), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x = torch.randn(6, 4)
    plain = nn.Sequential(net[0], net[1], nn.ReLU(), net[3])
    sites = ["0:grad_output", "1:grad_output", "1:grad_input", "2:grad_output", "2:grad_input"]
    with unsum.capture(plain, *sites) as truth:
        plain(x).square().sum().backward()
    with unsum.capture(net, *sites) as got:
        net(x).square().sum().backward()
    for site in sites:
        assert torch.equal(got[site], truth[site]), site


def test_the_same_tensor_twice_in_an_output():
    net = Boxing(lambda y: (y, y))
    with unsum.capture(net, ":grad_output[0]", ":grad_output[1]") as got:
        first, second = net(torch.randn(2, 4))
        assert first is second
        (first + 2 * second).sum().backward()
    assert torch.equal(got[":grad_output[0]"], torch.full((2, 4), 3.0))
    assert torch.equal(got[":grad_output[1]"], torch.full((2, 4), 3.0))


def test_query_is_key_stays_true():
    seen = []

    class Attention(nn.Module):
        def forward(self, query, key):
            seen.append(query is key)
            return query * key

    net = nn.ModuleDict({"attn": Attention()})
    x = torch.randn(2, 4, requires_grad=True)
    with unsum.capture(net, "attn:grad_input[0]") as got:
        net["attn"](x, x).sum().backward()
    assert seen == [True]
    close(got["attn:grad_input[0]"], x.grad)


def test_a_module_that_returns_a_parameter():
    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4))

        def forward(self):
            return self.table

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = Position()

        def forward(self, x):
            return (x * self.position()).sum() + self.position.table.sum()

    net, x = Net(), torch.randn(3, 4)
    for _ in range(3):
        with unsum.capture(net, "position:grad_output") as got:
            net(x).backward()
        close(got["position:grad_output"], x.sum(0))
        assert not net.position.table._backward_hooks


def test_an_edit_that_writes_into_its_argument_does_not_reach_the_sibling_branch():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.same = nn.Linear(4, 4), nn.Identity()

        def forward(self, x):
            h = x * 1
            return self.same(h) + (h + self.fc(h))

    def in_place(t):
        return t.zero_()

    net, x = Branches(), torch.randn(2, 4, requires_grad=True)
    with unsum.edit(net, {"fc:grad_output": in_place}):
        net(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 2.0))
    with unsum.edit(net, {"same:output": in_place}):
        out = net(x)
    close(out, x + net.fc(x))


def test_an_input_that_broadcasts_inside_the_module():
    class Broadcast(nn.Module):
        def forward(self, x):
            return x + torch.ones(3, 4) * 2, x.expand(5, 4) * 3

    net, x = nn.ModuleDict({"m": Broadcast()}), torch.randn(4, requires_grad=True)
    with unsum.capture(net, "m:grad_input") as got:
        first, second = net["m"](x * 1)
        (first.sum() + second.sum()).backward()
    assert torch.equal(got["m:grad_input"], torch.full((4,), 3.0 + 15.0))


def test_a_module_that_returns_its_input_and_uses_it_too():
    class Both(nn.Module):
        def forward(self, x):
            return x, torch.tanh(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = Both()

        def forward(self, x):
            h = x * 1
            same, other = self.both(h)
            return (h * 7 + same * 3 + other * 5).sum()

    net, x = Net(), torch.randn(2, 4, requires_grad=True)
    with unsum.capture(net, "both:grad_input") as got:
        net(x).backward()
    close(got["both:grad_input"], (3 + 5 * (1 - torch.tanh(x) ** 2)).detach())


def test_the_captured_gradient_of_a_leaf_survives_the_next_backward():
    x = torch.ones(3, requires_grad=True)
    net = nn.Sequential(nn.Linear(3, 3))
    with unsum.capture(net, "0:grad_input") as got:
        net(x).sum().backward()
        net(x).sum().backward()
    x.grad = None
    with unsum.capture(None, "x:grad_output") as marked:
        net(unsum.mark(x, "x")).sum().backward()
        net(x).sum().backward()
    truth = (torch.ones(3) @ net[0].weight).detach()
    for value in (*got.calls("0:grad_input"), marked["x:grad_output"]):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:, :1], r"\(3, 1\).*needs \(3, 4\)"),
        (lambda t: t.double(), r"float64.*needs .*float32"),
        (lambda t: None, "NoneType"),
        (lambda t: t.to("meta"), r"meta.*needs .*cpu"),
        (unsum.replace(torch.zeros(2, 4)), r"got \(2, 4\), needs \(3, 4\)"),
        (unsum.add(torch.zeros(5)), "size of tensor|got"),
        (unsum.steer(torch.zeros(3)), r"\(3,\), needs \(4,\)"),
    ],
    ids=["shape", "dtype", "nothing", "device", "replace", "add", "steer"],
)
@pytest.mark.parametrize("site", ["fc:output", "fc:grad_output"])
def test_an_edit_of_another_shape_dtype_or_device_is_an_error_that_names_the_site(site, change, says):
    net = Residual()
    with pytest.raises((SiteError, RuntimeError), match=says) as caught:
        with unsum.edit(net, {site: change}):
            net(torch.randn(3, 4)).sum().backward()
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert site in told
    assert "(3, 4)" in told


def test_a_function_that_returns_no_gradient_does_not_break_the_hook():
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return None

    net = Block(Cut.apply)
    with unsum.capture(net, "fc:grad_output", missing="ignore") as got:
        net(torch.randn(2, 4)).sum().backward()
    assert got.calls("fc:grad_output") == [None]


def test_a_capture_does_not_replace_an_output_that_is_false():
    class Flag(nn.Module):
        def forward(self, x):
            return False

    net = nn.ModuleDict({"flag": Flag()})
    with unsum.capture(net, "flag:output", missing="ignore"):
        assert net["flag"](1) is False


# ---- which call, which backward -----------------------------------------------------------------------------------


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


# ---- values -------------------------------------------------------------------------------------------------------


def test_a_value_changed_in_place_after_its_capture_is_not_shown():
    net, x = Block(F.relu_), torch.randn(3, 4)
    with unsum.capture(net, "fc:output") as got:
        net(x)
    with pytest.raises(SiteError, match='fc:output.*changed in place(.|\n)*keep="clone"'):
        got["fc:output"]
    with unsum.capture(net, "fc:output", keep="clone") as got:
        net(x)
    close(got["fc:output"], F.linear(x, net.fc.weight, net.fc.bias).detach())


def test_a_parameters_gradient_survives_what_is_done_to_grad():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc.weight:grad") as got:
        net(x).sum().backward()
    kept = net.fc.weight.grad.clone()
    net(x).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    net.zero_grad(set_to_none=False)
    assert torch.equal(got["fc.weight:grad"], kept)


def test_inference_mode():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:output") as got, torch.inference_mode():
        net(x)
    close(got["fc:output"], net.fc(2 * x).detach())


def test_autocast_shows_what_really_flows():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:input", "fc:grad_output", "fc.weight:grad") as got:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        out.float().sum().backward()
    assert got["fc:input"].dtype == torch.float32
    assert got["fc:grad_output"].dtype == torch.bfloat16
    assert got["fc.weight:grad"].dtype == torch.float32


# ---- which object -------------------------------------------------------------------------------------------------


def test_the_projection_inside_multihead_attention_is_never_called_and_says_so():
    net = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    x = torch.randn(3, 2, 4)
    for block in (
        lambda: unsum.capture(net, "attn.out_proj:output"),
        lambda: unsum.edit(net, {"attn.out_proj:output": unsum.zero()}),
    ):
        with pytest.raises(SiteError, match=r"attn.out_proj:output.*MultiheadAttention.*attn:output\[0\]"):
            with block():
                net["attn"](x, x, x)


def test_the_fast_path_of_the_encoder_does_not_hide_its_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), unsum.capture(layer, "linear1:output") as got:
        layer(x)
    assert got["linear1:output"].shape == (2, 3, 16)


def test_a_forward_that_was_patched_on_the_instance():
    net, x = Residual(), torch.randn(2, 4)
    net.fc.forward = lambda x: x * 7
    with unsum.capture(net, "fc:output", "fc:grad_input") as got:
        net(x.requires_grad_()).sum().backward()
    close(got["fc:output"], (14 * x).detach())
    assert (got["fc:grad_input"] == 21).all()


def test_parametrizations_and_spectral_norm_keep_their_buffers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    twin = copy.deepcopy(net)
    x = torch.randn(3, 4)
    twin(x).sum().backward()
    with unsum.capture(net, "0:input", "0:grad_output", "0.parametrizations.weight.original:grad") as got:
        net(x).sum().backward()
    for (name, one), other in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    original = "parametrizations.weight.original"
    assert torch.equal(got[f"0.{original}:grad"], twin.get_parameter(f"0.{original}").grad)
    with pytest.raises(SiteError, match="parametrizations.weight.original:grad"):
        with unsum.capture(net, "0.weight:grad"):
            pass


def test_tied_parameters_and_modules_are_found_under_every_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.one = self.two = nn.Linear(4, 4)

        def forward(self, ids):
            return self.head(self.two(self.one(self.embed(ids))))

    net = Tied()
    with unsum.capture(net, "head.weight:grad", "two:output") as got:
        net(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(got["head.weight:grad"], net.embed.weight.grad)
    assert torch.equal(got["embed.weight:grad"], net.embed.weight.grad)
    assert len(got.calls("two:output")) == len(got.calls("one:output")) == 2


def test_a_copy_made_inside_a_block_does_not_write_into_it():
    net, x = Residual(), torch.randn(2, 4)
    with unsum.capture(net, "fc:output") as got:
        net(x)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            other(x)
    assert len(got.calls("fc:output")) == 1


def test_modules_exchanged_before_the_block_are_resolved_when_it_opens():
    net, x = Residual(), torch.randn(2, 4)
    block = unsum.capture(net, "fc:output")
    net.fc = nn.Linear(4, 4)
    net.load_state_dict(Residual().state_dict(), assign=True)
    with block as got:
        net(x)
    close(got["fc:output"], net.fc(2 * x).detach())


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_torch_func_transforms_are_refused_by_name(transform):
    net = Residual()
    run = transform(lambda x: net(x[None]).sum())
    with pytest.raises(UnsupportedError, match="torch.func"):
        with unsum.capture(net, "fc:output"):
            run(torch.randn(4) if transform is torch.func.grad else torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torch_jit_and_fx_are_refused_by_name():
    net, x = Residual(), torch.randn(2, 4)
    with pytest.raises(UnsupportedError, match="torch.jit"):
        with unsum.capture(torch.jit.trace(net, x), "fc:output"):
            pass
    with pytest.raises(UnsupportedError, match="torch.jit.trace"):
        with unsum.capture(net, "fc:output"):
            torch.jit.trace(net, x)
    with pytest.raises(UnsupportedError, match="torch.fx"):
        with unsum.capture(net, ":output"):
            torch.fx.Tracer().trace(nn.Sequential(net))
            torch.fx.symbolic_trace(net)(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_any_exit_the_model_has_exactly_the_users_own_hooks(error):
    class Failing(Residual):
        def forward(self, x):
            super().forward(x)
            raise error("the user's own")

    net, fired = Failing(), []
    net.fc.register_forward_hook(lambda *_: fired.append(1))

    def hooks():
        return [
            (name, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._forward_hooks_with_kwargs))
            for name, m in net.named_modules()
        ] + [len(p._backward_hooks or ()) for p in net.parameters()]

    before = hooks()
    run_backward = torch.autograd._engine_run_backward
    with pytest.raises(error, match="the user's own"):
        with unsum.capture(net, "fc:output", "same:grad_input", "fc.weight:grad"):
            with unsum.edit(net, {"fc:output": unsum.scale(2.0), "fc.weight:grad": unsum.scale(2.0)}):
                net(torch.randn(2, 4))
    assert hooks() == before
    assert fired == [1]

    def generator():
        with unsum.capture(net, "fc:output", "fc.weight:grad"):
            yield 1
            yield 2

    steps = generator()
    next(steps)
    assert hooks() != before
    steps.close()
    assert hooks() == before
    assert torch.autograd._engine_run_backward is run_backward


@pytest.mark.parametrize("method", ["__call__", "_call_impl"])
@pytest.mark.parametrize("compiled", [False, True])
def test_others_who_replace_the_call_of_modules(method, compiled, monkeypatch):
    """Before a block, inside it and beyond its end: nobody's replacement is lost, and blocks go on to see calls."""
    model, x, seen = nn.Linear(3, 2), torch.randn(4, 3), []
    if compiled:  # in place: then the call itself is watched
        monkeypatch.setattr(
            model, "_compiled_call_impl", lambda *given: nn.Module._call_impl(model, *given), raising=False
        )
    present = lambda: getattr(nn.Module, method)
    put = lambda call: setattr(nn.Module, method, call)
    original = present()

    def wrapped(before):
        def call(self, *args, **kwargs):
            seen.append(before)
            return before(self, *args, **kwargs)

        return call

    def norms():
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x).square().sum().backward()
        return g[unsum.Norms].norms()

    try:
        first = norms()
        assert present() is original
        outer = wrapped(original)
        put(outer)
        torch.testing.assert_close(norms(), first)
        assert present() is outer and len(seen) == 1
        with unsum.gradients(model, unsum.Norms()):
            over = wrapped(present())
            put(over)
            model(x).square().sum().backward()
        assert present() is over
        for _ in range(2):
            torch.testing.assert_close(norms(), first)
        put(outer)
        torch.testing.assert_close(norms(), first)
        assert present() is outer
    finally:
        put(original)
    torch.testing.assert_close(norms(), first)
    assert present() is original
