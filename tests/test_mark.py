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


class Marks(nn.Module):
    """A mark inside a forward, which has the name of a module beside it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        h = unsum.mark(torch.tanh(self.fc(x)), "h")
        return unsum.mark(self.out(h), "fc")


def test_marks_and_sites_of_a_model_in_one_capture():
    net, x = Marks(), torch.randn(2, 3)
    sites = ("fc:output", "mark:h:output", "mark:h:grad_output", "mark:loss:grad_output", "fc.weight:grad")
    with unsum.capture(net, *sites) as got:
        loss = unsum.mark(net(x).sum(), "loss")
        (loss * 3).backward()
    assert torch.equal(got["mark:h:output"], torch.tanh(got["fc:output"]))
    h = got["mark:h:output"].clone().requires_grad_()  # the same network, written without modules
    (net.out(h).sum() * 3).backward()
    assert torch.equal(got["mark:h:grad_output"], h.grad)
    assert got["mark:loss:grad_output"] == 3
    assert set(got.keys()) == set(sites)
    assert [event.site for event in got.trace()][:2] == ["fc:output", "mark:h:output"]


def test_a_mark_with_the_name_of_a_module_is_another_site():
    net, x = Marks(), torch.randn(2, 3)
    with unsum.capture(net, "fc:output", "mark:fc:output") as got:
        out = net(x)
    assert torch.equal(got["fc:output"], net.fc(x))
    assert torch.equal(got["mark:fc:output"], out)
    with unsum.capture(net, "mark:*:output") as got:
        net(x)
    assert got.keys() == ["mark:h:output", "mark:fc:output"]


def test_marks_and_sites_of_a_model_in_one_edit():
    net, x = Marks(), torch.randn(2, 3)
    edits = {"fc:output": unsum.add(1.0), "mark:h:output": unsum.scale(2.0), "mark:h:grad_output": unsum.scale(5.0)}
    with unsum.edit(net, edits):
        out = net(x)
        out.sum().backward()
    h = torch.tanh(net.fc(x) + 1)
    torch.testing.assert_close(out, net.out(2 * h))
    (want,) = torch.autograd.grad(net.out(2 * h).sum(), net.fc.weight)
    torch.testing.assert_close(net.fc.weight.grad, 5 * want)


def test_a_site_with_mark_before_it_also_goes_without_a_model():
    with unsum.capture(None, "mark:x:output") as got:
        unsum.mark(leaf(), "x")
    assert got["x:output"] == got["mark:x:output"] == 2
    assert got.keys() == ["x:output"]


def test_misspelt_names_beside_a_model():
    """A module's at once; a mark's at the end, since nobody knows it before."""
    net = Marks()
    for block in (unsum.capture(net, "h:output"), unsum.edit(net, {"h:output": unsum.zero()})):
        with pytest.raises(SiteError, match=r"(?s)no site .h:output. in Marks.*.mark:h:output.") as told, block:
            raise AssertionError("the block must not open")
        assert "unsum.mark" in str(told.value)
    with pytest.raises(SiteError, match="mark:hh:output: no tensor was marked.*near: 'mark:h:output'"):
        with unsum.capture(net, "mark:hh:output"):
            net(torch.randn(2, 3))
    with pytest.raises(SiteError, match="mark:z:output: no tensor was marked.*unsum.mark"):
        with unsum.edit(net, {"mark:z:output": unsum.zero()}):
            pass
    for kind in ("input", "grad_input", "grad"):
        with pytest.raises(SiteError, match="'h:output' and 'h:grad_output' alone"):
            with unsum.capture(net, f"mark:h:{kind}"):
                pass
    with unsum.capture(net, "mark:h:output") as got:
        net(torch.randn(2, 3))
    with pytest.raises(KeyError, match="(?s)no tensor of this name was marked.*near: 'mark:h:output'"):
        got["mark:hh:output"]


def test_a_sweep_patches_a_mark():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 1)

        def forward(self, ids):
            return self.out(unsum.mark(self.embed(ids), "h")).sum()

    net = Named()
    clean, corrupt = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 4, 2]])
    sweep = unsum.patch_sweep(net, clean, corrupt, ["embed:output", "mark:h:output"], lambda out: out)
    assert sweep.sites == ["embed:output", "mark:h:output"]
    torch.testing.assert_close(sweep.values[0], sweep.values[1])
    torch.testing.assert_close(sweep.values[1, 1], torch.tensor(sweep.clean, dtype=torch.float64))


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
