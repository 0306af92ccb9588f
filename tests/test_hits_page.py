"""The page of hits: what it says is what the hits say, it loads nothing, and it can be read on a phone."""

import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import unsum
from unsum.errors import OptionError
from unsum.index import Hits
from unsum.report.charts import brief

NASTY = "</script><b>bold</b> & \"quoted\" 'text' <img src=x onerror=alert(1)>"
TEXTS = [["the cat sat", NASTY, "\n  indented\tand  wide "], ["one", "two words", "three words here"]]


def hits(texts=TEXTS, **changes):
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor([[2.5, 0.125, -1.75], [3e-7, 2e-7, 1e-7]], dtype=torch.float64)
    tokens = [
        [torch.randn(len(text.split()), generator=generator, dtype=torch.float64) for text in row] for row in texts
    ]
    names = [[f"<doc>&{q}-{r}" for r in range(3)] for q in range(2)]
    found = Hits(
        torch.tensor([[41, 0, 987654], [7, 8, 9]]), scores, scores.abs() / 8, None, tokens, names, texts, texts
    )
    return replace(found, **changes)


class Page(HTMLParser):
    """The elements of a page, each with its attributes and all of its text, and the words of the page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []  # every tag is closed

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in ("meta", "link"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data
        if not any(element["tag"] == "style" for element in self.open):
            self.text += data

    def classed(self, name):
        return [element for element in self.elements if name in element.get("class", "").split()]


def reported(tmp_path, found, *options, **named):
    path = found.report(tmp_path / "new" / "hits.html", *options, **named)
    return Page(path.read_text(encoding="utf-8"))


def flat(rows):
    return [each for row in rows for each in row]


def tokens_of(page):
    """(string, title, class, style) of each; the caption has two more, without a title."""
    return [(t["text"], t["title"], t["class"], t.get("style", "")) for t in page.classed("t") if "title" in t]


def test_the_page_says_what_the_hits_say(tmp_path):
    found = hits()
    page = reported(tmp_path, found, queries=["who <sat>?", "second"])
    assert [h["text"] for h in page.elements if h["tag"] == "h2"] == ["who <sat>?", "second"]
    items, rows = page.classed("hit"), found.rows()
    assert len(items) == len(rows) == 6
    told = zip(items, rows, page.classed("score"), page.classed("error"), page.classed("id"), strict=True)
    for item, row, score, error, name in told:
        assert float(score["title"]) == row["score"]
        assert score["text"] == ("+" if row["score"] > 0 else "") + brief(row["score"])
        assert error["text"] == f"± {brief(row['error'])}"
        assert name["text"] == row["id"]
        assert f"example {row['example']} ·" in item["text"] and row["text"].strip() in item["text"]
    assert [rank["text"] for rank in page.classed("rank")] == ["1", "2", "3"] * 2
    assert "positive: training on the example lowers the query's loss" in page.text
    assert "standard error" in page.text


def test_each_token_has_its_number_and_its_colour(tmp_path):
    found = hits()
    shown = iter(tokens_of(reported(tmp_path, found)))
    for texts, rows in zip(found.texts, found.tokens, strict=True):
        most = max(float(row.abs().max()) for row in rows)
        for text, row in zip(texts, rows, strict=True):
            for position, (word, score) in enumerate(zip(text.split(), row.tolist(), strict=True)):
                string, title, kind, style = next(shown)
                assert (string, title) == (word, f"position {position}: {'+' * (score > 0)}{brief(score)}")
                assert kind == ("t p" if score > 0 else "t n")
                assert float(style.removeprefix("--s:")) == pytest.approx(abs(score) / most, abs=0.006)
    assert next(shown, None) is None


def test_bars_begin_at_zero_and_end_at_the_score(tmp_path):
    page = reported(tmp_path, hits())
    bars = [b for b in page.elements if b["tag"] == "i" and b.get("class") in ("p", "n")]
    ends = [[float(x) for x in re.findall(r"[\d.e-]+(?=%)", b["style"])] for b in bars]
    low, wide = -1.75 * 9 / 8, 4.5 * 9 / 8 - 0.25 * 9 / 8  # with their errors
    zero = 100 * -low / wide
    assert [b["class"] for b in bars] == ["p", "p", "n", "p", "p", "p"]
    assert ends[0] == pytest.approx([zero, 250 / wide], rel=1e-3)
    assert ends[2] == pytest.approx([zero - 175 / wide, 175 / wide], rel=1e-3)
    assert ends[5] == pytest.approx([0, 100 / 3 * 8 / 9], rel=1e-3)


def test_words_give_the_strings_of_tokens(tmp_path):
    pieces = lambda text: re.findall(r"\s*\S{1,4}", text)
    found = hits()
    scores = [[torch.ones(len(pieces(text)) + 2) for text in row] for row in TEXTS]
    for row in scores:
        for each in row:
            each[-2:] = 0  # padding
    page = reported(tmp_path, replace(found, tokens=scores), pieces)
    assert [string for string, *_ in tokens_of(page)] == [p for row in TEXTS for text in row for p in pieces(text)]
    joined = [each["text"] for each in page.classed("tokens")]
    assert joined == [text.rstrip() for row in TEXTS for text in row]  # pieces with spaces of their own
    page = reported(tmp_path, found, str.split)
    assert page.classed("tokens")[0]["text"] == "the cat sat"  # words without


def test_without_strings_positions_are_numbered_beside_the_text(tmp_path):
    tokens = [[torch.arange(1.0, 6) for _ in row] for row in TEXTS]
    tokens[0][0] = torch.tensor([1.0, 2.0, -math.inf])  # as many as words, but only here
    page = reported(tmp_path, hits(tokens=tokens))
    assert [string for string, *_ in tokens_of(page)] == [*"012", *("01234" * 5)]
    assert [plain["text"] for plain in page.classed("plain")] == [text for row in TEXTS for text in row]
    assert [title for _, title, *_ in tokens_of(page)][:3] == ["position 0: +1", "position 1: +2", "position 2: −∞"]


def test_long_texts_are_folded_and_all_there(tmp_path):
    words = [f"w{k}" for k in range(900)]
    scores = torch.zeros(900, dtype=torch.float64)
    scores[600] = -2.0
    texts = [[" ".join(words)] * 3] * 2
    page = reported(tmp_path, hits(texts, tokens=[[scores] * 3] * 2))
    folds = [d for d in page.elements if d["tag"] == "details" and d.get("class") != "section"]
    assert len(folds) == 6 and all("open" not in fold for fold in folds)
    assert all("w600" in part["text"].split() for part in page.classed("part"))  # what matters is seen
    wholes = [each["text"] for each in page.classed("tokens") if each["tag"] == "div"]
    assert wholes == [" ".join(words)] * 6
    page = reported(tmp_path, hits(texts, tokens=None), queries=["long " * 100, "b"])
    assert [each["text"] for each in page.classed("plain")] == ["long " * 100, *[" ".join(words)] * 6]
    assert len([part for part in page.classed("part") if part["text"].startswith("w0 w1")]) == 6


def test_bare_hits_odd_numbers_and_no_hits(tmp_path):
    bare = Hits(torch.tensor([[3, 4]]), torch.tensor([[math.nan, -math.inf]]))
    page = reported(tmp_path, bare)
    assert [score["text"] for score in page.classed("score")] == ["NaN", "−∞"]
    assert "query 0" in page.text and not page.classed("bar") and not page.classed("id")
    assert "nan%" not in (tmp_path / "new" / "hits.html").read_text()
    assert "None." in reported(tmp_path, Hits(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0))).text
    zeros = reported(tmp_path, hits(scores=torch.zeros(2, 3), errors=None, tokens=[[torch.zeros(0)] * 3] * 2))
    assert [score["text"] for score in zeros.classed("score")] == ["0"] * 6
    torn = "\ud800 half of a pair"
    assert "? half of a pair" in reported(tmp_path, hits(texts=[[torn] * 3] * 2, tokens=None)).text


def test_hits_that_are_tokens_are_marked_in_their_texts(tmp_path):
    found = hits(tokens=None, positions=torch.tensor([[1, 0, 2], [0, 1, 2]]))
    page = reported(tmp_path, found, str.split)
    assert [t["text"] for t in page.classed("found")] == [
        text.split()[p] for row, places in zip(TEXTS, found.positions.tolist(), strict=True)
        for text, p in zip(row, places, strict=True)
    ]  # fmt: skip
    assert "training on the token lowers" in page.text and "position 1" in page.text
    assert [each["text"] for each in reported(tmp_path, found).classed("plain")] == flat(TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": ["one"]}, "queries= has 1 strings, and there are 2 queries"),
        ({"queries": "ab"}, "queries= takes a list of one string for each query; got str"),
        ({"queries": [1, 2]}, "queries= takes a list of one string"),
        ({"words": ["a"]}, "words= takes a function from an example to a list of strings; got list"),
        ({"words": lambda text: text.split()[1:]}, "hit 1 of query 0 .example 41. it gave 2 strings, and there are 3"),
        ({"words": lambda text: [*text.split(), "more"]}, "it gave 4 strings, and there are 3 tokens"),
        ({"words": lambda text: text}, "it gave a str; a list of strings is needed"),
        ({"words": lambda text: [1, 2, 3]}, "it gave a list with a int"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, options, message):
    for call in (lambda: hits().report(tmp_path / "h.html", **options), lambda: hits().show(**options)):
        with pytest.raises(OptionError, match=message):
            call()
    assert not (tmp_path / "h.html").exists()


def test_words_need_examples_and_a_page_needs_a_file(tmp_path):
    with pytest.raises(OptionError, match="the hits have none: unsum.index.open"):
        hits(examples=None).report(tmp_path / "h.html", str.split)
    with pytest.raises(OptionError, match="is a folder; name the file, such as .*hits.html"):
        hits().report(tmp_path)
    far = hits(tokens=None, positions=torch.full((2, 3), 5))
    with pytest.raises(OptionError, match="it gave 3 strings, and the token is at position 5"):
        far.report(tmp_path / "h.html", str.split)


def test_nothing_is_loaded_and_nothing_of_users_is_markup(tmp_path):
    texts = [[NASTY] * 3] * 2
    hits(texts).report(tmp_path / "h.html", queries=[NASTY, NASTY * 9])
    for text in ((tmp_path / "h.html").read_text(), hits(texts).show(queries=[NASTY] * 2)._repr_html_()):
        assert not re.findall(r"https?:|@import|url\(|<script|<img|<iframe|<b>bold", text)
        assert set(re.findall(r'(?:src|href)="([^"]*)', text)) <= {"data:,", "#main"}


def test_a_notebook_gets_one_element_whose_style_stays_inside(tmp_path):
    found = hits()
    whole, compact = found.show(str.split, ["a", "b"]), found._repr_html_()
    assert "2 queries" in repr(whole) and "hits.show()" in compact
    for text in (whole._repr_html_(), compact):
        page = Page(text)
        assert "unsum-hits" in page.elements[0]["class"] and page.elements[0]["text"].count("example 41") == 1
        assert text.startswith("<div") and "id=" not in re.sub(r'class="[^"]*"', "", text).replace("grid", "")
        assert len(page.classed("hit")) == 6
        assert [float(s["title"]) for s in page.classed("score")] == flat(found.scores.tolist())
        (style,) = [e["text"] for e in page.elements if e["tag"] == "style"]
        rules = re.findall(r"([^{}]+)\{[^{}]*\}", re.sub(r"/\*.*?\*/|@media[^{]*\{", "", style))
        assert len(rules) > 20
        assert all(
            part.strip(" }\n").startswith((".unsum-hits", ".unsum-tokens"))
            for rule in rules
            for part in rule.split(",")
        )


def test_a_notebook_shows_the_first_of_many(tmp_path):
    many = Hits(torch.arange(5 * 30).view(5, 30), torch.rand(5, 30))
    page = Page(many._repr_html_())
    assert len(page.classed("hit")) == 3 * 10
    assert "Not shown: 2 more queries and 20 more hits for each." in page.text
    assert len(Page(many.show()._repr_html_()).classed("hit")) == 150


def losses(model, batch):
    out = model(batch["ids"])
    return nn.functional.cross_entropy(out[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none").sum(1)


def test_hits_of_an_index_show_themselves(tmp_path):
    torch.manual_seed(0)
    words = ["the", "a", "cat", "dog", "sat", "ran", "here", "there"]
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))
    ids = torch.randint(0, 8, (12, 4))
    data = [{"ids": row, "text": " ".join(words[k] for k in row.tolist())} for row in ids]
    collate = lambda some: {"ids": torch.stack([each["ids"] for each in some])}
    for tokens, path in ((True, tmp_path / "tokens"), (False, tmp_path / "examples")):
        unsum.index.build(
            model, losses, data, path, project=4, tokens=tokens, collate=collate, text="text",
            ids=[f"d{k}" for k in range(12)], sketches=1 if tokens else 3, length=lambda each: len(each["ids"]),
        )  # fmt: skip
        found = unsum.index.open(path, data, collate=collate)
        answer = found.query(model, losses, {"ids": ids[:2]}, k=3, tokens=tokens)
        page = reported(tmp_path, answer)
        assert [each["text"] for each in page.classed("id")] == flat(answer.names)
        assert [each["text"] for each in page.classed("text")] == [data[k]["text"] for k in answer.ids.flatten()]
        assert len(tokens_of(page)) == (24 if tokens else 0)
        assert len(page.classed("error")) == (0 if tokens else 6)
    found = found.outliers(0.1)
    page = reported(tmp_path, found)
    assert [float(each["title"]) for each in page.classed("score")] == found.scores[0].tolist() != []
    assert "norm of the example's gradient" in page.text and "lowers the query's loss" not in page.text
    assert "stand out" in repr(found)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.xdist_group("browser")
def test_in_a_browser_nothing_is_asked_for_and_nothing_overflows(tmp_path):
    api = pytest.importorskip("playwright.sync_api")
    texts = [["word " * 400, NASTY, "x" * 900], ["one", "y" * 300 + " z", "a\nb " * 30]]
    found = hits(texts, names=[["i" * 300] * 3] * 2)
    folder, troubles = tmp_path / "pages", []
    found.report(folder / "heat.html", queries=["q" * 400, "b"])
    hits(texts, tokens=[[torch.randn(500)] * 3] * 2).report(folder / "cells.html")
    for name, shown in (("notebook", found.show()), ("compact", found)):
        (folder / f"{name}.html").write_text(f"<h2>mine</h2>{shown._repr_html_()}<details>mine</details>")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for path in sorted(folder.iterdir()):
            for wide in (1280, 390):
                for scheme in ("light", "dark"):
                    opened = browser.new_page(viewport={"width": wide, "height": 800}, color_scheme=scheme)
                    opened.on("console", lambda message: troubles.append(message.text))
                    opened.on(
                        "request", lambda each: each.url.startswith(("file:", "data:")) or troubles.append(each.url)
                    )
                    opened.goto(path.as_uri())
                    for is_open in (False, True):
                        opened.evaluate(
                            "o => document.querySelectorAll('.hit details').forEach(d => d.open = o)", is_open
                        )
                        sizes = opened.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                        assert sizes[0] <= sizes[1], (path.name, wide, scheme, is_open)
                    worst = opened.evaluate(CONTRAST)
                    assert path.stem in ("notebook", "compact") or worst >= 4.5, (path.name, scheme, worst)
                    opened.close()
        browser.close()
    assert troubles == []


# The least contrast of a token's text with what is behind it: its colour, laid over the card's.
CONTRAST = """() => {
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const linear = x => x <= .04045 * 255 ? x / 255 / 12.92 : ((x / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  return Math.min(...[...document.querySelectorAll('.t[title]')].map(t => {
    const card = parse(getComputedStyle(t.closest('.section') || document.body).backgroundColor);
    const [r, g, b, a] = parse(getComputedStyle(t).backgroundColor);
    const back = light([r, g, b].map((x, k) => x * a + card[k] * (1 - a)));
    const text = light(parse(getComputedStyle(t).color).slice(0, 3));
    return (Math.max(text, back) + .05) / (Math.min(text, back) + .05);
  }));
}"""
