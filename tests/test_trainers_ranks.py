"""Two processes inside the Hugging Face Trainer, Lightning and accelerate: each rank records its own examples, as plain
autograd has them, and trains as without."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn

import processes
import trainer_runs as runs
from one_by_one import norms_of
from test_watch import noise_scale
from trainer_runs import Each, Run
from unsum.training.run_file import read

pytestmark = pytest.mark.slow


@pytest.fixture
def two(ranks: dict[int, processes.Ranks]) -> processes.Ranks:
    return ranks[2]


def quietly() -> None:
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module="unsum")
    logging.disable(logging.WARNING)


def of_all_ranks(each: Each) -> Each:
    """The samples of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, each)
    return runs.joined(parts)


def same_records(
    run: Run, truth: Callable[[Run, int], Each], rank: int, *, loose: float = 1e-3, noise: bool = True
) -> None:
    assert [record.step for record in run.watch.history] == list(range(len(run.models)))
    for step, record in enumerate(run.watch.history):
        each = truth(run, step)
        torch.testing.assert_close(record.norms, norms_of(each), rtol=loose, atol=0)
        assert (record.rank, record.refused, record.nonfinite) == (rank, None, None)
        everybody = of_all_ranks(each)
        if noise:
            assert record.noise_scale == pytest.approx(noise_scale(everybody), rel=1e-2)


def same_weights(run: Run, without: Run) -> None:
    for name, value in run.weights().items():
        torch.testing.assert_close(value, without.weights()[name], rtol=1e-5, atol=1e-6)
        before = dict(run.models[0].named_parameters())[name]
        assert before.requires_grad != torch.equal(value, before), name


# ---- the Hugging Face Trainer ---------------------------------------------------------------------------------------


def examples(run: Run) -> list[list[list[int]]]:
    """For each step, the examples that this rank had, as their tokens."""
    found = []
    for step in run.batches:
        found.append([[t for t in row.tolist() if t] for batch in step for row in batch["input_ids"]])
    return found


def trainer(rank: int, folder: str, way: str) -> list[list[list[int]]]:
    quietly()
    make = runs.adapted if way == "LoRA" else runs.llama
    options = {"optim": "sgd", "learning_rate": 0.1, "ddp_backend": "gloo", **WAYS[way]}
    run = runs.with_trainer(make(), folder, watch={"to": f"{folder}/run.jsonl"}, **options)
    assert isinstance(run.trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    same_records(run, runs.trainers_truth, rank, loose=0.05 if way == "bf16" else 1e-3, noise=way != "bf16")
    same_weights(run, runs.with_trainer(make(), folder, watch=None, **options))
    return examples(run)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True},
    "LoRA": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_hugging_face_trainer(way: str, two: processes.Ranks, tmp_path: Any) -> None:
    if way == "LoRA":
        pytest.importorskip("peft")
    ours, theirs = two.run(trainer, str(tmp_path), way)
    for mine, yours in zip(ours, theirs, strict=True):
        assert not [each for each in mine if each in yours], "two ranks had one example"
    for file, rank in (("run.jsonl", 0), ("run.rank1.jsonl", 1)):
        records = read(tmp_path / file).records
        assert [record.rank for record in records] == [rank] * runs.STEPS


class Averages(nn.Module):
    """A model that accepts `num_items_in_batch`, and averages over its batch's tokens all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = runs.llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def averages_truth(run: Run, step: int) -> Each:
    """Each example's part of the mean over its micro-batch."""
    parts = []
    for batch in run.batches[step]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        each = per_sample_gradients(run.models[step].inner, runs.of_tokens, ids, mask)
        parts.append({f"inner.{name}": value / float(mask[:, 1:].sum()) for name, value in each.items()})
    return runs.joined(parts)


def averages(rank: int, folder: str, options: dict[str, Any]) -> None:
    quietly()
    run = runs.with_trainer(Averages(), folder, watch={}, ddp_backend="gloo", **options)
    same_records(run, averages_truth, rank)


def each_rank_by_its_own(rank: int, folder: str) -> list[list[int]]:
    quietly()
    run = runs.with_trainer(runs.llama(), folder, watch={}, average_tokens_across_devices=False)
    same_records(run, runs.trainers_truth, rank, noise=False)
    tokens = [int(batch["attention_mask"][:, 1:].sum()) for [batch] in run.batches]
    return [tokens, [record.noise_scale for record in run.watch.history]]


def test_a_model_that_averages_itself(two: processes.Ranks, tmp_path: Any) -> None:
    """The Trainer multiplies the losses of models that accept `num_items_in_batch` by the number of processes."""
    two.run(averages, str(tmp_path), {})
    two.run(averages, str(tmp_path), {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1})


def test_ranks_that_divide_by_their_own_tokens(two: processes.Ranks, tmp_path: Any) -> None:
    """Their samples do not have one weight in the step's gradient: there is no noise scale."""
    ours, theirs = two.run(each_rank_by_its_own, str(tmp_path))
    differ = [mine != yours for mine, yours in zip(ours[0], theirs[0], strict=True)]
    assert any(differ)
    for noise in (ours[1], theirs[1]):
        assert [value is None for value in noise] == differ


# ---- Lightning, accelerate ------------------------------------------------------------------------------------------


def lightning(rank: int, options: dict[str, Any]) -> list[str]:
    quietly()
    options = {"strategy": "ddp", "devices": 2, **options}
    run = runs.with_lightning(watch={}, **options)
    assert run.trainer.world_size == 2
    same_records(run, runs.rows_truth, rank)
    assert [record.ids for record in run.watch.history] == [runs.ids_of(run, step) for step in range(len(run.batches))]
    same_weights(run, runs.with_lightning(watch=None, **options))
    return [each for record in run.watch.history for each in record.ids]


def accelerates(rank: int, options: dict[str, Any]) -> list[str]:
    quietly()
    run = runs.with_accelerate(watched=True, **options)
    same_records(run, runs.rows_truth, rank)
    same_weights(run, runs.with_accelerate(watched=False, **options))
    return [each for record in run.watch.history for each in record.ids]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["plain", "accumulation"])
def test_lightning(options: dict[str, Any], two: processes.Ranks) -> None:
    pytest.importorskip("lightning")
    found = two.run(lightning, options)
    assert sorted(found[0] + found[1]) == sorted(row["id"] for row in runs.rows())


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}], ids=["plain", "accumulation"])
def test_accelerates_own_loop(options: dict[str, Any], two: processes.Ranks) -> None:
    pytest.importorskip("accelerate")
    found = two.run(accelerates, options)
    assert sorted(found[0] + found[1]) == sorted(row["id"] for row in runs.rows())
