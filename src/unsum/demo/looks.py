"""The files that the demo leaves behind: a report, the picture of the graph, and an index."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

import unsum
from unsum.demo.corpus import START, Corpus, Sentence
from unsum.demo.model import Transformer
from unsum.demo.terminal import Page
from unsum.demo.train import encode, losses
from unsum.destination import writable
from unsum.errors import OptionError


def places(out: Path) -> tuple[Path, Path]:
    """Where the report and the picture go, if they can be written there."""
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out {out}: this is a file, and a folder is needed; choose another")
    return writable(out / "report.html"), writable(out / "graph.svg")


def folder_for_index(out: Path) -> Path:
    """Where the index goes; one that an earlier demo left is removed."""
    folder = out / "index"
    if (folder / "plan.json").exists():
        shutil.rmtree(folder)
    return folder


def write(page: Page, files: tuple[Path, Path], corpus: Corpus, model: Transformer, norms: Tensor) -> dict[str, str]:
    """The report on 48 sentences, the dozen that pull hardest among them, and the graph of a step on four."""
    page.heading("To look at")
    report, graph = files
    order = norms.argsort(descending=True)
    hardest, others = order[:12], order[12:]
    chosen = torch.cat([hardest, others[torch.linspace(0, len(others) - 1, 36).long()]]).tolist()
    sentences = [corpus.sentences[index] for index in chosen]
    _report(report, corpus, model, sentences)
    _draw(graph, corpus, model, [sentence.words for sentence in sentences[:4]])
    width = max(24, *(len(str(path)) for path in files))
    page.line(f"    {report!s:<{width}}  the picture, every layer, and 48 sentences word by word")
    page.line(f"    {graph!s:<{width}}  one step: which tensors there are, which gradients are kept")
    index = report.parent / "index"
    page.line(f"    {index!s:<{width}}  the gradients of all sentences: unsum index info {index}")
    return {"report": str(report), "graph": str(graph)}


def _report(path: Path, corpus: Corpus, model: Transformer, sentences: list[Sentence]) -> None:
    """Whole sentences, the colours on the words that are guessed, what was planted marked."""
    lines = [sentence.words for sentence in sentences]
    labels = [f"planted: {sentence.kind}" if sentence.is_planted else "" for sentence in sentences]
    text = [[START, *line] for line in lines]
    title = "The demo's transformer"
    unsum.report(model, losses, encode(corpus, lines), path, text=text, ahead=1, labels=labels, title=title)


def _draw(path: Path, corpus: Corpus, model: Transformer, lines: list[tuple[str, ...]]) -> None:
    read, guess = encode(corpus, lines)
    loss = losses(model, (read, guess)).mean()
    loss.backward(retain_graph=True)  # the picture then shows how large the gradients are
    unsum.draw(loss, model, data={"read": read, "guess": guess}).save(path)
    model.zero_grad()
