"""A hook of mkdocs (mkdocs.yml): the pages that unsum writes, shown on the site as they are.

`<!-- example: report -->` in a page becomes a window onto `examples/report.html`, which is made when the site is built:
the report by the first program of report.md, the others by the programs below.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_MARK = re.compile(r"^<!-- example: (\w+) -->$", re.M)
_WINDOW = """<iframe class="example" src="examples/{0}.html" title="{1}" loading="lazy"></iframe>

[{1}, in a window of its own](examples/{0}.html)"""
_TITLES = {
    "report": "The page that this program writes",
    "watch": "The page of a run with wrong labels and one infinite input",
    "hits": "The training sentences behind a wrong one",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    from mkdocs.structure.files import File

    for name, page in pages().items():
        files.append(File.generated(config, f"examples/{name}.html", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put a window where a page asks for one."""
    return _MARK.sub(lambda match: _WINDOW.format(match[1], _TITLES[match[1]]), markdown)


def pages() -> dict[str, str]:
    """{name: HTML} of every example."""
    with _elsewhere():
        return {"report": _report(), "watch": _watch(), "hits": _hits()}


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """This checkout's unsum, in a folder that is thrown away, without lines of progress."""
    before, progress = os.getcwd(), os.environ.get("UNSUM_PROGRESS")
    sys.path.insert(0, str(DOCS.parent / "src"))
    os.environ["UNSUM_PROGRESS"] = "off"
    import torch

    torch.set_num_threads(1)  # the models are small: more threads would wait for each other
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.path.remove(str(DOCS.parent / "src"))
            os.environ.pop("UNSUM_PROGRESS")
            if progress is not None:
                os.environ["UNSUM_PROGRESS"] = progress


def _report() -> str:
    code = re.search(r"^```python\n(.*?)^```$", (DOCS / "report.md").read_text(encoding="utf-8"), re.M | re.S)
    assert code is not None
    exec(code[1], {"__name__": "report", "print": lambda *_: None})
    return Path("build/report.html").read_text(encoding="utf-8")


def _watch() -> str:
    import torch
    from torch import nn
    from torch.nn import functional as F

    import unsum

    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    wrong = torch.randperm(400)[:8]
    y[wrong] = 3 - y[wrong]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    watch = unsum.watch(model, loss_reduction="mean", ids=lambda batch: batch[2])
    batches = [(x[rows], y[rows], rows) for _ in range(8) for rows in torch.randperm(400).split(20)]
    batches[-2][0][3, 2] = float("inf")
    for inputs, labels, _ in watch.loader(batches):
        optimizer.zero_grad()
        with watch:
            F.cross_entropy(model(inputs), labels).backward()
        if inputs.isfinite().all():
            optimizer.step()
    return Path(watch.report("run.html")).read_text(encoding="utf-8")


def _hits() -> str:
    import torch
    from torch import nn
    from torch.nn import functional as F

    import unsum

    pets = {"ann": "cat", "ben": "dog", "cas": "owl", "dora": "pony", "eli": "crow", "finn": "hare"}
    forms = ("{} keeps a {}", "{} has a {}", "{} feeds the {}")
    texts = [form.format(name, pet) for form in forms for name, pet in pets.items()] + ["ben feeds the crow"]
    words = sorted({word for text in texts for word in text.split()})
    ids = torch.tensor([[words.index(word) for word in text.split()] for text in texts])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(len(words), 16), nn.Flatten(1), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 24))

    def losses(model: Any, ids: Any) -> Any:
        return F.cross_entropy(model(ids[:, :3]), ids[:, 3], reduction="none")

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        losses(model, ids).mean().backward()
        optimizer.step()
    asked = "ben keeps a crow"
    query = torch.tensor([[words.index(word) for word in asked.split()]])
    unsum.index.build(model, losses, list(ids), "index", project=16, text=lambda row: " ".join(words[k] for k in row))
    hits = unsum.index.open("index", data=list(ids)).query(model, losses, query, k=5)
    return hits.report("hits.html", queries=[f"Why “{asked}”?"]).read_text(encoding="utf-8")
