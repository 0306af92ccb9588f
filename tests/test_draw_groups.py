"""A picture folds modules into groups, opens the first of repeated blocks, and lays them out from top to bottom."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unsum
from drawn import SVG, Deep, article, downwards, draw, groups
from unsum.errors import OptionError


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
    assert groups(at_one)["fc1"].get("data-tensors") == "1" and not at_one.tensors("parameter")
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
    drawn = draw(F.cross_entropy(model(x), target), model, {"x": x, "target": target}, fold=99)
    kinds = {name: g.get("data-type") for name, g in groups(drawn).items()}
    assert kinds["2"] == "ReLU" and kinds["3"] == "MaxPool2d" and kinds["6"] == "AdaptiveAvgPool2d"
    assert set(drawn.tensors("parameter")) == set(dict(model.named_parameters()))
    downwards(drawn)


def test_the_first_of_repeated_blocks_is_open_and_the_others_are_one_box():
    model, x = Deep(200), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x})
    found = groups(drawn)
    first, others = found["blocks.0"], found["blocks.1"]
    assert (first.get("data-folded"), first.get("data-times"), first.get("data-tensors")) == ("false", None, "6")
    assert (others.get("data-folded"), others.get("data-times"), others.get("data-tensors")) == ("true", "199", "1194")
    assert "blocks.2" not in found
    assert {"blocks.1 … blocks.199", "199 × Block, like blocks.0"} < {"".join(t.itertext()) for t in others}
    apart = groups(draw(model(x).sum(), model, {"x": x}, repeat=False))
    assert {f"blocks.{k}" for k in range(200)} < set(apart)


def test_what_happens_before_the_first_block_does_not_make_it_differ():
    model, x = Deep(6), torch.randn(3, 4)
    model.first = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Flatten())  # views, which are not drawn
    found = groups(draw(model(x).sum(), model, {"x": x}))
    assert found["blocks.0"].get("data-folded") == "false" and found["blocks.1"].get("data-times") == "5"


def test_a_long_name_of_a_loss_is_written_in_full():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    loss = F.binary_cross_entropy_with_logits(model(x), torch.rand(3, 2))
    written = ["".join(text.itertext()) for text in draw(loss, model, {"x": x}).root.iter(f"{SVG}text")]
    assert "binary_cross_entropy_with_logits" in written


def test_parameters_are_numbers_and_tensors_are_tensors():
    model, x = Deep(6), torch.randn(3, 4)
    model.blocks[2].up.weight.requires_grad_(False)
    parameters = list(model.parameters())
    numbers, tensors = sum(p.numel() for p in parameters), len(parameters)
    for fold in (0, 1, None):
        drawn = draw(model(x).sum(), model, {"x": x}, fold=fold)
        assert f"{numbers:,} parameters in {tensors} tensors" in repr(drawn.picture)
        whole = groups(drawn)[""]
        assert (whole.get("data-parameters"), whole.get("data-tensors")) == (str(numbers), str(tensors))
    folded = draw(model(x).sum(), model, fold=0)
    assert f"{numbers:,} parameters" in "".join(groups(folded)[""].itertext())
    assert f"{numbers:,} parameters in {tensors} tensors" in groups(folded)[""].get("aria-label")
    blocks = groups(draw(model(x).sum(), model, fold=1))
    own = sum(p.numel() for p in model.blocks[4:].parameters())
    assert blocks["blocks.4"].get("data-parameters") == str(own)
    one = nn.Linear(1, 1, bias=False)
    assert "1 parameter in 1 tensor," in repr(unsum.draw(one(torch.ones(1, 1)).sum(), one))


def test_a_block_that_differs_is_drawn_by_itself():
    model, x = Deep(6), torch.randn(3, 4)
    model.blocks[2].up.weight.requires_grad_(False)
    found = groups(draw(model(x).sum(), model, fold=1))
    assert {n: (g.get("data-times"), g.get("data-like")) for n, g in found.items() if n.startswith("blocks")} == {
        "blocks.0": (None, None), "blocks.1": (None, "blocks.0"), "blocks.2": (None, None), "blocks.3": (None, None),
        "blocks.4": ("2", "blocks.3"),
    }  # fmt: skip


def test_layers_that_repeat_in_turn_are_drawn_as_one():
    layers = [layer for _ in range(50) for layer in (nn.Linear(4, 4), nn.ReLU())]
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *layers), torch.randn(3, 4, requires_grad=True)
    drawn = draw(model(x).sum(), model, {"x": x})
    # The first is apart: the gradient that it hands to x is stored.
    assert "49" in {g.get("data-times") for g in groups(drawn).values()}


def test_residual_sums_belong_to_their_block_in_all_of_them():
    model, x = Deep(4), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x}, fold=99)
    assert groups(drawn)["blocks.1"].get("data-times") == "3"
    assert len([g for g in drawn.all(role="operation") if g.get("data-name") == "add"]) == 1
    downwards(drawn)


def test_gpt2_small_shows_one_of_its_blocks():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    ids = torch.randint(0, 50000, (2, 8))
    loss = model(ids, labels=ids).loss
    drawn = draw(loss, model, {"ids": ids})
    found = groups(drawn)
    assert {n for n, g in found.items() if g.get("data-folded") == "false"} == {"", "transformer", "transformer.h.0"}
    assert {f"transformer.h.0.{name}" for name in ("ln_1", "attn", "ln_2", "mlp")} < set(found)
    assert found["transformer.h.1"].get("data-times") == "11"
    wide, tall = (float(n) for n in drawn.root.get("viewBox").split()[2:])
    assert wide <= 800 and tall <= 2400
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


def test_a_glob_that_fits_nothing_is_told_what_there_is():
    model, _, _, loss = article()
    with pytest.raises(OptionError, match="there are: fc1, fc2"):
        unsum.draw(loss, model, fold="zzz")
    with pytest.raises(OptionError, match="none without model="):
        unsum.draw(loss, fold="zzz")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()

    def forward(self, x):
        return self.act(x + self.conv2(self.act(self.conv1(x))))


def sources(drawn, name):
    """For each operation of this name, the keys of the tensors that go into it."""
    keys = [g.get("data-key") for g in drawn.all(role="operation") if g.get("data-name") == name]
    return [
        [g.get("data-tensor") for g in drawn.all(direction="forward") if g.get("data-operation") == key] for key in keys
    ]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), *(Residual() for _ in range(5))), torch.randn(2, 3, 8, 8)),
        (Deep(5), torch.randn(3, 4)),
        (
            nn.Sequential(
                nn.Linear(4, 8),
                nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 4),
                nn.Linear(8, 2),
            ),
            torch.randn(2, 3, 4),
        ),
    ],
    ids=["ResNet", "MLP with skips", "transformer"],
)
def test_a_skip_is_an_arrow_around_the_open_block_into_the_plus(model, x):
    drawn = draw(model(x).mean(), model, {"x": x})
    into = sources(drawn, "add")
    plus = {g.get("data-key"): g.find(f"{SVG}text").text for g in drawn.all(role="operation", name="add")}
    elsewhere = {g.get("data-tensor") for g in drawn.all(direction="forward") if g.get("data-operation") not in plus}
    assert set(plus.values()) == {"+"}
    assert into and all(len(tensors) == 2 and elsewhere & set(tensors) for tensors in into)


def legend(drawn):
    (found,) = drawn.all(role="legend")
    return {"".join(t.itertext()) for t in found.findall(f"{SVG}text")}


def test_the_legend_lists_what_is_drawn_and_nothing_else():
    model, x, y, loss = article()
    named = {"data", "parameter", "computed", "forward", "gradient, stored", "gradient, thrown away"}
    assert legend(draw(loss, model, {"x": x, "y": y})) == named
    assert legend(draw(loss, model)) == named - {"data"}
    folded = {"computed", "module with parameters, folded", "forward", "gradient, thrown away"}
    assert legend(draw(loss, model, fold=0)) == folded
    loss.backward()
    sizes = {"grad 12", "size of the gradient stored for the parameters"}
    assert legend(draw(loss, model, fold=0)) == folded | sizes


class Attention(nn.Module):
    def __init__(self, eager):
        super().__init__()
        self.qkv, self.proj, self.drop, self.eager = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.5), eager

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.eager:
            y = (q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(self.drop(y.transpose(1, 2).reshape(x.shape)))


@pytest.mark.parametrize("eager", [False, True], ids=["fused", "eager"])
def test_queries_keys_values_and_dropout_have_the_names_that_readers_know(eager):
    torch.manual_seed(0)
    model, x = Attention(eager), torch.randn(2, 5, 8)
    drawn = draw(model(x).sum(), model, {"x": x}, fold=99)
    (split,) = drawn.all(role="operation", name="unbind")
    made = f"t{split.get('data-key')[1:]}."
    names = [g.find(f"{SVG}text").text for g in drawn.all(role="intermediate") if g.get("data-key").startswith(made)]
    assert sorted(names) == ["k", "q", "v"]
    pills = {g.find(f"{SVG}text").text for g in drawn.all(role="operation")}
    assert {"linear", "drop", *(("matmul", "softmax") if eager else ("attention",))} <= pills
    assert not pills & {"addmm", "bmm", "view", "transpose", "permute"} and ("mul" in pills) == eager


def test_a_product_with_numbers_of_ones_own_is_no_dropout():
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    mask = (torch.arange(16).reshape(2, 8) % 2).float()
    for factor in (mask, torch.rand(2, 8) + 1, torch.full((2, 8), 2.0)):
        assert "dropout" not in {g.get("data-name") for g in draw((model(x) * factor).sum(), model).all()}


def test_the_statistics_of_a_normalization_are_in_it():
    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    model, x = nn.Sequential(nn.Linear(4, 8), RMSNorm(), nn.Linear(8, 2)), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x}, fold=1)
    assert [g.get("data-name") for g in drawn.all(role="operation")] == ["sum"]
    assert set(groups(drawn)) == {"", "0", "1", "2"}


def test_a_shared_table_is_looked_up_in_the_module_that_does_it():
    class Half(nn.Module):
        def __init__(self, embed):
            super().__init__()
            self.embed, self.mix = embed, nn.Linear(8, 8)

        def forward(self, ids, given=0):
            return self.mix(self.embed(ids) + given)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Embedding(9, 8)
            self.encoder, self.decoder = Half(shared), Half(shared)

        def forward(self, ids):
            return self.decoder(ids, self.encoder(ids))

    model, ids = Both(), torch.randint(9, (2, 3))
    found = groups(draw(model(ids).sum(), model, {"ids": ids}, fold=2))
    assert {"encoder.embed", "encoder.mix", "decoder.embed", "decoder.mix"} < set(found)
