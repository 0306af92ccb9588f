"""Clipping per sample asks the model itself whether samples interact, once for each of its modes."""

import gc

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import InteractionError, UnsupportedError


def squares(model, x):
    return model(x).square().sum()


def rows(n=5):
    return (3 * torch.randn(n, 4),)


def step(model, loss, batch, **options):
    with unsum.clip_per_sample(model, **options) as clipped:
        loss(model, *batch).backward()
    return clipped


class Detached(nn.Module):
    """Centres by the batch's mean, without a trace in the graph."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return h - h.mean(0).detach() if self.training else h


@pytest.mark.parametrize("make", [Detached, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
def test_samples_that_interact_are_refused(make):
    model = make()
    with pytest.raises(InteractionError, match="clip_per_sample.*interact") as caught:
        step(model, squares, rows())
    assert "exact" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())


def test_the_model_is_asked_in_the_first_step_of_each_mode():
    calls = []
    model = Detached().eval()
    model.fc.forward = lambda x, own=model.fc.forward: (calls.append(len(x)), own(x))[1]
    step(model, squares, rows())
    asked = len(calls)
    assert asked > 2
    step(model, squares, rows())
    assert len(calls) == asked + 1
    step(model, squares, rows(), verify=True)
    assert len(calls) > asked + 2
    model.train()
    with pytest.raises(InteractionError):
        step(model, squares, rows())
    step(model, squares, rows(), verify=False)  # what the user knows better


def test_one_sample_says_nothing_about_interaction():
    model = Detached()
    step(model, squares, rows(1))
    with pytest.raises(InteractionError):
        step(model, squares, rows())


def test_dropout_is_no_obstacle_and_draws_what_it_would_have_drawn():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), rows()
    torch.manual_seed(1)
    plain = squares(model, *batch)
    torch.manual_seed(1)
    with unsum.clip_per_sample(model) as clipped:
        loss = squares(model, *batch)
        loss.backward()
    torch.testing.assert_close(loss, plain)
    assert (clipped.norms > 0).all()


def test_a_model_that_cannot_be_asked_says_verify_false():
    class Drifting(nn.Linear):
        def forward(self, x):
            return super().forward(x) * next(factors)

    factors = iter(range(1, 100))
    model = Drifting(4, 2)
    with pytest.raises(UnsupportedError, match="clip_per_sample.*(?s:.)*verify=False"):
        step(model, squares, rows())
    step(model, squares, rows(), verify=False)


def test_what_was_asked_is_forgotten_with_the_model():
    from unsum.training import clip

    before = len(clip._verified)
    model = nn.Linear(4, 2)
    step(model, squares, rows())
    assert len(clip._verified) == before + 1
    del model
    gc.collect()
    assert len(clip._verified) == before


def test_a_backward_after_the_block_is_told():
    model = nn.Linear(3, 1)
    with pytest.warns(UserWarning, match="no backward came: nothing is clipped"), unsum.clip_per_sample(model):
        model(torch.ones(2, 3)).sum()
    with unsum.clip_per_sample(model), torch.no_grad():  # which has none
        model(torch.ones(2, 3))
    watch = unsum.watch(model)
    with pytest.warns(UserWarning, match="without a backward, which has no record"), watch:
        model(torch.ones(2, 3)).sum()
    with watch, torch.no_grad():
        model(torch.ones(2, 3))
    assert watch.last is None


@pytest.mark.parametrize("first", ["the same rows", "a last layer of zeros"])
def test_an_answer_that_says_nothing_is_asked_again(first):
    model = nn.Sequential(Detached(), nn.Linear(4, 2))
    batch = rows()
    if first == "the same rows":
        batch = (batch[0][:1].expand(5, 4).contiguous(),)
    else:
        with torch.no_grad():
            model[1].weight.zero_()
    step(model, squares, batch)
    with torch.no_grad():
        model[1].weight.normal_()
    with pytest.raises(InteractionError):
        step(model, squares, rows())


class Converted(nn.Module):
    """Computes its loss in bfloat16 and returns copies in float32, as accelerate's wrapper does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            z = self.down(torch.relu(self.up(x)))
            loss = nn.functional.cross_entropy(z, y, reduction="sum")
        return {"loss": loss.float(), "logits": z.float()}


def test_outputs_that_are_copies_in_another_dtype_are_verified():
    torch.manual_seed(0)
    model, x, y = Converted(), torch.randn(6, 4), torch.randint(3, (6,))
    with unsum.clip_per_sample(model, 0.5):
        model(x, y)["loss"].backward()
    found = [p.grad.clone() for p in model.parameters()]
    wanted = [torch.zeros_like(p) for p in model.parameters()]
    for k in range(6):
        each = torch.autograd.grad(model(x[k : k + 1], y[k : k + 1])["loss"], list(model.parameters()))
        norm = sum(g.square().sum() for g in each).sqrt()
        for total, g in zip(wanted, each, strict=True):
            total += g * min(1.0, 0.5 / float(norm))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
