"""Training on a GPU: half precision with a GradScaler inside the trainers, and DDP and FSDP2 over NCCL with one
process, against plain autograd in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum
from one_by_one import norms_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE, BACKEND = "cuda", "nccl"
LOOSE = 0.03  # of half precision


def same_records(run: Any, truth: Any) -> None:
    """Norms as plain autograd has them, in every step whose scale was not too large, as the last ones' was not."""
    assert [record.step for record in run.watch.history] == list(range(len(run.models)))
    finite = [bool(record.norms.isfinite().all()) for record in run.watch.history]
    assert finite[-1]
    for step, record in enumerate(run.watch.history):
        assert record.refused is None
        if finite[step]:
            torch.testing.assert_close(record.norms, norms_of(truth(run, step)), rtol=LOOSE, atol=0)
        else:
            assert record.nonfinite is not None


def same_weights(run: Any, without: Any) -> None:
    """A step is skipped by the scaler in one run if it is in the other."""
    start, wanted = dict(run.models[0].named_parameters()), without.weights()
    for name, value in run.weights().items():
        if not start[name].requires_grad:
            continue
        moved = float((wanted[name] - start[name]).abs().max())
        assert moved > 0, name
        assert float((value - wanted[name]).abs().max()) < LOOSE * moved, name


# ---- inside trainers, in float16 ------------------------------------------------------------------------------------


TRAINER: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "adapters": {},
}


@pytest.mark.parametrize("way", TRAINER)
def test_the_hugging_face_trainer_in_float16(way: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import trainer_runs as runs

    make = runs.adapted if way == "adapters" else runs.llama
    options = {"fp16": True, "use_cpu": False, "optim": "sgd", "learning_rate": 0.1, "max_steps": 5, **TRAINER[way]}
    run = runs.with_trainer(make(), tmp_path, watch={}, **options)
    assert run.trainer.accelerator.scaler.is_enabled()
    assert next(run.model.parameters()).device.type == DEVICE
    same_records(run, runs.trainers_truth)
    same_weights(run, runs.with_trainer(make(), tmp_path, watch=None, **options))


@pytest.mark.parametrize("scale", [2.0**10, 2.0**60], ids=["", "too large at first"])
@pytest.mark.parametrize("parts", [1, 2])
def test_lightning_in_float16(parts: int, scale: float) -> None:
    pytest.importorskip("transformers")
    plugins = pytest.importorskip("lightning.pytorch.plugins")
    import trainer_runs as runs

    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, backoff_factor=2.0**-50)
        precision = plugins.MixedPrecision("16-mixed", DEVICE, scaler)
        return {"accelerator": "gpu", "devices": 1, "plugins": [precision], "accumulate_grad_batches": parts}

    run = runs.with_lightning(watch={}, **options())
    assert run.trainer.precision_plugin.scaler.is_enabled()
    same_records(run, runs.rows_truth)
    assert (run.watch.history[0].nonfinite is not None) == (scale > 2.0**20)
    same_weights(run, runs.with_lightning(watch=None, **options()))


@pytest.mark.parametrize("parts", [1, 2])
def test_accelerates_own_loop_in_float16(parts: int) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import trainer_runs as runs

    options = {"cpu": False, "mixed_precision": "fp16", "gradient_accumulation_steps": parts}
    run = runs.with_accelerate(watched=True, **options)
    same_records(run, runs.rows_truth)
    same_weights(run, runs.with_accelerate(watched=False, **options))


# ---- a process group of one -----------------------------------------------------------------------------------------


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKEND, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2, not resharded", "fsdp2, bfloat16"])
def test_norms_watch_clip_capture_and_edit(kind: str) -> None:
    import rank_checks

    rank_checks.check(0, kind, DEVICE)


class Classifier(nn.Module):
    """Wide enough for matrix units, with a part that DDP and FSDP2 wrap for themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)
        )
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y, reduction="sum")


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ten_steps_of_training_with_a_grad_scaler(kind: str) -> None:
    """Watched and clipped, under autocast to float16."""
    import rank_checks

    model: Any = rank_checks.WRAPPED[kind](Classifier().to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8)
    watch = unsum.watch(model, scaler=scaler, optimizer=optimizer)
    generator, half = torch.Generator().manual_seed(0), torch.float16 if DEVICE == "cuda" else torch.bfloat16
    for step in range(10):
        x, y = torch.randn(6, 64, generator=generator), torch.randint(8, (6,), generator=generator)
        plain = Classifier()
        plain.load_state_dict({name: rank_checks.whole(p).cpu() for name, p in values(model).items()})
        each = per_sample_gradients(plain, loss_of, x, y)
        norms, bound = norms_of(each), float(norms_of(each).median())
        clipped = unsum.clip_per_sample(model, max_norm=bound, scaler=scaler, verify=False)
        with watch if step % 2 else clipped as found:
            with torch.autocast(DEVICE, half):
                loss = loss_of(model, x.to(DEVICE), y.to(DEVICE))
            scaler.scale(loss).backward()
        seen = watch.last.norms if step % 2 else found.norms
        torch.testing.assert_close(seen.double().cpu(), norms, rtol=LOOSE, atol=0)
        weights = torch.ones(6) if step % 2 else (bound / norms).clamp(max=1)
        scaler.unscale_(optimizer)
        for name, grad in rank_checks.grads(model).items():
            wanted = torch.tensordot(weights.double(), each[name], 1)
            off = (grad.double().cpu() - wanted).norm()
            assert off < LOOSE * (weights * norms).norm(), f"{name}, step {step}"
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(watch.history) == 5
    assert watch.last.layers["head"].update > 0


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
