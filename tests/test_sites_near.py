"""Every site that an error proposes exists: it is listed, and a capture of it is opened."""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import unsum
from unsum.errors import SiteError, UnsumError
from unsum.sites import Names
from unsum.types import KINDS


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))
        self.act = nn.ReLU()
        self.head = self.experts[0]["up"]

    def forward(self, x):
        for expert, scale in zip(self.experts, [*self.scales, 1.0], strict=True):
            x = x + scale * expert["down"](self.act(expert["up"](x)))
        return self.head(x)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.decoder = nn.Linear(4, 4)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def colons():
    net = nn.Sequential(nn.Linear(2, 2))
    net.add_module("c:output", nn.ReLU())
    return net


MODELS = {
    "experts": Experts(),
    "scripted": Scripted(),
    "linear": nn.Linear(3, 2),
    "relu": nn.Sequential(nn.ReLU(), nn.Sigmoid()),
    "list": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]),
    "empty": nn.ModuleList(),
    "transformer": nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8), 2, enable_nested_tensor=False),
    "lstm": nn.Sequential(nn.LSTM(4, 3)),
    "colons": colons(),
}


def typos(text):
    """The text with one or two letters left out, doubled, exchanged or replaced, or a part cut off."""

    def change(text, how, at, letter):
        at = at % (len(text) + 1)
        return {
            "omit": text[:at] + text[at + 1 :],
            "double": text[:at] + text[at : at + 1] * 2 + text[at + 1 :],
            "exchange": text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
            "replace": text[:at] + letter + text[at + 1 :],
            "begin": text[at:],
            "end": text[:at],
        }[how]

    one = st.tuples(
        st.sampled_from(["omit", "double", "exchange", "replace", "begin", "end"]), st.integers(0, 99),
        st.sampled_from("abeorstu0129_.*?:@[]"),
    )  # fmt: skip

    def apply(changes):
        changed = text
        for how, at, letter in changes:
            changed = change(changed, how, at, letter)
        return changed

    return st.lists(one, min_size=1, max_size=3).map(apply)


@st.composite
def misspelt(draw):
    which = draw(st.sampled_from(sorted(MODELS)))
    model = MODELS[which]
    names = [*Names(model).modules, *Names(model).parameters]
    site = (
        f"{draw(st.sampled_from(names))}:{draw(st.sampled_from(KINDS))}{draw(st.sampled_from(['', '@1', '[0]', '.x']))}"
    )
    return which, draw(st.one_of(st.just(site), typos(site), typos(site.partition(":")[0])))


def proposed(error):
    line = re.search(r"near: (.*)", str(error))
    return [] if line is None else [a or b for a, b in re.findall(r"""'([^']*)'|"([^"]*)\"""", line[1])]


def opened(block):
    with block:
        pass


@settings(max_examples=500, deadline=None)
@given(misspelt())
@example(("scripted", "*"))
def test_every_site_that_is_proposed_exists(case):
    which, asked = case
    model = MODELS[which]
    listed = set(unsum.sites(model))
    for attempt in (
        lambda: opened(unsum.capture(model, asked, missing="ignore")),
        lambda: opened(unsum.edit(model, {asked: unsum.zero()}, missing="ignore")),
        lambda: unsum.sites(model, asked),
    ):
        near = []
        try:
            attempt()
        except UnsumError as error:
            near = proposed(error)
        for site in near:
            found = set(unsum.sites(model, site))  # one, or those that a pattern names
            assert found and found <= listed, (asked, site)
            opened(unsum.capture(model, site, missing="ignore"))


@pytest.mark.parametrize(
    ("which", "asked", "near"),
    [
        ("experts", "expert:output", "experts.0.up:output"),  # the nearest name is a list, which is not called
        ("experts", "experts.0.upp:output@3[1]", "experts.0.up:output"),  # only a run shows calls and paths
        ("experts", "act:grad", ["act:grad_output"]),
        ("experts", "scale.0:grad", "scales.0:grad"),
        ("experts", "experts.0.up.weight", ["experts.0.up.weight:grad"]),
        ("experts", "experts.*.up:outptu", "experts.*.up:output"),
        ("experts", "hed:outptu", "head:output"),
        ("scripted", "encode:output", "decoder:output"),  # a torch.jit module is refused
        ("scripted", "dcoder:output", "decoder:output"),
        ("empty", "*:grad_input[0]", []),
        ("linear", "*:output", [":output"]),
        ("relu", "0.weight:grad", []),
        ("colons", "c:output:outptu", "c:output:output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_proposed(which, asked, near):
    with pytest.raises(SiteError) as told:
        unsum.sites(MODELS[which], asked)
    found = proposed(told.value)
    assert near in found if isinstance(near, str) else near == found
    assert not {"experts:output", "experts.0:output", "encoder:output"} & set(found)


def test_without_a_model_only_kinds_are_proposed():
    with pytest.raises(SiteError, match="near kinds: 'output'") as told:
        with unsum.capture(None, "y:outptu"):
            pass
    assert "y:output'" not in str(told.value)
    with pytest.raises(SiteError, match="near kinds: 'output'"):
        with unsum.capture(nn.Linear(2, 2), (nn.Linear, "outptu")):
            pass


def test_what_a_capture_proposes_when_it_is_read_exists():
    model = MODELS["experts"]
    with unsum.capture(model, (nn.ReLU, "output"), "head:output") as got:
        model(torch.ones(2, 4))
    with pytest.raises(SiteError) as told:
        got["act:input"]
    assert "ReLU:output" not in proposed(told.value)
    for near in proposed(told.value):
        assert near in got or near in unsum.sites(model)
