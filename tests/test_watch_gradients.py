"""`unsum.watch`: the noise scale and updates, where other code changes `.grad` or steps in unusual places."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum
from one_by_one import norms_of
from test_watch import noise_scale


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed + 10 * n))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def clipping(model: nn.Module) -> unsum.opened.Opened:
    return unsum.clip_per_sample(model, max_norm=0.1)


def not_to_grad(model: nn.Module) -> unsum.opened.Opened:
    return unsum.gradients(model, unsum.Norms(), grad=False)


@pytest.mark.parametrize("is_outer", [False, True])
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("other", [clipping, not_to_grad])
@pytest.mark.parametrize("sizes", [(6,), (6, 4)])
def test_beside_a_block_that_holds_grad_aside(is_outer: bool, has_grad: bool, other, sizes: Sequence[int]) -> None:
    model = net()
    for parameter in model.parameters() if has_grad else ():
        parameter.grad = torch.ones_like(parameter)
    xs = [rows(n) for n in sizes]
    each = per_sample_gradients(model, loss, torch.cat(xs))
    watch, block = unsum.watch(model), other(model)
    with watch if is_outer else block, block if is_outer else watch:
        for x in xs:
            loss(model, x).backward()
    assert watch.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)
    grad = torch.cat([each[name].sum(0).flatten() for name in ("0.weight", "0.bias")]).norm()
    assert watch.last.layers["0"].grad == pytest.approx(float(grad), rel=1e-4)


def test_the_noise_scale_of_means_over_micro_batches_of_different_sizes() -> None:
    """Estimates of |G|² and tr Σ, averaged over many steps, are those of the distribution."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)  # of whose loss, its output, the gradient is the input
    mean, spread = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, 1.0, 2.0])
    watch = unsum.watch(model, loss_reduction="mean", layers=False)
    signal, noise = 0.0, 0.0
    for _ in range(1500):
        with watch:
            for n in (1, 4, 3):
                model(mean + spread * torch.randn(n, 3)).mean().backward()
        squares = watch.last.norms.square().mean().item()  # |G|² + tr Σ on average
        signal += squares / (1 + watch.last.noise_scale)
        noise += squares - squares / (1 + watch.last.noise_scale)
        model.zero_grad()
    assert noise / signal == pytest.approx(float(spread.square().sum() / mean.square().sum()), rel=0.1)


def test_no_noise_scale_if_grad_is_cleared_between_micro_batches() -> None:
    model = net()
    watch = unsum.watch(model)
    for to_none in (True, False):
        with watch:
            loss(model, rows(6)).backward()
            model.zero_grad(set_to_none=to_none)
            loss(model, rows(6)).backward()
        assert watch.last.noise_scale is None and len(watch.last.norms) == 12


def test_no_noise_scale_if_hooks_change_or_clear_gradients() -> None:
    scaled, cleared = net(), net()
    scaled[0].weight.register_hook(lambda grad: 10 * grad)
    for parameter in cleared.parameters():  # an optimizer that steps in the backward
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for model in (scaled, cleared):
        watch = unsum.watch(model)
        with watch:
            loss(model, rows(6)).backward()
        assert watch.last.noise_scale is None and watch.last.norms.all()


def test_the_noise_scale_beside_blocks_that_look_and_that_edit() -> None:
    model = net()
    for _ in range(3):  # the first is compared with torch's gradients, by hooks
        one, two = unsum.watch(model), unsum.watch(model)
        each = per_sample_gradients(model, loss, rows(6))
        with one, two, unsum.capture(model, "0.weight:grad"):
            loss(model, rows(6)).backward()
        for watch in (one, two):
            assert watch.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)
        with one, unsum.edit(model, {"0.weight:grad": unsum.scale(10.0)}):
            loss(model, rows(6)).backward()
        assert one.last.noise_scale is None
        model.zero_grad()


def test_no_noise_scale_where_all_gradients_are_zero() -> None:
    model = net()
    watch = unsum.watch(model)
    with watch:
        (0 * model(rows(6))).sum().backward()
    assert watch.last.noise_scale is None


def test_medians_leave_out_what_is_not_a_number() -> None:
    record = unsum.training.Record(0, norms=torch.tensor([1.0, torch.nan, 2.0, 4.0, 3.0]), ids=[0, 1, 2, 3, 4])
    assert record.scalars()["norm/median"] == 2.5 and "2.5 median, nan largest (sample 1)" in str(record)


def moved(before: Sequence[Tensor], layer: nn.Linear) -> float:
    now = [p.detach() for p in layer.parameters()]
    return float(torch.cat([(a - b).flatten() for a, b in zip(now, before, strict=True)]).norm())


def values(layer: nn.Linear) -> list[Tensor]:
    return [p.detach().clone() for p in layer.parameters()]


def size(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in tensors]).norm())


def test_the_update_of_an_optimizer_that_steps_inside_the_block() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch, expected = unsum.watch(model, optimizer=optimizer), []
    for step in range(4):
        before = values(model[0])
        with watch:
            optimizer.zero_grad()
            loss(model, rows(6, step)).backward()
            optimizer.step()
        expected.append(moved(before, model[0]) / size(values(model[0])))
    assert [record.layers["0"].update for record in watch.history] == pytest.approx(expected, rel=1e-4)


def test_the_update_of_an_optimizer_that_calls_a_closure() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch = unsum.watch(model, optimizer=optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with watch:
            found = loss(model, rows(6))
            found.backward()
        return found

    for _ in range(2):
        before = values(model[0])
        optimizer.step(closure)
        record = watch.last
        assert record.layers["0"].update == pytest.approx(moved(before, model[0]) / record.layers["0"].weight, rel=1e-4)


@pytest.mark.filterwarnings("ignore:unsum.watch. a value is not finite")
def test_a_step_that_a_scaler_skips_has_no_update() -> None:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
    watch = unsum.watch(model, optimizer=optimizer, scaler=scaler, every=2)
    for step in range(3):
        x = rows(6)
        x[0, 0] = torch.inf if step == 0 else 0.0
        with watch:
            scaler.scale(loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert watch.history[0].layers["0"].update is None and watch.history[1].layers["0"].update > 0


def test_several_optimizers_and_layers_that_none_of_them_trains() -> None:
    model = nn.Sequential(*net(), nn.Linear(1, 1))
    first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[2].parameters(), 0.5)
    watch = unsum.watch(model, optimizer=[first, second])
    for _ in range(2):
        befores = [values(model[0]), values(model[2])]
        with watch:
            loss(model, rows(6)).backward()
        first.step()
        second.step()
        model.zero_grad()
        for name, before in zip(("0", "2"), befores, strict=True):
            update = moved(before, model[int(name)]) / size(before)
            assert watch.last.layers[name].update == pytest.approx(update, rel=1e-4)
        assert watch.last.layers["3"].update is None


@pytest.mark.filterwarnings("ignore:unsum.watch. a value is not finite")
def test_a_value_that_is_not_finite_in_a_forward_before_the_backward_of_another() -> None:
    for order in ((0, 1), (1, 0)):
        model = net()
        watch = unsum.watch(model)
        xs = [rows(4), rows(6)]
        xs[1][2, 0] = torch.nan
        with watch:
            losses = [loss(model, x) for x in xs]
            for k in order:
                losses[k].backward()
        where = watch.last.nonfinite
        assert (where.site, where.sample, where.microbatch) == ("0:output", 6, 1)
        assert watch.last.norms.isnan().nonzero().flatten().tolist() == [6]


@pytest.mark.parametrize("same", [True, False], ids=["the same graph", "another"])
def test_what_autograd_returns_is_no_part_of_the_step(same: bool) -> None:
    model = net()
    watch = unsum.watch(model)
    for _ in range(4):
        model.zero_grad()
        x = rows(6)
        with watch:
            known = loss(model, x)
            (grad,) = torch.autograd.grad(known, model[0].weight, retain_graph=True)  # to weigh one loss by another
            (known if same else loss(model, x)).backward()
        each = per_sample_gradients(model, loss, x)
        torch.testing.assert_close(watch.last.norms, norms_of(each), rtol=1e-3, atol=0)
        assert watch.last.noise_scale == pytest.approx(noise_scale(each), rel=1e-3)
        torch.testing.assert_close(grad, model[0].weight.grad)


def test_parameters_that_no_gradient_reaches_are_told_once() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "spare": nn.Linear(3, 1)})
    watch = unsum.watch(model)
    with pytest.warns(UserWarning, match=r"no gradient has reached spare.weight, spare.bias in the first 5") as told:
        for _ in range(7):
            with watch:
                model["used"](torch.ones(4, 3)).sum().backward()
    assert len(told) == 1
