"""What `unsum.integrations.transformers.Watch` adds to the Trainer's logs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.fc(x).square().mean()}


def test_a_record_joins_the_logs_once(tmp_path) -> None:
    import unsum.integrations.transformers

    torch.manual_seed(0)
    callback = unsum.integrations.transformers.Watch(every=3)
    args = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=6, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    data = [{"x": torch.randn(3)} for _ in range(12)]
    trainer = transformers.Trainer(Net(), args, train_dataset=data, callbacks=[callback])
    trainer.train()
    logged = ["unsum/norm/median" in entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [True, False, False, True, False, False]
