"""Callbacks for the Hugging Face Trainer and Lightning, and accelerate's own loop: records against plain autograd."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum
from one_by_one import norms_of

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def texts(count: int = 12) -> list[dict[str, Tensor]]:
    """Examples of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 32, (4 + k % 3,), generator=generator)} for k in range(count)]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Dynamic padding: as long as the longest of the batch."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def own_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The sum over an example's tokens."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    labels = ids.masked_fill(mask == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), reduction="sum")


class Kept(transformers.TrainerCallback):
    """Copies of the model as it is when each step begins."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        plain = copy.deepcopy(model)
        plain.__dict__.pop("forward", None)  # which accelerate has put there
        plain.forward = type(plain).forward.__get__(plain)
        self.models.append(plain)


def train(model: nn.Module, folder: Any, *, watch: dict[str, Any] | None = None, **options: Any) -> Any:
    callback, kept = unsum.integrations.transformers.Watch(**(watch or {})), Kept()
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_steps=1, learning_rate=1e-2, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=texts(), data_collator=padded, callbacks=[kept, callback]
    )
    batches: list[dict[str, Tensor]] = []
    inner = trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        batches.append({name: value.clone() for name, value in inputs.items()})
        return inner(model, inputs, *rest)

    trainer.training_step = training_step
    trainer.train()
    return callback.watch, kept.models, batches, trainer


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "clipped": {"max_grad_norm": 0.01},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_hugging_face_trainer(way: str, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    watch, models, batches, trainer = train(llama(), tmp_path, **WAYS[way])
    assert [record.step for record in watch.history] == [0, 1, 2]
    each = len(batches) // 3
    for record, model in zip(watch.history, models, strict=True):
        own = batches[record.step * each : (record.step + 1) * each]
        wanted = torch.cat(
            [norms_of(per_sample_gradients(model, own_loss, b["input_ids"], b["attention_mask"])) for b in own]
        )
        torch.testing.assert_close(record.norms, wanted, rtol=0.05 if way == "bf16" else 1e-3, atol=0)
        assert record.noise_scale is not None
        assert record.layers["model.layers.0.mlp.up_proj"].output > 0
    logged = [log for log in trainer.state.log_history if "unsum/norm/median" in log]
    assert len(logged) == 3
    assert logged[-1]["unsum/norm/largest"] == pytest.approx(float(watch.last.norms.max()))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_the_trainer_with_adapters(dora: bool, bf16: bool, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    watch, models, batches, _ = train(model, tmp_path, gradient_accumulation_steps=2, bf16=bf16)
    for record, model in zip(watch.history, models, strict=True):
        own = batches[record.step * 2 : record.step * 2 + 2]
        wanted = torch.cat(
            [norms_of(per_sample_gradients(model, own_loss, b["input_ids"], b["attention_mask"])) for b in own]
        )
        torch.testing.assert_close(record.norms, wanted, rtol=0.05 if bf16 else 1e-3, atol=0)


def test_the_trainer_compiled(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    watch, models, batches, _ = train(llama(), tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    for record, model, b in zip(watch.history, models, batches, strict=True):
        wanted = norms_of(per_sample_gradients(model, own_loss, b["input_ids"], b["attention_mask"]))
        torch.testing.assert_close(record.norms, wanted, rtol=1e-3, atol=0)


def test_the_trainers_options(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(unsum.errors.OptionError, match="every=0"):
        unsum.integrations.transformers.Watch(every=0)
    watch, *_ = train(llama(), tmp_path, watch={"every": 2, "optimizer": True, "to": str(tmp_path / "run.jsonl")})
    assert [record.step for record in watch.history] == [0, 2]
    assert watch.last.layers["lm_head"].update > 0
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


def test_lightning(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self(batch["x"]), batch["y"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Models(lightning.Callback):
        models: list[nn.Module] = []  # noqa: RUF012

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            self.models.append(copy.deepcopy(module.net))

    torch.manual_seed(0)
    data = [{"x": torch.randn(5), "y": torch.randint(3, ()), "id": f"s{k}"} for k in range(24)]
    for options in ({}, {"accumulate_grad_batches": 2}):
        callback, kept, log = unsum.integrations.lightning.Watch(loss_reduction="mean"), Models(), CSVLogger(tmp_path)
        kept.models = []
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", callbacks=[kept, callback], logger=log, log_every_n_steps=1,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(Net(), torch.utils.data.DataLoader(data, 4))
        size = 4 * options.get("accumulate_grad_batches", 1)
        assert len(callback.watch.history) == 24 // size
        for record in callback.watch.history:
            own = data[record.step * size : (record.step + 1) * size]
            x, y = torch.stack([d["x"] for d in own]), torch.stack([d["y"] for d in own])
            model = kept.models[record.step * size // 4]
            each = per_sample_gradients(model, lambda m, x, y: F.cross_entropy(m(x), y), x, y)
            torch.testing.assert_close(record.norms, norms_of(each), rtol=1e-3, atol=0)
            assert record.ids == [d["id"] for d in own]
        log.save()
        assert (
            "unsum/norm/median" in (tmp_path / "lightning_logs" / f"version_{log.version}" / "metrics.csv").read_text()
        )


def test_accelerates_own_loop(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the trainers in other tests
    torch.manual_seed(0)
    data = [(torch.randn(5), torch.randint(3, ())) for _ in range(16)]
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    plain = copy.deepcopy(net)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.0), torch.utils.data.DataLoader(data, 4)
    )
    watch = unsum.watch(model, loss_reduction="mean", scaler=accelerator.scaler)
    watch.division.by_micro_batches = True
    for x, y in loader:  # as docs/training.md has it
        if accelerator.sync_gradients:  # the step before is over
            watch.open()
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                watch.close()
            optimizer.step()
            optimizer.zero_grad()
    assert len(watch.history) == 2
    for record in watch.history:
        own = data[record.step * 8 : record.step * 8 + 8]
        x, y = torch.stack([x for x, _ in own]), torch.stack([y for _, y in own])
        each = per_sample_gradients(plain, lambda m, x, y: F.cross_entropy(m(x), y), x, y)
        torch.testing.assert_close(record.norms, norms_of(each), rtol=0.05, atol=0)


def test_where_a_library_is_missing() -> None:
    with pytest.raises(AttributeError, match="there are: transformers, lightning"):
        unsum.integrations.keras
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unsum.integrations.transformers.__name__ == "unsum.integrations.transformers"
