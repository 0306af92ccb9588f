"""Clipping per sample refuses what would see, or use, gradients that are not clipped, and samples without a bound."""

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn

import unsum
from unsum.errors import SamplesError, UnsupportedError


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def rows(n=6):
    return 3 * torch.randn(n, 4, dtype=torch.float64)


def squares(model, x):
    return model(x).square().sum()


def clipped_sum(model, x, limit):
    each = per_sample_gradients(model, squares, x)
    norms = norms_of_all(each)
    return {name: torch.einsum("n,n...->...", (limit / norms).clamp(max=1), grad) for name, grad in each.items()}


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_since_they_see_what_is_not_clipped(kind):
    model, seen = net(), []
    handle = getattr(model[2].weight, kind)(lambda given: seen.append(given))  # an optimizer in the backward, a mask
    with pytest.raises(UnsupportedError, match=r"clip_per_sample: 2.weight: hooks"):
        with unsum.clip_per_sample(model):
            squares(model, rows()).backward()
    assert not seen and all(p.grad is None for p in model.parameters())
    with unsum.clip_per_sample(model, params="0.*"):  # another parameter's
        squares(model, rows()).backward()
    handle.remove()
    with unsum.clip_per_sample(model), unsum.capture(model, "2.weight:grad"):  # not our own
        squares(model, rows()).backward()


@pytest.mark.parametrize("is_outer", [False, True])
def test_edits_of_parameters_gradients_are_refused(is_outer):
    model, x = net(), rows()
    blocks = [unsum.clip_per_sample(model), unsum.edit(model, {"0.weight:grad": unsum.scale(10.0)})]
    first, second = reversed(blocks) if is_outer else blocks
    with pytest.raises(UnsupportedError, match=r"0.weight: an edit"), first, second:
        squares(model, x).backward()
    assert all(p.grad is None for p in model.parameters())
    with blocks[1], unsum.clip_per_sample(model, params="2.*"):  # of another parameter
        squares(model, x).backward()


def test_gradients_that_autograd_returns_are_not_clipped_and_are_refused():
    model, x = net(), rows()
    with unsum.clip_per_sample(model):
        with pytest.raises(UnsupportedError, match=r"torch.autograd.grad of 0.weight"):
            torch.autograd.grad(squares(model, x), model[0].weight)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_inputs_are_no_obstacle():
    model, x = net(), rows()
    with unsum.clip_per_sample(model, max_norm=0.5) as clipped:
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(squares(model, given), given)
        moved = x + 0.1 * grad.sign()
        squares(model, moved).backward()
    assert len(clipped.norms) == len(x)
    for name, expected in clipped_sum(model, moved, 0.5).items():
        torch.testing.assert_close(model.get_parameter(name).grad, expected)


def test_a_scaler_that_is_switched_off_skips_no_step():
    model, x = net(), rows()
    x[2] = torch.nan
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(SamplesError, match="sample 2 of this backward is not finite"):
        with unsum.clip_per_sample(model, scaler=scaler):
            scaler.scale(squares(model, x)).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["clip", "watch"])
def test_messages_propose_the_block_that_was_written(where):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    outside = model(x).sum()
    block = unsum.clip_per_sample(model) if where == "clip" else unsum.watch(model)
    with pytest.raises(unsum.errors.UnknownSamples, match="samples=unsum.dim") as raised, block:
        outside.backward()
    assert "unsum.gradients" not in str(raised.value)


def test_norms_where_the_backward_was_outside():
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="no backward came"), unsum.clip_per_sample(model) as clipped:
        loss = model(torch.randn(4, 3)).sum()
    loss.backward()
    with pytest.raises(unsum.errors.NoBackward, match=r"with unsum.clip_per_sample\(model\) as clipped"):
        clipped.norms
