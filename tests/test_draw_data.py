"""Data enters a picture where the operation that reads it shows it, and nowhere by guessing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drawn import draw


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
    assert data_arrows(drawn) == [("x", "addmm")] and "x may also enter at +: it keeps no data" in drawn.notes()
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
