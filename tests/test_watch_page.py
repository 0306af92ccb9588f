"""The page on a watched run: what it says is what the records say, and it loads nothing."""

import math
import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import OptionError
from unsum.report.curves import Axis
from unsum.training import page, summary, terminal
from unsum.training.record import Layer, NonFinite, Record

TEXT = "</script><b>bold</b> & 'quoted'"


def records(count=12, *, first=0, every=1, bad=None, layers=3):
    torch.manual_seed(0)
    found = []
    for k in range(count):
        norms = torch.rand(6, dtype=torch.float64) + 1
        own = {f"blocks.{i}.fc": Layer(norm=0.1 * (i + 1), grad=1.0, weight=3.0, update=1e-3) for i in range(layers)}
        record = Record(
            first + k * every, 1 / (k + 1), norms, [f"s{k}-{j}" for j in range(6)], noise_scale=5.0 + k, layers=own
        )
        if k == 3:
            norms[4] = 50.0
            record.outliers, record.texts = ["s3-4"], {"s3-4": TEXT}
        if k == bad:
            record.nonfinite = NonFinite("blocks.1.fc:output", "nan", f"s{k}-2", 7, "blocks.1.fc.weight")
            record.loss = math.nan
        found.append(record)
    return found


class Page(HTMLParser):
    """The tags of a page, and its words."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.ids, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def made(tmp_path, found, **options):
    return Page(page.write(found, tmp_path / "run.html", **options).read_text(encoding="utf-8"))


def test_the_page_says_what_the_records_say(tmp_path):
    shown = made(tmp_path, records(), title="Mine <1>")
    assert shown.open == []  # every tag is closed
    assert shown.ids == ["main", "norms", "loss", "noise", "outliers", "outlier-table", "map-norm", "map-update",
                         "layers", "layer-table"]  # fmt: skip
    assert (
        "12 steps watched (steps 0 to 11), 6 samples in each. The loss went from 0.75 to 0.0871 (medians of the"
        in shown.text
    )
    assert "A sample stood out by its gradient once. Every value was finite." in shown.text
    assert "Mine <1>" in shown.text and TEXT in shown.text  # escaped, and read back
    (mark,) = [attrs for tag, attrs in shown.tags if tag == "i" and "title" in attrs]
    assert mark["title"].startswith("sample s3-4, step 3: norm 50. ")
    assert mark["style"].startswith(f"left:{100 * 3 / 11:.4g}%;top:0%")


def test_the_page_asks_for_nothing(tmp_path):
    made(tmp_path, records(bad=5))
    text = (tmp_path / "run.html").read_text()
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|<script|<img|<iframe", text)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', text)) == {"data:,", ""}
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_what_is_not_finite_comes_first(tmp_path):
    shown = made(tmp_path, records(bad=5))
    assert shown.ids[:2] == ["main", "nonfinite"]
    for fact in ("step 5", "value NaN", "site blocks.1.fc:output", "sample s5-2", "position in the sample 7",
                 "parameter blocks.1.fc.weight", "micro-batch 0"):  # fmt: skip
        assert fact in shown.text
    lines = [attrs["d"] for tag, attrs in shown.tags if tag == "path" and attrs["class"] == "line middle"]
    assert all("nan" not in line for line in lines)
    assert lines[1].count("M") == 2  # the loss has a gap


@pytest.mark.parametrize(("count", "every"), [(1, 1), (2, 5), (5_000, 10)])
def test_short_and_long_runs(tmp_path, count, every):
    shown = made(tmp_path, records(count, first=7, every=every, layers=40))
    points = next(attrs["d"] for tag, attrs in shown.tags if tag == "path" and attrs["class"] == "line middle")
    assert points.count("L") + 1 == min(count, len(summary.thinned(count, page.POINTS)))
    assert (tmp_path / "run.html").stat().st_size < 600_000
    assert "nan" not in points and f"{7 + (count - 1) * every:,}" in shown.text


def test_refused_steps_and_runs_without_norms(tmp_path):
    bare = [Record(step, refused="samples interact\n  in bn" if step else None) for step in range(3)]
    shown = made(tmp_path, bare)
    assert "No norms in 2 steps, first in step 1." in shown.text and "samples interact in bn" in shown.text
    assert shown.ids == ["main"]
    negative = [Record(step, 1.0, torch.ones(2), [0, 1], noise_scale=-3.0) for step in range(3)]
    assert "3 of 3 estimates are negative" in made(tmp_path, negative).text


def test_numbers_that_cannot_be_drawn_do_not_stop_the_page(tmp_path):
    odd = [
        Record(0, math.inf, torch.tensor([math.nan, math.inf]), ["a", "b"], math.inf, ["a", "b"], None, {"": Layer(0)}),
        Record(1, 0.0, torch.zeros(2), ["a", "b"], 0.0, [], None, {"": Layer(norm=math.nan, update=math.inf)}),
        Record(2, -1e30, torch.full((2,), 1e-30), ["a", "b"], 1e30, ["b"], None, {"other": Layer(norm=1e30)}),
    ]  # fmt: skip
    shown = made(tmp_path, odd)
    assert shown.open == [] and "(the model)" in shown.text
    for tag, attrs in shown.tags:
        assert tag != "path" or not re.search("nan|inf", attrs["d"])


def test_a_watch_writes_its_page(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    watch = unsum.watch(model)
    with pytest.raises(OptionError, match="no record yet"):
        watch.report(tmp_path / "run.html")
    for _ in range(3):
        with watch:
            model(torch.randn(6, 3)).sum().backward()
    assert watch.report(tmp_path / "new" / "run.html") == tmp_path / "new" / "run.html"
    assert "3 steps watched" in Page((tmp_path / "new" / "run.html").read_text()).text
    with pytest.raises(OptionError, match="is a folder"):
        watch.report(tmp_path)


def test_ticks_are_within_the_axis_and_few():
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        low, wide = torch.randn(2, generator=generator, dtype=torch.float64).mul(8).exp().tolist()
        for values in ([low, low + wide], [low, low], [-low, wide], [low, low * (1 + wide)]):
            axis = Axis(values)
            places = [axis(tick) for tick in axis.ticks]
            assert all(-0.1 <= place <= 100.1 for place in [*places, axis(values[0]), axis(values[1])])
            assert len(places) <= 9, (values, axis.ticks)
            assert len(places) >= 1, (values, axis.ticks)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.xdist_group("browser")
@pytest.mark.parametrize(("wide", "layers"), [(1280, 3), (375, 40)])
def test_in_a_browser_nothing_is_asked_for_and_nothing_overflows(tmp_path, wide, layers):
    api = pytest.importorskip("playwright.sync_api")
    path = page.write(records(40, bad=20, layers=layers), tmp_path / "run.html")
    troubles = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": wide, "height": 800}, color_scheme="dark")
        opened.on("console", lambda message: troubles.append(message.text))
        opened.on("request", lambda each: each.url.startswith(("file:", "data:")) or troubles.append(each.url))
        opened.goto(path.as_uri())
        sizes = opened.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        rows = opened.evaluate(
            "[...document.querySelectorAll('.map')].map(m => [m.children[0], m.children[1]].map(e => e.clientHeight))"
        )
        browser.close()
    assert troubles == [] and sizes[0] <= sizes[1]
    assert all(names == map for names, map in rows)  # a layer's name is beside its row


def test_a_loss_that_ends_as_nan_is_said_to(tmp_path):
    found = records(bad=7)
    for record in found[7:]:
        record.loss = math.nan
    shown = made(tmp_path, found)
    assert "The loss is NaN from step 7 on (0.143 before)." in shown.text and "last loss NaN" in shown.text
    told = terminal.text(found)
    assert next(line for line in told.splitlines() if line.startswith("loss")).split()[1:4] == ["1", "NaN", "1"]
    found[-1].loss = 0.5
    assert "The loss went from" in made(tmp_path, found).text  # it came back


def test_samples_that_go_by_rows_are_said_to(tmp_path):
    found = records()
    assert "numbered by their row" not in made(tmp_path, found).text
    for record in found:
        record.ids, record.outliers = list(range(6)), [4] if record.outliers else []
    shown = made(tmp_path, found)
    assert "numbered by their row in the step; no ids were given" in shown.text
    assert "again and again" not in shown.text and "numbered by row in the step" in terminal.text(found)


def test_a_watch_and_its_page_show_themselves_in_a_notebook(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    watch = unsum.watch(model)
    assert "<iframe" not in watch._repr_html_()
    with watch:
        model(torch.ones(4, 3)).sum().backward()
    path = watch.report(tmp_path / "run.html")
    assert path.parent == tmp_path and path.exists()
    for shown in (path._repr_html_(), watch._repr_html_()):
        assert "<iframe" in shown and "5 of 21" in shown
    path.unlink()
    assert "<iframe" not in path._repr_html_()
