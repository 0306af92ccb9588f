"""`unsum.watch` and `unsum.clip_per_sample` in loops that are a little unusual: what was once wrong there."""

from __future__ import annotations

import warnings

import pytest
import torch
from reference import per_sample_gradients
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import unsum
from one_by_one import norms_of
from test_watch import noise_scale


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_cleared_inside_the_block(to_none: bool) -> None:
    model, watch = net(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = unsum.watch(model)
    for step in range(4):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        each = per_sample_gradients(model, loss, x)
        with watch:
            optimizer.zero_grad(set_to_none=to_none)
            loss(model, x).backward()
        optimizer.step()
        assert watch.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)
        grad = torch.cat([each[name].sum(0).flatten() for name in ("0.weight", "0.bias")]).norm()
        assert watch.last.layers["0"].grad == pytest.approx(float(grad), rel=1e-4)


def test_ids_of_every_other_step() -> None:
    model, watch = net(), None
    batches = [{"x": torch.randn(4, 6), "id": torch.arange(4) + 10 * k} for k in range(5)]
    watch = unsum.watch(model, every=2)
    for batch in watch.loader(batches):
        with watch:
            loss(model, batch["x"]).backward()
    assert [record.ids[0] for record in watch.history] == [0, 20, 40]


def test_ids_outlive_a_close_too_many() -> None:
    model, watch = net(), None
    watch = unsum.watch(model, every=2)
    for k in range(3):
        watch.note({"id": torch.arange(4) + 10 * k})
        watch.close()  # of no step
        watch.open()
        loss(model, torch.randn(4, 6)).backward()
        watch.close()
        watch.close()
    assert [record.ids[0] for record in watch.history] == [0, 20]


def test_two_backwards_through_one_output_are_refused_with_the_way_out() -> None:
    model, x = net(), torch.randn(5, 6)

    def step() -> None:
        out = model(x)
        out[:, 0].sum().backward(retain_graph=True)
        out.square().sum().backward()

    watch = unsum.watch(model)
    for block in (watch, unsum.clip_per_sample(model, verify=False), unsum.gradients(model, unsum.Norms(), keep=True)):
        with pytest.raises(unsum.errors.SamplesError, match="second backward") as told:
            with block:
                step()
        assert "(first_loss + second_loss).backward()" in str(told.value)
        assert "keep=" not in str(told.value)
    with watch:
        loss(model, x).backward()
    with pytest.warns(UserWarning, match=r"\(first_loss \+ second_loss\).backward\(\)"):
        with watch:
            step()
        refused = watch.last
    assert refused.norms is None
    assert {(layer.norm, layer.largest) for layer in refused.layers.values()} == {(None, None)}  # not of one of the two


def test_batches_that_are_fetched_ahead_have_no_ids() -> None:
    model = net()
    watch = unsum.watch(model)
    batches = iter(watch.loader([{"x": torch.randn(4, 6), "id": torch.arange(4) + 10 * k} for k in range(4)]))
    ahead = next(batches)
    with pytest.warns(UserWarning, match="counted by rows"):
        coming = next(batches)
    for _ in range(2):
        with watch:
            loss(model, ahead["x"]).backward()
        ahead, coming = coming, next(batches)
    assert all(record.ids == [0, 1, 2, 3] for record in watch.history)


def test_groups_keep_their_ids() -> None:
    model, x = net(), torch.randn(5, 6)
    watch = unsum.watch(model, samples=torch.tensor([7, 7, 3, 7, 3]))
    with watch:
        loss(model, x).backward()
    assert watch.last.ids == [3, 7]


@pytest.mark.filterwarnings("ignore:unsum.watch. a value is not finite")
def test_a_loss_scale_that_is_too_large() -> None:
    """Several layers of one shape, whose first comparison meets values that are not finite."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    watch, x = unsum.watch(model, scaler=scaler), torch.randn(8, 8)
    for _ in range(6):
        optimizer.zero_grad()
        with watch:
            with torch.autocast("cpu", torch.float16):
                value = model(x).square().sum() * 10
            scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(watch.history) == 6
    each = norms_of(per_sample_gradients(model, lambda m, x: m(x).square().sum() * 10, x))
    assert watch.last.norms.isfinite().all() == torch.isfinite(each).all()


def test_a_sample_that_is_not_finite_is_not_clipped() -> None:
    model, x = net(), torch.randn(5, 6)
    with unsum.clip_per_sample(model, verify=False):
        loss(model, x).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    x[3] = float("nan")
    with pytest.raises(unsum.errors.SamplesError, match="sample 3"):
        with unsum.clip_per_sample(model, verify=False):
            loss(model, x).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name])


def test_a_run_inside_an_exception_handler_is_recorded() -> None:
    model, x = net(), torch.randn(5, 6)
    watch = unsum.watch(model)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:  # a second try, say
        watch.open()
        loss(model, x).backward()
        watch.close()
    assert len(watch.history) == 1


def test_two_bounds_on_one_model_are_refused() -> None:
    model, x = net(), torch.randn(5, 6)
    with unsum.clip_per_sample(model, max_norm=1.0, verify=False):
        with pytest.raises(unsum.errors.OptionError, match="clipped already"):
            unsum.clip_per_sample(model, max_norm=0.1, verify=False).open()
        with unsum.clip_per_sample(net(), max_norm=0.1, verify=False):  # another model's
            loss(model, x).backward()
    assert float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) <= 5.001


def test_two_optimizer_steps_in_one_block_are_told_once() -> None:
    model = nn.Linear(3, 1)
    optimizer, other = (torch.optim.SGD(p, 0.1) for p in (model.parameters(), nn.Linear(3, 1).parameters()))
    watch = unsum.watch(model)

    def step() -> None:
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        other.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with watch:
                step()
                other.step()  # of another model
        with unsum.clip_per_sample(model):
            step()
    for block in (watch, unsum.clip_per_sample(model)):
        with pytest.warns(UserWarning, match="stepped twice inside one block") as told, block:
            for _ in range(3):
                step()
        assert len(told) == 1 and told[0].filename == __file__
    assert not _global_optimizer_post_hooks


@pytest.mark.parametrize("grad", [True, False])
def test_an_evaluation_inside_the_block_does_not_count(grad: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    watch, x = unsum.watch(model), torch.randn(4, 3)
    with watch:
        if not grad:
            model.eval()
        with torch.set_grad_enabled(grad):
            model(100 * x)
        model.train()
        model(x).sum().backward()
        model(torch.full((2, 3), float("nan")))
    expected = model[0](x).square().mean().sqrt().item()
    assert watch.last.layers["0"].output == pytest.approx(expected, rel=1e-5)
    assert watch.last.nonfinite is None


def test_the_number_of_micro_batches_that_losses_are_divided_by() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(6, 3)
    watch = unsum.watch(model, accumulation=3)
    with watch:
        for part in x.split(2):
            (model(part).sum() / 3).backward()
    torch.testing.assert_close(watch.last.norms, (x.square().sum(1) + 1).sqrt().double(), rtol=1e-5, atol=0)
    with pytest.raises(unsum.errors.OptionError, match="accumulation=0"):
        unsum.watch(model, accumulation=0)


def test_an_option_without_its_name_is_told() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(unsum.errors.OptionError, match=r"got a SGD, too.\n  write: unsum.watch\(model, optimizer="):
        unsum.watch(model, torch.optim.SGD(model.parameters(), 0.1))
