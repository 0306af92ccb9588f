"""The table of `unsum.sites`: blocks that are alike once, and shapes after a batch."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import unsum
from unsum import cli


class Block(nn.Module):
    def __init__(self, width=4, experts=0):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        for expert in self.experts:
            x = x + expert(x)
        return x


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(4, 2)

    def forward(self, x, twice=False):
        x = self.blocks(x)
        return self.head(self.blocks(x) if twice else x)


def lines(found):
    return [line.split("  ")[0] for line in str(found).splitlines()[1:]]


def test_blocks_that_are_alike_are_shown_once_and_iterated_over_all():
    found = unsum.sites(Net(*(Block() for _ in range(12))))
    assert lines(found) == [
        '""', "blocks", "blocks.0 … blocks.11: 12 × the same", "blocks.0", "blocks.0.up", "blocks.0.down", "head",
    ]  # fmt: skip
    assert "blocks.7.up.weight:grad" in found and len(list(found)) == len(found) == 4 * (3 + 36) + 2 * 25
    whole = unsum.sites(Net(*(Block() for _ in range(12))), fold=False)
    assert "same" not in str(whole) and len(lines(whole)) == 39
    assert list(whole) == list(found)


def test_a_block_that_differs_is_shown():
    found = unsum.sites(Net(Block(), Block(), Block(8), Block(), Block(), Block()))
    assert [line for line in lines(found) if ":" in line] == [
        "blocks.0, blocks.1: 2 × the same", "blocks.3 … blocks.5: 3 × the same",
    ]  # fmt: skip
    assert "blocks.2.up" in lines(found) and "blocks.1.up" not in lines(found)


def test_another_type_or_a_parameter_more_is_a_difference():
    def net(*last):
        return str(unsum.sites(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), *last)))

    assert "0 … 2: 3 × the same" in net(nn.ReLU())
    assert "0 … 2: 3 × the same" in net(nn.Linear(3, 3, bias=False))
    assert "0 … 2: 3 × the same" in net(nn.Linear(3, 4))
    assert "0 … 3: 4 × the same" in net(nn.Linear(3, 3))


def test_blocks_in_blocks_are_folded_too():
    found = unsum.sites(Net(*(Block(experts=8) for _ in range(3))))
    assert lines(found)[2:8] == [
        "blocks.0 … blocks.2: 3 × the same", "blocks.0", "blocks.0.up", "blocks.0.down",
        "blocks.0.experts.0 … blocks.0.experts.7: 8 × the same", "blocks.0.experts.0",
    ]  # fmt: skip


def test_names_that_are_not_numbers_are_never_left_out():
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("q", "k", "v", "layer1", "layer2", "layer3")})
    assert lines(unsum.sites(model)) == list(model)


def test_two_layers_are_not_hidden_behind_a_line_of_the_same_length():
    assert lines(unsum.sites(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "*:output")) == ["0", "1"]


def test_what_patterns_choose_is_folded_too():
    found = unsum.sites(Net(*(Block() for _ in range(12))), "*.up:output")
    assert lines(found) == ["blocks.0 … blocks.11: 12 × the same", "blocks.0.up"]
    assert len(found) == 12


@pytest.mark.parametrize("page", ["sites.md", "index.md"])
def test_the_pages_show_what_is_printed(page, capsys):
    text, names, shown = (Path(__file__).parent.parent / "docs" / page).read_text(), {}, 0
    for language, block in re.findall(r"^```(python|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            capsys.readouterr()
            exec(block, names)
        elif block.startswith(("module", "no site")):
            assert capsys.readouterr().out == block
            shown += 1
    assert shown == {"sites.md": 3, "index.md": 1}[page]


class Odd(nn.Module):
    """Outputs of several kinds."""

    def __init__(self):
        super().__init__()
        self.rnn, self.shared, self.unused, self.names = nn.LSTM(4, 3), nn.Linear(3, 3), nn.Linear(1, 1), Names()

    def forward(self, x, *, mask=None):
        y, _ = self.rnn(x)
        self.names(y)
        return {"first": self.shared(y), "second": self.shared(y[:2])}


class Names(nn.Module):
    def forward(self, x):
        return "no tensor"


def test_the_shapes_are_those_that_a_forward_returns():
    x = torch.randn(5, 2, 4)
    found = unsum.sites(Odd(), batch=x)
    assert found.shapes == {
        ":output.first": (5, 2, 3), ":output.second": (2, 2, 3), "rnn:output[0]": (5, 2, 3),
        "rnn:output[1][0]": (1, 2, 3), "rnn:output[1][1]": (1, 2, 3), "shared:output@0": (5, 2, 3),
        "shared:output@1": (2, 2, 3),
    }  # fmt: skip
    table = {line.split()[0]: line for line in str(found).splitlines()}
    assert "(5, 2, 3); (2, 2, 3) in 2 calls" in table["shared"]
    assert ".first (5, 2, 3), .second (2, 2, 3)" in table['""']
    assert table["unused"].split()[2] == table["names"].split()[2] == "-"
    assert unsum.sites(Odd()).shapes == {} and "output" not in str(unsum.sites(Odd())).splitlines()[0]
    model = Odd()
    with unsum.capture(model, *found.shapes) as got:  # they are sites
        model(x)
    assert {site: tuple(got[site].shape) for site in found.shapes} == found.shapes


@pytest.mark.parametrize(
    "batch",
    [torch.ones(3, 4), (torch.ones(3, 4),), [torch.ones(3, 4), False], {"x": torch.ones(3, 4), "twice": False}],
    ids=["tensor", "tuple", "list", "mapping"],
)
def test_a_batch_is_an_argument_arguments_or_keywords(batch):
    found = unsum.sites(Net(Block(), Block()), batch=batch)
    assert found.shapes["head:output"] == (3, 2) and found.shapes["blocks.1.up:output"] == (3, 4)


def test_a_batch_that_does_not_fit_says_how_the_model_was_called():
    with pytest.raises(TypeError) as told:
        unsum.sites(nn.Linear(3, 2), batch=(torch.ones(1, 3), torch.ones(1)))
    assert "model(*batch)" in told.value.__notes__[0]


def test_the_batch_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    unsum.sites(model, batch=torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_blocks_whose_outputs_differ_are_not_the_same():
    class Pool(nn.Module):
        def forward(self, x):
            return x[::2]

    found = unsum.sites(nn.Sequential(Pool(), Pool(), Pool(), Pool()), "*:output", batch=torch.ones(16, 2))
    assert lines(found) == ["0", "1", "2", "3"] and found.shapes["3:output"] == (1, 2)


def test_a_wrapped_model_is_run_too():
    model = torch.nn.DataParallel(Net(Block()))
    assert unsum.sites(model, batch=torch.ones(3, 4)).shapes[":output"] == (3, 2)


def test_the_command_line_shows_shapes_and_everything(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def setup():\n"
        "    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))\n"
        "    losses = lambda model, batch: (model(batch[0]) - batch[1]).square().sum(1)\n"
        "    return model, losses, (torch.ones(3, 4), torch.ones(3, 4))\n"
    )
    assert cli.main(["sites", "train.py:setup", "--shapes"]) == 0
    told = capsys.readouterr().out
    assert "0 … 4: 5 × the same" in told and "(3, 4)" in told
    assert cli.main(["sites", "train.py:setup", "--all"]) == 0
    assert "same" not in (told := capsys.readouterr().out) and "(3, 4)" not in told
    assert cli.main(["sites", "train.py:setup", "4:output", "--shapes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sites"] == ["4:output"] and told["shapes"]["4:output"] == [3, 4]
