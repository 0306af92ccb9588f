"""`unsum watch`: a run in the terminal, for programs, and as a page."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import unsum
from unsum import cli
from unsum.training import run_file, terminal
from unsum.training.record import Layer, NonFinite, Record
from unsum.training.sinks import jsonl


@pytest.fixture
def run(tmp_path):
    """A file with twenty records: an outlier with its text, and a NaN."""
    path = tmp_path / "run.jsonl"
    sink = jsonl(path)
    for step in range(20):
        norms = torch.tensor([1.0, 1.5, 2.0, 30.0 if step == 7 else 1.2])
        ids = [4 * step + k for k in range(4)]
        sink(
            Record(
                step, 10.0 - step / 4, norms, ids, noise_scale=3.0, outliers=[ids[3]] if step == 7 else [],
                nonfinite=NonFinite("fc:output", "nan", 37, 2, "fc.weight") if step == 9 else None,
                layers={"fc": Layer(norm=1.0, update=1e-3), "head": Layer(norm=2.0, update=5e-3)},
                texts={31: "un élève\nlit"} if step == 7 else {},
            )
        )  # fmt: skip
    return path


def test_a_run_in_the_terminal(run, capsys):
    assert cli.main(["watch", str(run)]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert (
        "20 steps watched (steps 0 to 19), 4 samples in each. The loss went from 9.62 to 5.62 (medians of the"
        in told.out
    )
    assert "First value that is not finite: step 9, nan at fc:output, sample 37, position 2" in told.out
    loss = next(line.split() for line in told.out.splitlines() if line.startswith("loss"))
    assert loss[1:4] == ["10", "5.25", "10"] and loss[4][0] == "█" and loss[4][-1] == "▁"
    outlier = next(line.split() for line in told.out.splitlines() if line.endswith("lit"))
    assert outlier == ["7", "30", "17.1", "31", "un", "élève", "lit"]
    layers = told.out.splitlines()[-2:]
    assert [line.split()[:2] for line in layers] == [["head", "0.005"], ["fc", "0.001"]]  # the largest updates first


def test_for_programs(run, capsys):
    assert cli.main(["watch", str(run), "--json", "--last", "12"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["records"], found["steps"], found["notes"]) == (12, [8, 19], [])
    assert found["loss"] == {"first": 8.0, "last": 5.25} and found["outliers"] == []
    assert found["nonfinite"]["step"] == 9 and found["nonfinite"]["site"] == "fc:output"
    assert found["layers"]["head"]["update"] == 0.005


def test_as_a_page(run, capsys, tmp_path):
    page = tmp_path / "new" / "run.html"
    assert cli.main(["watch", str(run), "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"page: {page}\n")
    assert "<h1>run</h1>" in page.read_text() and "un élève" in page.read_text(encoding="utf-8")
    assert cli.main(["watch", str(run), "--html", str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def test_a_torn_last_line_is_left_out_with_a_note(run, capsys):
    whole = run.read_bytes()
    run.write_bytes(whole[:-30])
    assert cli.main(["watch", str(run), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["steps"] == [0, 18]
    assert "run.jsonl: the last line is torn" in told.err and len(told.err.splitlines()) == 1
    run.write_bytes(whole[:-30] + b"\n" + whole.splitlines()[-1] + b"\n[1]\n")  # a run that went on after it
    assert run_file.read(run).records[-1].step == 19
    assert run_file.read(run).notes == ["2 damaged lines are left out: 20, 22"]


def test_a_run_that_was_resumed_or_started_again(run):
    sink = jsonl(run)
    sink(Record(15, 1.0))  # from a checkpoint
    found = run_file.read(run)
    assert [record.step for record in found.records] == list(range(16)) and found.records[-1].loss == 1.0
    assert "5 earlier records are left out" in found.notes[0]
    sink(Record(0, 2.0))
    assert [record.loss for record in run_file.read(run).records] == [2.0]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("gone.jsonl", None, "no file"),
        ("empty.jsonl", b"", "no step was watched yet"),
        ("other.jsonl", b'{"a": 1}\n{"b": 2}\n', "holds no record of unsum.watch: line 1"),
        ("binary.jsonl", bytes(range(256)), "holds no record"),
        ("run.parquet", b"PAR1", "reads JSON lines"),
    ],
)
def test_files_that_are_no_run(tmp_path, capsys, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["watch", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("wrong", [["--last", "0"], ["--last", "x"], ["--what"]])
def test_a_wrong_command_line(run, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["watch", str(run), *wrong])
    assert stopped.value.code == 2
    capsys.readouterr()


def test_without_rich_and_without_utf8(run):
    code = "import sys; sys.modules['rich'] = None; from unsum import cli; sys.exit(cli.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "watch", str(run)], capture_output=True, timeout=120,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"#" in done.stdout and done.stdout.isascii()


def test_what_a_watch_has_written_is_what_is_shown(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = unsum.watch(model, to=tmp_path / "run.jsonl", optimizer=optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        with watch:
            model(torch.randn(6, 3)).square().sum().backward()
        optimizer.step()
    watch.flush()
    found = run_file.read(tmp_path / "run.jsonl").records
    assert [each.as_dict() for each in found] == [each.as_dict() for each in watch.history]
    assert terminal.text(found) == terminal.text(watch.history)


def test_other_ranks_are_named(run):
    jsonl(run)(Record(0, rank=1))
    assert run_file.read(run).notes == ["this is rank 0; other ranks: run.rank1.jsonl"]
