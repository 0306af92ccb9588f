"""Clipping per sample and private steps under DDP: what two processes do is what one does."""

import copy

import pytest
import torch
from torch import nn

import unsum


def assert_alike(ours, wanted):
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def run_rank(rank, as_views):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 4)
    alone, own = copy.deepcopy(model), x[rank::2]
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
    for _ in range(3):
        wrapped.zero_grad()
        with unsum.clip_per_sample(wrapped, max_norm=0.3) as clipped:
            wrapped(own).square().sum().backward()
        assert len(clipped.norms) == 3
    with unsum.clip_per_sample(alone, max_norm=0.3):
        alone(x).square().sum().backward()
    wanted = [p.grad for p in alone.parameters()]
    assert_alike([2 * p.grad for p in model.parameters()], wanted)  # a mean over ranks, as with any gradient
    wrapped.zero_grad()
    with unsum.clip_per_sample(wrapped, max_norm=0.3):
        with wrapped.no_sync():
            wrapped(own[:1]).square().sum().backward()
        wrapped(own[1:]).square().sum().backward()
    assert_alike([2 * p.grad for p in model.parameters()], wanted)
    wrapped.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dp = unsum.private(wrapped, optimizer, max_norm=0.3, noise_multiplier=0.0, expected_batch=4, sample_rate=0.5)
    with dp:
        wrapped(own).square().sum().backward()
    dp.step()
    moved = [before - after for before, after in zip(alone.parameters(), model.parameters(), strict=True)]
    assert_alike([4 * each.detach() for each in moved], wanted)  # a sum over ranks, over the expected batch


@pytest.mark.slow
@pytest.mark.parametrize("as_views", [False, True])
def test_two_processes_with_ddp_clip_as_one(ranks, as_views):
    ranks[2].run(run_rank, as_views)
