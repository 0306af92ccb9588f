"""A picture shows where captures, edits and gradients blocks have acted; a trace draws itself as a time line."""

import gc
import weakref

import torch
from torch import nn

import unsum
from drawn import SVG, Deep, Drawn, article, draw, groups, in_graph


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
    assert groups(draw(loss, model, show=[got]))["blocks.0"].get("data-times") == "5"
    with unsum.capture(model, "blocks.3.up:output") as one:
        loss = model(x).sum()
    assert groups(draw(loss, model, show=one, fold=1))["blocks.0"].get("data-times") == "3"


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
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]), torch.randn(2, 4)
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


def test_an_empty_trace_draws_itself():
    with unsum.capture(nn.Linear(1, 1), ":output", missing="ignore") as got:
        pass
    assert "nothing fired" in got.trace().picture().svg
