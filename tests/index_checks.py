"""What every rank of a process group does to build an index, for tests of several processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unsum
from curvature_nets import Examples, classified, ids, mlp, numbers
from rank_checks import Net, sharded

X, Y = numbers(0, 41, 4), ids(1, 41, high=3)
IDS = ids(2, 41, 5)


class Stop(Exception):
    """A rank gives up."""


class Rows(Examples):
    """Examples of which one cannot be read, once the builds have begun."""

    def __init__(self, *tensors: Tensor, broken: int | None = None, error: type[Exception] = Stop) -> None:
        super().__init__(*tensors)
        self.broken, self.error, self.reads = broken, error, 0

    def __getitem__(self, k: int) -> Any:
        if k == self.broken:
            raise self.error(f"example {k} cannot be read")
        return super().__getitem__(k)


def token_losses(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    logits = model(x)[:, :-1]
    return nn.functional.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").sum(1)


def net(kind: str) -> nn.Module:
    if kind == "plain":
        return mlp()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(mlp())
    if "buffers" in kind:
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
        model: nn.Module = nn.Sequential(*layers).double().eval()
        return nn.parallel.DistributedDataParallel(model).eval() if kind.startswith("ddp") else model
    model = Net().double() if "float64" in kind else Net()
    return sharded(model) if kind.startswith("fsdp2") else model


def build(rank: int, kind: str, path: Path, broken: int | None = None, **options: Any) -> None:
    """The whole data set, on every rank."""
    torch.set_num_threads(1)
    of_tokens = kind.startswith(("fsdp2", "net"))
    data = Rows(IDS, broken=broken) if of_tokens else Rows(X, Y, broken=broken)
    loss = token_losses if of_tokens else classified
    options = {"project": 3, "batch_size": 4, "shard_size": 4, "dtype": "float32"} | options
    unsum.index.build(net(kind), loss, data, path, **options)


def build_or_error(rank: int, *args: Any, **options: Any) -> str | None:
    """What a rank says that fails."""
    try:
        build(rank, *args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def slowly_read(example: Any) -> str:
    time.sleep(0.05)
    return str(example[0].tolist())


def build_not_finite(rank: int, kind: str, path: Path, at: int) -> str | None:
    """One example has a loss that is not finite; the data is otherwise the same. Reading texts takes a while, so that
    the others are still busy with their batch when one fails."""

    def broken(model: nn.Module, batch: Any) -> Tensor:
        tokens = kind.startswith("fsdp2")
        losses = token_losses(model, batch) if tokens else classified(model, batch)
        bad = (batch[0] == (IDS if tokens else X)[at]).all(1)
        return losses * torch.where(bad, torch.nan, 1.0)

    try:
        data = Examples(IDS) if kind.startswith("fsdp2") else Examples(X, Y)
        options: Any = {"project": 3, "batch_size": 4, "shard_size": 4, "dtype": "float32", "text": slowly_read}
        unsum.index.build(net(kind), broken, data, path, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def build_broken_off(path: Path) -> None:
    """Under fully_shard, the forward of the last batch, which one rank has, breaks off in the middle."""
    model, now = net("fsdp2, float64"), False

    def fails(module: nn.Module, args: Any) -> None:
        if now:
            raise Stop("in the middle of a forward")

    def losses(model: nn.Module, batch: Any) -> Tensor:
        nonlocal now
        now = len(batch[0]) == 1  # of 41 examples in batches of 4
        return token_losses(model, batch)

    model.head.register_forward_pre_hook(fails)
    unsum.index.build(model, losses, Examples(IDS), path, project=3, batch_size=4, shard_size=4)


def build_other(rank: int, path: Path) -> str | None:
    """Each rank gives a part of the data, as for training."""
    try:
        options: Any = {"project": 3, "batch_size": 4, "shard_size": 4, "dtype": "float32"}
        unsum.index.build(mlp(), classified, Examples(X[rank::2], Y[rank::2]), path, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}


def left_over(path: Path) -> list[str]:
    """Hidden files that are no locks."""
    return sorted(file.name for file in path.glob(".*") if not file.name.endswith(".lock"))
