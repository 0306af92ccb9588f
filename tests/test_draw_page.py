"""A picture saves itself, shows itself on a page, and refuses what cannot be drawn."""

import json
import re
from collections import OrderedDict
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import unsum
from drawn import MLP, SVG, Deep, article, draw
from unsum.errors import OptionError, UnsumError


def test_it_saves_itself_shows_itself_and_needs_no_network(tmp_path):
    model, x, y, loss = article()
    picture = unsum.draw(loss, model, {"x": x, "y": y})
    assert picture.save(tmp_path / "x.svg").read_text() == picture.svg == picture._repr_svg_()
    assert picture.svg in picture._repr_html_() and " parameters in 2 tensors" in repr(picture)
    page = picture.save(str(tmp_path / "x.html")).read_text()
    for text in (picture.svg, page):
        assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}
    for suffix in ("x.png", "x"):
        with pytest.raises(OptionError, match=r"\.svg or \.html"):
            picture.save(tmp_path / suffix)


def test_two_pictures_on_a_page_do_not_share_names():
    model, x, y, loss = article()
    one, other = unsum.draw(loss, model, {"x": x}), unsum.draw(loss, model, {"x": x, "y": y})
    names = [set(re.findall(r'id="([^"]+)"', picture.svg)) for picture in (one, other)]
    assert names[0] and not names[0] & names[1]
    name = one.svg.partition('id="')[2].partition('"')[0]
    rules = re.search(r"<style>(.*?)</style>", one.svg, re.DOTALL)[1]
    for selectors in re.findall(r"(?:^|[{}])\s*([^{}@]+)\{", rules):
        assert all(selector.strip().startswith(f"#{name}") for selector in selectors.split(",")), selectors
    assert "prefers-color-scheme: dark" in rules


def pages(picture):
    """The pictures on a page, each with the groups that are open in it, and where clicks lead from each."""
    pictures = re.findall(r'<template data-picture="\d+">(.*?)</template>', picture.html, re.DOTALL)
    moves = json.loads(re.search(r'id="moves">(.*?)</script>', picture.html, re.DOTALL)[1])
    opened = []
    for svg in pictures:
        found = ElementTree.fromstring(svg).iter(f"{SVG}g")
        opened.append({g.get("data-name") for g in found if g.get("data-folded") == "false"})
    return opened, moves


def test_several_groups_can_be_open_at_once_on_the_page():
    model, x = Deep(3), torch.randn(3, 4)
    opened, moves = pages(unsum.draw(model(x).sum(), model, {"x": x}, fold=1))
    assert opened[0] == {""} and set(moves[0]) == {"", "first", "blocks.0", "blocks.1", "head"}
    assert "blocks.1" in opened[moves[0]["blocks.1"]]
    here = 0
    for name in ("first", "blocks.0", "blocks.0.up", "head"):
        here = moves[here][name]
    assert here >= 0 and opened[here] == {"", "first", "blocks.0", "blocks.0.up", "head"}
    here = moves[here]["blocks.0"]  # what is in it folds with it
    assert opened[here] == {"", "first", "head"}


def test_a_page_promises_no_click_that_leads_nowhere():
    layers = {f"l{k}": nn.Sequential(nn.Linear(4, 4 + k), nn.Linear(4 + k, 4)) for k in range(60)}
    model, x = nn.Sequential(OrderedDict(layers)), torch.randn(3, 4)
    opened, moves = pages(unsum.draw(model(x).sum(), model, {"x": x}, fold=1))
    for k, (names, ways) in enumerate(zip(opened, moves, strict=True)):
        for name, to in ways.items():
            there = opened[to if to >= 0 else ~to]
            assert (name in there) != (name in names), (k, name)
            if to >= 0 and name not in names:
                assert there == names | {name}
    assert len(opened) == len(moves) <= 150 and any(to < 0 for ways in moves for to in ways.values())


def test_text_from_the_user_is_escaped():
    model, x, y, loss = article()
    drawn = draw(loss, model, {'<x & "y">': x, "y": y})
    assert '<x & "y">' in drawn.tensors("data")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(3),), "no graph"),
        ((3.0,), "a tensor is drawn"),
        ((torch.ones(1, requires_grad=True) * 2, "model"), "expected an nn.Module"),
        ((torch.ones(1, requires_grad=True) * 2, None, [1]), "names for tensors"),
        ((torch.ones(1, requires_grad=True) * 2, None, {"x": 1}), "not a tensor"),
    ],
    ids=["no graph", "no tensor", "no module", "no mapping", "no tensors"],
)
def test_what_cannot_be_drawn_is_refused(arguments, said):
    with pytest.raises(UnsumError, match=said):
        unsum.draw(*arguments)


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(OptionError, match="what a block gives"):
        unsum.draw(torch.ones(1, requires_grad=True) * 2, show=[3])


def test_a_compiled_model_is_one_operation_and_says_so():
    model, x = MLP(), torch.randn(5, 4)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(x).sum()
    drawn = draw(loss, compiled, {"x": x})
    assert "compiled" in drawn.notes() and "compiled" in [g.get("data-name") for g in drawn.all(role="operation")]
    assert set(drawn.tensors("parameter")) == {"fc1.weight", "fc2.weight"}
    loss.backward()
    assert model.fc1.weight.grad is not None


def test_a_leaf_is_no_loss():
    with pytest.raises(OptionError, match="is a leaf"):
        unsum.draw(nn.Parameter(torch.tensor(2.0)))
