"""Edits: what they change, what follows, what a capture beside them sees, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum
from unsum.errors import OptionError, SiteError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.same, self.fc2 = nn.Linear(4, 3), nn.Identity(), nn.Linear(3, 2)

    def forward(self, x):
        return self.fc2(self.same(torch.tanh(self.fc1(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def by_hand(net, x, at_fc1=lambda h: h, at_fc2=lambda h: h):
    """The same network without modules, edited in the open."""
    h = at_fc1(F.linear(x, net.fc1.weight, net.fc1.bias))
    return F.linear(at_fc2(torch.tanh(h)), net.fc2.weight, net.fc2.bias)


def grads(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True)


def backward(net, x=X):
    net.zero_grad()
    out = net(x)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in net.parameters()]


@pytest.mark.parametrize(
    ("site", "change", "hand"),
    [
        ("fc1:output", unsum.scale(2.0), {"at_fc1": lambda h: h * 2}),
        ("fc1:output", [unsum.scale(2.0), unsum.add(1.0)], {"at_fc1": lambda h: h * 2 + 1}),
        ("fc1:output", [unsum.add(1.0), torch.sin], {"at_fc1": lambda h: torch.sin(h + 1)}),
        ("fc2:input", unsum.clip(-0.1, 0.1), {"at_fc2": lambda h: h.clamp(-0.1, 0.1)}),
        ("same:output", unsum.zero().at(features=1), {"at_fc2": lambda h: h * torch.tensor([1.0, 0, 1])}),
        ("same:input", unsum.remove(torch.tensor([0.0, 2.0, 0])), {"at_fc2": lambda h: h * torch.tensor([1.0, 0, 1])}),
        ((nn.Identity, "output"), unsum.steer(torch.tensor([0.0, 3.0, 4.0]), 10.0),
         {"at_fc2": lambda h: h + torch.tensor([0.0, 6.0, 8.0])}),
    ],
    ids=["scale", "list", "callable", "input", "at", "remove", "type"],
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_the_network_edited_by_hand(net, site, change, hand):
    with unsum.edit(net, {site: change}):
        out, got = backward(net)
    truth = by_hand(net, X, **hand)
    torch.testing.assert_close(out, truth.detach())
    for one, other in zip(got, grads(net, truth.square().sum()), strict=True):
        torch.testing.assert_close(one, other)


def test_gradient_edits(net):
    out, plain = backward(net)
    delta = (2 * out) @ net.fc2.weight.detach()
    with unsum.edit(net, {"fc2:grad_input": unsum.clip(-0.1, 0.1)}):
        _, got = backward(net)
    hidden = torch.tanh(F.linear(X, net.fc1.weight, net.fc1.bias)).detach()
    truth = (delta.clamp(-0.1, 0.1) * (1 - hidden**2)).T @ X
    torch.testing.assert_close(got[0], truth)
    torch.testing.assert_close(got[2], plain[2])  # fc2's own gradient is as ever
    with unsum.edit(net, {"fc1:grad_output": unsum.reverse(0.5)}):
        _, got = backward(net)
    torch.testing.assert_close(got[0], -0.5 * plain[0])
    with unsum.edit(net, {"fc1.weight:grad": [unsum.clip_norm(0.1), unsum.scale(2.0)]}):
        _, got = backward(net)
    torch.testing.assert_close(got[0].norm(), torch.tensor(0.2))
    torch.testing.assert_close(got[1], plain[1])


def test_patching_from_another_run(net):
    other = X.flip(0) * 2
    with unsum.capture(net, "fc1:output") as got:
        net(other)
    with unsum.edit(net, {"fc1:output": unsum.replace(got["fc1:output"])}):
        assert torch.equal(net(X), net(other))
    with unsum.edit(net, {"fc1:output": unsum.replace(got["fc1:output"]).at(samples=[1, 3])}):
        mixed = net(X)
    for i in range(5):
        torch.testing.assert_close(mixed[i], net((other if i in (1, 3) else X)[i : i + 1])[0])


def test_a_replaced_value_keeps_what_is_before_it_in_the_graph_with_a_gradient_of_zero(net):
    with unsum.edit(net, {"fc1:output": unsum.replace(torch.ones(5, 3))}):
        with unsum.capture(net, "fc1:grad_output") as got:
            _, after = backward(net)
    assert (after[0] == 0).all()
    assert (got["fc1:grad_output"] != 0).any()  # the gradient at the patched value itself


ORDERS = pytest.mark.parametrize("site", ["fc1", "same"], ids=["a tensor of its own", "an alias"])


@ORDERS
@pytest.mark.parametrize("kind", ["output", "input", "grad_output", "grad_input"])
def test_a_capture_sees_the_edits_of_blocks_opened_before_it_and_not_of_those_inside(net, site, kind):
    place, x = f"{site}:{kind}", X.clone().requires_grad_()
    with unsum.capture(net, place) as plain:
        backward(net, x)
    edit = lambda c: unsum.edit(net, {place: unsum.scale(c)})
    with unsum.capture(net, place) as outer, edit(2.0), unsum.capture(net, place) as middle, edit(3.0):
        with unsum.capture(net, place) as inner:
            backward(net, x)
    assert torch.equal(outer[place], plain[place])
    torch.testing.assert_close(middle[place], 2 * outer[place])
    torch.testing.assert_close(inner[place], 6 * outer[place])


def test_a_capture_and_a_users_own_hooks(net):
    net.fc1.register_forward_hook(lambda m, a, out: out + 1)
    with unsum.capture(net, "fc1:output") as got:
        net(X)
    torch.testing.assert_close(got["fc1:output"], F.linear(X, net.fc1.weight, net.fc1.bias).detach() + 1)


def test_an_ordinary_training_loop(net):
    twin = Net()
    twin.load_state_dict(net.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (net, twin)]
    with unsum.edit(net, {"fc1:output": unsum.scale(0.5), "fc2.weight:grad": unsum.scale(2.0)}):
        for step in range(5):
            optimizers[0].zero_grad()
            net(X + step).square().mean().backward()
            optimizers[0].step()
    for step in range(5):
        optimizers[1].zero_grad()
        by_hand(twin, X + step, at_fc1=lambda h: h / 2).square().mean().backward()
        twin.fc2.weight.grad *= 2
        optimizers[1].step()
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_generation_loop_is_edited_at_the_call_that_was_named(net):
    cell = nn.GRUCell(4, 4)

    def generate():
        h, states = torch.zeros(1, 4), []
        for _ in range(4):
            h = cell(torch.ones(1, 4), h)
            states.append(h)
        return states

    plain = generate()
    holder = nn.ModuleDict({"cell": cell})
    with unsum.edit(holder, {"cell:output@2": unsum.zero()}):
        edited = generate()
    assert [torch.equal(a, b) for a, b in zip(plain, edited, strict=True)] == [True, True, False, False]
    assert (edited[2] == 0).all()


def test_leaving_a_gradient_edit_before_its_backward_is_refused(net):
    with pytest.raises(SiteError, match="fc1:grad_output.*backward"):
        with unsum.edit(net, {"fc1:grad_output": unsum.scale(2.0)}):
            loss = net(X).sum()
    with pytest.raises(SiteError, match="fc1:grad_output.*backward"):
        loss.backward()
    with unsum.edit(net, {"fc1:grad_output": unsum.scale(2.0)}):
        first, second = net(X).sum(), net(X).sum()
        first.backward()
    with pytest.raises(SiteError, match="fc1:grad_output.*backward"):
        second.backward()  # the other micro-batch
    with unsum.edit(net, {"fc1:grad_output": unsum.scale(2.0)}, missing="ignore"):
        loss = net(X).sum()
    with pytest.raises(SiteError, match="fc1:grad_output.*backward"):
        loss.backward()


def test_an_edited_output_may_be_differentiated_after_the_block(net):
    with unsum.edit(net, {"fc1:output": unsum.scale(2.0)}):
        loss = net(X).square().sum()
    loss.backward()
    truth = grads(net, by_hand(net, X, at_fc1=lambda h: 2 * h).square().sum())
    for p, g in zip(net.parameters(), truth, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_a_users_exception_is_never_replaced_by_ours(net):
    with pytest.raises(ZeroDivisionError):
        with unsum.edit(net, {"fc1:grad_output": unsum.scale(2.0)}):
            net(X)
            1 / 0

    def fails(t):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        with unsum.edit(net, {"fc1:output": fails}):
            net(X)
    assert "fc1:output" in caught.value.__notes__[0]


def test_sites_never_reached_and_several_tensors(net):
    with pytest.raises(SiteError, match="fc2:output: never fired"):
        with unsum.edit(net, {"fc1:output": unsum.zero(), "fc2:output": unsum.zero()}):
            net.fc1(X)
    with unsum.edit(net, {"fc2:output": unsum.zero()}, missing="ignore"):
        net.fc1(X)
    lstm = nn.Sequential(nn.LSTM(4, 3))
    with pytest.raises(SiteError, match=r"0:output: holds 3 tensors.*'0:output\[0\]'"):
        with unsum.edit(lstm, {"0:output": unsum.zero()}):
            lstm(X)
    with unsum.edit(lstm, {"0:output[1][0]": unsum.zero(), "0:grad_output[0]": unsum.zero()}):
        out, (h, _) = lstm(X)
        (out.sum() + 0 * h.sum()).backward()
    assert (h == 0).all()
    assert (lstm[0].weight_ih_l0.grad == 0).all()


def test_bad_edits_are_errors_that_say_what_is_meant(net):
    with pytest.raises(SiteError, match="fc1:output.*reverse.*grad_output"):
        unsum.edit(net, {"fc1:output": unsum.reverse()})
    with pytest.raises(OptionError, match=r"fc1:output: call the verb: unsum.zero\(...\)"):
        unsum.edit(net, {"fc1:output": unsum.zero})
    with pytest.raises(OptionError, match="fc1:output.*float"):
        unsum.edit(net, {"fc1:output": 2.0})
    with pytest.raises(OptionError, match="mapping"):
        unsum.edit(net, [("fc1:output", unsum.zero())])
    with pytest.raises(OptionError, match="missing"):
        unsum.edit(net, {}, missing="no")
    with unsum.edit(net, {}), unsum.edit(None, {}):
        net(X)


def test_gradients_are_edited_without_the_scale_of_a_grad_scaler(net):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with unsum.edit(net, {"fc1:grad_output": unsum.clip(-0.1, 0.1)}):
        backward(net)
    truth = net.fc1.weight.grad.clone()
    net.zero_grad()
    with unsum.edit(net, {"fc1:grad_output": unsum.clip(-0.1, 0.1)}, scaler=scaler):
        scaler.scale(net(X).square().sum()).backward()
    torch.testing.assert_close(net.fc1.weight.grad / 1024, truth)


def test_a_shared_module_is_edited_at_one_call_and_a_glob_at_all(net):
    holder = nn.ModuleDict({"fc": nn.Linear(4, 4)})
    x = torch.randn(2, 4)
    with unsum.edit(holder, {"fc:output@1": unsum.zero(), "f*:output": unsum.add(1.0)}):
        first, second = holder["fc"](x), holder["fc"](x)
    torch.testing.assert_close(first, holder["fc"](x) + 1)
    assert (second == 1).all()
