"""What a block remembers from step to step, so that it need not be found again: never stale."""

import gc
import weakref

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from unsum.plan.signature import survey
from unsum.plan.skeleton import _FOLLOWS, _KEEPS_SHAPE, _VIEWS
from unsum.seams import tensors
from unsum.step import deliver as grads

# ---- the signature --------------------------------------------------------------------------------------------------

ONE = {
    "TBackward0": lambda x: x.t(),
    "TransposeBackward0": lambda x: x.transpose(0, 1),
    "PermuteBackward0": lambda x: x.permute(1, 0),
    "UnsqueezeBackward0": lambda x: x.unsqueeze(1),
    "SelectBackward0": lambda x: x.select(0, 1),
    "SliceBackward0": lambda x: x[:1],
    "UnbindBackward0": lambda x: x.unbind()[0],
    "CloneBackward0": lambda x: x.clone(),
    "GeluBackward0": nn.functional.gelu,
    "ReluBackward0": torch.relu,
    "SiluBackward0": nn.functional.silu,
    "TanhBackward0": torch.tanh,
    "SigmoidBackward0": torch.sigmoid,
    "NativeLayerNormBackward0": lambda x: nn.functional.layer_norm(x, x.shape[1:]),
    "NativeDropoutBackward0": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "AddBackward0": lambda x: x + x,
    "SubBackward0": lambda x: x - x.exp(),
    "MulBackward0": lambda x: x * x,
    "MmBackward0": lambda x: x @ x,
    "BmmBackward0": lambda x: torch.bmm(x[None], x[None]),
    "AddmmBackward0": lambda x: torch.addmm(x, x, x),
    "ViewBackward0": lambda x: x.view(-1).view(1, -1),
    "UnsafeViewBackward0": lambda x: torch.ops.aten._unsafe_view(torch.ops.aten._unsafe_view(x, [-1]), [1, -1]),
    "ReshapeAliasBackward0": lambda x: torch.ops.aten._reshape_alias(
        torch.ops.aten._reshape_alias(x, [x.numel()], [1]), [1, x.numel()], [x.numel(), 1]
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda x: nn.functional.scaled_dot_product_attention(
        *[x[None, None]] * 3
    ),
}


def signed(make, size, dtype, like=None):
    x = torch.full((size, size), 0.5, dtype=dtype, requires_grad=True)
    seen = survey([make(x.exp()).cos().grad_fn], {id(x): "x"})
    return seen.signature, [(type(node).__name__, node) for node in seen.nodes]


@pytest.mark.parametrize("kind", [*_FOLLOWS, *_VIEWS])
def test_a_signature_tells_sizes_and_dtypes_that_are_not_read(kind):
    if kind == "ScaledDotProductFlashAttentionBackward0":
        pytest.skip("needs a GPU")
    known, nodes = signed(ONE[kind], 4, torch.float32)
    assert kind in [name for name, _ in nodes], [name for name, _ in nodes]
    own = [node for _, node in nodes]
    shown = [*known[0].shown(own), *known[0].viewed(own)]
    assert any(name == kind and all(node is not s for s in shown) for name, node in nodes)
    assert signed(ONE[kind], 4, torch.float32)[0] == known
    assert signed(ONE[kind], 6, torch.float32)[0] != known
    assert signed(ONE[kind], 4, torch.float64)[0] != known


def test_what_may_take_a_tensor_without_an_edge_is_read():
    x = torch.ones(4, 1, requires_grad=True)
    names = {id(x): "x"}
    for make in (lambda h, c: h + c, lambda h, c: h * c, lambda h, c: c - h):
        narrow, wide = (survey([make(x.exp(), torch.ones(4, k)).grad_fn], names).signature for k in (1, 3))
        assert narrow != wide


@pytest.mark.parametrize("op", [torch.matmul, torch.bmm])
def test_a_product_with_a_tensor_without_an_edge_is_read(op):
    x = torch.ones(2, 3, 4, requires_grad=True)
    square, wide = (survey([op(x.exp(), torch.ones(2, 4, k)).grad_fn], {}).signature for k in (4, 5))
    assert square != wide


def test_views_that_no_other_view_takes_are_read():
    x = torch.ones(24, requires_grad=True)
    made = [
        survey([x.exp().view(*shape).cos().grad_fn], {id(x): "x"}).signature for shape in ((4, 6), (2, 12), (24, 1))
    ]
    assert len(set(made)) == 3


@pytest.mark.parametrize("kind", _KEEPS_SHAPE)
def test_a_view_below_what_keeps_its_shape_is_told_by_the_view_above(kind):
    x = torch.full((24,), 0.5, requires_grad=True)

    def of(*shape, dtype=torch.float32):
        result = ONE[kind](x.exp().to(dtype).view(*shape))
        return survey([result.reshape(-1).clone().view(3, 8).cos().grad_fn], {id(x): "x"})

    seen = of(4, 6)
    read = [*seen.signature[0].shown(seen.nodes), *seen.signature[0].viewed(seen.nodes)]
    assert kind in [type(node).__name__ for node in seen.nodes]
    assert [type(node).__name__ for node in read].count("ViewBackward0") == 1  # the topmost
    assert of(4, 6).signature == seen.signature
    assert len({of(*shape).signature for shape in ((4, 6), (6, 4), (2, 12), (24, 1))}) == 4
    assert of(4, 6, dtype=torch.float64).signature != seen.signature


def test_a_parameter_that_has_changed_its_shape_under_its_name_is_another():
    def of(weight):
        return survey([weight.t().exp().grad_fn], {id(weight): "weight"}).signature

    weight = nn.Parameter(torch.ones(4, 4))
    before = of(weight)
    assert of(nn.Parameter(torch.ones(4, 4))) == before
    weight.data = torch.ones(4, 5)
    assert of(weight) != before
    assert of(nn.Parameter(torch.ones(4, 4, dtype=torch.float64))) != before


# ---- names ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        last = self.two if "two" in self._modules else self.three
        return last(self.one(x).tanh())


def replaced(net):
    net.two.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))


def swapped(net):
    net.one, net.two = net.two, net.one


def tied(net):
    net.two.weight = net.one.weight


def frozen(net):
    net.one.weight.requires_grad_(False)


def another(net):
    net.two = nn.Linear(3, 3).double()


def renamed(net):
    net.three = net.two
    del net.two


def widened(net):
    net.two.weight.data, net.two.bias.data = torch.randn(5, 3).double(), torch.randn(5).double()


@pytest.mark.parametrize("change", [replaced, swapped, tied, frozen, another, renamed, widened])
def test_names_are_those_of_the_model_as_it_is_now(change):
    torch.manual_seed(0)
    net = Net().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    loss = lambda net, x: net(x).square().sum()
    for step in range(6):
        if step == 4:
            change(net)
        net.zero_grad()
        truth = per_sample_gradients(net, loss, x)
        for options in ({}, {"grad": False}):
            with unsum.gradients(net, unsum.Norms(), **options) as g:
                loss(net, x).backward()
            found = g[unsum.Norms].by_parameter()
            assert set(found) == set(truth)
            for name, each in found.items():
                torch.testing.assert_close(each, truth[name].reshape(len(x), -1).square().sum(1))
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, truth[name].sum(0))


def test_what_is_remembered_of_a_model_does_not_hold_it():
    net, x = Net(), torch.randn(4, 3)
    for _ in range(4):
        with unsum.gradients(net, unsum.Norms()):
            net(x).sum().backward()
    held = [weakref.ref(each) for each in (net, net.one, net.one.weight)]
    del net
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_coverage_has_the_meetings_of_all_backwards():
    net, x = Net(), torch.randn(4, 3)
    with unsum.gradients(net, unsum.Norms()) as g:
        for run in (net, net, net.one, net, net.one):
            run(x).sum().backward()
    rows = [row for row in g.coverage_rows()[0] if row[0] in ("one.weight", "")]
    assert len({row[2:5] for row in rows}) >= 2  # the same weight at two places, each once
    assert len(rows) == len(set(rows))


# ---- .grad ----------------------------------------------------------------------------------------------------------


def test_gradients_that_come_together_have_memory_of_their_own():
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(3, 3), nn.Tanh())))
    x, steps = torch.randn(4, 3), 5
    for _ in range(steps):
        net.zero_grad()
        with unsum.gradients(net, unsum.Norms()):
            net(x).sum().backward()
    plain = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    memory = set()
    for parameter, wanted in zip(net.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
        assert parameter.grad._base is None and parameter.grad.stride() == parameter.stride()
        assert parameter.grad.untyped_storage().nbytes() == parameter.numel() * 4
        memory.add(parameter.grad.untyped_storage().data_ptr())
    assert len(memory) == len(plain)


def values(*parameters):
    return [torch.full(tuple(p.shape), 2.0, dtype=p.dtype) for p in parameters]


def test_gradients_are_put_as_torch_puts_them():
    a, b, c = (nn.Parameter(torch.ones(2, 3, dtype=d)) for d in (torch.float32, torch.float32, torch.float64))
    turned = nn.Parameter(torch.ones(3, 2).t())
    grads.accumulate([a, b, c], values(a, b, c))  # two dtypes
    grads.accumulate([a, b, turned, turned], values(a, b, turned, turned))  # some have one, one is there twice
    for parameter, wanted in ((a, 4.0), (b, 4.0), (c, 2.0), (turned, 4.0)):
        assert torch.equal(parameter.grad, torch.full((2, 3), wanted, dtype=parameter.dtype))
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("clone", [None, getattr(torch, "_foreach_clone", None)])
def test_copies_are_equal_with_every_torch(clone, monkeypatch):
    monkeypatch.setattr(tensors, "_clone", clone)
    whole = torch.randn(3, 2, 2)
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    grads.accumulate(parameters, whole.unbind())
    for parameter, value in zip(parameters, whole.clone(), strict=True):
        assert torch.equal(parameter.grad, value) and parameter.grad._base is None
    whole.zero_()
    assert all(bool(parameter.grad.any()) for parameter in parameters)


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(grads, "BOUND", 10)
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(4)]
    delivery = grads.Delivery()
    delivery.put(parameters[:1], values(*parameters[:1]))
    assert parameters[0].grad is not None  # by itself: at once
    delivery.put(parameters[1:], values(*parameters[1:]))
    assert all(parameter.grad is not None for parameter in parameters)


def test_nothing_of_a_backward_that_failed_comes_with_the_next():
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())))
    x = torch.randn(4, 3)
    x.requires_grad_()
    for _ in range(5):
        with unsum.gradients(net, unsum.Norms()):
            net(x * 1).sum().backward()
    net.zero_grad()
    h = x * 1

    def fail(grad):
        raise ValueError("no")

    h.register_hook(fail)
    with unsum.gradients(net, unsum.Norms()) as g:
        with pytest.raises(ValueError, match="no"):
            net(h).sum().backward()
        net.zero_grad()
        net(x * 1).sum().backward()
    for parameter, wanted in zip(
        net.parameters(), torch.autograd.grad(net(x).sum(), list(net.parameters())), strict=True
    ):
        torch.testing.assert_close(parameter.grad, wanted)
    assert len(g.ids) == 4


def test_a_gradient_that_fills_its_memory_becomes_the_parameters_own():
    whole, part = torch.randn(1, 3, 2), torch.randn(2, 3, 2)
    turned = torch.randn(2, 3).t()
    for value, is_adopted in ((whole[0], True), (part[0], False), (part[1], False), (turned, False)):
        parameter = nn.Parameter(torch.zeros(3, 2))
        grads.accumulate([parameter], [value])
        assert torch.equal(parameter.grad, value) and not parameter.grad._is_view()
        assert parameter.grad.stride() == parameter.stride()
        assert (parameter.grad.data_ptr() == value.data_ptr()) == is_adopted
        assert parameter.grad.untyped_storage().nbytes() == 6 * 4
        grads.accumulate([parameter], [value])
        assert torch.equal(parameter.grad, 2 * value if not is_adopted else value)
