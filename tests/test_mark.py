"""Marked tensors: sites without any module."""

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import SiteError


def leaf(value=2.0):
    return torch.tensor(value, requires_grad=True)


def test_a_mark_costs_nothing_and_changes_nothing_outside_a_block():
    x = leaf()
    assert unsum.mark(x, "x") is x
    with unsum.capture(None, "other:output", missing="ignore"):
        assert unsum.mark(x, "x") is x


def test_a_leaf_can_be_marked_and_no_hook_is_left_on_it():
    x = leaf()
    with unsum.capture(None, "x:output", "x:grad_output") as got:
        (unsum.mark(x, "x") * 3 + x).backward()
    assert got["x:output"] == 2
    assert got["x:grad_output"] == 3  # what flows through the mark, not all of it
    assert x.grad == 4
    assert not x._backward_hooks


def test_a_mark_inside_a_model_and_in_a_loop():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            for _ in range(3):
                x = unsum.mark(torch.tanh(self.fc(x)), "h")
            return x

    net, x = Net(), torch.randn(2, 3)
    with unsum.capture(None, "h:output", "h:grad_output") as marks, unsum.capture(net, "fc:output") as got:
        net(x).sum().backward()
    assert len(marks.calls("h:output")) == len(got.calls("fc:output")) == 3
    assert torch.equal(marks["h:output@1"], torch.tanh(got["fc:output@1"]))
    assert (marks["h:grad_output@2"] == 1).all()
    with unsum.edit(None, {"h:output@2": unsum.zero()}):
        assert (net(x) == 0).all()


def test_the_same_tensor_marked_twice_has_two_shares():
    x = leaf()
    with unsum.capture(None, "*:grad_output") as got:
        y = x * 1
        (unsum.mark(y, "a") * 3 + unsum.mark(y, "b") * 5).backward()
    assert got["a:grad_output"] == 3
    assert got["b:grad_output"] == 5
    assert sorted(got.keys()) == ["a:grad_output", "b:grad_output"]


def test_a_marked_tensor_that_is_changed_in_place():
    x = leaf(10.0)
    with unsum.capture(None, "y:grad_output") as got:
        y = unsum.mark(x**2, "y")
        y *= 3
        (y * 2).backward()
    assert got["y:grad_output"] == 6
    assert x.grad == 120


def test_marks_that_are_not_there_or_not_used_are_errors():
    with pytest.raises(SiteError, match="z:output: no tensor was marked.*near: 'zz:output'"):
        with unsum.capture(None, "z:output"):
            unsum.mark(leaf(), "zz")
    with pytest.raises(SiteError, match="y:grad_output: never fired"):
        with unsum.capture(None, "y:grad_output"):
            y = leaf() ** 2
            unsum.mark(y, "y")  # its result is thrown away
            (y * 3).backward()


@pytest.mark.parametrize("site", ["y:input", "y:grad_input", "y:grad", (nn.Linear, "output")], ids=str)
def test_without_a_model_only_outputs_of_marks_can_be_named(site):
    with pytest.raises(SiteError, match="without a model"):
        with unsum.capture(None, site):
            pass


def test_a_mark_can_be_compiled_while_no_block_is_open():
    run = torch.compile(lambda x: unsum.mark(x * 2, "y") + 1, fullgraph=True, backend="eager")
    assert run(torch.ones(1)) == 3


def test_bad_marks():
    with pytest.raises(SiteError, match="tensor"):
        unsum.mark(3.0, "x")
    for name in ("", "a:b", 3):
        with pytest.raises(SiteError, match="name"):
            unsum.mark(leaf(), name)
    with unsum.capture(None, "y:output", missing="ignore") as got:
        pass
    with pytest.raises(KeyError, match="no tensor of this name was marked"):
        got["y:output"]
