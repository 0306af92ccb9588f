"""The pages say what the results say."""

import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import unsum

ROOT = Path(__file__).parent.parent


def load(path, monkeypatch):
    monkeypatch.syspath_prepend(str(path.parent))  # scripts import their neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_table_of_costs_is_made_from_the_last_results(monkeypatch):
    tables = load(ROOT / "benchmarks" / "tables.py", monkeypatch)
    page, found = (ROOT / "docs" / "cost.md").read_text(), tables.results()
    assert found.keys() >= {"capture_overhead", "norms_cpu", "norms_cuda", "quantities_cuda", "growth_cpu"}
    for name, result in found.items():
        assert tables.TABLES[name](result) in page, name
    assert tables.filled(page, found) == page
    for name in found.keys() & {"growth_cpu", "growth_cuda"}:
        for file, svg in tables.charts(found[name]).items():
            assert (ROOT / "docs" / "growth" / file).read_text() == svg


def test_the_page_on_privacy_says_what_was_measured(monkeypatch):
    private = load(ROOT / "benchmarks" / "private.py", monkeypatch)
    page = (ROOT / "docs" / "private.md").read_text()
    for results in (private.RESULTS, private.ON_GPU):
        assert private.filled(page, json.loads(results.read_text())) == page


def test_a_size_that_failed_stands_in_the_table_of_growth_with_its_reason(monkeypatch):
    tables = load(ROOT / "benchmarks" / "tables.py", monkeypatch)
    ratio = {"median": 1.1, "low": 1.0, "high": 1.2}
    row = {"us_per_sample": {"plain": 2.0, "norms": 2.2}, "to_plain": ratio, "memory": 1.01, "norms": "off by 1e-05"}
    rows = [{"B": b, "T": 128, **row} for b in (1, 4)] + [
        {"B": 512, "T": 128, "note": "fails: OutOfMemoryError: a | b"}
    ]
    tokens = [{"B": 4, "T": 128, **row}]
    machine = {"cpu": "some", "gpu": "NVIDIA H200", "torch": "2.11.0"}
    result = {"machine": machine, "device": "cuda", "model": {"width": 768}, "samples": rows, "tokens": tokens}
    table = tables.growth(result)
    assert "gpu NVIDIA H200" in table and "| 4 | 128 | 2 | 2 | 1.10× | 1.00, 1.20 | 1.01× | off by 1e-05 |" in table
    assert "| 512 | 128 | fails: OutOfMemoryError: a / b | | | | | |" in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1
    assert list(tables.charts(result)) == ["cuda_samples.svg"] and "cuda_tokens.svg" not in table
    assert "NVIDIA H200" in tables.charts(result)["cuda_samples.svg"]
    page, found = (ROOT / "docs" / "cost.md").read_text(), tables.results() | {"growth_cuda": result}
    new = tables.filled(page, found)
    assert table in new and tables.filled(new, found) == new


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere():
    pages, notebooks = (list((ROOT / "docs").rglob(f"*.{ending}")) for ending in ("md", "ipynb"))
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f" {page.relative_to(ROOT / 'docs').with_suffix('.md')}\n" in navigation for page in pages + notebooks)
    for page in [*pages, *notebooks, ROOT / "README.md"]:
        for target in re.findall(r"\]\(([\w./-]+\.(?:md|svg|ipynb))\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def referenced():
    """What the reference page shows, by the path that it names."""
    for path in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M):
        if "integrations." in path and importlib.util.find_spec(path.split(".")[2]) is None:
            continue  # of a library that is not installed here
        yield path, pkgutil.resolve_name(path)


def test_every_public_name_is_on_the_reference_page():
    shown = [thing for _, thing in referenced()]
    for name in set(unsum.__all__) - {"testing"}:
        assert any(thing is getattr(unsum, name) for thing in shown), name
    assert {unsum.testing.assert_exact, unsum.testing.laws} <= {thing for thing in shown if callable(thing)}


def test_every_public_name_is_taught_on_a_page_that_runs():
    pages = "".join(p.read_text() for p in (ROOT / "docs").glob("*.md") if p.name != "api.md")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", pages, re.M | re.S))
    assert [name for name in unsum.__all__ if not re.search(rf"\bunsum\.{name}\b", code)] == []


def test_everything_on_the_reference_page_has_an_example():
    parts = ("BySample", "Layer", "Stats", "Flag")  # of a Report, whose example shows them
    for path, thing in referenced():
        assert ">>>" in (thing.__doc__ or "") or path.endswith(parts), path


def program(page):
    """The code blocks of a page, each on its own lines, and nothing else."""
    inside, lines = False, []
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


@pytest.mark.skipif(importlib.util.find_spec("nnsight") is None, reason="nnsight is not installed")
def test_the_page_on_nnsight_runs_in_a_process_of_its_own(tmp_path):  # importing it here would be felt by every test
    file, page = tmp_path / "page.py", ROOT / "docs" / "from" / "nnsight.md"
    file.write_text(program(page))
    done = subprocess.run(
        [sys.executable, file],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.M | re.S)
    assert len(shown) > 4
    assert done.stdout == "".join(shown)


def test_the_pictures_are_what_the_engine_does_today(monkeypatch):
    pictures = load(ROOT / "docs" / "pictures.py", monkeypatch)
    drawn = pictures.draw()
    assert drawn == pictures.draw()
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").iterdir()}, (
        "python docs/pictures.py draws them again; look at them before they are committed"
    )


def test_the_pictures_of_pages_are_what_their_code_draws(monkeypatch):
    drawn = load(ROOT / "docs" / "drawn.py", monkeypatch)
    found = {name: svg for page in drawn.PAGES for name, svg in drawn.draw(page).items()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "drawn").iterdir()}
    assert found.keys() == kept.keys()
    for name, svg in found.items():
        assert svg == kept[name], f"{name}: python docs/drawn.py draws it again; look at it before it is committed"


def test_the_picture_on_hooks_shows_which_gradients_are_stored():
    drawn = ElementTree.parse(ROOT / "docs" / "drawn" / "two_layers.svg").getroot()
    told = " ".join(element.text or "" for element in drawn if element.tag.endswith("desc"))
    stored, _, rest = told.partition("Gradients are stored for: ")[2].partition(".\u0020No gradient is computed for: ")
    assert all(name in stored for name in ("fc0.weight", "fc1.weight", "a₁")) and "a₀" not in stored
    assert "x" in rest and "y" in rest


def test_the_pictures_show_the_network_of_the_page_and_can_be_read_aloud(monkeypatch):
    pictures = load(ROOT / "docs" / "pictures.py", monkeypatch)
    page = (ROOT / "docs" / "how.md").read_text()
    assert inspect.getsource(pictures.Net) in page
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert f"](pictures/{picture.name})" in page
        tags = {element.tag.rpartition("}")[2]: element.text for element in ElementTree.parse(picture).getroot()}
        assert tags["title"] and tags["desc"]


def test_the_files_that_the_page_on_one_step_names_are_there():
    named = set(re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", (ROOT / "docs" / "how.md").read_text()))
    assert len(named) > 30
    assert [name for name in named if not any((ROOT / top / name).exists() for top in ("src/unsum", "."))] == []


def test_no_page_of_the_site_asks_the_network_for_anything(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    loads = re.compile(
        r"<(?:script|img|source|iframe)\b[^>]*\bsrc=[\"']?([^\"'\s>]+)|<link\b[^>]*\bhref=[\"']?([^\"'\s>]+)"
    )
    for page in pages:
        for match in loads.finditer(page.read_text()):
            assert not re.match(r"(https?:)?//", match[1] or match[2]), (page.name, match[0])
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text()), sheet.name


def test_every_notebook_has_a_page_with_its_outputs_and_its_file_beside_it(site):
    notebooks = list((ROOT / "docs" / "tutorials").glob("*.ipynb"))
    assert len(notebooks) > 5
    for notebook in notebooks:
        file = site / "tutorials" / notebook.name
        page = file.with_suffix(".html").read_text()
        assert file.read_text() == notebook.read_text() and f'href="{notebook.name}" download' in page
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        assert len(re.findall(r'<div class="language-text printed(?: wraps)? highlight">', page)) == sum(
            "text" in output or output["data"].keys() == {"text/plain"} for cell in cells for output in cell["outputs"]
        )
        for output in (output for cell in cells for output in cell["outputs"] if "data" in output):
            if "image/svg+xml" in output["data"]:
                assert re.search(r'id="(unsum-\w+)"', "".join(output["data"]["image/svg+xml"]))[0] in page


def test_the_reference_shows_every_public_name(site):
    page = (site / "api.html").read_text()
    for name in set(unsum.__all__) - {"errors", "testing"}:
        assert re.search(rf'id="unsum\.[\w.]*\b{name}"', page), name
