"""The public surface is what is listed, and the command line answers."""

import json

import pytest
import torch
from torch import nn

import unsum
from unsum import cli

MODULES = {"curvature", "errors", "index", "integrations", "sinks", "testing"}


def test_all_is_what_is_visible():
    names = {n for n in vars(unsum) if not n.startswith("_")}
    modules = {n for n in names if type(getattr(unsum, n)).__name__ == "module"}
    assert names - modules | MODULES == set(unsum.__all__)


def test_every_public_function_has_a_docstring_with_an_example():
    for name in set(unsum.__all__) - MODULES:
        assert ">>>" in (getattr(unsum, name).__doc__ or ""), name


def test_the_errors_are_one_tree():
    e = unsum.errors
    for error in (e.SiteError, e.SamplesError, e.InteractionError, e.UnsupportedError, e.OptionError):
        assert issubclass(error, e.UnsumError)
    assert issubclass(e.UnknownSite, (e.SiteError, KeyError))


def test_the_demo_prints_what_the_articles_show(capsys):
    assert cli.main(["demo", "--seeds"]) == 0
    told = capsys.readouterr().out
    for figure in ("12 → 24", "60 → 20", "y used twice: 10", "(5, 6, 4)", "(5, 10)", "fc2.weight.grad: True"):
        assert figure in told


def test_sites_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "net.py"
    make = "def make():\n    return nn.Sequential(nn.Linear(2, 3)), None, None\n"
    file.write_text(f"from torch import nn\n{make}def no(): return 3\nready = nn.ReLU()\n")
    assert cli.main(["sites", f"{file}:make"]) == 0
    assert "Linear" in capsys.readouterr().out
    assert cli.main(["sites", f"{file}:make", "*:output", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["0:output"]
    assert cli.main(["sites", f"{file}:ready", ":output"]) == 0
    capsys.readouterr()
    for target in (
        f"{file}:gone",
        f"{file}:no",
        "gone:make",
        f"{tmp_path}/gone.py:make",
        "torch.nn:Linear",
    ):
        assert cli.main(["sites", target]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert cli.main(["sites", f"{file}:make", "1:output"]) == 1


def test_check_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def right():\n    return nn.Linear(3, 1), lambda m, x: m(x).square().sum(1), torch.randn(4, 3)\n"
        "def wrong():\n    return nn.BatchNorm1d(3), lambda m, x: m(x).square().sum(1), torch.randn(4, 3)\n"
        "def no(): return 3\n"
    )
    assert cli.main(["check", f"{file}:right"]) == 0
    assert capsys.readouterr().out.startswith("ok")
    assert cli.main(["check", f"{file}:wrong", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and "interact" in told["interacting"]
    assert cli.main(["check", f"{file}:no"]) == 1
    assert "(model, loss_fn, batch)" in capsys.readouterr().err


def test_the_fixture_that_any_project_gets(assert_exact):
    batch = torch.randn(4, 3, dtype=torch.float64)
    assert assert_exact(nn.Linear(3, 2).double(), lambda m, x: m(x).square().sum(1), batch).ok
    with pytest.raises(AssertionError, match="interact"):
        assert_exact(nn.BatchNorm1d(3).double(), lambda m, x: m(x).square().sum(1), batch)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "--help"], ["sites", "--help"], ["demo", "--help"], ["--version"]], ids=str
)
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 0 and "unsum" in capsys.readouterr().out
