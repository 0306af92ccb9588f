"""The picture says what autograd does: asserted on its structure, never on pixels."""

import gc
import json
import re
import weakref
from collections import OrderedDict
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsum
from unsum.errors import OptionError, UnsumError

SVG = "{http://www.w3.org/2000/svg}"


class Drawn:
    """A picture, read again from its text."""

    def __init__(self, picture):
        self.picture = picture
        self.root = ElementTree.fromstring(picture.svg)
        self.groups = list(self.root.iter(f"{SVG}g"))

    def all(self, **wanted):
        keys = {f"data-{k.replace('_', '-')}": v for k, v in wanted.items()}
        return [g for g in self.groups if all(g.get(k) == v for k, v in keys.items())]

    def tensors(self, role=None):
        found = [g for g in self.groups if g.get("class") == "tensor" and role in (None, g.get("data-role"))]
        return {g.get("data-name") or g.get("data-key"): g for g in found}

    def arrows(self, direction):
        """(tensor's name or shape, operation's name) of every arrow of this direction, sorted."""
        names = {g.get("data-key"): g.get("data-name") or g.get("data-shape") for g in self.groups if g.get("data-key")}
        return sorted(
            (names[g.get("data-tensor")], names[g.get("data-operation")]) for g in self.all(direction=direction)
        )

    def landing(self, name):
        """How gradients come back to a tensor: the kinds of the arrows that land on it."""
        key = self.tensors()[name].get("data-key")
        return [g.get("data-gradient") for g in self.all(direction="backward") if g.get("data-tensor") == key]

    def notes(self):
        return " ".join(" ".join("".join(g.itertext()).split()) for g in self.all(role="legend"))


class MLP(nn.Module):
    """The network of the article: two linear layers without bias."""

    def __init__(self, relu=False):
        super().__init__()
        self.fc1 = nn.Linear(4, 3, bias=False)
        self.fc2 = nn.Linear(3, 2, bias=False)
        self.relu = relu

    def forward(self, x):
        a = self.fc1(x)
        return self.fc2(F.relu(a) if self.relu else a)


def article(*, relu=False, **kwargs):
    torch.manual_seed(0)
    model, x, y = MLP(relu), torch.randn(5, 4, **kwargs), torch.randn(5, 2)
    return model, x, y, 0.5 * ((model(x) - y) ** 2).sum()


def draw(*args, **kwargs):
    return Drawn(unsum.draw(*args, **kwargs))


# ---- the article's network -------------------------------------------------------------------------------------------

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


def test_sizes_of_what_flows_are_those_of_autograd():
    model, x, y, loss = article(relu=True)
    loss.backward(retain_graph=True)
    drawn = draw(loss, model, {"x": x, "y": y})
    out = model(x)
    out.retain_grad()
    (0.5 * ((out - y) ** 2).sum()).backward()
    sizes = {
        (g.get("data-tensor"), g.get("data-operation")): float(g.get("data-norm"))
        for g in drawn.all(direction="backward")
    }
    by_name = {name: g.get("data-key") for name, g in drawn.tensors().items()}
    sub = next(g for g in drawn.all(role="operation") if g.get("data-name") == "sub").get("data-key")
    (at_sub,) = [size for (tensor, op), size in sizes.items() if op == sub]
    assert at_sub == pytest.approx(float(out.grad.norm()), rel=1e-4)
    for name in ("fc1.weight", "fc2.weight"):
        (size,) = [size for (tensor, _), size in sizes.items() if tensor == by_name[name]]
        assert size == pytest.approx(float(dict(model.named_parameters())[name].grad.norm()) / 2, rel=1e-4)


def test_the_size_at_a_tensor_is_that_of_what_has_come_through_the_views():
    w, x = torch.randn(3, requires_grad=True), torch.randn(5, 3)
    loss = (w.expand(5, 3) * x).sum()
    (arrow,) = draw(loss, data={"w": w, "x": x}, flow=True).all(direction="backward", gradient="stored")
    assert float(arrow.get("data-norm")) == pytest.approx(float(x.sum(0).norm()))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn_like(grad)


def test_a_custom_function_is_never_called_by_drawing():
    x = torch.randn(3, requires_grad=True)
    loss = Noisy.apply(x.exp()).sum()
    state = torch.get_rng_state()
    for flow in (None, True):
        drawn = draw(loss, data={"x": x}, flow=flow)
        assert torch.equal(torch.get_rng_state(), state)
    assert "custom function" in drawn.all(direction="backward", gradient="stored")[0].get("aria-label")
    assert [name for name, _ in norms_at(drawn)] == ["sum"]


def test_sizes_before_a_backward_only_if_asked_for_and_never_if_freed():
    model, x, y, loss = article()
    assert not draw(loss, model, {"x": x, "y": y}).root.findall(".//*[@data-norm]")
    asked = draw(loss, model, {"x": x, "y": y}, flow=True)
    assert all(g.get("data-norm") for g in asked.all(direction="backward"))
    loss.backward()
    freed = draw(loss, model, {"x": x, "y": y})
    assert [g.get("data-norm") is not None for g in freed.all(direction="backward", gradient="stored")] == [True, True]
    thrown = freed.all(direction="backward", gradient="thrown-away")
    assert all(g.get("data-norm") is None and "freed" in g.get("aria-label") for g in thrown)
    with pytest.raises(OptionError, match="freed"):
        unsum.draw(loss, model, flow=True)


# ---- what is stored, and what is not ---------------------------------------------------------------------------------


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


# ---- where data enters -----------------------------------------------------------------------------------------------


def test_two_tensors_that_shapes_cannot_tell_apart_are_not_guessed():
    model, x, y = nn.Linear(4, 4), torch.randn(5, 4), torch.randn(5, 4)
    loss = (model(x) - y).square().sum()
    before = draw(loss, model, {"x": x, "y": y})
    assert ("x", "addmm") in before.arrows("forward") and ("y", "sub") in before.arrows("forward")
    assert "Found by its shape" in before.all(direction="forward", gradient="none")[1].get("aria-label")
    loss.backward()
    after = draw(loss, model, {"x": x, "y": y})
    assert not after.tensors("data") and "by its shape it may enter at" in after.notes()


def test_ids_images_and_targets_find_their_places():
    model, ids = nn.Embedding(10, 4), torch.randint(0, 10, (2, 3))
    assert ("ids", "embedding") in draw(model(ids).sum(), model, {"ids": ids}).arrows("forward")
    loss = model(ids).sum()
    loss.backward()
    assert ("ids", "embedding") in draw(loss, model, {"ids": ids}).arrows("forward")
    conv, images = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    target = torch.randint(0, 4, (2,))
    loss = F.cross_entropy(conv(images).mean((2, 3)), target)
    for _ in range(2):
        drawn = draw(loss, conv, {"images": images, "target": target}).arrows("forward")
        assert ("images", "convolution") in drawn and ("target", "nll_loss") in drawn
        if conv.weight.grad is None:
            loss.backward()


def test_a_number_is_no_target():
    model, x, y = nn.Linear(4, 2), torch.randn(5, 4), torch.randn(5, 2)
    loss = (2 * model(x) - y).square().sum()
    assert ("y", "sub") in draw(loss, model, {"x": x, "y": y}).arrows("forward")


# ---- nothing is disturbed --------------------------------------------------------------------------------------------


def test_no_hook_fires_no_grad_moves_no_random_number_is_drawn_and_the_backward_follows():
    model, x, y, loss = article(relu=True)
    fired = []
    model.fc1.register_forward_hook(lambda *_: fired.append("forward"))
    model.fc1.weight.register_hook(lambda grad: fired.append("gradient"))
    loss.register_hook(lambda grad: fired.append("loss"))
    loss.grad_fn.register_prehook(lambda grads: fired.append("node"))
    state = torch.get_rng_state()
    for flow in (None, True, False):
        unsum.draw(loss, model, {"x": x, "y": y}, flow=flow).save
    assert not fired and model.fc1.weight.grad is None and torch.equal(torch.get_rng_state(), state)
    loss.backward(retain_graph=True)
    fired.clear()
    grad = model.fc1.weight.grad.clone()
    unsum.draw(loss, model, {"x": x, "y": y})
    assert not fired and torch.equal(model.fc1.weight.grad, grad)
    loss.backward()
    assert torch.allclose(model.fc1.weight.grad, 2 * grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_is_drawn_without_computing_it_again(reentrant):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 4, requires_grad=True)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
    calls.clear()
    drawn = draw(loss, model, {"x": x})
    assert not calls
    if not reentrant:
        assert set(drawn.tensors("parameter")) == set(dict(model.named_parameters()))
        with pytest.raises(OptionError, match="checkpoint"):
            unsum.draw(loss, model, flow=True)
    loss.backward()
    expected = torch.autograd.grad(model(x.detach()).square().sum(), model[0].weight)[0]
    assert torch.allclose(model[0].weight.grad, expected)
    unsum.draw(loss, model, {"x": x})


def in_graph(loss):
    """A weak reference to something that lives as long as the graph."""

    class Token:
        pass

    token = loss.grad_fn.metadata["token"] = Token()
    return weakref.ref(token)


def test_a_picture_holds_no_graph():
    model, x, y, loss = article()
    picture = unsum.draw(loss, model, {"x": x, "y": y})
    node = in_graph(loss)
    there = weakref.ref(x)
    del loss, x, y
    gc.collect()
    assert node() is None and there() is None and picture.svg


def test_a_model_with_dropout_draws_the_same_picture_twice():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(5, 4)
    loss = model(x).sum()
    assert unsum.draw(loss, model, {"x": x}).svg == unsum.draw(loss, model, {"x": x}).svg


# ---- groups ----------------------------------------------------------------------------------------------------------


def groups(drawn):
    return {g.get("data-name"): g for g in drawn.all(role="group")}


def test_small_networks_are_open_with_their_modules_around_them():
    model, x, y, loss = article()
    found = groups(draw(loss, model, {"x": x, "y": y}))
    assert {name: g.get("data-type") for name, g in found.items()} == {"": "MLP", "fc1": "Linear", "fc2": "Linear"}
    assert all(g.get("data-folded") == "false" for g in found.values())


def test_folding_by_depth_and_by_name():
    model, x, y, loss = article()
    assert list(groups(draw(loss, model, fold=0))) == [""]
    at_one = draw(loss, model, {"x": x, "y": y}, fold=1)
    assert {n for n, g in groups(at_one).items() if g.get("data-folded") == "true"} == {"fc1", "fc2"}
    assert groups(at_one)["fc1"].get("data-parameters") == "1" and not at_one.tensors("parameter")
    by_name = groups(draw(loss, model, fold="*1"))
    assert by_name["fc1"].get("data-folded") == "true" and by_name["fc2"].get("data-folded") == "false"
    with pytest.raises(OptionError, match="fits no group"):
        unsum.draw(loss, model, fold="nowhere.*")


def test_a_cnn_is_grouped_by_its_layers_without_circles():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip
    x, target = torch.randn(2, 3, 16, 16), torch.tensor([1, 2])
    drawn = draw(F.cross_entropy(model(x), target), model, {"x": x, "target": target})
    kinds = {name: g.get("data-type") for name, g in groups(drawn).items()}
    assert kinds["2"] == "ReLU" and kinds["3"] == "MaxPool2d" and kinds["6"] == "AdaptiveAvgPool2d"
    assert set(drawn.tensors("parameter")) == set(dict(model.named_parameters()))
    downwards(drawn)


def downwards(drawn):
    """Every forward arrow ends below where it begins."""
    for group in drawn.all(direction="forward"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", group.findall(f"{SVG}path")[0].get("d"))]
        assert numbers[-1] > numbers[1]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, layers, d=8):
        super().__init__()
        self.first = nn.Linear(4, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_repeated_blocks_are_drawn_once_with_how_many_there_are():
    model, x = Deep(200), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x})
    found = groups(drawn)
    assert found["blocks.0"].get("data-times") == "200" and found["blocks.0"].get("data-parameters") == "1200"
    assert "blocks.1" not in found and "×200" in drawn.picture.svg
    apart = groups(draw(model(x).sum(), model, {"x": x}, repeat=False))
    assert {f"blocks.{k}" for k in range(200)} < set(apart)


def test_a_block_that_differs_is_drawn_by_itself():
    model, x = Deep(6), torch.randn(3, 4)
    model.blocks[2].up.weight.requires_grad_(False)
    times = {n: g.get("data-times") for n, g in groups(draw(model(x).sum(), model, fold=1)).items()}
    assert (times["blocks.0"], times["blocks.2"], times["blocks.3"]) == ("2", None, "3")


def test_layers_that_repeat_in_turn_are_drawn_once():
    layers = [layer for _ in range(50) for layer in (nn.Linear(4, 4), nn.ReLU())]
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *layers), torch.randn(3, 4, requires_grad=True)
    drawn = draw(model(x).sum(), model, {"x": x})
    # The first is apart: the gradient that it hands to x is stored.
    assert "50" in {g.get("data-times") for g in groups(drawn).values()}


def test_residual_sums_belong_to_their_block_in_all_of_them():
    model, x = Deep(4), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x}, fold=99)
    assert groups(drawn)["blocks.0"].get("data-times") == "4"
    adds = [g for g in drawn.all(role="operation") if g.get("data-name") == "add"]
    assert [g.get("data-times") for g in adds] == ["4"]
    downwards(drawn)


def test_gpt2_small_folds_to_one_screen():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    ids = torch.randint(0, 50000, (2, 8))
    loss = model(ids, labels=ids).loss
    drawn = draw(loss, model, {"ids": ids})
    assert groups(drawn)["transformer.h.0"].get("data-times") == "12" and "×12" in drawn.picture.svg
    wide, tall = (float(n) for n in drawn.root.get("viewBox").split()[2:])
    assert wide <= 1440 and tall <= 900 / 0.8
    tied = drawn.tensors("parameter")["transformer.wte.weight"]
    assert tied.get("data-gradient") == "stored" and drawn.landing("transformer.wte.weight") == ["stored", "stored"]
    everything = draw(loss, model, {"ids": ids}, fold=99, repeat=False)
    assert set(everything.tensors("parameter")) == set(dict(model.named_parameters()))
    downwards(everything)


def test_a_penalty_is_no_part_of_the_model():
    model, x, y, loss = article()
    drawn = draw(loss + model.fc1.weight.square().sum(), model, {"x": x, "y": y})
    assert drawn.landing("fc1.weight") == ["stored", "stored"]
    assert set(groups(drawn)) == {"", "fc1", "fc2"}
    downwards(drawn)


def test_tied_weights_are_one_box():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids):
            return self.head(self.emb(ids))

    model, ids = Tied(), torch.randint(0, 7, (2, 5))
    drawn = draw(model(ids).sum(), model, {"ids": ids})
    assert list(drawn.tensors("parameter")) == ["emb.weight"] and drawn.landing("emb.weight") == ["stored"] * 2
    assert set(groups(drawn)) == {"", "emb", "head"}


class Again(nn.Module):
    """Calls a layer twice, with something between."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self.deep = nn.Sequential(nn.Linear(4, 4), self.fc)

    def forward(self, x):
        return self.fc(F.relu(self.deep(F.relu(self.fc(x)))))


def test_a_layer_that_is_called_again_makes_no_circle():
    model, x = Again(), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x})
    assert drawn.landing("fc.weight") == ["stored"] * 3
    downwards(drawn)


def test_views_are_drawn_if_asked_for():
    model, x, y, loss = article()
    names = [g.get("data-name") for g in draw(loss, model, views=True).all(role="operation")]
    assert names.count("t") == 2
    hidden = draw(loss, model, {"x": x, "y": y}).root.findall(".//*[@data-through='t']")
    assert len(hidden) == 2


# ---- where blocks act ------------------------------------------------------------------------------------------------


def test_captures_edits_the_cut_and_meetings_are_shown_where_they_act():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4), torch.randn(5, 2)
    with unsum.capture(model, "0:input", "0:grad_output", "1:output", "2.weight:grad") as got:
        with unsum.edit(model, {"1:output": unsum.scale(2.0)}) as edited, unsum.gradients(model) as g:
            out = model(x)
            loss = (out - y).square().sum()
            loss.backward(retain_graph=True)
            inside = draw(loss, model, {"x": x, "y": y, "out": out})
    after = draw(loss, model, {"x": x, "y": y, "out": out}, show=[got, edited, g])
    assert inside.picture.svg == after.picture.svg
    tensors = after.tensors()
    assert tensors["x"].get("data-captured") == "0:input"
    assert tensors["2.weight"].get("data-captured") == "2.weight:grad"
    assert tensors["out"].get("data-cut") == "true" and len(after.root.findall(".//*[@data-cut]")) == 1
    (captured,) = [g for g in tensors.values() if g.get("data-captured") == "0:grad_output"]
    assert captured.get("data-shape") == "5×3"
    (edit,) = [g for g in tensors.values() if g.get("data-edited")]
    assert edit.get("data-edited") == "1:output"
    meetings = [g.get("data-meeting") for g in after.all(role="operation") if g.get("data-meeting")]
    assert [set(m.split()) for m in meetings] == [{"0.weight", "0.bias"}, {"2.weight", "2.bias"}]
    plain = draw(loss, model, {"x": x, "y": y, "out": out})
    assert not plain.root.findall(".//*[@data-site]") and not plain.root.findall(".//*[@data-cut]")


def test_sites_of_repeated_blocks_keep_them_together_unless_they_differ():
    model, x = Deep(5), torch.randn(3, 4)
    with unsum.capture(model, "blocks.*.up:output") as got:
        loss = model(x).sum()
    assert groups(draw(loss, model, show=[got]))["blocks.0"].get("data-times") == "5"
    with unsum.capture(model, "blocks.3.up:output") as one:
        loss = model(x).sum()
    assert groups(draw(loss, model, show=one, fold=1))["blocks.0"].get("data-times") == "3"


def test_notes_in_the_graph_let_it_go():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with unsum.capture(model, ":output", ":input") as got, unsum.gradients(model):
        loss = model(x).sum()
        loss.backward()
    node, there = in_graph(loss), weakref.ref(x)
    del loss, x
    gc.collect()
    assert node() is None and got[":input"] is not None
    del got
    gc.collect()
    assert there() is None


# ---- the picture itself ----------------------------------------------------------------------------------------------


def test_it_saves_itself_shows_itself_and_needs_no_network(tmp_path):
    model, x, y, loss = article()
    picture = unsum.draw(loss, model, {"x": x, "y": y})
    assert picture.save(tmp_path / "x.svg").read_text() == picture.svg == picture._repr_svg_()
    assert picture.svg in picture._repr_html_() and "2 parameters" in repr(picture)
    page = picture.save(str(tmp_path / "x.html")).read_text()
    for text in (picture.svg, page):
        assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}
    for suffix in ("x.png", "x"):
        with pytest.raises(OptionError, match=r"\.svg or \.html"):
            picture.save(tmp_path / suffix)


def test_two_pictures_on_a_page_do_not_share_names():
    model, x, y, loss = article()
    one, other = unsum.draw(loss, model, {"x": x}), unsum.draw(loss, model, {"x": x, "y": y})
    names = [set(re.findall(r'id="([^"]+)"', picture.svg)) for picture in (one, other)]
    assert names[0] and not names[0] & names[1]
    name = one.svg.partition('id="')[2].partition('"')[0]
    rules = re.search(r"<style>(.*?)</style>", one.svg, re.DOTALL)[1]
    for selectors in re.findall(r"(?:^|[{}])\s*([^{}@]+)\{", rules):
        assert all(selector.strip().startswith(f"#{name}") for selector in selectors.split(",")), selectors
    assert "prefers-color-scheme: dark" in rules


def pages(picture):
    """The pictures on a page, each with the groups that are open in it, and where clicks lead from each."""
    pictures = re.findall(r'<template data-picture="\d+">(.*?)</template>', picture.html, re.DOTALL)
    moves = json.loads(re.search(r'id="moves">(.*?)</script>', picture.html, re.DOTALL)[1])
    opened = []
    for svg in pictures:
        found = ElementTree.fromstring(svg).iter(f"{SVG}g")
        opened.append({g.get("data-name") for g in found if g.get("data-folded") == "false"})
    return opened, moves


def test_several_groups_can_be_open_at_once_on_the_page():
    model, x = Deep(3), torch.randn(3, 4)
    opened, moves = pages(unsum.draw(model(x).sum(), model, {"x": x}, fold=1))
    assert opened[0] == {""} and set(moves[0]) == {"", "first", "blocks.0", "head"}
    here = 0
    for name in ("first", "blocks.0", "blocks.0.up", "head"):
        here = moves[here][name]
    assert here >= 0 and opened[here] == {"", "first", "blocks.0", "blocks.0.up", "head"}
    here = moves[here]["blocks.0"]  # what is in it folds with it
    assert opened[here] == {"", "first", "head"}


def test_a_page_promises_no_click_that_leads_nowhere():
    layers = {f"l{k}": nn.Sequential(nn.Linear(4, 4 + k), nn.Linear(4 + k, 4)) for k in range(60)}
    model, x = nn.Sequential(OrderedDict(layers)), torch.randn(3, 4)
    opened, moves = pages(unsum.draw(model(x).sum(), model, {"x": x}, fold=1))
    for k, (names, ways) in enumerate(zip(opened, moves, strict=True)):
        for name, to in ways.items():
            there = opened[to if to >= 0 else ~to]
            assert (name in there) != (name in names), (k, name)
            if to >= 0 and name not in names:
                assert there == names | {name}
    assert len(opened) == len(moves) <= 150 and any(to < 0 for ways in moves for to in ways.values())


def test_text_from_the_user_is_escaped():
    model, x, y, loss = article()
    drawn = draw(loss, model, {'<x & "y">': x, "y": y})
    assert '<x & "y">' in drawn.tensors("data")


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(3),), "no graph"),
        ((3.0,), "a tensor is drawn"),
        ((torch.ones(1, requires_grad=True) * 2, "model"), "expected an nn.Module"),
        ((torch.ones(1, requires_grad=True) * 2, None, [1]), "names for tensors"),
        ((torch.ones(1, requires_grad=True) * 2, None, {"x": 1}), "not a tensor"),
    ],
    ids=["no graph", "no tensor", "no module", "no mapping", "no tensors"],
)
def test_what_cannot_be_drawn_is_refused(arguments, said):
    with pytest.raises(UnsumError, match=said):
        unsum.draw(*arguments)


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(OptionError, match="capture, edit or gradients"):
        unsum.draw(torch.ones(1, requires_grad=True) * 2, show=[3])


def test_a_compiled_model_is_one_operation_and_says_so():
    model, x = MLP(), torch.randn(5, 4)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(x).sum()
    drawn = draw(loss, compiled, {"x": x})
    assert "compiled" in drawn.notes() and "compiled" in [g.get("data-name") for g in drawn.all(role="operation")]
    assert set(drawn.tensors("parameter")) == {"fc1.weight", "fc2.weight"}
    loss.backward()
    assert model.fc1.weight.grad is not None


# ---- traces ----------------------------------------------------------------------------------------------------------


def test_a_trace_is_a_time_line_in_the_order_of_its_events(tmp_path):
    model, x, y, _ = article()
    with unsum.capture(model, "fc1:input", "fc2:output", "fc2:grad_output", "fc1.weight:grad") as got:
        (model(x) - y).square().sum().backward()
    trace = got.trace()
    drawn = Drawn(trace.picture())
    events = drawn.all(role="event")
    assert [g.get("data-site") for g in events] == [event.site for event in trace]
    assert [g.get("data-direction") for g in events] == [event.direction for event in trace]
    assert [g.get("data-name") for g in drawn.all(role="lane")] == ["fc1", "fc2", "fc1.weight"]
    places = [float(g.find(f"{SVG}rect").get("x")) for g in events]
    assert places == sorted(places)
    assert trace.save(tmp_path / "trace.svg").read_text() == trace._repr_svg_()
    assert str(trace).splitlines()[0].startswith("fc1:input")


def test_a_long_trace_goes_on_below_and_can_be_read():
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]), torch.randn(2, 4)
    with unsum.capture(model, "*:input", "*:output", "*:grad_output", missing="ignore") as got:
        model(x).sum().backward()
    picture = got.trace().picture()
    drawn = Drawn(picture)
    wide = float(drawn.root.get("viewBox").split()[2])
    events = drawn.all(role="event")
    assert wide <= 1440 and [g.get("data-order") for g in events] == [str(k) for k in range(len(got.trace()))]
    places = [(float(g.find(f"{SVG}rect").get("y")), float(g.find(f"{SVG}rect").get("x"))) for g in events]
    rows = [k for k in range(1, len(places)) if places[k][1] < places[k - 1][1]]  # where it goes on below
    assert rows and all(places[k][0] > max(y for y, _ in places[:k]) for k in rows)
    assert "max-width: none !important" in picture.html and "overflow-x: auto" in picture.html


def test_an_empty_trace_draws_itself():
    with unsum.capture(nn.Linear(1, 1), ":output", missing="ignore") as got:
        pass
    assert "nothing fired" in got.trace().picture().svg


# ---- what drawing must not do, and must not say ----------------------------------------------------------------------


class Inside(nn.Module):
    """A layer within a reentrant checkpoint, and one after it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(checkpoint(lambda h: torch.tanh(self.a(h)), x, use_reentrant=True))


@pytest.mark.parametrize("retained", [False, True])
def test_a_reentrant_checkpoint_is_not_run_by_drawing(retained):
    model, x, fired = Inside(), torch.randn(3, 4, requires_grad=True), []
    loss = model(x).sum()
    if retained:
        loss.backward(retain_graph=True)
        model.zero_grad()
        x.grad = None
    model.a.weight.register_hook(lambda grad: fired.append("hook"))
    model.a.register_forward_hook(lambda *_: fired.append("forward"))
    drawn = draw(loss, model, {"x": x}, flow=True)
    assert not fired and model.a.weight.grad is None
    assert "custom function" in next(
        g.get("aria-label") for g in drawn.all(direction="backward", gradient="stored") if " x " in g.get("aria-label")
    )
    assert any(g.get("data-norm") for g in drawn.all(direction="backward"))  # before the checkpoint it is known


def test_a_reentrant_checkpoint_hides_what_is_inside_and_says_so():
    model, x = Inside(), torch.randn(3, 4, requires_grad=True)
    notes = draw(model(x).sum(), model, {"x": x}).notes()
    assert "reentrant checkpoint" in notes and "not reached" not in notes and "may use them" in notes


def norms_at(drawn):
    """(operation's name, norm) of every gradient that comes back with a number."""
    names = {g.get("data-key"): g.get("data-name") for g in drawn.all(role="operation")}
    arrows = [g for g in drawn.all(direction="backward") if g.get("data-norm")]
    return sorted((names[g.get("data-operation")], float(g.get("data-norm"))) for g in arrows)


def test_a_view_that_is_used_twice_gives_each_use_its_own_size():
    model, x = nn.Linear(4, 6), torch.randn(2, 4)
    h = model(x).transpose(0, 1)
    one, other = (h.relu() * 10).sum(), h.tanh().sum()
    parts = [float(torch.autograd.grad(part, h, retain_graph=True)[0].norm()) for part in (one, other)]
    found = dict(norms_at(draw(one + other, model, flow=True)))
    assert found["relu"] == pytest.approx(parts[0], rel=1e-4) and found["tanh"] == pytest.approx(parts[1], rel=1e-4)


def test_a_broadcast_that_is_used_twice_gives_no_number_that_is_not_its_own():
    w, x = torch.randn(3, requires_grad=True), torch.randn(5, 3)
    wide = (w * 2).expand(5, 3)
    drawn = draw((wide * x).sum() + wide.exp().sum(), data={"x": x}, flow=True)
    labels = [g.get("aria-label") for g in drawn.all(direction="backward") if "added to others" in g.get("aria-label")]
    assert len(labels) == 2


def test_sizes_of_complex_gradients_are_whole():
    w, x = torch.randn(3, 4, dtype=torch.cfloat, requires_grad=True), torch.randn(4, dtype=torch.cfloat)
    z = (w @ x) * 1j
    loss = z.abs().square().sum()
    (wanted,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert dict(norms_at(draw(loss, data={"x": x}, flow=True)))["abs"] == pytest.approx(float(wanted.norm()), rel=1e-4)


@pytest.mark.parametrize("by", ["edit", "hook"])
def test_behind_a_gradient_that_is_changed_there_is_no_number(by):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(2, 4)
    if by == "edit":
        with unsum.edit(model, {"1:grad_output": unsum.zero()}) as edited:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
        drawn = draw(loss, model, {"x": x}, show=[edited])
    else:
        h = model[1](model[0](x))
        h.register_hook(torch.zeros_like)
        loss = model[2](h).sum()
        loss.backward(retain_graph=True)
        drawn = draw(loss, model, {"x": x})
    names = [name for name, _ in norms_at(drawn)]
    assert "relu" not in names and "sum" in names
    labels = [g.get("aria-label") for g in drawn.all(direction="backward", gradient="thrown-away")]
    assert sum("has changed the gradient" in label for label in labels) == 1


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


def test_a_jagged_tensor_is_drawn_without_sizes():
    model = nn.Linear(4, 6)
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(4, 4)], layout=torch.jagged)
    loss = model(ragged).values().sum()
    loss.backward(retain_graph=True)
    drawn = draw(loss, model)
    assert set(drawn.tensors("parameter")) == {"weight", "bias"}
    assert any("cannot be called by hand" in g.get("aria-label") for g in drawn.all(direction="backward"))


def data_arrows(drawn):
    return [arrow for arrow in drawn.arrows("forward") if arrow[0] in drawn.tensors("data")]


def test_what_a_node_has_made_does_not_enter_there():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    logp = model(x).log_softmax(-1)
    old = logp.detach()
    drawn = draw((logp - old).exp().mean(), model, {"x": x, "old": old})
    assert data_arrows(drawn) == [("old", "sub"), ("x", "addmm")]
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    h = model[:2](x)
    drawn = draw(model[2](h).square().sum(), model, {"x": x, "h": h.detach()})
    assert data_arrows(drawn) == [("x", "addmm")] and "h (5×4): it could not be found" in drawn.notes()


def test_a_tensor_that_is_not_the_one_that_was_kept_is_not_drawn():
    model, x, z = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 4)
    loss = model((x - x.mean(0)) / x.std(0)).sum()
    drawn = draw(loss, model, {"unused": z})
    assert not drawn.tensors("data") and "unused (5×4): it could not be found" in drawn.notes()
    loss.backward()  # by the rule of shapes it may be it, and the hover text says no more
    assert "nothing is kept there" in draw(loss, model, {"z": z}).all(direction="forward", gradient="none")[0].get(
        "aria-label"
    )


def test_data_that_autocast_has_cast_is_found():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    assert data_arrows(draw(loss, model, {"x": x, "z": torch.randn(5, 4)})) == [("x", "addmm")]


def test_a_plain_copy_of_data_is_found_but_not_one_that_proves_nothing():
    model, x = nn.Linear(4, 3), torch.randn(4, 5).t()
    assert data_arrows(draw(model(x.contiguous()).sum(), model, {"x": x})) == [("x", "addmm")]
    drawn = draw(model(torch.ones(5, 4)).sum(), model, {"x": torch.ones(5, 4)})
    assert not data_arrows(drawn) and "could not be found" in drawn.notes()


def test_a_second_use_that_leaves_no_trace_is_told_of():
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    drawn = draw((x + model(x)).square().sum(), model, {"x": x})
    assert data_arrows(drawn) == [("x", "addmm")] and "x may also enter at add: it keeps no data" in drawn.notes()
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
    assert "x may also enter at sub" in draw((model(x) - x).square().sum(), model, {"x": x}).notes()
    assert "may also" not in draw(model(x).square().sum(), model, {"x": x}).notes()


def test_a_frozen_layer_after_a_trainable_one_is_drawn_whole():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(5, 4)
    model[2].requires_grad_(False)
    drawn = draw(model(x).square().sum(), model, {"x": x})
    assert {"2.weight", "2.bias"} <= set(drawn.tensors("parameter")) and "frozen" not in drawn.notes()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_is_named_as_data_stays_a_parameter(frozen):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4)
    model[1].weight.requires_grad_(not frozen)
    drawn = draw(model(x).sum(), model, {"x": x, "w": model[1].weight})
    assert "1.weight" in drawn.tensors("parameter") and set(drawn.tensors("data")) == {"x"}


def test_data_may_have_the_name_of_a_frozen_parameter():
    model, x, mask = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    model.bias.requires_grad_(False)
    drawn = draw((model(x) * mask).sum(), model, {"x": x, "bias": mask})
    assert "bias" in drawn.tensors("parameter") | drawn.tensors("data")
    roles = sorted(g.get("data-role") for g in drawn.all(name="bias"))
    assert roles == ["data", "parameter"]


def test_what_was_copied_before_it_was_used_could_not_be_found():
    model, x = nn.LSTM(5, 6, batch_first=True), torch.randn(3, 4, 5)
    assert "x (3×4×5): it could not be found" in draw(model(x)[0].sum(), model, {"x": x}).notes()


# ---- names and shapes of groups --------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out((self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1) @ self.v(x))


def test_what_stands_side_by_side_is_not_drawn_once():
    x, other = torch.randn(2, 4), torch.randn(2, 4)
    towers = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    drawn = draw((towers["a"](x) * towers["b"](other)).sum(), towers, {"x": x, "other": other})
    assert {"a", "b"} <= set(groups(drawn)) and {"a.weight", "b.weight"} <= set(drawn.tensors("parameter"))
    model = Attends()
    assert {"q", "k", "v", "out"} <= set(groups(draw(model(x).sum(), model, {"x": x})))


def test_a_folded_layer_shows_the_shapes_that_go_in_and_come_out():
    model, x = nn.Sequential(nn.Linear(32, 100), nn.ReLU(), nn.Linear(100, 5)), torch.randn(2, 7, 32)
    text = unsum.draw(model(x).logsumexp(-1).sum(), model, {"x": x}, fold=1).svg
    assert "2×7×32 → 2×7×100" in text and "2×7×100 → 2×7×5" in text and "→ 14×" not in text


def test_a_leaf_is_no_loss():
    with pytest.raises(OptionError, match="is a leaf"):
        unsum.draw(nn.Parameter(torch.tensor(2.0)))


def test_a_glob_that_fits_nothing_is_told_what_there_is():
    model, _, _, loss = article()
    with pytest.raises(OptionError, match="there are: fc1, fc2"):
        unsum.draw(loss, model, fold="zzz")
    with pytest.raises(OptionError, match="none without model="):
        unsum.draw(loss, fold="zzz")


def test_arrows_do_not_run_through_the_names_of_frames():
    model, x, y, loss = article()
    drawn = draw(loss, model, {"x": x, "y": y})
    everything = list(drawn.root.iter())
    plates = [k for k, e in enumerate(everything) if e.get("class") == "plate"]
    arrows = [k for k, e in enumerate(everything) if "backward" in (e.get("class") or "").split()]
    names = [k for k, e in enumerate(everything) if e.get("class") == "name"]
    in_picture = [k for k in arrows if k < names[0]]
    assert len(plates) == len(names) == 3 and max(in_picture) < min(plates)
    assert all(everything[plate + 1].get("class") == "name" for plate in plates)
