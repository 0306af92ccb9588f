"""What every rank of a process group finds for its samples, under DDP and FSDP2, against plain autograd: on any device,
with any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum
from one_by_one import norms_of


class Net(nn.Module):
    """An embedding, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def batches(rank: int, step: int) -> Tensor:
    """Other lengths in other steps; as many samples on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (3, 4 + step % 2), generator=generator)


def sharded(model: nn.Module, *, reshard: bool = True, policy: Any = None) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"reshard_after_forward": reshard, "mp_policy": policy or MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def bfloat16() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
    "fsdp2": sharded,
    "fsdp2, not resharded": lambda model: sharded(model, reshard=False),
    "fsdp2, bfloat16": lambda model: sharded(model, policy=bfloat16()),
}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}


def same(ours: Tensor, wanted: Tensor, loose: float, what: str) -> None:
    torch.testing.assert_close(ours.double().cpu(), wanted.double(), rtol=loose, atol=loose * float(wanted.abs().max()),
                               msg=lambda told: f"{what}: {told}")  # fmt: skip


def noise_scale(of_ranks: list[dict[str, Tensor]]) -> float:
    """tr Σ / |G|² of all ranks' samples."""
    flat = torch.cat([torch.cat([value.flatten(1) for value in row.values()], 1) for row in of_ranks])
    trace = flat.var(0).sum()
    return float(trace / (flat.mean(0).square().sum() - trace / len(flat)))


def check(rank: int, kind: str, device: str = "cpu") -> None:
    ranks = dist.get_world_size()
    plain, model = Net(), WRAPPED[kind](Net().to(device))
    loose = 0.05 if "bfloat16" in kind else 1e-4
    watch = unsum.watch(model)
    for step in range(4):
        everything = [batches(other, step) for other in range(ranks)]
        of_ranks = [per_sample_gradients(plain, loss, other) for other in everything]
        x, each = everything[rank].to(device), of_ranks[rank]
        mean = {name: sum(other[name].sum(0) for other in of_ranks) / ranks for name in each}
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms(), unsum.Project(k=3)) as g:
            loss(model, x).backward()
        assert list(g) == [name for name, _ in plain.named_parameters()]
        same(g.norms(), norms_of(each), loose, "norms")
        alone = Net().to(device)  # where random numbers are the same
        with unsum.gradients(alone, unsum.Project(k=3), grad=False) as one:
            loss(alone, x).backward()
        same(g[unsum.Project].matrix(), one[unsum.Project].matrix().cpu(), loose, "projections")
        for name, value in grads(model).items():
            same(value, mean[name], loose, f"{name}.grad")
        with unsum.gradients(model, grad=False) as g:
            loss(model, x).backward()
        for name in g:
            same(g[name].per_sample(), each[name], loose, name)
        for name, value in grads(model).items():
            same(value, mean[name], loose, f"{name}.grad, untouched")
        model.zero_grad()
        with watch:
            loss(model, x).backward()
        same(watch.last.norms, norms_of(each), loose, "watched norms")
        assert abs(watch.last.noise_scale / noise_scale(of_ranks) - 1) < (0.3 if "bfloat16" in kind else 1e-2), (
            watch.last.noise_scale
        )
        assert watch.last.rank == rank
        own = plain.head.weight.detach().square().sum() + plain.head.bias.detach().square().sum()
        same(torch.tensor(watch.last.layers["head"].weight), own.sqrt(), loose, "weights")
        clip(model, x, of_ranks, loose)
        flow(model, plain, x, loose)


def clip(model: nn.Module, x: Tensor, of_ranks: list[dict[str, Tensor]], loose: float) -> None:
    bound, wanted = 2.0, {}
    for each in of_ranks:
        weights = (bound / norms_of(each)).clamp(max=1)
        for name, value in each.items():
            part = torch.einsum("n,n...->...", weights, value) / len(of_ranks)
            wanted[name] = wanted.get(name, 0) + part
    model.zero_grad()
    with unsum.clip_per_sample(model, max_norm=bound, verify=False) as clipped:
        loss(model, x).backward()
    assert clipped.norms.shape == (3,)
    for name, value in grads(model).items():
        same(value, wanted[name], loose, f"{name}.grad, clipped")


def flow(model: nn.Module, plain: nn.Module, x: Tensor, loose: float) -> None:
    sites = ["blocks.0.1:input", "blocks.1.3:output", "blocks.0.1:grad_output", "head.weight:grad"]
    found = []
    for each in (model, plain):
        with unsum.capture(each, *sites) as got:
            loss(each, x if each is model else x.cpu()).backward()
        found.append(got)
    for site in sites:
        same(found[0][site], found[1][site], loose, site)
    with torch.no_grad(), unsum.edit(model, {"blocks.0.2:output": unsum.zero()}):
        edited = model(x)
    for module in model.modules():
        if hasattr(module, "reshard"):  # else zero_grad() would clear the whole parameters' gradients, torch's own way
            module.reshard()
    with torch.no_grad(), unsum.edit(plain, {"blocks.0.2:output": unsum.zero()}):
        same(edited, plain(x.cpu()), loose, "edited")


def check_other_numbers(rank: int) -> None:
    """Of means over batches of different sizes there is no noise scale; of sums there is."""
    plain, model = Net(), WRAPPED["ddp"](Net())
    for reduction in (None, "mean"):
        watch = unsum.watch(model, loss_reduction=reduction)
        for step in range(3):
            everything = [batches(other, step)[: 3 - other % 2] for other in range(2)]
            x = everything[rank]
            each = [per_sample_gradients(plain, loss, x) for x in everything]
            model.zero_grad()
            with watch:
                (loss(model, x) / (len(x) if reduction == "mean" else 1)).backward()
            same(watch.last.norms, norms_of(each[rank]), 1e-4, "norms")
            if reduction == "mean":
                assert watch.last.noise_scale is None
            else:
                assert abs(watch.last.noise_scale / noise_scale(each) - 1) < 1e-2


def check_other_sizes(rank: int) -> None:
    """One rank meets new lengths, one of them as many as there are samples, and learns anew; the other does not."""
    from torch.distributed.fsdp import fully_shard

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    plain, model = make(), make()
    for part in (model[0], model[3], model):
        fully_shard(part)
    watch = unsum.watch(model)
    for step in range(5):
        x = torch.randn(4, 3 + step if rank == 0 else 3, 6)
        model.zero_grad()
        with watch:
            loss(model, x).backward()
        same(watch.last.norms, norms_of(per_sample_gradients(plain, loss, x)), 1e-4, "norms")
