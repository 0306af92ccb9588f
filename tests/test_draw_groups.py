"""A picture folds modules into groups, draws repeated blocks once, and lays them out from top to bottom."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unsum
from drawn import Deep, article, downwards, draw, groups
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
    drawn = draw(F.cross_entropy(model(x), target), model, {"x": x, "target": target})
    kinds = {name: g.get("data-type") for name, g in groups(drawn).items()}
    assert kinds["2"] == "ReLU" and kinds["3"] == "MaxPool2d" and kinds["6"] == "AdaptiveAvgPool2d"
    assert set(drawn.tensors("parameter")) == set(dict(model.named_parameters()))
    downwards(drawn)


def test_repeated_blocks_are_drawn_once_with_how_many_there_are():
    model, x = Deep(200), torch.randn(3, 4)
    drawn = draw(model(x).sum(), model, {"x": x})
    found = groups(drawn)
    assert found["blocks.0"].get("data-times") == "200" and found["blocks.0"].get("data-tensors") == "1200"
    assert "blocks.1" not in found and "×200" in drawn.picture.svg
    apart = groups(draw(model(x).sum(), model, {"x": x}, repeat=False))
    assert {f"blocks.{k}" for k in range(200)} < set(apart)


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
    own = sum(p.numel() for p in model.blocks[3:].parameters())
    assert blocks["blocks.3"].get("data-parameters") == str(own)
    one = nn.Linear(1, 1, bias=False)
    assert "1 parameter in 1 tensor," in repr(unsum.draw(one(torch.ones(1, 1)).sum(), one))


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
