"""`unsum index` on the command line."""

import json

import pytest

from unsum import cli

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Linear(3, 2)
data = [(torch.randn(3), torch.tensor(k % 2)) for k in range(20)]


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def examples():
    return model, losses, data


def question():
    return model, losses, (torch.ones(2, 3), torch.tensor([0, 1]))
"""


@pytest.fixture
def setup(tmp_path):
    (tmp_path / "setup.py").write_text(SETUP)
    return tmp_path / "setup.py", tmp_path / "index"


def run(capsys, *arguments):
    code = cli.main(["index", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_build_ask_and_verify(setup, capsys):
    file, path = setup
    code, out = run(capsys, "build", f"{file}:examples", path, "--project", 2, "--batch-size", 4, "--shard-size", 8)
    assert code == 0 and out.startswith("index of 20 examples, K = 6 (float16); 3 shards")
    code, out = run(capsys, "query", f"{file}:question", path, "-k", 3, "--json")
    found = json.loads(out)
    assert code == 0 and len(found["ids"]) == 2 and len(found["ids"][0]) == len(found["scores"][1]) == 3
    code, out = run(capsys, "query", f"{file}:question", path, "-k", 3, "--score", "influence")
    assert code == 0 and len(out.splitlines()) == 7
    code, out = run(capsys, "info", path, "--json")
    assert code == 0 and json.loads(out)["rows"] == 20
    assert run(capsys, "verify", path) == (0, "whole\n")
    (path / "shard-000001.safetensors").write_bytes(b"")
    assert run(capsys, "verify", path) == (1, "shard-000001.safetensors\n")


def test_parts(setup, capsys):
    file, path = setup
    options = ("--shard-size", 4, "--batch-size", 4)
    for part in ("0/2", "1/2"):
        assert run(capsys, "build", f"{file}:examples", path, "--part", part, *options)[0] == 0
    assert run(capsys, "build", f"{file}:examples", path, *options)[0] == 0


def test_what_is_wrong_is_told(setup, capsys):
    file, path = setup
    assert cli.main(["index", "info", str(path)]) == 1
    assert "no index" in capsys.readouterr().err
    for wrong in (["--part", "2/2"], ["--part", "x"], ["--project", "0"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["index", "build", f"{file}:examples", str(path), *wrong])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["index"])


def test_what_is_typed_counts_more_than_the_target_s_options(setup, capsys):
    file, path = setup
    file.write_text(SETUP + "\n\ndef more():\n    return model, losses, data, {'project': 1, 'dtype': 'float32'}\n")
    assert run(capsys, "build", f"{file}:more", path, "--project", 2)[1].startswith(
        "index of 20 examples, K = 6 (float32)"
    )


def test_data_that_names_no_function_is_a_wrong_command_line(setup, capsys):
    file, path = setup
    with pytest.raises(SystemExit, match="2"):
        cli.main(["index", "query", f"{file}:question", str(path), "--data", str(file)])
    assert "--data" in capsys.readouterr().err
