"""Inputs and outputs of every form: nested, repeated, returned unchanged, broadcast. Each has its own gradient,
or an error that names the site."""

import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import unsum
from hazard_nets import Block, Residual, close
from unsum.errors import SiteError

torch.manual_seed(0)


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:, :1], r"\(3, 1\).*needs \(3, 4\)"),
        (lambda t: t.double(), r"float64.*needs .*float32"),
        (lambda t: None, "NoneType"),
        (lambda t: t.to("meta"), r"meta.*needs .*cpu"),
        (unsum.replace(torch.zeros(2, 4)), r"got \(2, 4\), which does not broadcast to \(3, 4\)"),
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
