"""Every tutorial runs, and prints and draws what is stored in it."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS = {  # beside torch and what the tests themselves need
    "debug_training": ["sklearn"],
    "first_five_minutes": ["sklearn"],
    "patch_and_steer": ["transformers"],
    "train_privately": ["sklearn", "dp_accounting"],
    "trainer_norms": ["transformers", "accelerate"],
    "which_examples": ["sklearn", "safetensors", "pyarrow"],
}
LONG = {"debug_training", "train_privately", "trainer_norms"}
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(notebook):
    """[(source, outputs)] of the code cells, as plain data; text in one piece."""
    joined = lambda value: "".join(value) if isinstance(value, list) else value
    outputs = lambda cell: [
        joined(output["text"]) if "text" in output else {kind: joined(data) for kind, data in output["data"].items()}
        for output in cell["outputs"]
    ]
    return [(joined(cell["source"]), outputs(cell)) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def differs(found, stored):
    """Whether outputs differ: printed text at all, pictures and parts of pages in their words or by more than rounding
    in their numbers, which they hold with all digits."""
    if isinstance(stored, str) or isinstance(found, str) or found.keys() != stored.keys():
        return found != stored
    for kind, text in stored.items():
        (words, numbers), (other_words, other_numbers) = parts(text), parts(found[kind])
        if words != other_words or numbers != pytest.approx(other_numbers, rel=1e-4, abs=1e-4):
            return True
    return False


def parts(text):
    """What stands between the numbers, and the numbers, without the names of pictures, which are made from contents."""
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    text = re.sub(r"unsum-[0-9a-f]{10}", "", text)
    return re.split(number, text), [float(each) for each in re.findall(number, text)]


def test_every_tutorial_says_what_it_needs():
    assert [path.stem for path in TUTORIALS] == sorted(NEEDS)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in LONG else []) for p in TUTORIALS],
)
def test_a_tutorial_prints_and_draws_what_is_stored_in_it(path):
    for package in ["nbclient", "ipykernel", *NEEDS[path.stem]]:
        pytest.importorskip(package)
    today = script("tutorials").run(path)
    for (source, stored), (_, found) in zip(shown(json.loads(path.read_text())), shown(today), strict=True):
        is_same = len(found) == len(stored) and not any(map(differs, found, stored))
        assert is_same, (
            f"python docs/tutorials.py {path.stem} stores the outputs of this cell again:\n{source}\n{found}"
        )


def test_outputs_that_differ_are_noticed_and_rounding_is_not():
    picture = lambda text: {"image/svg+xml": text}
    stored = picture('<svg id="unsum-0123456789"><text x="1.5">norm 0.25</text></svg>')
    assert not differs(picture('<svg id="unsum-9876543210"><text x="1.50001">norm 0.25</text></svg>'), stored)
    assert differs(picture('<svg id="unsum-0123456789"><text x="1.5">norm 0.26</text></svg>'), stored)
    assert differs(picture('<svg id="unsum-0123456789"><text x="1.5">loss 0.25</text></svg>'), stored)
    assert differs({"text/html": "1"}, picture("1")) and differs("0.25\n", "0.26\n") and not differs("1\n", "1\n")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_stored_without_what_differs_from_run_to_run(path):
    nbformat = pytest.importorskip("nbformat")
    text = path.read_text(encoding="utf-8")
    tidied = script("tutorials").tidied(nbformat.reads(text, as_version=4))
    assert nbformat.writes(tidied) + "\n" == text


def test_a_page_of_a_notebook_shows_text_code_printed_lines_and_pictures():
    output = lambda **data: {"output_type": "display_data", "data": data}
    stream = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    picture = output(
        **{
            "image/svg+xml": ["<svg>\n", "\n", "<style>@media (prefers-color-scheme: dark) { # {} }</style></svg>"],
            "text/plain": ["<Picture>"],
        }
    )
    page = script("notebook_pages").page(
        {
            "cells": [
                {"cell_type": "markdown", "source": ["# Title\n", "\n", "text"]},
                {"cell_type": "code", "source": ["print(1)\n", "print(2)"], "outputs": [stream]},
                {"cell_type": "code", "source": ["picture"], "outputs": [picture]},
                {"cell_type": "code", "source": ["3"], "outputs": [output(**{"text/plain": ["3"]})]},
            ]
        },
        "some.ipynb",
    )
    assert page.startswith('# Title\n\ntext\n\n<p class="notebook-file"><a href="some.ipynb" download>')
    assert "```python\nprint(1)\nprint(2)\n```\n\n```{ .text .printed }\n1\n2\n```" in page
    dark = '<style>[data-md-color-scheme="slate"] { # {} }</style>'  # by the switch of the page
    assert f"<svg>\n{dark}</svg>" in page and "<Picture>" not in page  # no blank line, which would end the block
    assert page.endswith("```{ .text .printed }\n3\n```\n")


def test_links_to_notebooks_lead_to_their_pages():
    turned = script("notebook_pages").on_page_markdown("[a](tutorials/a.ipynb) [b](b.ipynb#part) [c](c.md) `d.ipynb`")
    assert turned == "[a](tutorials/a.md) [b](b.md#part) [c](c.md) `d.ipynb`"
