"""Bytes of tensors that are held at once, as torch's allocator counts them: convolutions go from sample to sample, and
must not hold what they have made of all."""

import pytest
import torch
from reference import per_sample_gradients
from torch import nn

import unsum
from unsum.factors import windows
from unsum.kernels import recorded


def peak_of(function):
    """Bytes of tensors at the highest point, beyond those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def pictures():
    """Gradients of one sample take more than activations of one."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 12 * 12, 3)), torch.randn(16, 3, 12, 12)


def steps(model, x):
    """A plain step and one with norms, each warm: the plan is learnt, and recordings are made and compared."""

    def plain():
        model.zero_grad(set_to_none=True)
        model(x).square().sum().backward()

    def norms():
        model.zero_grad(set_to_none=True)
        with unsum.gradients(model, unsum.Norms()):
            model(x).square().sum().backward()

    for step in (plain, norms) * 5:
        step()
    return plain, norms


@pytest.mark.parametrize("by_pairs", [False, True])
def test_norms_of_convolutions_hold_the_gradients_of_few_samples_at_once(by_pairs, monkeypatch):
    model, x = pictures()
    one = model[2].weight.nbytes
    monkeypatch.setattr(windows.costs, "cheaper", lambda *_, **__: "gram" if by_pairs else "product")
    monkeypatch.setattr(windows, "AT_ONCE", 1 << 16)
    plain, norms = steps(model, x)
    assert peak_of(norms) <= peak_of(plain) + len(x) / 2 * one


def test_a_recording_lets_go_of_what_it_has_read():
    def one_after_the_other(x):
        total = torch.zeros(1 << 10)
        for row in x:
            total = total + (row * 2).square()
        return [total]

    x = torch.randn(50, 1 << 10)
    with recorded.Tape([x]) as tape:
        found = one_after_the_other(x)
    program = recorded.record(tape, found)
    assert torch.equal(program(x)[0], found[0])
    assert peak_of(lambda: program(x)) <= peak_of(lambda: one_after_the_other(x))


def test_held_gradients_of_convolutions_are_formed_where_they_stay():
    torch.manual_seed(0)
    x, delta = torch.randn(32, 1, 16, 8, 8), torch.randn(32, 1, 16, 8, 8)
    geometry = windows.Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    kind = windows.Windows(x, delta, geometry, (16, 16, 3, 3))
    assert kind.forms()
    one = 16 * 16 * 9 * 4
    assert peak_of(lambda: kind.norms_and_each(want_sum=False)) <= (32 + 8) * one


@pytest.mark.parametrize("some", [1, 5 * 4 * 9 * 4, 1 << 20])
def test_pairs_of_places_give_the_same_whatever_is_unfolded_at_once(some, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(6, 5, 2)).double()
    x = torch.randn(7, 4, 3, 3, dtype=torch.float64)
    loss = lambda model, x: model(x).square().sum()
    wanted = sum(each.flatten(1).square().sum(1) for each in per_sample_gradients(model, loss, x).values())
    monkeypatch.setattr(windows.costs, "cheaper", lambda *_, **__: "gram")
    monkeypatch.setattr(windows, "AT_ONCE", some)
    for _ in range(5):
        with unsum.gradients(model, unsum.Norms()) as g:
            loss(model, x).backward()
        torch.testing.assert_close(g[unsum.Norms].sq_norms(), wanted)
