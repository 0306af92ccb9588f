"""The Hugging Face Trainer: records have the data set's own ids, whatever order it trains in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import unsum
from unsum.errors import OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Net(nn.Module):
    """The norm of a sample's gradient is √(|x|² + 1), whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.fc(x).sum(), "logits": self.fc(x)}


def rows(count: int = 18, **more: Any) -> list[dict[str, Any]]:
    """A list of dicts, which a collator must not change."""
    return [{"x": torch.tensor([float(k), 1.0]), "index": k, **more} for k in range(count)]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows())


def stacked(examples: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([each["x"] for each in examples])}


def norm_of(index: int) -> float:
    return (index**2 + 2) ** 0.5


def trained(folder: Any, data: Any, *, ids: Any = "index", text: Any = None, watch: Any = None, **options: Any) -> Any:
    callback = unsum.integrations.transformers.Watch(**(watch or {}))
    given = {"per_device_train_batch_size": 2, "remove_unused_columns": False, "num_train_epochs": 3} | options
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", **given
    )
    collate = callback.collator(stacked, ids=ids, text=text)
    trainer = transformers.Trainer(
        Net(), args, train_dataset=data, eval_dataset=rows(4), data_collator=collate, callbacks=[callback]
    )
    trainer.train()
    return callback, trainer


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation that does not divide an epoch": {"gradient_accumulation_steps": 2},
    "evaluation in between": {"eval_strategy": "epoch", "gradient_accumulation_steps": 2},
    "workers that fetch ahead": {"dataloader_num_workers": 2, "eval_strategy": "epoch"},
    "every third step": {"watch": {"every": 3}, "gradient_accumulation_steps": 2},
    "a last batch that is smaller": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "compiled": {
        "torch_compile": True, "torch_compile_backend": "aot_eager", "eval_strategy": "epoch", "num_train_epochs": 1,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_the_examples_that_ids_name(way: str, tmp_path: Any) -> None:
    data = rows()
    callback, trainer = trained(tmp_path, data, **WAYS[way])
    seen = []
    for record in callback.watch.history:
        torch.testing.assert_close(record.norms.tolist(), [norm_of(k) for k in record.ids], rtol=1e-4, atol=0)
        seen += record.ids
    assert all("index" in row for row in data)
    if "watch" not in WAYS[way]:
        epochs = WAYS[way].get("num_train_epochs", 3)
        assert sorted(seen) == sorted(list(range(18)) * epochs) and seen[:18] != list(range(18))  # shuffled
    assert trainer.evaluate(rows(3))["eval_runtime"] > 0
    assert trainer.evaluate([{"x": torch.ones(2)}])["eval_runtime"] > 0  # examples without an index


def test_an_iterable_data_set(tmp_path: Any) -> None:
    callback, _ = trained(tmp_path, Stream(), max_steps=5, gradient_accumulation_steps=2)
    assert [record.ids for record in callback.watch.history][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_functions_of_examples_and_texts(tmp_path: Any) -> None:
    data = rows(16, words="some text")
    data[11]["x"] = torch.tensor([1000.0, 1.0])
    callback, _ = trained(
        tmp_path, data, ids=lambda row: f"s{int(row['index'])}", text="words", per_device_train_batch_size=16,
        num_train_epochs=1,
    )  # fmt: skip
    assert callback.watch.last.outliers == ["s11"] and callback.watch.last.texts == {"s11": "some text"}
    assert sorted(callback.watch.last.ids) == sorted(f"s{k}" for k in range(16))


def test_examples_without_ids_are_told(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="remove_unused_columns=False"):
        trained(tmp_path, rows(), remove_unused_columns=True)
    with pytest.raises(OptionError, match="example 1 of a batch has no 'index'"):
        callback = unsum.integrations.transformers.Watch()
        callback.collator(default_collate, ids="index")([{"x": 1, "index": 2}, {"x": 1}])
    with pytest.raises(OptionError, match="neither ids= nor text="):
        callback.collator(default_collate)


def test_what_is_written_wrong_is_told() -> None:
    watch = unsum.integrations.transformers.Watch
    with pytest.raises(OptionError, match=r"data_collator=callback.collator\(collate, ids=\"index\"\)"):
        watch(ids="index")
    with pytest.raises(OptionError, match="gradient_accumulation_steps"):
        watch(accumulation=2)
    with pytest.raises(OptionError, match=r"(?s)Watch\(Net\).*callbacks=\[unsum.integrations.transformers.Watch\(\)\]"):
        watch(Net())
    with pytest.raises(OptionError, match=r"has not seen a training step.*\n.*callbacks=\[callback\]"):
        watch().watch
    with pytest.raises(AttributeError, match=r"callbacks=\[unsum.integrations.transformers.Watch\(\)\]"):
        transformers.trainer_callback.CallbackHandler([unsum.watch(Net())], None, None, None, None).on_init_end(
            None, None, None
        )
