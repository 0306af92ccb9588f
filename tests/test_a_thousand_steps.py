"""A thousand steps with everything on: memory stays flat, records are right, the weights are those of a run without."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum
from one_by_one import norms_of
from unsum.training.run_file import read

STEPS, WARM = 1000, 299  # by then all that is learnt once is learnt, and what is kept for a while is full
PLANTED = range(50, STEPS, 100)  # steps with a sample unlike the others


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 7)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.embed(x) * scale[:, None, None]
        return self.head(h + self.mlp(self.norm(h)))


def loss_of(model: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x, scale)[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    return losses.view(len(x), -1).sum(1).mean()


def batches() -> Iterator[dict[str, Any]]:
    """Six samples, of two lengths in turn."""
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        scale = torch.ones(6, dtype=torch.float64)
        if step in PLANTED:
            scale[3] = 20.0
        names = [f"{step}/{row}" for row in range(6)]
        yield {
            "x": torch.randint(7, (6, 4 + step % 2), generator=generator),
            "scale": scale,
            "id": names,
            "text": names,
        }


def train(
    watched: Callable[[nn.Module, Any], Any] | None, each_step: Callable[[int, nn.Module, Any, Any], None]
) -> Any:
    """The model after all steps."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.002)  # so slow that rounding is not made larger
    watch = None if watched is None else watched(model, optimizer)
    for step, batch in enumerate(batches() if watch is None else watch.loader(batches())):
        if watch is not None:
            watch.open()
        loss_of(model, batch["x"], batch["scale"]).backward()
        if watch is not None:
            watch.close()
        each_step(step, model, watch, batch)
        optimizer.step()
        optimizer.zero_grad()
    if watch is not None:
        watch.flush()
    return model


def held() -> tuple[int, int, int]:
    """Objects, tensors among them, and megabytes of this process, with what torch holds; 0 where nobody says."""
    gc.collect()
    objects, told = gc.get_objects(), Path("/proc/self/statm")
    tensors = sum(isinstance(each, Tensor) for each in objects)
    return len(objects), tensors, int(told.read_text().split()[1]) * 4096 >> 20 if told.exists() else 0


@pytest.mark.slow
def test_a_thousand_steps(tmp_path: Path) -> None:
    seen = []

    def each_step(step: int, model: nn.Module, watch: Any, batch: Any) -> None:
        if step % 100 == 99:
            each = per_sample_gradients(model, loss_of, batch["x"], batch["scale"])
            torch.testing.assert_close(watch.last.norms, norms_of(each), rtol=1e-9, atol=0)
            del each
        if step in (WARM, STEPS - 1):
            seen.append(held())

    watched = lambda model, optimizer: unsum.watch(
        model, to=tmp_path / "run.jsonl", optimizer=optimizer, loss_reduction="mean", text="text", history=100
    )
    model = train(watched, each_step)
    objects, tensors, megabytes = (after - before for before, after in zip(*seen, strict=True))
    assert tensors == 0
    assert objects < 100
    assert megabytes <= 2
    plain = train(None, lambda *_: None)
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-14)
    records = read(tmp_path / "run.jsonl").records
    assert [record.step for record in records] == list(range(STEPS))
    assert [record.step for record in records if f"{record.step}/3" in record.outliers][: len(PLANTED)] == list(PLANTED)
    assert all(layer.update for record in records for layer in record.layers.values())
