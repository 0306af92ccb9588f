"""The grammar of sites, what it finds, and what it says when it finds nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unsum
from unsum.errors import SiteError
from unsum.sites import Site, parse, site_name
from unsum.types import KINDS


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Inner(), "norm": nn.LayerNorm(4)}) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block["mlp"](block["norm"](x))
        return self.head(x)


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("fc1:input", Site("fc1", "input")),
        (":output", Site("", "output")),
        ("enc:output@1", Site("enc", "output", 1)),
        ("lm:output.logits", Site("lm", "output", None, ("logits",))),
        ("attn:grad_output@2[0].k['a.b']", Site("attn", "grad_output", 2, (0, "k", "a.b"))),
        ("blocks.*.mlp:grad_input", Site("blocks.*.mlp", "grad_input")),
        ("fc1.weight:grad", Site("fc1.weight", "grad")),
        ((nn.Linear, "input[-1]"), Site(nn.Linear, "input", None, (-1,))),
    ],
    ids=str,
)
def test_the_grammar(text, site):
    assert parse(text) == site
    if isinstance(text, str):
        assert str(parse(text)) == text


steps = st.one_of(st.integers(0, 99), st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), st.just("two words"))


@given(
    st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True),
    st.sampled_from(KINDS),
    st.none() | st.integers(0, 99),
    st.lists(steps, max_size=3).map(tuple),
)
def test_what_is_written_is_what_is_read(where, kind, call, path):
    assert parse(site_name(where, kind, call, path)) == Site(where, kind, call, path)


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("block.1.mlp:output", "'blocks.1.mlp:output'"),
        ("heads:output", "'head:output'"),
        ("head:outptu", "'head:output'"),
        ("head", "'head:output'"),
        ("head:grad", "'head.weight:grad'"),
        ("head.weight:output", "'head.weight:grad'"),
        ("head.wieght:grad", "'head.weight:grad'"),
        ("up:output", "'blocks.0.mlp.up:output'"),
        ("blocks.*.mpl:output", "blocks"),
        ("head:output[0", "path"),
        ((nn.Conv2d, "output"), "unsum.sites"),
        ((lambda name, module: False, "output"), "unsum.sites"),
        (3, "name:kind"),
        ((nn.Linear,), "name:kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize(
    "block",
    [unsum.capture, lambda model, site: unsum.edit(model, {site: unsum.zero()})],
    ids=["capture", "edit"],
)
def test_a_name_that_fits_nothing_is_an_error_on_entry_with_near_names(asked, near, block):
    entered = False
    with pytest.raises(SiteError) as caught:
        with block(GPT(), asked):
            entered = True
    assert not entered
    assert near in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_globs_types_and_predicates_choose_modules():
    model, x = GPT(), torch.randn(2, 4)

    def names(*asked):
        with unsum.capture(model, *asked) as got:
            model(x).sum().backward()
        return got.keys()

    assert names("blocks.*.mlp:output") == [f"blocks.{i}.mlp:output" for i in range(3)]
    assert names("*.up:output") == [f"blocks.{i}.mlp.up:output" for i in range(3)]
    assert names((nn.LayerNorm, "output")) == [f"blocks.{i}.norm:output" for i in range(3)]
    assert names((lambda name, module: name.endswith("1.norm"), "input")) == ["blocks.1.norm:input"]
    assert len(names((nn.Linear, "grad"))) == 14
    assert len(names("*:output")) == 13  # without the containers and the root
    assert names(":output") == [":output"]


def test_a_container_named_outright_says_why_it_never_fires():
    model = GPT()
    with pytest.raises(SiteError, match="blocks:output.*ModuleList is a container"):
        with unsum.capture(model, "blocks:output"):
            model(torch.randn(2, 4))


def test_sites_lists_every_site_and_prints_a_table():
    listed = unsum.sites(GPT())
    assert len(listed) == len(list(listed)) == 4 * 14 + 20
    assert "blocks.2.mlp.up:grad_input" in listed
    assert "blocks.2.mlp.up.weight:grad" in listed
    assert "blocks:output" not in listed
    table = str(listed).splitlines()
    assert table[0].split() == ["module", "type", "sites"]
    assert any(line.startswith("blocks.0.mlp.up") and "Linear" in line for line in table)
    assert list(unsum.sites(GPT(), "*.up:output", "head.weight:grad")) == [
        *(f"blocks.{i}.mlp.up:output" for i in range(3)),
        "head.weight:grad",
    ]


def test_every_listed_site_can_be_captured():
    model, x = GPT(), torch.randn(2, 4, requires_grad=True)
    with unsum.capture(model, *unsum.sites(model)) as got:
        model(x).sum().backward()
    assert sorted(got.keys()) == sorted(unsum.sites(model))


def test_names_with_colons_and_lists_that_can_be_called():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    net.add_module("c:output", nn.ReLU())
    listed = list(unsum.sites(net))
    assert "c:output:output" in listed and "0.parametrizations.weight:output" in listed
    with unsum.capture(net, *(s for s in listed if s.endswith(":output"))) as got:
        net(torch.ones(1, 2))
    assert got["c:output:output"].shape == (1, 2)
    with pytest.raises(SiteError, match="near: ':output'"):
        with unsum.capture(nn.Linear(2, 2), "*:output"):
            pass


def test_what_is_no_model_is_refused():
    for model in (None, "model", nn.Linear):
        with pytest.raises(SiteError):
            unsum.sites(model)
