"""Pictures of many architectures in a real browser, with its own letters: every text can be read."""

from pathlib import Path

import pytest
import torch

import unsum
from batches import suite
from drawn import Deep, article
from legible import CHROMIUM, reader

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to try pictures in")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),  # one browser, one process
]

SUITE = suite()
DOCS = Path(__file__).parent.parent / "docs"
SPREAD = (
    "gpt2", "gpt_neox", "bloom", "falcon", "llama", "gemma2", "phi3", "mamba", "rwkv", "mixtral", "jetmoe",
    "bert", "distilbert", "albert", "deberta-v2", "convbert", "funnel", "t5", "bart", "vit", "swin", "resnet",
    "segformer", "nn/convolutions", "nn/lstm", "nn/gru", "nn/encoder",
)  # fmt: skip
OTHERS = tuple(name for name in SUITE if name not in SPREAD)


@pytest.fixture(scope="module")
def troubles():
    with reader() as of:
        yield of


def pictures(name):
    """The graph as it is drawn by default, and the time line of every module's output and gradient."""
    architecture = SUITE[name]
    model, step = architecture.model(), architecture.steps()[0]
    with unsum.capture(model, "*:output", "*:grad_output", reduce="norm", missing="ignore") as got:
        loss = architecture.losses(model, step).sum()
        loss.backward(retain_graph=True)
    return {"graph": unsum.draw(loss, model), "time line": got.trace().picture()}


@pytest.mark.parametrize("name", [*SPREAD, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_text_of_a_picture_can_be_read(troubles, name):
    for what, picture in pictures(name).items():
        assert troubles(picture.svg) == [], what


@pytest.mark.parametrize(
    "options", [{"fold": 0}, {"fold": 99}, {"fold": 99, "repeat": False}, {"views": True}], ids=str
)
@pytest.mark.parametrize("name", ["gpt2", "resnet", "nn/lstm"])
def test_every_text_can_be_read_however_far_it_is_open(troubles, name, options):
    architecture = SUITE[name]
    model = architecture.model()
    loss = architecture.losses(model, architecture.steps()[0]).sum()
    loss.backward(retain_graph=True)
    assert troubles(unsum.draw(loss, model, **options).svg) == []


def test_what_blocks_did_can_be_read(troubles):
    model, x, y, _ = article()
    with unsum.capture(model, "fc1:input", "fc1:grad_output", "fc2.weight:grad") as got:
        with unsum.edit(model, {"fc1:output": unsum.scale(2.0)}) as edited, unsum.gradients(model) as g:
            loss = (model(x) - y).square().sum()
            loss.backward()
    assert troubles(unsum.draw(loss, model, {"x": x, "y": y}, show=[got, edited, g]).svg) == []


LONG = "the_name_of_a_thing_that_somebody_has_called_by_a_whole_sentence_and_then_some"


def test_long_names_stay_in_their_boxes(troubles):
    model = torch.nn.ModuleDict({LONG: Deep(3), LONG.upper(): Deep(3)})
    x = torch.randn(3, 4)
    loss = sum(module(x) for module in model.values()).sum()
    for fold in (None, 1, 99):
        assert troubles(unsum.draw(loss, model, {LONG: x}, fold=fold).svg) == []


STORED = sorted(path for folder in ("drawn", "growth", "pictures") for path in (DOCS / folder).glob("*.svg"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_stored_pictures_of_the_pages_can_be_read(troubles, path):
    assert troubles(path.read_text(encoding="utf-8")) == []


FAULTS = {
    "leaves the picture": '<text x="190" y="20">long enough</text>',
    "overlaps": '<text x="9" y="20">one</text><text x="12" y="24">two</text>',
    "leaves its box": '<g class="tensor"><rect class="box" x="5" y="5" width="20" height="20"/>'
    '<text x="9" y="20">much too long</text></g>',
    "goes through the text": '<text x="9" y="20">one</text><g><path class="forward" d="M15 0V50"/></g>',
    "goes through the box": '<g class="op"><rect class="box" x="5" y="5" width="20" height="20"/></g>'
    '<g><path class="backward" d="M15 0V50"/></g>',
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(troubles, fault):
    found = troubles(f'<svg xmlns="http://www.w3.org/2000/svg" width="200" height="60">{FAULTS[fault]}</svg>')
    assert len(found) == 1 and fault in found[0]
