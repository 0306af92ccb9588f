"""Blocks that leave `.grad` alone, clip, or only look, inside each other: `.grad` is what each would make of it."""

import pytest
import torch
from reference import norms_of_all, per_sample_gradients
from torch import nn

import unsum


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(model, x):
    return model(x).square().sum()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def clipped(model, x, bound):
    each = per_sample_gradients(model, loss, x)
    norms = norms_of_all(each)
    return {name: torch.einsum("n,n...->...", (bound / norms).clamp(max=1), value) for name, value in each.items()}


def look(model):
    return unsum.gradients(model, unsum.Norms(), grad=False)


def clip(model):
    return unsum.clip_per_sample(model, max_norm=1.0)


@pytest.mark.parametrize(
    "blocks", [(clip, look), (look, clip), (look, clip, look)], ids=["outside", "inside", "between"]
)
def test_norms_are_read_where_gradients_are_clipped(blocks):
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    wanted = dict.fromkeys(names, 0.0)
    for x in batches(5):  # accumulated: .grad is there from the second on
        for name, own in clipped(model, x, 1.0).items():
            wanted[name] = wanted[name] + own
        opened = [block(model) for block in blocks]
        for block in opened:
            block.open()
        loss(model, x).backward()
        for block in reversed(opened):
            block.close()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name])


def test_two_blocks_that_leave_grad_alone():
    model = mlp()
    first, *rest = batches(5)
    loss(model, first).backward()
    stored = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    for x in rest:
        with look(model), unsum.gradients(model, unsum.SecondMoment(), grad=False):
            loss(model, x).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is stored[name][0]
            assert torch.equal(parameter.grad, stored[name][1])


@pytest.mark.parametrize("step", [0, 3], ids=["learnt", "known"])
def test_grad_is_put_back_when_a_block_refuses_what_came(step):
    model, kept = mlp(), torch.ones(4, 3, dtype=torch.float64)
    model[0].weight.grad = kept
    for k, x in enumerate(batches(5)):
        bad = k == step
        x = x.index_fill(0, torch.tensor([1]), torch.inf) if bad else x
        before = model[0].weight.grad.clone()
        try:
            with look(model), clip(model):
                loss(model, x).backward()
        except unsum.errors.NotFinite:
            assert bad
            assert torch.equal(model[0].weight.grad, before)
        else:
            assert not bad
            assert not torch.equal(model[0].weight.grad, before)
    assert model[0].weight.grad is kept


class Switched(nn.Module):
    """A layer with an adapter that is left out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.adapter, self.is_on = nn.Linear(3, 3), nn.Linear(3, 3), True

    def forward(self, x):
        h = self.layer(x)
        return h + self.adapter(h) if self.is_on else h


@pytest.mark.parametrize("how", ["backward", "inputs"])
def test_a_step_that_does_not_reach_the_chosen_parameters_leaves_grad_alone(how):
    torch.manual_seed(0)
    model = Switched().double()
    before = torch.ones(3, 3, dtype=torch.float64)
    model.layer.weight.grad = before
    for k, x in enumerate(batches(6)):
        model.is_on = k != 3
        with unsum.gradients(model, unsum.Norms(), params="adapter.*", grad=False):
            given = {} if how == "backward" or model.is_on else {"inputs": [model.layer.weight]}
            loss(model, x).backward(**given)
        assert model.layer.weight.grad is before
        assert torch.equal(before, torch.ones_like(before))
        assert model.layer.bias.grad is None


def test_a_block_sees_the_model_as_it_is_when_it_opens():
    model, norms = mlp(), unsum.Norms()
    block = unsum.gradients(model, norms)
    for k, x in enumerate(batches(7)):
        if k == 3:
            model[2] = nn.Linear(4, 2).double()
        if k == 5:
            model.append(nn.Linear(2, 2).double())
        with block:
            loss(model, x).backward()
        each = per_sample_gradients(model, loss, x)
        wanted = norms_of_all(each)
        torch.testing.assert_close(norms.norms(), wanted)


@pytest.mark.parametrize("hook", ["module", "all modules", "before"])
def test_hooks_of_modules_find_the_gradients_that_the_backward_has_come_past(hook):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(5, 5), nn.Tanh())]).double()
    seen = []

    def note(module, *_):
        later = list(model)[list(model).index(module) + 1 :] if module in list(model) else []
        seen.append([layer.weight.grad is not None for layer in later if isinstance(layer, nn.Linear)])

    handles = []
    if hook == "all modules":
        handles.append(nn.modules.module.register_module_full_backward_hook(note))
    for layer in model:
        if hook == "module":
            handles.append(layer.register_full_backward_hook(note))
        elif hook == "before":
            handles.append(layer.register_full_backward_pre_hook(note))
    try:
        for _ in range(5):
            model.zero_grad()
            seen.clear()
            with unsum.gradients(model, unsum.Norms()):
                loss(model, torch.randn(4, 10, 5, dtype=torch.float64).requires_grad_()).backward()
            assert len(seen) >= 6
            assert all(all(each) for each in seen)
    finally:
        for handle in handles:
            handle.remove()
