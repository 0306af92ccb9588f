"""A picture shows where captures, edits and gradients blocks have acted; a trace draws itself as a time line."""

import gc
import weakref

import pytest
import torch
from torch import nn

import unsum
from drawn import SVG, Deep, Drawn, article, draw, groups, in_graph
from unsum.flow.trace import Event, Trace


def test_captures_edits_the_cut_and_meetings_are_shown_where_they_act():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4), torch.randn(5, 2)
    with unsum.capture(model, "0:input", "0:grad_output", "1:output", "2.weight:grad") as got:
        with unsum.edit(model, {"1:output": unsum.scale(2.0)}) as edited, unsum.gradients(model) as g:
            out = model(x)
            loss = (out - y).square().sum()
            loss.backward(retain_graph=True)
            inside = draw(loss, model, {"x": x, "y": y, "out": out})
    after = draw(loss, model, {"x": x, "y": y, "out": out}, show=[got, edited, g])
    assert inside.picture.svg == after.picture.svg
    tensors = after.tensors()
    assert tensors["x"].get("data-captured") == "0:input"
    assert tensors["2.weight"].get("data-captured") == "2.weight:grad"
    assert tensors["out"].get("data-cut") == "true" and len(after.root.findall(".//*[@data-cut]")) == 1
    (captured,) = [g for g in tensors.values() if g.get("data-captured") == "0:grad_output"]
    assert captured.get("data-shape") == "5×3"
    (edit,) = [g for g in tensors.values() if g.get("data-edited")]
    assert edit.get("data-edited") == "1:output"
    meetings = [g.get("data-meeting") for g in after.all(role="operation") if g.get("data-meeting")]
    assert [set(m.split()) for m in meetings] == [{"0.weight", "0.bias"}, {"2.weight", "2.bias"}]
    plain = draw(loss, model, {"x": x, "y": y, "out": out})
    assert not plain.root.findall(".//*[@data-site]") and not plain.root.findall(".//*[@data-cut]")


def test_sites_of_repeated_blocks_keep_them_together_unless_they_differ():
    model, x = Deep(5), torch.randn(3, 4)
    with unsum.capture(model, "blocks.*.up:output") as got:
        loss = model(x).sum()
    others = groups(draw(loss, model, show=[got]))["blocks.1"]
    assert (others.get("data-times"), others.get("data-like")) == ("4", "blocks.0")
    with unsum.capture(model, "blocks.3.up:output") as one:
        loss = model(x).sum()
    found = groups(draw(loss, model, show=one, fold=1))
    assert {n: (g.get("data-times"), g.get("data-like")) for n, g in found.items() if n.startswith("blocks")} == {
        "blocks.0": (None, None), "blocks.1": ("2", "blocks.0"), "blocks.3": (None, None), "blocks.4": (None, None),
    }  # fmt: skip


def test_notes_in_the_graph_let_it_go():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    with unsum.capture(model, ":output", ":input") as got, unsum.gradients(model):
        loss = model(x).sum()
        loss.backward()
    node, there = in_graph(loss), weakref.ref(x)
    del loss, x
    gc.collect()
    assert node() is None and got[":input"] is not None
    del got
    gc.collect()
    assert there() is None


def test_a_trace_is_a_time_line_in_the_order_of_its_events(tmp_path):
    model, x, y, _ = article()
    with unsum.capture(model, "fc1:input", "fc2:output", "fc2:grad_output", "fc1.weight:grad") as got:
        (model(x) - y).square().sum().backward()
    trace = got.trace()
    drawn = Drawn(trace.picture())
    events = drawn.all(role="event")
    assert [g.get("data-site") for g in events] == [event.site for event in trace]
    assert [g.get("data-direction") for g in events] == [event.direction for event in trace]
    assert [g.get("data-name") for g in drawn.all(role="lane")] == ["fc1", "fc2", "fc1.weight"]
    places = [float(g.find(f"{SVG}rect").get("x")) for g in events]
    assert places == sorted(places)
    assert trace.save(tmp_path / "trace.svg").read_text() == trace._repr_svg_()
    assert str(trace).splitlines()[0].startswith("fc1:input")


def test_a_long_trace_goes_on_below_and_can_be_read():
    model, x = nn.Sequential(*[nn.Linear(4 + k, 5 + k) for k in range(30)]), torch.randn(2, 4)
    with unsum.capture(model, "*:input", "*:output", "*:grad_output", missing="ignore") as got:
        model(x).sum().backward()
    picture = got.trace().picture()
    drawn = Drawn(picture)
    wide = float(drawn.root.get("viewBox").split()[2])
    events = drawn.all(role="event")
    assert wide <= 1440 and [g.get("data-order") for g in events] == [str(k) for k in range(len(got.trace()))]
    places = [(float(g.find(f"{SVG}rect").get("y")), float(g.find(f"{SVG}rect").get("x"))) for g in events]
    rows = [k for k in range(1, len(places)) if places[k][1] < places[k - 1][1]]  # where it goes on below
    assert rows and all(places[k][0] > max(y for y, _ in places[:k]) for k in rows)
    assert "max-width: none !important" in picture.html and "overflow-x: auto" in picture.html


def test_a_trace_shows_the_first_of_repeated_blocks_and_the_others_as_one():
    model, x = Deep(12), torch.randn(3, 4)
    with unsum.capture(model, "blocks.*.up:output", "blocks.*.up:grad_output", "head:output") as got:
        model(x).sum().backward()
    drawn = Drawn(got.trace().picture())
    events = [(g.get("data-site"), g.get("data-times")) for g in drawn.all(role="event")]
    assert events == [
        ("blocks.0.up:output", None), ("blocks.1.up:output", "11"), ("head:output", None),
        ("blocks.11.up:grad_output", "11"), ("blocks.0.up:grad_output", None),
    ]  # fmt: skip
    assert [g.get("data-name") for g in drawn.all(role="lane")] == ["blocks.0.up", "blocks.1 … 11.up", "head"]
    assert len(got.trace()) == 25


def event(site, shape=(2, 3)):
    return Event(site, 0, None, shape, torch.float32)


@pytest.mark.parametrize(
    ("sites", "lanes"),
    [
        (["a.0:output", "a.1:output"], ["a.0", "a.1"]),
        ([f"a.{k}:{kind}" for k in range(4) for kind in ("input", "output")], ["a.0", "a.1 … 3"]),
        ([f"a.{k}:{'input' if k == 2 else 'output'}" for k in range(5)], [f"a.{k}" for k in range(5)]),
        (["a.0:output", "a.1:output", "a.3:output"], ["a.0", "a.1", "a.3"]),
        (["a.0:output", "b:output", "a.1:output", "a.2:output"], ["a.0", "b", "a.1", "a.2"]),
        (
            [f"a.{k}.e.{j}:output" for k in range(3) for j in range(4)],
            ["a.0.e.0", "a.0.e.1 … 3", "a.1, 2.e.0", "a.1, 2.e.1 … 3"],
        ),
    ],
    ids=["two", "in turn", "one differs", "one is missing", "not one after the other", "in each other"],
)
def test_only_blocks_in_a_row_with_the_same_events_share_a_lane(sites, lanes):
    drawn = Drawn(Trace([event(site) for site in sites]).picture())
    assert [g.get("data-name") for g in drawn.all(role="lane")] == lanes
    assert sum(int(g.get("data-times", "1")) for g in drawn.all(role="event")) == len(sites)


def test_layers_of_different_types_have_lanes_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4), nn.ReLU())
    with unsum.capture(model, "*:output") as got:
        model(torch.randn(2, 4))
    assert [event.type for event in got.trace()] == ["Linear", "ReLU", "Dropout", "Linear", "ReLU"]
    drawn = Drawn(got.trace().picture())
    assert [g.get("data-name") for g in drawn.all(role="lane")] == list("01234")


def test_two_lanes_are_never_written_alike():
    long = "base_model.model." + "encoder." * 12
    names = [f"{long}layers.{k}.{'attention.' * 3}projection.default" for k in (0, 3, 10)]
    drawn = Drawn(Trace([event(f"{name}:output") for name in names]).picture())
    written = ["".join(g.find(f"{SVG}text").itertext()) for g in drawn.all(role="lane")]
    assert len(set(written)) == 3


def test_an_empty_trace_draws_itself():
    with unsum.capture(nn.Linear(1, 1), ":output", missing="ignore") as got:
        pass
    assert "nothing fired" in got.trace().picture().svg


def test_the_block_in_which_something_was_edited_is_open():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(9)))
    with unsum.edit(model, {"4.mlp:output": unsum.scale(2.0)}) as edited:
        loss = model(torch.randn(3, 6)).square().sum()
    drawn = draw(loss, model, show=[edited])
    assert {"4.norm", "4.mlp"} <= set(groups(drawn)) and drawn.root.findall(".//*[@data-edited]")
