"""Small runs in the loops that people have: the Hugging Face Trainer, Lightning, accelerate. Each keeps the model as it
was when each step began, and its batches, so that every record can be compared with plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import per_sample_gradients
from torch import Tensor, nn

import unsum

transformers = pytest.importorskip("transformers")
STEPS = 3
Each = dict[str, Tensor]  # {parameter: (n, *shape)}


@dataclass
class Run:
    """What a run has left: the watch (None where nobody watched), the model, and for each step the model at its begin,
    and its micro-batches."""

    model: nn.Module
    watch: Any = None
    models: list[nn.Module] = field(default_factory=list)
    batches: list[list[Any]] = field(default_factory=list)
    trainer: Any = None

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}


def joined(parts: Sequence[Each]) -> Each:
    """The samples of several micro-batches, one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# ---- the Hugging Face Trainer ---------------------------------------------------------------------------------------


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(*, dora: bool = False) -> nn.Module:
    """The same with adapters, whose parameters are not zero."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


def texts(count: int = 12) -> list[dict[str, Tensor]]:
    """Examples of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 32, (4 + k % 3,), generator=generator)} for k in range(count)]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Dynamic padding: as long as the longest of the batch."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def of_tokens(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The sum over an example's tokens."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    labels = ids.masked_fill(mask == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), reduction="sum")


class Kept(transformers.TrainerCallback):
    """Copies of the model as it is when each step begins."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        plain = copy.deepcopy(model).cpu()
        plain.__dict__.pop("forward", None)  # which accelerate has put there
        plain.forward = type(plain).forward.__get__(plain)
        self.run.models.append(plain)
        self.run.batches.append([])


def with_trainer(
    model: nn.Module, folder: Any, *, watch: dict[str, Any] | None, trainer: Any = None, **options: Any
) -> Run:
    """Three steps of the Trainer, or of another; `watch` has the callback's options, None is without."""
    run = Run(model)
    callback = None if watch is None else unsum.integrations.transformers.Watch(**watch)
    given = {"use_cpu": True, "per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2} | options
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, **given
    )
    run.trainer = (trainer or transformers.Trainer)(
        model, arguments, train_dataset=texts(), data_collator=padded,
        callbacks=[Kept(run), *([] if callback is None else [callback])],
    )  # fmt: skip
    inner = run.trainer.training_step

    def training_step(model: Any, inputs: Any, *rest: Any) -> Any:
        run.batches[-1].append({name: value.cpu().clone() for name, value in inputs.items()})
        return inner(model, inputs, *rest)

    run.trainer.training_step = training_step
    run.trainer.train()
    run.watch = None if callback is None else callback.watch
    return run


def trainers_truth(run: Run, step: int, loss: Any = of_tokens) -> Each:
    """Each example of a step alone, through the model as it was."""
    batches = run.batches[step]
    return joined([per_sample_gradients(run.models[step], loss, b["input_ids"], b["attention_mask"]) for b in batches])


# ---- rows of numbers, in classes, for Lightning and accelerate -----------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(count: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(5, generator=generator), "y": torch.randint(3, (), generator=generator), "id": f"s{k}"}
        for k in range(count)
    ]


def of_class(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def rows_truth(run: Run, step: int) -> Each:
    return joined(
        [per_sample_gradients(run.models[step], of_class, b["x"].cpu(), b["y"].cpu()) for b in run.batches[step]]
    )


def ids_of(run: Run, step: int) -> list[str]:
    return [each for batch in run.batches[step] for each in batch["id"]]


def with_lightning(*, watch: dict[str, Any] | None, **options: Any) -> Run:
    """One epoch of Lightning's Trainer, in batches of 4; the loss is their mean."""
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self(batch["x"]), batch["y"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Models(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number % trainer.accumulate_grad_batches == 0:
                run.models.append(copy.deepcopy(module.net).cpu())
                run.batches.append([])
            run.batches[-1].append(batch)

    module = Net()
    run = Run(module.net)
    callback = None if watch is None else unsum.integrations.lightning.Watch(loss_reduction="mean", **watch)
    given = {"accelerator": "cpu", "logger": False} | options
    run.trainer = lightning.Trainer(
        max_epochs=1, callbacks=[Models(), *([] if callback is None else [callback])], log_every_n_steps=1,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, **given,
    )  # fmt: skip
    run.trainer.fit(module, torch.utils.data.DataLoader(rows(), 4))
    run.watch = None if callback is None else callback.watch
    return run


def with_accelerate(*, watched: bool, lr: float = 0.1, **options: Any) -> Run:
    """One epoch of a loop of accelerate's, as docs/watch.md has it."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the trainers in other tests
    given = {"cpu": True} | options
    accelerator = accelerate.Accelerator(**given)
    run = Run(network())
    model, optimizer, loader = accelerator.prepare(
        run.model, torch.optim.SGD(run.model.parameters(), lr), torch.utils.data.DataLoader(rows(), 4)
    )
    if watched:
        accumulation = accelerator.gradient_accumulation_steps
        run.watch = watch = unsum.watch(
            model, loss_reduction="mean", accumulation=accumulation, scaler=accelerator.scaler
        )
    for batch in loader:
        if accelerator.sync_gradients:  # the step before is over
            run.models.append(_plain(run.model))
            run.batches.append([])
            if watched:
                watch.note(batch)
                watch.open()
        elif watched:
            watch.note(batch)
        run.batches[-1].append(batch)
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
            if accelerator.sync_gradients and watched:
                watch.close()
            optimizer.step()
            optimizer.zero_grad()
    return run


def _plain(model: nn.Module) -> nn.Module:
    """A copy of the network, without what accelerate has put on it."""
    found = network()
    found.load_state_dict(model.state_dict())
    return found
