"""DDP and FSDP2 over gloo: every rank finds for its samples what one process finds, and `.grad` is the mean."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum
from one_by_one import norms_of

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """An embedding, two blocks, a head tied to the embedding."""

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
    torch.testing.assert_close(ours.double(), wanted.double(), rtol=loose, atol=loose * float(wanted.abs().max()),
                               msg=lambda told: f"{what}: {told}")  # fmt: skip


def check(kind: str, rank: int, ranks: int) -> None:
    plain, model = Net(), WRAPPED[kind](Net())
    loose = 0.05 if "bfloat16" in kind else 1e-4
    watch = unsum.watch(model)
    for step in range(4):
        x = batches(rank, step)
        everything = [batches(other, step) for other in range(ranks)]
        each = per_sample_gradients(plain, loss, x)
        mean = {name: sum(per_sample_gradients(plain, loss, other)[name].sum(0) for other in everything) / ranks
                for name in each}  # fmt: skip
        model.zero_grad()
        with unsum.gradients(model, unsum.Norms(), unsum.Project(k=3)) as g:
            loss(model, x).backward()
        assert list(g) == [name for name, _ in plain.named_parameters()]
        same(g.norms(), norms_of(each), loose, "norms")
        with unsum.gradients(plain, unsum.Project(k=3), grad=False) as one:
            loss(plain, x).backward()
        same(g[unsum.Project].matrix(), one[unsum.Project].matrix(), loose, "projections")
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
        rows = [per_sample_gradients(plain, loss, other) for other in everything]
        flat = torch.cat([torch.cat([value.flatten(1) for value in row.values()], 1) for row in rows])
        trace = flat.var(0).sum()
        scale = float(trace / (flat.mean(0).square().sum() - trace / len(flat)))
        assert abs(watch.last.noise_scale / scale - 1) < (0.3 if "bfloat16" in kind else 1e-2), watch.last.noise_scale
        assert watch.last.rank == rank
        own = plain.head.weight.detach().square().sum() + plain.head.bias.detach().square().sum()
        same(torch.tensor(watch.last.layers["head"].weight), own.sqrt(), loose, "weights")
        clip(kind, model, plain, everything, rank, loose)
        flow(model, plain, x, loose, is_bfloat="bfloat16" in kind)


def clip(kind: str, model: nn.Module, plain: nn.Module, everything: list[Tensor], rank: int, loose: float) -> None:
    bound, wanted = 2.0, {}
    for x in everything:
        each = per_sample_gradients(plain, loss, x)
        weights = (bound / norms_of(each)).clamp(max=1)
        for name, value in each.items():
            part = torch.einsum("n,n...->...", weights, value) / len(everything)
            wanted[name] = wanted.get(name, 0) + part
    model.zero_grad()
    with unsum.clip_per_sample(model, max_norm=bound, verify=False) as clipped:
        loss(model, everything[rank]).backward()
    assert clipped.norms.shape == (3,)
    for name, value in grads(model).items():
        same(value, wanted[name], loose, f"{name}.grad, clipped")


def flow(model: nn.Module, plain: nn.Module, x: Tensor, loose: float, *, is_bfloat: bool) -> None:
    sites = ["blocks.0.1:input", "blocks.1.3:output", "blocks.0.1:grad_output", "head.weight:grad"]
    found = []
    for each in (model, plain):
        with unsum.capture(each, *sites) as got:
            loss(each, x).backward()
        found.append(got)
    for site in sites:
        same(found[0][site], found[1][site], loose, site)
    with torch.no_grad(), unsum.edit(model, {"blocks.0.2:output": unsum.zero()}):
        edited = model(x)
    for module in model.modules():
        if hasattr(module, "reshard"):  # else zero_grad() would clear the whole parameters' gradients, torch's own way
            module.reshard()
    with torch.no_grad(), unsum.edit(plain, {"blocks.0.2:output": unsum.zero()}):
        same(edited, plain(x), loose, "edited")


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


def worker(rank: int, ranks: int, port: int, kind: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    verdict = Path(folder) / str(rank)
    try:
        if kind == "other sizes":
            check_other_sizes(rank)
        else:
            check(kind, rank, ranks)
        verdict.write_text("fine")
    except BaseException:
        verdict.write_text(traceback.format_exc())
        os._exit(0)
    with contextlib.suppress(Exception):
        dist.barrier()
    os._exit(0)  # the verdict is in the file; gloo's threads may abort an orderly exit


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", WRAPPED)
def test_as_one_process(kind: str, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(ranks, free_port(), kind, folder), nprocs=ranks)
        for rank in range(ranks):
            assert (Path(folder) / str(rank)).read_text() == "fine", f"rank {rank}"


def test_ranks_that_learn_at_other_times() -> None:
    test_as_one_process("other sizes", 2)


def test_tensor_parallel_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            model = copy.deepcopy(Net())
            mesh = init_device_mesh("cpu", (1,))
            model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))
            with pytest.raises(unsum.errors.UnsupportedError, match=r"head\.weight is a DTensor.*tensor parallel"):
                unsum.gradients(model)
        finally:
            dist.destroy_process_group()
