"""Sinks: what is written, that a sink which fails never stops training, and that nothing is lost."""

import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import NotInstalled, OptionError
from unsum.training.record import Layer, NonFinite, Record
from unsum.training.sinks import Sinks
from unsum.training.sinks.send import KEPT


def record(step, rank=0, **more):
    values = {"loss": 0.5, "norms": torch.tensor([1.0, 2.0]), "ids": [7, "b"], "layers": {"fc": Layer(norm=1.5)}} | more
    return Record(step=step, rank=rank, **values)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def steps(path):
    return [line["step"] for line in lines(path)]


class Failing:
    """A sink that fails while `is_broken`, and keeps what it has taken."""

    def __init__(self, error=None):
        self.is_broken, self.taken, self.calls, self.error = True, [], 0, error or RuntimeError("no connection")

    def __call__(self, record):
        self.calls += 1
        if self.is_broken:
            raise type(self.error)(*self.error.args)  # a new one: an error holds the frames that it has passed
        self.taken.append(record.step)


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def test_a_line_has_the_keys_of_the_record_and_reads_back(tmp_path):
    bad = record(
        3, loss=math.nan, nonfinite=NonFinite("fc:output", "nan", sample="b", position=(1, 2)), texts={"b": "x"}
    )
    sinks = Sinks(tmp_path / "new" / "run.jsonl")
    sinks.send(bad)
    (line,) = lines(tmp_path / "new" / "run.jsonl")
    assert line == bad.as_dict() and line["loss"] == "nan"
    again = Record.from_dict(line)
    assert again.nonfinite == bad.nonfinite and math.isnan(again.loss) and again.norms.tolist() == [1.0, 2.0]


def test_a_file_that_is_there_is_appended_to_and_a_torn_line_stays_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    for step in range(2):
        Sinks(str(path)).send(record(step))
    assert steps(path) == [0, 1]
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # the process was killed
    Sinks(path).send(record(3))
    whole = path.read_text().splitlines()
    assert whole[2] == '{"step": 2, "lo' and json.loads(whole[3])["step"] == 3


def test_each_rank_writes_its_own_file_and_loggers_of_ours_only_on_rank_0(tmp_path, capsys):
    own = []
    sinks = Sinks([tmp_path / "run.jsonl", own.append, unsum.sinks.console()])
    for rank in range(3):
        sinks.send(record(rank, rank=rank))
    assert sorted(os.listdir(tmp_path)) == ["run.jsonl", "run.rank1.jsonl", "run.rank2.jsonl"]
    assert steps(tmp_path / "run.rank2.jsonl") == [2]
    assert [each.rank for each in own] == [0, 1, 2]
    assert capsys.readouterr().out.count("\n") == 1


RANKS = """
    import sys, torch, unsum
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = torch.nn.Linear(3, 1)
    watch = unsum.watch(model, to=folder + "/run.jsonl")
    for step in range(2):
        with watch:
            model(torch.randn(4, 3)).sum().backward()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def test_two_processes_write_two_files(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(RANKS)]
    here = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=here) for rank in range(2)]
    assert [each.wait(120) for each in started] == [0, 0]
    for name, rank in (("run.jsonl", 0), ("run.rank1.jsonl", 1)):
        assert [(line["step"], line["rank"]) for line in lines(tmp_path / name)] == [(0, rank), (1, rank)]


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_training_goes_on_when_the_disk_is_full_and_nothing_is_lost(tmp_path):
    path = tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    watch = unsum.watch(model, to=path)
    with pytest.warns(UserWarning, match=r"sink .*run.jsonl failed \(OSError.*No space left") as told:
        for _ in range(3):
            with watch:
                model(x).sum().backward()
        watch.flush()
    assert len(told) == 1 and len(watch.history) == 3
    path.unlink()  # space comes back
    with watch:
        model(x).sum().backward()
    assert steps(path) == [0, 1, 2, 3]


LIMITED = """
    import resource, sys
    from unsum.training.record import Record
    from unsum.training.sinks import Sinks
    sinks = Sinks(sys.argv[1])
    sinks.send(Record(step=0, ids=list(range(50))))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(sys.argv[1], "rb") as file:
        size = len(file.read())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limit[1]))  # room for 20 bytes: a short write
    sinks.send(Record(step=1, ids=list(range(50))))
    with open(sys.argv[1], "rb") as file:
        print(len(file.read()) == size)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    sinks.send(Record(step=2))
"""


def test_a_line_that_fits_in_part_is_taken_back(tmp_path):
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"
    assert done.stderr.count("UserWarning") == 1 and "bytes written" in done.stderr
    assert steps(path) == [0, 1, 2]


# ---- sinks that fail -------------------------------------------------------------------------------------------------


def test_a_logger_that_raises_is_told_of_once_and_gets_its_records_later():
    sink, other = Failing(), []
    sinks = Sinks([sink, other.append])
    with pytest.warns(UserWarning, match=r"sink Failing failed \(RuntimeError: no connection\)") as told:
        for step in range(4):
            sinks.send(record(step))
        sinks.flush()
    assert len(told) == 1 and len(other) == 4
    sink.is_broken = False
    sinks.send(record(4))
    assert sink.taken == [0, 1, 2, 3, 4]


def test_one_record_that_a_sink_cannot_take_does_not_stop_the_others():
    taken, tries = [], []

    def sink(record):
        tries.append(record.step)
        if record.step == 1 and len(tries) < 6:
            raise ValueError("cannot take it")
        taken.append(record.step)

    sinks = Sinks(sink)
    with pytest.warns(UserWarning, match="cannot take it"):
        for step in range(4):
            sinks.send(record(step))
    assert sorted(taken) == [0, 2, 3]
    sinks.flush()
    assert sorted(taken) == [0, 1, 2, 3]


def test_what_waits_is_bounded():
    sink = Failing()
    sinks = Sinks(sink)
    with pytest.warns(UserWarning, match=f"{KEPT:,}"):
        for step in range(KEPT + 5):
            sinks.send(Record(step=step))
    sink.is_broken = False
    sinks.flush()
    assert sink.taken == list(range(5, KEPT + 5))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_the_user_can_still_stop(error):
    sink = Failing(error)
    sinks = Sinks(sink)
    with pytest.raises(type(error)):
        sinks.send(record(0))
    sink.is_broken = False
    sinks.send(record(1))
    assert sink.taken == [0, 1]


def test_flush_reaches_a_sink_that_has_one():
    class Held(list):
        flushed = 0

        def __call__(self, record):
            self.append(record)

        def flush(self):
            self.flushed += 1

    held = Held()
    model = nn.Linear(3, 1)
    watch = unsum.watch(model, to=held)
    with watch:
        model(torch.ones(2, 3)).sum().backward()
    watch.flush()
    assert held.flushed == 1 and len(held) == 1


def test_a_sink_gets_what_waits_when_the_watch_is_let_go():
    sink = Failing()
    sinks = Sinks(sink)
    with pytest.warns(UserWarning, match="no connection"):
        sinks.send(record(0))
    sink.is_broken = False
    del sinks
    gc.collect()
    assert sink.taken == [0]


AT_EXIT = """
    import sys, torch, unsum
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = unsum.watch(model, to=sys.argv[1], optimizer=optimizer)
    with watch:
        model(torch.randn(4, 3)).sum().backward()
"""


def test_the_last_record_is_written_when_the_program_ends(tmp_path):
    """Its update never comes, so that it is not complete until then."""
    subprocess.run([sys.executable, "-c", textwrap.dedent(AT_EXIT), tmp_path / "run.jsonl"], timeout=120, check=True)
    assert steps(tmp_path / "run.jsonl") == [0]


# ---- wrong sinks -----------------------------------------------------------------------------------------------------


class Writer:
    def add_scalar(self, *_): ...


async def later(record): ...


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("run.csv", r"\.jsonl or \.parquet"),
        ("run", r"\.jsonl or \.parquet"),
        ("", r"\.jsonl or \.parquet"),
        (3, "int is no sink"),
        ({"a": 1}, "dict is no sink"),
        (Writer(), r"unsum\.sinks\.tensorboard\(writer\)"),
        ([[print]], "a list in a list"),
        ([print, None], "NoneType is no sink"),
        (lambda: None, "called with one record"),
        (later, "async"),
        (Writer, "a class"),
        ("/dev/null/x/run.jsonl", "cannot make the folder"),
    ],
)
def test_a_wrong_sink_is_an_error_before_training(to, told):
    with pytest.raises(OptionError, match=told):
        unsum.watch(nn.Linear(1, 1), to=to)


def test_a_path_that_cannot_be_written_is_an_error_before_training(tmp_path):
    with pytest.raises(OptionError, match="is a folder"):
        (tmp_path / "run.jsonl").mkdir()
        Sinks(tmp_path / "run.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot make the folder"):
        Sinks(tmp_path / "file" / "run.jsonl")


PACKAGES = {"tensorboard": ("runs",), "wandb": (), "mlflow": (), "trackio": (), "parquet": ("run.parquet",)}


@pytest.mark.parametrize("name", PACKAGES)
def test_where_a_package_is_absent_the_factory_says_how_to_install_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absent = {"parquet": "pyarrow"}.get(name, name)
    for module in [each for each in sys.modules if each.partition(".")[0] == absent]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, absent, None)  # as if it were not installed
    with pytest.raises(NotInstalled, match=f"{absent}.*pip install {absent}") as told:
        getattr(unsum.sinks, name)(*PACKAGES[name])
    assert isinstance(told.value, ImportError)
    assert os.listdir(tmp_path) == []


# ---- console ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_console_prints_every_kth_record_and_those_that_are_not_finite(has_rich, capsys, monkeypatch):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    elif importlib.util.find_spec("rich") is None:
        pytest.skip("rich is not installed")
    sink = unsum.sinks.console(every=3)
    for step in range(6):
        sink(record(step, nonfinite=NonFinite("fc:output", "nan") if step == 4 else None, outliers=["[b]"]))
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in told] == ["0", "3", "4"]
    assert "NOT FINITE: nan at fc:output" in told[2] and "outliers [b]" in told[0]
    with pytest.raises(OptionError, match="every=0"):
        unsum.sinks.console(every=0)
