"""The files that the demo leaves behind: a report, and the picture of the graph."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import unsum
from unsum.demo.corpus import Corpus
from unsum.demo.model import Transformer
from unsum.demo.page import Page
from unsum.demo.train import encode, losses


def write(page: Page, out: Path, corpus: Corpus, model: Transformer, norms: Tensor) -> dict[str, str]:
    """The report on 48 sentences, those that pull hardest among them; the graph of one step on four."""
    page.heading("To look at")
    out.mkdir(parents=True, exist_ok=True)
    order = norms.argsort(descending=True)
    chosen = torch.cat([order[:12], order[12:].view(-1)[:: max(1, (len(order) - 12) // 36)][:36]]).tolist()
    lines = [corpus.sentences[index].words for index in chosen]
    written = {}
    if hasattr(unsum, "report"):
        written["report"] = out / "report.html"
        text = [["<start>", *line][: len(line)] for line in lines]
        unsum.report(model, losses, encode(corpus, lines), written["report"], text=text, title="The demo's transformer")
    if hasattr(unsum, "draw"):
        written["graph"] = out / "graph.svg"
        read, guess = encode(corpus, lines[:4])
        loss = losses(model, (read, guess)).mean()
        unsum.draw(loss, model, data={"read": read, "guess": guess}).save(written["graph"])
    for path in written.values():
        page.line(f"    {path}")
    return {name: str(path) for name, path in written.items()}
