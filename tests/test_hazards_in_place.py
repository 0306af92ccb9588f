"""Values and gradients changed in place: captured as they were at their module, or an error that names the site."""

import pytest
import torch
from reference import gradient_of
from torch import nn
from torch.nn import functional as F

import unsum
from hazard_nets import Block, Residual, close
from unsum.errors import SiteError

torch.manual_seed(0)


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
