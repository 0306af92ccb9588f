"""Callbacks for the Hugging Face Trainer and Lightning, and accelerate's own loop: records against plain autograd."""

from __future__ import annotations

import functools
import gc
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import trainer_runs as runs
import unsum
from one_by_one import norms_of

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "clipped": {"max_grad_norm": 0.01},
}


def same_records(run: runs.Run, truth: Any, loose: float = 1e-3) -> None:
    assert [record.step for record in run.watch.history] == list(range(len(run.models)))
    for step, record in enumerate(run.watch.history):
        torch.testing.assert_close(record.norms, norms_of(truth(run, step)), rtol=loose, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_the_hugging_face_trainer(way: str, tmp_path: Any) -> None:
    run = runs.with_trainer(runs.llama(), tmp_path, watch={}, **WAYS[way])
    assert len(run.watch.history) == runs.STEPS
    same_records(run, runs.trainers_truth, 0.05 if way == "bf16" else 1e-3)
    for record in run.watch.history:
        assert record.noise_scale is not None
        assert record.layers["model.layers.0.mlp.up_proj"].output > 0
    logged = [log for log in run.trainer.state.log_history if "unsum/norm/median" in log]
    assert len(logged) == runs.STEPS
    assert logged[-1]["unsum/norm/largest"] == pytest.approx(float(run.watch.last.norms.max()))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_the_trainer_with_adapters(dora: bool, bf16: bool, tmp_path: Any) -> None:
    run = runs.with_trainer(runs.adapted(dora=dora), tmp_path, watch={}, gradient_accumulation_steps=2, bf16=bf16)
    same_records(run, runs.trainers_truth, 0.05 if bf16 else 1e-3)


def test_the_trainer_compiled(tmp_path: Any) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    same_records(runs.with_trainer(runs.llama(), tmp_path, watch={}, **options), runs.trainers_truth)


class Unhanded(runs.transformers.Trainer):
    """Does not hand the number of tokens to the model, which averages over each micro-batch then."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs=return_outputs)


class Dividing(Unhanded):
    loss_is_scaled_for_ga = False


class Derived(runs.transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class Wrapped(torch.nn.Module):
    """Hands everything to a model inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = runs.llama()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **rest: Any) -> Any:
        return self.inside(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **rest)


class Silent(torch.nn.Module):
    """Accepts no number of tokens, and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = runs.llama()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kept: Any) -> Any:
        return self.inside(input_ids=input_ids, attention_mask=attention_mask, **kept)

    accepts_loss_kwargs = False


def by_all_tokens(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("trainer", [Unhanded, Dividing])
def test_a_trainer_with_a_loss_of_its_own(trainer: Any, tmp_path: Any) -> None:
    run = runs.with_trainer(runs.llama(), tmp_path, watch={}, trainer=trainer, gradient_accumulation_steps=2)
    for step, record in enumerate(run.watch.history):
        counts = [(b["labels"][:, 1:] != -100).sum().expand(len(b["labels"])) for b in run.batches[step]]
        truth = norms_of(runs.trainers_truth(run, step)) / torch.cat(counts)  # what the model averages over stays
        torch.testing.assert_close(record.norms, truth, rtol=1e-3, atol=0)


def derived() -> torch.nn.Module:
    return Derived(runs.llama().config)


@pytest.mark.parametrize("make", [derived, Wrapped])
def test_a_model_whose_parent_or_part_computes_the_loss(make: Any, tmp_path: Any) -> None:
    run = runs.with_trainer(make(), tmp_path, watch={}, gradient_accumulation_steps=2)
    same_records(run, runs.trainers_truth)


@pytest.mark.parametrize("make", [runs.llama, Silent])
def test_a_trainer_with_a_loss_function(make: Any, tmp_path: Any) -> None:
    trainer = functools.partial(runs.transformers.Trainer, compute_loss_func=by_all_tokens)
    options = {"gradient_accumulation_steps": 2, "remove_unused_columns": False}
    same_records(runs.with_trainer(make(), tmp_path, watch={}, trainer=trainer, **options), runs.trainers_truth)


def test_the_trainers_options(tmp_path: Any) -> None:
    with pytest.raises(unsum.errors.OptionError, match="every=0"):
        unsum.integrations.transformers.Watch(every=0)
    options = {"every": 2, "optimizer": True, "to": str(tmp_path / "run.jsonl")}
    watch = runs.with_trainer(runs.llama(), tmp_path, watch=options).watch
    assert [record.step for record in watch.history] == [0, 2]
    assert watch.last.layers["lm_head"].update > 0
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulation"])
def test_lightning(options: dict[str, Any], tmp_path: Any) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    log = loggers.CSVLogger(tmp_path)
    run = runs.with_lightning(watch={}, logger=log, **options)
    same_records(run, runs.rows_truth)
    assert [record.ids for record in run.watch.history] == [runs.ids_of(run, step) for step in range(len(run.batches))]
    assert sum(len(record.ids) for record in run.watch.history) == len(runs.rows())
    log.save()
    assert "unsum/norm/median" in (Path(log.log_dir) / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "options",
    [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}],
    ids=str,
)
def test_accelerates_own_loop(options: dict[str, Any]) -> None:
    run = runs.with_accelerate(watched=True, **options)
    assert len(run.watch.history) == math.ceil(6 / options.get("gradient_accumulation_steps", 1))  # the last is shorter
    same_records(run, runs.rows_truth, 0.05 if "mixed_precision" in options else 1e-3)


def test_where_a_library_is_missing() -> None:
    with pytest.raises(AttributeError, match="there are: transformers, lightning"):
        unsum.integrations.keras
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unsum.integrations.transformers.__name__ == "unsum.integrations.transformers"


def test_a_mean_of_a_loss_that_is_divided_already_is_refused(tmp_path: Any) -> None:
    with pytest.raises(unsum.errors.OptionError, match="divided by num_items_in_batch"):
        runs.with_trainer(runs.llama(), tmp_path, watch={"loss_reduction": "mean"}, gradient_accumulation_steps=2)
    trainer = functools.partial(runs.transformers.Trainer, compute_loss_func=by_all_tokens)
    with pytest.raises(unsum.errors.OptionError, match="Watch\\(\\)  # without loss_reduction"):
        runs.with_trainer(runs.llama(), tmp_path, watch={"loss_reduction": "mean"}, trainer=trainer)
    assert not unsum.seams.here()


def test_batch_norm_in_the_trainer_is_refused_once_and_leaves_nothing_open(tmp_path: Any) -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)

        def forward(self, x: Any) -> Any:
            return {"loss": self.out(self.norm(x)).square().sum()}

    arguments = runs.transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    data = [{"x": torch.randn(3)} for _ in range(8)]
    callback = unsum.integrations.transformers.Watch()
    trainer = runs.transformers.Trainer(Normed(), arguments, train_dataset=data, callbacks=[callback])
    with pytest.raises(unsum.errors.InteractionError) as raised:
        trainer.train()
    assert "model.eval()" not in str(raised.value) and 'Watch(interacting="exact")' in str(raised.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raised = trainer = callback = None
        gc.collect()
    assert not unsum.seams.here()
