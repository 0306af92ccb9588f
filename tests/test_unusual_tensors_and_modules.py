"""Nested, scripted, empty, meta and batched tensors and modules: right numbers, or an error of unsum's own."""

import warnings

import pytest
import torch
from reference import each_of, per_sample_gradients
from torch import nn
from torch.nn import functional as F

import unsum
from one_by_one import assert_same, right_or_refused, same, squares
from one_by_one import random as noise
from unsum.errors import UnsumError
from verify_blocks import KINDS, D, N, mlp


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


NESTED = {
    "given": lambda net, rows: net(jagged(rows)).values().square().sum(),
    "given, made dense": lambda net, rows: net(jagged(rows)).to_padded_tensor(0.0).square().sum(),
    "given, made a list": lambda net, rows: sum(part.square().sum() for part in net(jagged(rows)).unbind()),
    "of strides": lambda net, rows: net(torch.nested.as_nested_tensor(rows)).to_padded_tensor(0.0).square().sum(),
}


@pytest.mark.parametrize("lengths", [(3, 1, 5, 2), (4, 4, 4, 4)], ids=["other lengths", "n = T"])
@pytest.mark.parametrize("way", NESTED)
def test_nested_tensors_are_right_or_refused(way, lengths):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    rows = [noise(length, D) for length in lengths]
    each = each_of(model, [squares(model, row) for row in rows])
    with warnings.catch_warnings(action="ignore"):
        right_or_refused(model, lambda: NESTED[way](model, rows), each)


def test_nested_tensors_inside_the_model_are_right_or_refused():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, lengths):
            return self.net(jagged([row[:length] for row, length in zip(x, lengths, strict=True)])).values()

    model, x, lengths = Inside(), noise(N, 5, D), [3, 1, 5, 2]
    each = each_of(model, [squares(model.net, row[:length]) for row, length in zip(x, lengths, strict=True)])
    right_or_refused(model, lambda: model(x, lengths).square().sum(), each)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.gain = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, h):
        return torch.tanh(self.a(h)) * self.gain + h


JITTED = {
    "a scripted part": lambda x: mlp(torch.jit.script(Scripted().double())),
    "a traced part": lambda x: mlp(torch.jit.trace(Scripted().double(), noise(N, 6))),
    "a scripted model": lambda x: torch.jit.script(mlp(Scripted().double())),
    "a traced model": lambda x: torch.jit.trace(mlp(Scripted().double()), x),
}


@pytest.mark.parametrize("way", JITTED)
def test_scripted_modules_are_right_or_refused(way):
    x = noise(N, D)
    with warnings.catch_warnings(action="ignore"):
        model = JITTED[way](x)
    each = each_of(model, model(x).square().sum(1))
    for _ in range(2):  # such a module is optimised after some runs
        right_or_refused(model, lambda: squares(model, x), each)


def test_a_scripted_function_in_the_model_is_right_or_refused():
    with warnings.catch_warnings(action="ignore"):
        gelu = torch.jit.script(_gelu)

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.b(gelu(self.a.bias, F.linear(x, self.a.weight)))

    model, x = Fused().double(), noise(N, D)
    each = each_of(model, model(x).square().sum(1))
    for _ in range(2):
        right_or_refused(model, lambda: squares(model, x), each)


def _gelu(bias: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    h = h + bias
    return h * 0.5 * (1.0 + torch.tanh(0.79788456 * h * (1 + 0.044715 * h * h)))


@KINDS
def test_many_backwards_at_once_for_the_inputs_bring_no_samples_or_are_refused(kind):
    reducer = kind() if kind else None
    model, x = mlp(), noise(N, D).requires_grad_()
    each = per_sample_gradients(model, squares, x.detach())
    directions = torch.eye(3).double()[:, None].expand(3, N, 3)
    wanted = torch.autograd.grad(model(x), x, directions, is_grads_batched=True)[0]
    for _ in range(3):
        try:
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                (found,) = torch.autograd.grad(model(x), x, directions, is_grads_batched=True)
                squares(model, x.detach()).backward()
            assert_same(g, each, reducer)
        except UnsumError:
            continue
        same(found, wanted, 1e-9, "the rows of the Jacobian")


@KINDS
def test_many_backwards_at_once_for_the_parameters_add_up_or_are_refused(kind):
    reducer = kind() if kind else None
    model, x = mlp(), noise(N, D)
    parameters = list(model.parameters())
    directions = torch.eye(3).double()[:, None].expand(3, N, 3)
    wanted = torch.autograd.grad(model(x), parameters, directions, is_grads_batched=True)
    for _ in range(3):
        try:
            with unsum.gradients(model, *([reducer] if reducer else [])) as g:
                found = torch.autograd.grad(model(x), parameters, directions, is_grads_batched=True)
            assert_same(g, per_sample_gradients(model, lambda m, x: m(x).sum(), x), reducer)
        except UnsumError:
            continue
        for ours, right in zip(found, wanted, strict=True):
            same(ours, right, 1e-9, "what was asked for")


class Empty(nn.Module):
    """A layer without inputs, or without outputs, beside others."""

    def __init__(self, inputs, outputs):
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # "initialising is a no-op"
            self.empty, self.a = nn.Linear(inputs, outputs), nn.Linear(D, 3)
        self.inputs = inputs

    def forward(self, x):
        return torch.cat([torch.tanh(self.empty(x[..., : self.inputs])), self.a(x)], -1)


@pytest.mark.parametrize("shape", [(N, D), (N, 3, D), (3, D)], ids=["rows", "tokens", "n = outputs"])
@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (0, 0)], ids=["no inputs", "no outputs", "neither"])
def test_layers_without_inputs_or_outputs_are_right_or_refused(sizes, shape):
    torch.manual_seed(0)
    model, x = Empty(*sizes).double(), noise(*shape)
    each = per_sample_gradients(model, squares, x)
    right_or_refused(model, lambda: squares(model, x), each)


def test_a_layer_without_inputs_alone_is_right_or_refused():
    with warnings.catch_warnings(action="ignore"):
        model = nn.Linear(0, 3).double()
    nn.init.normal_(model.bias)
    x = torch.zeros(N, 0).double()
    right_or_refused(model, lambda: squares(model, x), per_sample_gradients(model, squares, x))


def test_parameters_of_no_rows_are_right_or_refused():
    class Virtual(nn.Module):
        """A table to which no virtual token was added."""

        def __init__(self):
            super().__init__()
            self.prompt, self.net = nn.Parameter(torch.zeros(0, D)), mlp()

        def forward(self, x):
            return self.net(torch.cat([self.prompt.expand(len(x), -1, -1), x], 1))

    model, x = Virtual().double(), noise(N, 3, D)
    right_or_refused(model, lambda: squares(model, x), per_sample_gradients(model, squares, x))


@KINDS
def test_a_model_that_lies_on_the_meta_device_in_part_is_refused_by_name(kind):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.nowhere = nn.Linear(D, 6), nn.Linear(6, 3, device="meta")

        def forward(self, x):
            return self.nowhere(torch.tanh(self.here(x)).to("meta"))

    model = Parts()
    for _ in range(2):
        with pytest.raises(UnsumError, match=r"nowhere.*meta|meta.*nowhere"):
            with unsum.gradients(model, *([kind()] if kind else [])) as g:
                squares(model, torch.randn(N, D)).backward()
            g[kind].norms() if kind else g.norms()


def test_a_model_on_the_meta_device_is_refused_by_name():
    model = nn.Linear(D, 3, device="meta")
    with pytest.raises(UnsumError, match="meta"):
        with unsum.gradients(model) as g:
            squares(model, torch.randn(N, D, device="meta")).backward()
        g.norms()


def test_parameters_on_the_meta_device_that_are_not_used_are_right_or_refused():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.nowhere = mlp(), nn.Linear(6, 3, device="meta")

        def forward(self, x):
            return self.net(x)

    model, x = Unused(), noise(N, D)
    each = {f"net.{name}": values for name, values in per_sample_gradients(model.net, squares, x).items()}
    right_or_refused(model, lambda: squares(model, x), each)
    right_or_refused(model, lambda: squares(model, x), each, params="net.*")


GRAD_DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@pytest.mark.parametrize("frozen_bias", [False, True], ids=["all", "weights alone"])
@pytest.mark.parametrize(("weights", "grads"), GRAD_DTYPES)
def test_gradients_of_another_dtype_than_the_weights_are_right_or_refused(weights, grads, frozen_bias):
    model, x = mlp().to(weights), torch.randn(N, D).to(weights)
    each = per_sample_gradients(model, squares, x)
    for name, p in model.named_parameters():
        if not (frozen_bias and name.endswith("bias")):
            p.grad_dtype = grads
    squares(model, x).backward()
    wanted = {name: p.grad.dtype for name, p in model.named_parameters()}
    tolerance = 0.05 if torch.bfloat16 in (weights, grads) else 1e-5
    right_or_refused(model, lambda: squares(model, x), each, tolerance=tolerance)
    for options in ({}, {"grad": False}):
        model.zero_grad()
        try:
            with unsum.gradients(model, unsum.Norms(), **options):
                squares(model, x).backward()
        except UnsumError:
            continue
        found = {name: p.grad.dtype for name, p in model.named_parameters() if p.grad is not None}
        assert found == ({} if options else wanted)
