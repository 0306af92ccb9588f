"""`unsum.watch`: ids and texts from batches of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unsum
from unsum.errors import OptionError


@dataclass
class Batch:
    x: Tensor
    id: list[str]


class Pair(NamedTuple):
    x: Tensor
    ids: list[str]


X = torch.randn(3, 4)


def record(batch: Any, x: Tensor = X, **options: Any) -> unsum.training.Record:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    watch = unsum.watch(model, **options)
    for _ in watch.loader([batch]):
        with watch:
            model(x).sum().backward()
    return watch.last


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": X, "id": ["a", "b", "c"]}, ["a", "b", "c"]),
        ({"x": X, "ids": ("a", "b", "c")}, ["a", "b", "c"]),
        ({"x": X, "idx": torch.tensor([[7], [8], [9]])}, [7, 8, 9]),
        ({"x": X, "index": np.array([7, 8, 9])}, [7, 8, 9]),
        ({"x": X, "id": [np.int64(7), torch.tensor(8), 9]}, [7, 8, 9]),
        (Batch(X, ["a", "b", "c"]), ["a", "b", "c"]),
        (Pair(X, ["a", "b", "c"]), ["a", "b", "c"]),
        ((X, ["a", "b", "c"]), [0, 1, 2]),
        ({"x": X, "id": None}, [0, 1, 2]),
        ({"x": X, "id": {"a": 1}}, [0, 1, 2]),
        (X, [0, 1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_ids_that_batches_have(batch: Any, expected: list[Any]) -> None:
    found = record(batch).ids
    assert found == expected and all(type(each) in (int, str) for each in found)


@pytest.mark.parametrize("ids", [["a", "b"], 7, "abc", torch.tensor(7)])
def test_other_ids_than_one_for_each_sample_are_told(ids: Any) -> None:
    with pytest.warns(UserWarning, match=r"\d ids were found in the batches of a step with 3 samples"):
        assert record({"id": ids}).ids == [0, 1, 2]


def test_the_id_of_a_batch_of_one() -> None:
    assert record({"id": "abc"}, X[:1]).ids == ["abc"]


def test_ids_that_are_asked_for() -> None:
    assert record(Batch(X, ["a", "b", "c"]), ids="id").ids == ["a", "b", "c"]
    assert record(SimpleNamespace(key=["a", "b", "c"]), ids="key").ids == ["a", "b", "c"]
    assert record((X, "abc"), ids=lambda batch: list(batch[1])).ids == ["a", "b", "c"]
    for batch, why in (
        ((X,), "function"),
        ({"x": X}, "no key 'key'; it has 'x'"),
        (Batch(X, []), r"no key 'key'; it has 'x', 'id'\n  write: ids=\"id\""),
        ({"key": {}}, "dict"),
    ):
        with pytest.raises(OptionError, match=why):
            record(batch, ids="key")


def test_texts_without_ids() -> None:
    x = torch.ones(8, 4)
    x[5] = 1000.0
    found = record({"words": [f"text {k}" for k in range(8)]}, x, text="words")
    assert found.outliers == [5] and found.texts == {5: "text 5"}
    with pytest.warns(UserWarning, match="2 texts were found in the batches of a step with 8 samples"):
        assert record({"words": ["a", "b"]}, x, text="words").texts == {}


def test_a_text_that_no_file_can_hold(tmp_path) -> None:
    x = torch.ones(8, 4)
    x[5] = 1000.0
    model = nn.Linear(4, 1)
    watch = unsum.watch(model, text="words", to=tmp_path / "run.jsonl")
    watch.note({"words": ["broken \ud800"] * 8})
    with watch:
        model(x).sum().backward()
    watch.report(tmp_path / "run.html")
    assert watch.last.texts == {5: "broken ?"} and "broken ?" in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["ids", "text"])
def test_ids_that_were_asked_for_and_no_batch_that_was_seen(option: str) -> None:
    model = nn.Linear(4, 1)
    watch = unsum.watch(model, **{option: "id"})
    with pytest.warns(UserWarning, match="no batch was seen") as told:
        for _ in range(2):
            with watch:
                model(X).sum().backward()
    assert len(told) == 1 and told[0].filename == __file__
    assert watch.last.ids == [0, 1, 2]
