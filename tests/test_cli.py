"""The command line: what scripts rely on."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unsum
from unsum import cli
from unsum.errors import OptionError

FILE = """
import torch
from torch import nn
import beside

def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(1)

def setup():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), squares, (torch.randn(6, 3), torch.randn(6, 1))

def mixed():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), squares, setup()[2]

def scalar():
    model, _, batch = setup()
    return model, lambda m, b: squares(m, b).sum(), batch

def broken():
    raise KeyError("no such thing")

def fails():
    model, _, batch = setup()
    return model, lambda m, b: m(b[0] @ torch.ones(7)), batch

def swapped(): return squares, setup()[0], None
def number(): return 3
"""

COMMANDS = ("sites", "check", "draw", "report", "watch", "demo")
INDEX = ("build", "query", "info", "verify", "export")


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    file = tmp_path / "net.py"
    file.write_text(FILE)
    return lambda name: f"{file}:{name}"


def test_a_report_with_a_summary_for_machines(target, capsys, tmp_path):
    assert cli.main(["report", target("setup"), "-o", "out/r.html", "--json", "--title", "Mine"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(Path("out/r.html")) and (tmp_path / "out/r.html").exists()
    assert told["samples"] == 6 and told["flags"] == [] and told["check"] is True and told["missing"] == {}
    assert "<h1>Mine</h1>" in (tmp_path / "out/r.html").read_text()
    assert cli.main(["report", target("setup"), "--no-check"]) == 0
    assert "report.html: 4 layers, 6 samples, 0 flags" in capsys.readouterr().out


def test_flags_make_a_strict_report_fail(target, capsys):
    assert cli.main(["report", target("setup"), "--strict"]) == 0
    assert cli.main(["report", target("mixed")]) == 0
    capsys.readouterr()
    assert cli.main(["report", target("mixed"), "--strict", "--json"]) == 3
    assert {flag["kind"] for flag in json.loads(capsys.readouterr().out)["flags"]} == {"interacting"}


def test_a_picture(target, capsys, tmp_path):
    assert cli.main(["draw", target("setup"), "-o", "g.svg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "g.svg"}
    picture = (tmp_path / "g.svg").read_text()
    assert picture.lstrip().startswith("<svg") and "batch[0]" in picture and 'data-name="0.weight"' in picture
    assert cli.main(["draw", target("setup"), "--backward", "-o", "g.html"]) == 0
    assert capsys.readouterr().out == "g.html\n" and "<html" in (tmp_path / "g.html").read_text()


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("check", "scalar", "one loss for each of the samples"),
        ("report", "scalar", "one loss for each of the samples"),
        ("report", "swapped", "its first is function, no nn.Module"),
        ("report", "number", "must return (model, loss_fn, batch), got int"),
        ("draw", "number", "must return (model, loss_fn, batch), got int"),
        ("sites", "number", "not an nn.Module"),
        ("sites", "gone", "has no function 'gone'"),
        ("report", "broken", "raised KeyError: 'no such thing' (net.py, line "),
        ("report", "fails", "net.py:fails failed: RuntimeError: "),
        ("check", "fails", "net.py:fails failed: RuntimeError: "),
        ("draw", "fails", "net.py:fails failed: RuntimeError: "),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(target, capsys, command, name, said):
    assert cli.main([command, target(name)]) == 1
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and told.err.startswith("unsum: ") and said in told.err


def test_the_whole_traceback_if_asked(target, capsys):
    assert cli.main(["report", target("broken")]) == 1
    assert "--traceback shows where" in capsys.readouterr().err
    assert cli.main(["report", target("broken"), "--traceback"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and 'raise KeyError("no such thing")' in told and "--traceback" not in told


@pytest.mark.parametrize("text", ["1 +", "import nothing_of_this_name", "raise ValueError('early')"])
def test_a_file_that_cannot_be_loaded(tmp_path, capsys, text):
    (tmp_path / "bad.py").write_text(text)
    assert cli.main(["sites", f"{tmp_path / 'bad.py'}:make"]) == 1
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and "cannot load" in told and "bad.py" in told


def test_a_wrong_command_line_is_code_2(target):
    for arguments in ([], ["nonsense"], ["report"], ["report", target("setup"), "--colour"]):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 2


@pytest.mark.parametrize("command", [*COMMANDS, *(f"index {each}" for each in INDEX)])
def test_every_command_has_help_with_an_example_and_the_codes(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*command.split(), "--help"])
    told = capsys.readouterr().out
    assert left.value.code == 0 and f"example: unsum {command}" in told and "--json" in told
    assert all(re.search(rf"^  {code}  ", told, re.M) for code in range(4))


def test_as_a_program_of_its_own(target, tmp_path):
    """Nothing but JSON on standard output, no progress line where there is no terminal, a module as the target."""
    run = lambda *arguments: subprocess.run(
        [sys.executable, "-m", "unsum", *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    done = run("report", "net:setup", "--json")
    assert done.returncode == 0 and done.stderr == "" and json.loads(done.stdout)["path"] == "report.html"
    done = run("check", "net:mixed", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["ok"] is False
    told = run("--help").stdout
    assert all(command in told for command in (*COMMANDS, "exit codes"))


def test_the_commands_of_the_page_are_understood():
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert {shlex.split(line)[1] for line in lines} == {*COMMANDS, "index"}
    for line in lines:
        cli._parser().parse_args(shlex.split(line, comments=True)[1:])


# ---- what reviewers have run into -----------------------------------------------------------------------------------

LOUD = """
import torch
from torch import nn
print("loaded")

def loss_fn(model, batch):
    print("loss")
    return model(batch).square().sum(1)

def setup():
    print("set up")
    return nn.Linear(3, 1), loss_fn, torch.ones(4, 3)

def stopped(): raise KeyboardInterrupt
def leaves(): raise SystemExit("bye")
def batchnorm(): return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), loss_fn, torch.randn(4, 3)
def never(): raise AssertionError("the work has begun")
"""


@pytest.fixture
def loud(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(LOUD)


@pytest.mark.parametrize("command", ["sites", "check", "draw", "report"])
def test_what_users_print_does_not_disturb_the_result(loud, capsys, command):
    assert cli.main([command, "loud.py:setup", "--json"]) == 0
    told = capsys.readouterr()
    json.loads(told.out)
    assert told.err.startswith("loaded\nset up\n")


@pytest.mark.parametrize("command", ["draw", "report"])
@pytest.mark.parametrize("path", ["loud.py/x.svg", "/proc/x.svg", "folder.svg"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(loud, capsys, tmp_path, command, path):
    (tmp_path / "folder.svg").mkdir()
    assert cli.main([command, "loud.py:never", "-o", path]) == 1
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and path.removesuffix("/x.svg") in told and "never" not in told


def test_folders_that_are_missing_are_made_for_a_picture(loud, capsys, tmp_path):
    assert cli.main(["draw", "loud.py:setup", "-o", "new/sub/x.svg"]) == 0
    assert (tmp_path / "new/sub/x.svg").read_text().lstrip().startswith("<svg")
    assert cli.main(["draw", "loud.py:never", "-o", "other.svg"]) == 1
    assert not (tmp_path / "other.svg").exists()
    assert cli.main(["draw", "loud.py:never", "-o", "new/sub/x.svg"]) == 1
    assert (tmp_path / "new/sub/x.svg").stat().st_size > 0  # trying a place does not empty it


@pytest.mark.parametrize("out", ["loud.py", "/proc/there"])
def test_the_demo_does_not_begin_if_it_cannot_write(loud, capsys, out):
    assert cli.main(["demo", "--out", out]) == 1
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and out in told.err


@pytest.mark.parametrize("target", ["loud.py", ":setup", "loud.py:"])
def test_a_target_without_a_function_is_a_wrong_command_line(loud, capsys, target):
    with pytest.raises(SystemExit) as left:
        cli.main(["sites", target])
    assert left.value.code == 2 and "module:function or file.py:function" in capsys.readouterr().err


def test_only_what_is_required_is_called_so(capsys):
    with pytest.raises(SystemExit):
        cli.main(["sites"])
    assert "required: target\n" in capsys.readouterr().err


def test_a_syntax_error_is_told_with_its_own_line(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("x = 1\n\ndef setup(:\n")
    assert cli.main(["sites", f"{tmp_path / 'bad.py'}:setup"]) == 1
    told = capsys.readouterr().err
    assert "(bad.py, line 3)" in told and "frozen" not in told and told.count("bad.py, line") == 1


def test_an_interruption_is_one_line(loud, capsys):
    assert cli.main(["check", "loud.py:stopped"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "unsum: interrupted"
    assert cli.main(["check", "loud.py:leaves"]) == 1
    assert "raised SystemExit: bye (loud.py, line" in capsys.readouterr().err


def test_that_samples_interact_is_said_once(loud, capsys, tmp_path):
    assert cli.main(["check", "loud.py:batchnorm"]) == 3
    assert capsys.readouterr().out.count("samples interact") == 1
    assert cli.main(["report", "loud.py:batchnorm"]) == 0
    assert "samples: interact at" in capsys.readouterr().out
    assert "amples interact: samples interact" not in (tmp_path / "report.html").read_text().lower()


def test_the_articles_programs_as_json(capsys):
    assert cli.main(["demo", "--seeds", "--json"]) == 0
    assert any("Σ δ⊗a" in line for line in json.loads(capsys.readouterr().out)["lines"])


def test_pictures_make_their_folders_and_name_a_place_that_refuses(tmp_path):
    model = torch.nn.Linear(2, 1)
    with unsum.capture(model, ":output") as got:
        loss = model(torch.ones(1, 2)).sum()
    for thing in (unsum.draw(loss, model), got.trace()):
        path = thing.save(tmp_path / type(thing).__name__ / "new" / "x.svg")
        assert path.read_text().lstrip().startswith("<svg")
        with pytest.raises(OptionError, match="cannot write /proc/x.svg"):
            thing.save("/proc/x.svg")
