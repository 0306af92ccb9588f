"""Every program of the articles that this project grew from, run through unsum, with the numbers that come out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unsum


class SimpleNet(nn.Module):
    """Seed 000."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 5)
        self.fc2 = nn.Linear(5, 2)

    def forward(self, x):
        return self.fc2(self.fc1(x))


class MyModel(nn.Module):
    """Seed 001."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 5)

    def forward(self, x):
        return self.linear(x)


class MLP(nn.Module):
    """Seed 003."""

    def __init__(self, d_in, d_hidden, d_out):
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden, bias=False)
        self.fc2 = nn.Linear(d_hidden, d_out, bias=False)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def test_seed_000_the_activation_of_a_layer():
    net = SimpleNet()
    with unsum.capture(net, "fc1:output") as got:
        net(torch.randn(1, 10))
    assert got["fc1:output"].shape == (1, 5)


def test_seed_000_a_gradient_has_the_shape_of_its_weight():
    net = SimpleNet()
    with unsum.capture(net, "fc1.weight:grad") as got:
        F.mse_loss(net(torch.randn(1, 10)), torch.randn(1, 2)).backward()
    assert got["fc1.weight:grad"].shape == (5, 10)
    assert torch.equal(got["fc1.weight:grad"], net.fc1.weight.grad)


def test_seed_000_gradients_follow_the_edited_activation():
    torch.manual_seed(0)
    net = SimpleNet()
    x, y = torch.randn(1, 10), torch.randn(1, 2)
    with unsum.edit(net, {"fc1:output": unsum.scale(2.0)}):
        F.mse_loss(net(x), y).backward()
    h = F.linear(x, net.fc1.weight, net.fc1.bias) * 2
    by_hand = torch.autograd.grad(F.mse_loss(F.linear(h, net.fc2.weight, net.fc2.bias), y), net.fc1.weight)
    torch.testing.assert_close(net.fc1.weight.grad, by_hand[0])
    assert net.fc1.weight.grad.shape == (5, 10)


def test_seed_001_example_1_activations_and_gradients():
    model = MyModel()
    with unsum.capture(model, "linear:output", "linear:grad_output", "linear.weight:grad") as got:
        output = model(torch.randn(1, 10))
        (output**2).sum().backward()
    assert torch.equal(got["linear:output"], output.detach())
    assert torch.equal(got["linear:grad_output"], 2 * output.detach())
    assert torch.equal(got["linear.weight:grad"], model.linear.weight.grad)


def test_seed_001_example_2_the_gradient_is_that_of_the_edited_output():
    """The article says that it "is still based on the original forward pass". It is not."""
    torch.manual_seed(0)
    model, x = MyModel(), torch.randn(1, 10)
    with unsum.edit(model, {"linear:output": unsum.add(1.0)}):
        (model(x) ** 2).sum().backward()
    edited = F.linear(x, model.linear.weight, model.linear.bias).detach() + 1
    torch.testing.assert_close(model.linear.weight.grad, (2 * edited).T @ x)
    original = (2 * (edited - 1)).T @ x
    assert not torch.allclose(model.linear.weight.grad, original)


def test_seed_001_example_3_a_gradient_of_ones_own_making():
    torch.manual_seed(0)
    model, x = MyModel(), torch.randn(1, 10)
    mine = torch.randn(5, 10)
    with unsum.edit(model, {"linear.weight:grad": unsum.replace(mine)}):
        (model(x) ** 2).sum().backward()
    assert torch.equal(model.linear.weight.grad, mine)
    output = model(x).detach()
    torch.testing.assert_close(model.linear.bias.grad, (2 * output)[0])


@pytest.mark.parametrize(
    ("start", "verb", "plain", "edited"),
    [
        (2.0, unsum.scale(2.0), 12.0, 24.0),
        # The article says 6 for the second: 1 · 2x with x = 10 is 20.
        (10.0, unsum.clip(-1, 1), 60.0, 20.0),
    ],
    ids=["scaled", "clipped"],
)
def test_seed_002_a_hook_on_a_tensor(start, verb, plain, edited):
    def gradient():
        x = torch.tensor(start, requires_grad=True)
        y = unsum.mark(x**2, "y")
        (y * 3).backward()
        return x.grad.item()

    assert gradient() == plain
    with unsum.edit(None, {"y:grad_output": verb}):
        assert gradient() == edited


def test_seed_002_a_hook_sees_the_sum_over_all_uses():
    x = torch.tensor(2.0, requires_grad=True)
    with unsum.capture(None, "y:output", "y:grad_output") as got, unsum.edit(None, {"y:grad_output": unsum.scale(0.5)}):
        y = unsum.mark(x**2, "y")
        (y * 3 + y * 2).backward()
    assert got["y:output"].item() == 4
    assert got["y:grad_output"].item() == 5
    assert x.grad.item() == 10


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, 4).requires_grad_(True), torch.randn(5, 6, 2)
    model = MLP(4, 3, 2)
    with unsum.capture(model, "fc1:input", "fc2:input", "fc1:grad_output", "fc2:grad_output") as got:
        (0.5 * ((model(x) - y) ** 2).sum()).backward()
    return model, got


def test_seed_003_shapes_and_order(mlp):
    _, got = mlp
    assert [(event.site, event.shape) for event in got.trace()] == [
        ("fc1:input", (5, 6, 4)),
        ("fc2:input", (5, 6, 3)),
        ("fc2:grad_output", (5, 6, 2)),
        ("fc1:grad_output", (5, 6, 3)),
    ]
    lines = str(got.trace()).splitlines()
    assert [line.split()[0] for line in lines] == ["fc1:input", "fc2:input", "fc2:grad_output", "fc1:grad_output"]
    assert "forward" in lines[0]
    assert "backward" in lines[3]


def test_seed_003_the_reconstruction_is_the_gradient(mlp):
    model, got = mlp
    for name in ("fc1", "fc2"):
        again = torch.einsum("nto,nti->oi", got[f"{name}:grad_output"], got[f"{name}:input"])
        torch.testing.assert_close(again, getattr(model, name).weight.grad, atol=1e-6, rtol=1e-5)


def test_seed_003_the_kronecker_product():
    layer = nn.Linear(3, 2, bias=False)
    delta = torch.tensor([1.0, 2.0])
    with unsum.capture(nn.Sequential(layer), "0:input", "0:grad_output") as got:
        layer(torch.tensor([3.0, 4.0, 5.0])).backward(delta)
    product = torch.kron(got["0:grad_output"], got["0:input"])
    assert product.tolist() == [3, 4, 5, 6, 8, 10]
    assert torch.equal(product, layer.weight.grad.flatten())


def test_seed_003_autograd_computes_nothing_for_data_that_needs_no_gradient():
    """The article says that the gradient of such an input is computed and thrown away. Autograd skips it."""
    needed = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            needed.append(ctx.needs_input_grad)
            x, _ = ctx.saved_tensors
            return None, x.T @ grad

    Product.apply(torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)).sum().backward()
    assert needed == [(False, True)]

    model = MLP(4, 3, 2)
    with pytest.raises(unsum.errors.SiteError, match="fc1:grad_input.*needs no gradient"):
        with unsum.capture(model, "fc1:grad_input"):
            model(torch.randn(5, 4)).sum().backward()
