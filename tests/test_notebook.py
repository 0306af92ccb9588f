"""How results show themselves in a notebook: as HTML that says the same as the text, and styles nothing else."""

import copy
import pickle
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import unsum
from report_nets import batch, net, squares
from unsum.training.record import Record

_SPLIT = re.compile(r",(?![^()]*\))")  # a selector's parts, but for those of `:is(...)`


class Read(HTMLParser):
    """The text of a fragment, its tables as rows of cells, and which elements are left open."""

    def __init__(self, text):
        super().__init__()
        self.words, self.rows, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += [data] * ("style" not in self.open)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def coverage():
    model = net()
    with unsum.gradients(model) as g:
        squares(model, batch()).sum().backward()
    return g.coverage()


def influence():
    examples = [(torch.randn(6), torch.randn(2)) for _ in range(9)]
    return unsum.influence(net(), squares, examples, examples[:2])


SHOWN = {
    "sites": lambda folder: unsum.sites(net()),
    "sites of many blocks": lambda folder: unsum.sites(
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(300))), fold=False
    ),
    "coverage": lambda folder: coverage(),
    "check": lambda folder: unsum.check(net(), squares, batch()),
    "report": lambda folder: unsum.report(net(), squares, batch(), folder / "r.html"),
    "influence": lambda folder: influence(),
    "top": lambda folder: influence().top(3),
    "heatmap": lambda folder: unsum.heatmap(["a", "b"], [1.0, 2.0]),
    "record": lambda folder: Record(step=3, loss=0.5, norms=torch.tensor([1.0, 2.0]), ids=[0, 1]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_one_element_whose_rules_reach_nothing_else(name, tmp_path):
    text = SHOWN[name](tmp_path)._repr_html_()
    assert Read(text).open == []
    for element in re.findall(r"<div class=\"(unsum-[\w-]+)[^>]*><style>(.*?)</style>", text, re.S):
        kind, style = element
        plain = re.sub(r"/\*.*?\*/|@media[^{]*\{", "", style, flags=re.S)
        selectors = [part.strip() for rule in re.findall(r"([^{}]+)\{[^{}]*\}", plain) for part in _SPLIT.split(rule)]
        assert selectors and all(part.startswith(f".{kind}") for part in selectors), selectors
    assert text.count("<style>") >= 1


def test_a_check_shows_each_parameter_and_its_error():
    checked = unsum.check(net(), squares, batch())
    page = Read(checked._repr_html_())
    assert page.rows[0][:2] == ["parameter", "error"]
    assert {row[0]: row[1] for row in page.rows[1:]} == {
        row.name: f"{row.error:.1e}" if row.error else "0" for row in checked.rows
    }
    assert "ok" in page.words and repr(checked) == str(checked)


def test_a_check_that_fails_says_so_first():
    wrong = unsum.check(net(), squares, batch())
    wrong = type(wrong)([*wrong.rows, type(wrong.rows[0])("<b>evil", 0.5)], wrong.tolerance, "rows 0 and 1 meet", "")
    page = Read(wrong._repr_html_())
    assert page.words[0] == "NOT ok" and page.rows[1] == ["<b>evil", "5.0e-01", "WRONG"]
    assert any("samples interact: rows 0 and 1 meet" in word for word in page.words)


def test_a_report_shows_its_page_in_a_frame_and_prints_in_few_lines(tmp_path):
    made = unsum.report(net(), squares, batch(), tmp_path / "r.html")
    frames = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, given: frames.append(dict(given)) if tag == "iframe" else None
    parser.feed(made._repr_html_())
    assert [frame["srcdoc"] for frame in frames] == [made.path.read_text()]
    assert repr(made) == str(made) and len(repr(made)) < 2_000
    made.path.unlink()
    assert "<iframe" not in made._repr_html_() and "no longer there" in made._repr_html_()


def test_coverage_is_still_a_text_and_prints_without_quotes():
    found = coverage()
    assert isinstance(found, str) and repr(found) == str(found) == "".join(found) and "\n" in found
    for copied in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert copied == found and copied._repr_html_() == found._repr_html_()
    page = Read(found._repr_html_())
    assert page.rows[0][0] == "parameter" and [row[0] for row in page.rows[1:]] == list(dict(net().named_parameters()))
    assert all(cell in found for row in page.rows for cell in row)


def test_the_sites_of_blocks_that_are_alike_are_one_row_of_words():
    found = unsum.sites(nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))), batch=torch.ones(5, 3))
    rows = Read(found._repr_html_()).rows
    assert rows[0] == ["module", "type", "output", "sites"] and ["0 … 11: 12 × the same"] in rows
    assert all(cell in repr(found) for row in rows for cell in row)


def test_long_tables_end_in_how_many_rows_are_left():
    rows = Read(SHOWN["sites of many blocks"](None)._repr_html_()).rows
    assert rows[-1] == ["and 201 more rows"] and len(rows) == 102  # a heading, 100 rows of 301, and that


def test_influence_shows_the_examples_that_help_most():
    found = influence()
    rows = Read(found.top(3)._repr_html_()).rows[1:]
    assert [int(row[2]) for row in rows] == found.top(3).ids.flatten().tolist()
    assert [int(row[1]) for row in rows] == [1, 2, 3, 1, 2, 3] and rows[0][3].startswith("+")
    assert "influence of 9 examples on 2 queries" in found._repr_html_()
