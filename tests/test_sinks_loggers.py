"""Parquet and the loggers: what they hold is what the records say. Each where it is installed, without a network."""

import errno
import math
import os

import pytest
import torch

import unsum
from unsum.errors import OptionError
from unsum.training.record import Layer, NonFinite, Record
from unsum.training.sinks import Sinks, files

TEXTS = {"b": "a text with <b> and **stars**"}


def record(step, **more):
    values = {
        "loss": 0.5 / (step + 1), "norms": torch.tensor([1.0, 9.0]), "ids": ["a", "b"], "outliers": ["b"],
        "texts": TEXTS, "layers": {"block.0": Layer(norm=1.5, update=1e-3), "": Layer(norm=0.5)},
    }  # fmt: skip
    return Record(step=step, **(values | more))


# ---- Parquet ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet")


def test_parquet_has_one_row_for_each_record(parquet, tmp_path):
    sinks = Sinks(tmp_path / "run.parquet")
    where = NonFinite("fc:output", "nan", sample=3, position=(1, 2))
    for step in range(150):
        sinks.send(record(step, nonfinite=where if step == 70 else None, norms=None if step == 1 else torch.ones(2)))
    assert len(parquet.read_table(tmp_path / "run.parquet")) == 128  # two parts; the rest is held back
    sinks.send(record(150, ids=[1, 2], loss=math.nan))
    sinks.flush()
    rows = parquet.read_table(tmp_path / "run.parquet").to_pylist()
    assert [row["step"] for row in rows] == list(range(151))
    assert rows[70]["nonfinite"]["position"] == [1, 2] and rows[70]["nonfinite"]["sample"] == "3"
    assert rows[0]["layers"][0]["layer"] == "block.0" and rows[0]["layers"][0]["update"] == 1e-3
    assert rows[0]["texts"] == [{"id": "b", "text": TEXTS["b"]}] and rows[1]["norms"] is None
    assert rows[150]["ids"] == ["1", "2"] and math.isnan(rows[150]["loss"])


def test_parquet_is_complete_when_the_sink_is_let_go_and_the_next_run_adds_to_it(parquet, tmp_path):
    for step in range(3):
        Sinks(tmp_path / "run.parquet").send(record(step, rank=0))
    Sinks(tmp_path / "run.parquet").send(record(0, rank=1))
    assert [row["step"] for row in parquet.read_table(tmp_path / "run.parquet").to_pylist()] == [0, 1, 2]
    assert len(parquet.read_table(tmp_path / "run.rank1.parquet")) == 1


def test_parquet_keeps_what_could_not_be_written(parquet, tmp_path, monkeypatch):
    sinks = Sinks(tmp_path / "run.parquet")
    write = parquet.write_table

    def full(rows, path):
        path.write_bytes(b"PAR1")  # a part of it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.warns(UserWarning, match="No space left") as told:
        for step in range(200):
            sinks.send(record(step))
        sinks.flush()
    assert len(told) == 1 and os.listdir(tmp_path / "run.parquet") == []
    monkeypatch.setattr(parquet, "write_table", write)
    sinks.flush()
    assert [row["step"] for row in parquet.read_table(tmp_path / "run.parquet").to_pylist()] == list(range(200))


def test_parquet_does_not_write_over_a_file(parquet, tmp_path):
    (tmp_path / "run.parquet").write_text("mine")
    with pytest.raises(OptionError, match="is a file"):
        unsum.sinks.parquet(tmp_path / "run.parquet")
    assert (tmp_path / "run.parquet").read_text() == "mine"


def test_a_slow_run_is_written_by_the_clock(parquet, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SECONDS", 0.0)
    Sinks(tmp_path / "run.parquet").send(record(0))
    assert len(parquet.read_table(tmp_path / "run.parquet")) == 1


# ---- loggers ---------------------------------------------------------------------------------------------------------


def sent(sink):
    sinks = Sinks(sink)
    for step in range(3):
        sinks.send(record(step))
    sinks.send(record(9, rank=1))  # which another process logs, or nobody
    sinks.flush()
    return record(2).scalars()


def test_tensorboard_has_curves_histograms_and_texts(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    scalars = sent(unsum.sinks.tensorboard(tmp_path / "own"))
    with SummaryWriter(str(tmp_path / "shared")) as writer:
        sent(unsum.sinks.tensorboard(writer))
    for folder, prefix in (("own", ""), ("shared", "unsum/")):
        found = EventAccumulator(str(tmp_path / folder)).Reload()
        for name, value in scalars.items():
            events = found.Scalars(prefix + name)
            assert [event.step for event in events] == [0, 1, 2]
            assert events[2].value == pytest.approx(value)
        assert found.Histograms(f"{prefix}norms")[0].histogram_value.max == 9
        text = found.Tensors(f"{prefix}outliers/text_summary")[0].tensor_proto.string_val[0].decode()
        assert TEXTS["b"] in text


def test_tensorboard_is_asked_only_for_what_it_can_be(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    for wrong, told in ((3, "not int"), (tmp_path / "file", "cannot make the folder")):
        with pytest.raises(OptionError, match=told):
            unsum.sinks.tensorboard(wrong)


def test_mlflow_has_curves_and_texts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    scalars = sent(unsum.sinks.mlflow())
    assert mlflow.active_run() is None  # no run is open that was not before
    with mlflow.start_run() as run:
        sent(unsum.sinks.mlflow())
    client = mlflow.MlflowClient()
    (own,) = [each for each in client.search_runs(["0"]) if each.info.run_id != run.info.run_id]
    for key, prefix in ((own.info.run_id, ""), (run.info.run_id, "unsum/")):
        for name, value in scalars.items():
            history = client.get_metric_history(key, prefix + name)
            assert [each.step for each in history] == [0, 1, 2]
            assert history[2].value == pytest.approx(value)
        assert next(each.path for each in client.list_artifacts(key, "outliers")) == "outliers/step-00000000.txt"
    with pytest.raises(OptionError, match="run=int"):
        unsum.sinks.mlflow(3)


def test_wandb_has_curves_of_its_own_and_an_axis_of_its_own_in_a_shared_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    run = wandb.init(mode="offline", dir=tmp_path, project="p")
    monkeypatch.setattr(
        run, "log", lambda values, step=None, log=run.log: (logged.append((values, step)), log(values, step))
    )
    scalars = sent(unsum.sinks.wandb())
    values, step = logged[2]
    assert step is None and values["unsum/step"] == 2
    assert {name: values[f"unsum/{name}"] for name in scalars} == scalars
    assert values["unsum/outlier_texts"].data == [["b", 9.0, TEXTS["b"]]]
    run.finish()
    sent(unsum.sinks.wandb(mode="offline", dir=tmp_path, project="p"))
    assert wandb.run.summary["norm/largest"] == 9 and wandb.run.step == 2
    wandb.finish()
    for wrong in ({"run": 3}, {"run": run, "project": "p"}):
        with pytest.raises(OptionError, match=r"sinks\.wandb"):
            unsum.sinks.wandb(**wrong)


def test_trackio_has_curves(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    scalars = sent(unsum.sinks.trackio(project="unsum-test", name="first", auto_log_cpu=False))
    trackio.finish()
    logs = SQLiteStorage.get_logs("unsum-test", "first")
    trackio.delete_project("unsum-test", force=True)
    assert [each["step"] for each in logs] == [0, 1, 2]
    assert {name: logs[2][name] for name in scalars} == pytest.approx(scalars)
