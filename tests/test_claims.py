"""Every measured figure in the prose of README.md and docs/index.md comes from a file of results."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("claims", ROOT / "benchmarks" / "claims.py")
claims = importlib.util.module_from_spec(spec)
spec.loader.exec_module(claims)


@pytest.mark.parametrize("page", claims.PAGES, ids=lambda page: page.name)
def test_the_figures_of_a_page_are_those_of_the_last_results(page):
    text = page.read_text(encoding="utf-8")
    assert claims.filled(text) == text, "python benchmarks/claims.py fills them in"
    assert text.count("<!-- figure:") == len(claims.MARKED.findall(text)) == text.count("<!-- /figure -->")
    assert not re.search(r"^\s*<!-- figure", text, re.M), "at the start of a line a mark ends the paragraph"


@pytest.mark.parametrize("page", claims.PAGES, ids=lambda page: page.name)
def test_no_measured_figure_stands_outside_of_marks(page):
    assert claims.unmarked(page.read_text(encoding="utf-8")) == [], (
        "put it between marks: benchmarks/claims.py says how"
    )


def test_every_figure_can_be_told_from_the_results():
    for name, figure in claims.FIGURES.items():
        assert re.fullmatch(r"[\d.,]+( to [\d.,]+)?", figure(claims.read)), name


def test_a_figure_is_the_one_of_the_result_file_and_changes_with_it():
    page = "took <!-- figure: planted in the demo, found by norms -->3<!-- /figure --> of them"
    result = {"planted": 20, "precision": {"gradient norm": 0.25}}
    assert claims.filled(page, {"demo": result}.get) == page.replace(">3<", ">5<")
    with pytest.raises(SystemExit, match="no figure 'speed'"):
        claims.filled("<!-- figure: speed -->9<!-- /figure -->")


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("a step took 1.07 times as long", ["1.07 times"]),
        ("1.07× of a step, 12 % more, 40 ms", ["1.07×", "12 %", "40 ms"]),
        ("finds 17 of these 20 sentences", ["17 of these 20"]),
        ("| a table | 3.5× |", ["3.5×"]),
        ("a step took <!-- figure: x -->1.07<!-- /figure --> times as long", []),
        ("it needs Python 3.11 and torch 2.11; a batch of 5 samples; `clip(1.25)`", []),
        ("```python\nscale(1.25)  # 2 times\n```", []),
    ],
)
def test_what_counts_as_a_measured_figure(prose, found):
    assert claims.unmarked(prose) == found
