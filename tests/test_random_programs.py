"""Random small programs around one module: shares, views, in-place changes, several uses, against plain autograd.

The truth never touches a hook: the module is given a leaf of its own, and what it returns is replaced by one.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import unsum
from unsum.errors import SiteError

torch.manual_seed(0)
W = torch.randn(4, 4, dtype=torch.float64)

# Each step turns the current tensor into another; the first few inside the module, the rest around it.
STEPS = {
    "linear": lambda t, x: t.reshape(-1, 4) @ W if t.dim() == 2 else (t.reshape(-1, 4) @ W).view(t.shape),
    "tanh": lambda t, x: torch.tanh(t),
    "square": lambda t, x: t * t,
    "view": lambda t, x: t.view(t.shape),
    "transpose twice": lambda t, x: t.transpose(0, 1).contiguous().transpose(0, 1),
    "add in place": lambda t, x: (t * 1).add_(1),
    "relu in place on a view": lambda t, x: (t * 1).view(-1).relu_().view(t.shape),
    "column in place": lambda t, x: _column(t * 1),
    "residual": lambda t, x: t + x,
    "twice the input": lambda t, x: t * torch.sigmoid(x) + x * x,
    "itself": lambda t, x: t,
}


def _column(t):
    t[..., 0] *= 2
    return t


AFTER = {
    "nothing": lambda y: y,
    "add in place": lambda y: y.add_(1),
    "column in place": _column,
    "in place through an alias": lambda y: (y.view(-1).mul_(3), y)[1],
}


class Body(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def forward(self, x):
        t = x
        for step in self.steps:
            t = STEPS[step](t, x)
        return t


class Program(nn.Module):
    def __init__(self, before, inside, after, outside):
        super().__init__()
        self.before, self.body, self.after, self.outside = before, Body(inside), after, outside

    def forward(self, x, call=None):
        for step in self.before:
            x = STEPS[step](x, x)
        x = x * 1
        side = torch.tanh(x) if "before" in self.outside else 0
        y = AFTER[self.after]((call or self.body)(x))
        side = side + (x * 5 if "after" in self.outside else 0)
        return (y.square() + side).sum()


steps = st.lists(st.sampled_from(list(STEPS)), max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(3, 4), (2, 3, 4)]),
    steps,
    steps,
    st.sampled_from(list(AFTER)),
    st.sets(st.sampled_from(["before", "after"])),
)
def test_gradients_at_the_module_are_right_or_refused(shape, before, inside, after, outside):
    program = Program(before, inside, after, outside)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    try:
        program(x).backward()
    except RuntimeError:
        return  # torch itself refuses this in-place change
    plain, x.grad = x.grad, None
    got = None
    try:
        with unsum.capture(
            program, "body:input", "body:grad_input", "body:output", "body:grad_output", keep="clone"
        ) as got:
            program(x).backward()
    except SiteError as error:
        refused = str(error)
        assert "in place" in refused and "body" in refused
        assert x.grad is None
        return
    torch.testing.assert_close(x.grad, plain, atol=1e-12, rtol=1e-12)
    if after != "nothing" and outside and all(step in ("itself", "view") for step in inside):
        return  # what is changed is the input itself, and its other uses see that: there is no separate truth

    def own_input(value):
        leaf = value.detach().clone().requires_grad_()
        own_input.leaf = leaf
        return program.body(leaf * 1)

    program(x, own_input).backward()
    torch.testing.assert_close(got["body:grad_input"], own_input.leaf.grad, atol=1e-12, rtol=1e-12)

    def own_output(value):
        leaf = program.body(value).detach().clone().requires_grad_()
        own_output.leaf = leaf
        return leaf * 1

    program(x, own_output).backward()
    torch.testing.assert_close(got["body:grad_output"], own_output.leaf.grad, atol=1e-12, rtol=1e-12)
