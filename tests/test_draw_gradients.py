"""A picture says which tensors take part and which gradients are stored (asserted on its structure, not on pixels)."""

import pytest
import torch
from torch import nn

from drawn import SVG, article, downwards, draw

FORWARD = sorted([
    ("x", "mm"), ("fc1.weight", "mm"), ("5×3", "mm"), ("fc2.weight", "mm"), ("5×2", "sub"), ("y", "sub"),
    ("5×2", "pow"), ("5×2", "sum"), ("scalar", "mul"),
])  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after", "kept"])
def test_roles_arrows_and_gradients_of_the_articles_network(when):
    model, x, y, loss = article()
    if when != "before":
        loss.backward(retain_graph=when == "kept")
    drawn = draw(loss, model, {"x": x, "y": y})
    assert set(drawn.tensors("data")) == {"x", "y"}
    assert set(drawn.tensors("parameter")) == {"fc1.weight", "fc2.weight"}
    assert len(drawn.tensors("intermediate")) == 6 and "loss" in drawn.tensors("intermediate")
    assert [g.get("data-name") for g in drawn.all(role="operation")] == ["mm", "mm", "sub", "pow", "sum", "mul"]
    assert drawn.arrows("forward") == FORWARD
    # Torch computes nothing for x and y: the article draws their arrow as thrown away.
    assert drawn.arrows("backward") == [arrow for arrow in FORWARD if arrow[0] not in ("x", "y")]
    assert drawn.landing("fc1.weight") == drawn.landing("fc2.weight") == ["stored"]
    assert drawn.landing("x") == drawn.landing("y") == []
    kinds = [g.get("data-gradient") for g in drawn.all(direction="backward")]
    assert kinds.count("stored") == 2 and kinds.count("thrown-away") == 5
    none = drawn.all(direction="forward", gradient="none")
    assert len(none) == 2 and all("requires_grad=False" in g.find(f"{SVG}title").text for g in none)


def test_shapes_names_and_hover_are_on_everything():
    model, x, y, loss = article()
    drawn = draw(loss, model, {"x": x, "y": y})
    shapes = {name: g.get("data-shape") for name, g in drawn.tensors().items()}
    assert shapes["x"] == "5×4" and shapes["fc1.weight"] == "3×4" and shapes["loss"] == "scalar"
    for group in [*drawn.tensors().values(), *drawn.all(role="operation"), *drawn.all(direction="forward")]:
        assert group.get("tabindex") == "0" and group.find(f"{SVG}title").text == group.get("aria-label")
    tags = {element.tag: element.text for element in drawn.root}
    assert tags[f"{SVG}title"] and "fc1.weight" in tags[f"{SVG}desc"]


def test_data_that_requires_a_gradient_stores_it():
    model, x, y, loss = article(requires_grad=True)
    for _ in range(2):
        drawn = draw(loss, model, {"x": x, "y": y})
        assert drawn.landing("x") == ["stored"] and drawn.tensors()["x"].get("data-role") == "data"
        if x.grad is None:
            loss.backward()


@pytest.mark.parametrize("after", [False, True])
def test_a_frozen_parameter_gets_none(after):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4)
    model[2].weight.requires_grad_(False)
    loss = model(x).square().sum()
    if after:
        loss.backward()
    drawn = draw(loss, model, {"x": x})
    frozen = drawn.tensors("parameter")["2.weight"] if not after or "2.weight" in drawn.tensors() else None
    assert frozen is not None and frozen.get("data-gradient") == "none" and drawn.landing("2.weight") == []
    assert drawn.landing("2.bias") == drawn.landing("0.weight") == ["stored"]
    assert ("2.weight", "addmm") in drawn.arrows("forward")


def test_a_frozen_bias_stands_beside_its_weight_and_a_frozen_layer_before_all_is_told_of():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)), torch.randn(5, 4)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    drawn = draw(model(x).sum(), model, {"x": x})
    assert drawn.landing("2.bias") == [] and ("2.bias", "addmm") in drawn.arrows("forward")
    assert "0.weight" not in drawn.tensors() and "0.weight" in drawn.notes() and "x (5×4)" in drawn.notes()


@pytest.mark.parametrize("after", [False, True])
def test_retain_grad_is_seen_and_named_intermediates_are_named(after):
    model, x, y, _ = article()
    a = model.fc1(x)
    a.retain_grad()
    loss = (model.fc2(a) - y).square().sum()
    if after:
        loss.backward()
    assert draw(loss, model, {"x": x, "y": y, "a": a}).landing("a") == ["stored"]
    key = next(iter(draw(loss, model, {"x": x}).all(gradient="stored", role="intermediate")))
    assert key.get("data-shape") == "5×3"
    thrown = draw(loss, model, {"x": x, "out": loss}).landing("out")
    assert thrown == []  # the loss itself: nothing lands on it


def test_a_tensor_that_several_operations_use_gets_an_arrow_from_each():
    x = torch.randn(3, requires_grad=True)
    loss = (x.exp() + x.sin()).sum()
    drawn = draw(loss, data={"x": x})
    assert drawn.arrows("backward").count(("x", "exp")) == drawn.arrows("backward").count(("x", "sin")) == 1
    loss.backward()
    told = [g for g in draw(loss, data={"x": x}).all(direction="backward") if g.get("data-norm")]
    assert len(told) == 1  # the sum is known, its parts are not
    assert float(told[0].get("data-norm")) == pytest.approx(float(x.grad.norm()), rel=1e-4)


def test_a_trainable_parameter_that_is_not_reached_is_told_of():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    drawn = draw(model["used"](torch.ones(1, 2)).sum(), model)
    assert "idle.weight" in drawn.notes() and "idle.weight" not in drawn.tensors()


class Experts(nn.Module):
    """Chooses one of its layers, leaves one out, and returns a part of the result."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        a, b = self.layers[0](x).chunk(2, -1)
        return self.layers[2](torch.cat([a * b.sigmoid(), b], -1)) * self.scale


NETS = {
    "linear": (lambda: nn.Linear(4, 2), (5, 4)),
    "lstm": (lambda: nn.LSTM(4, 3, 2, batch_first=True), (2, 5, 4)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 3), (2, 5, 4)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.GroupNorm(2, 4), nn.PReLU()), (2, 3, 8, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), (5, 4)),
    "experts": (Experts, (5, 4)),
    "shared": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 3), (5, 4)),
    "bilinear": (lambda: Twice(nn.Bilinear(4, 4, 2)), (5, 4)),
}


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("frozen", ["none", "biases"])
def test_the_parameters_drawn_are_those_that_get_a_gradient(net, frozen):
    torch.manual_seed(0)
    make, shape = NETS[net]
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen == "none" or "bias" not in name)
    out = model(torch.randn(shape))
    loss = (out[0] if isinstance(out, tuple) else out).square().sum()
    drawn = draw(loss, model, repeat=False, fold=99)
    loss.backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    parameters = drawn.tensors("parameter")
    assert {name for name, g in parameters.items() if g.get("data-gradient") == "stored"} == reached
    keys = {g.get("data-key") for g in parameters.values()}
    landed = {g.get("data-tensor") for g in drawn.all(direction="backward", gradient="stored")}
    assert landed & keys == {parameters[name].get("data-key") for name in reached}
    downwards(drawn)


def test_what_is_stored_and_not_what_flows_is_told_of():
    model, x, y, loss = article()
    loss.backward(retain_graph=True)
    assert "not what flows" not in draw(loss, model, {"x": x, "y": y}).notes()
    loss.backward(retain_graph=True)
    assert "not what flows" in draw(loss, model, {"x": x, "y": y}).notes()


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_gradient_that_may_never_be_stored_is_not_promised():
    model, w, x = nn.Linear(3, 3), nn.Parameter(torch.ones(3)), torch.randn(2, 3)
    model.w = w
    loss = Half.apply(model(x), w).sum()
    assert "unless the custom function" in draw(loss, model).tensors()["w"].get("aria-label")
    loss.backward()
    assert ".grad, which is empty" in draw(loss, model).tensors()["w"].get("aria-label")
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss = model(x).sum()
    model.zero_grad()
    assert "clears it" in draw(loss, model).tensors()["weight"].get("aria-label")
    loss.backward()
    assert ".grad will hold it" not in draw(loss, model).tensors()["weight"].get("aria-label")
