"""`Hits`: the examples that answer queries best, as tensors, a table, JSON or a page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from unsum.destination import writable
from unsum.index import page
from unsum.index.words import Words


@dataclass(frozen=True, eq=False)
class Hits:
    """The examples with the highest scores for each query, best first. What `i.query` gives.

    Examples:
        >>> import tempfile, torch, unsum
        >>> model, folder = torch.nn.Linear(3, 1), tempfile.mkdtemp() + "/index"
        >>> loss = lambda m, x: m(x).square().sum(1)
        >>> unsum.index.build(model, loss, [torch.randn(3) for _ in range(20)], folder)
        >>> unsum.index.open(folder).query(model, loss, torch.randn(2, 3), k=5)
        the 5 best examples for 2 queries: hits.ids, hits.scores; print(hits), hits.report("hits.html")
    """

    ids: Tensor  # (queries, k): numbers of examples
    scores: Tensor  # (queries, k); positive: training on the example lowers the query's loss
    errors: Tensor | None = None  # (queries, k): standard errors, of an index with independent sketches
    positions: Tensor | None = None  # (queries, k): of hits that are tokens
    tokens: Sequence[Sequence[Tensor]] | None = None  # [query][rank]: the score of each token, (t,)
    names: Sequence[Sequence[str]] | None = None  # [query][rank]: ids that the index was built with
    texts: Sequence[Sequence[str]] | None = None  # [query][rank]: texts that it was built with
    examples: Sequence[Sequence[Any]] | None = None  # [query][rank], where the data set was given
    are_norms: bool = False  # whether scores are the norms of rows: what `i.outliers` gives
    left_out: Sequence[str] = ()  # parameters without positions, which `tokens` from whole gradients is without

    def __repr__(self) -> str:
        queries, k = self.ids.shape
        what = "tokens" if self.positions is not None else "examples"
        parts = [
            name
            for name in ("errors", "positions", "tokens", "names", "texts", "examples")
            if getattr(self, name) is not None
        ]
        held = ", ".join(f"hits.{name}" for name in ("ids", "scores", *parts))
        asked = "1 query" if queries == 1 else f"{queries} queries"
        told = f"{k} {what} that stand out" if self.are_norms else f"the {k} best {what} for {asked}"
        return f'{told}: {held}; print(hits), hits.report("hits.html")'

    def __str__(self) -> str:
        """A table: one line for each hit."""
        lines = ["  ".join(cells).rstrip() for cells in _aligned(self._table())]
        if self.tokens is not None and self.left_out:
            lines.append(f"the scores of tokens are without {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _table(self) -> list[list[str]]:
        shown = self.names is not None
        head = ["query", "rank", "example", "score", *(["±"] if self.errors is not None else [])]
        head += [*(["position"] if self.positions is not None else []), *(["id"] if shown else [])]
        lines = [[*head, "text" if self._texts() is not None else ""]]
        for row in self.rows():
            cells = [str(row["query"]), str(row["rank"]), str(row["example"]), f"{row['score']:.4g}"]
            cells += [f"{row['error']:.2g}"] if "error" in row else []
            cells += [str(row["position"])] if "position" in row else []
            cells += [_short(row["id"], 30)] if "id" in row else []
            lines.append([*cells, _short(row.get("text", ""))])
        return lines

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each hit: query, rank, example, score, and what else is known of it."""
        found = []
        texts = self._texts()
        for query, (ids, scores) in enumerate(zip(self.ids.tolist(), self.scores.tolist(), strict=True)):
            for rank, (example, score) in enumerate(zip(ids, scores, strict=True)):
                row: dict[str, Any] = {"query": query, "rank": rank + 1, "example": example, "score": score}
                if self.errors is not None:
                    row["error"] = self.errors[query, rank].item()
                if self.positions is not None:
                    row["position"] = int(self.positions[query, rank])
                if self.names is not None:
                    row["id"] = self.names[query][rank]
                if texts is not None:
                    row["text"] = texts[query][rank]
                if self.tokens is not None:
                    row["tokens"] = self.tokens[query][rank].tolist()
                found.append(row)
        return found

    def json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The hits as JSON, a list with one object for each; written to a file if a path is given."""
        text = json.dumps(self.rows(), ensure_ascii=False, indent=1)
        if path is not None:
            writable(path, example="hits.json").write_text(text + "\n", encoding="utf-8")
        return text

    def report(
        self, path: str | os.PathLike[str], words: Words | None = None, queries: Sequence[str] | None = None
    ) -> Path:
        """Write one page, which loads nothing, with the hits of every query; where `hits.tokens` has the scores of
        tokens, texts are heat maps.

        Args:
            path: The file; missing folders are made.
            words: A function from an example (`hits.examples[q][r]`) to the strings of its tokens. None: the words of
                the text, where they are as many as the tokens, or else the numbers of positions.
            queries: The text of each query, for its heading.
        """
        return page.write(self, path, words, queries)

    def show(self, words: Words | None = None, queries: Sequence[str] | None = None) -> page.Shown:
        """The same as `report` for a notebook, where what is returned shows itself."""
        return page.Shown(self, words, queries)

    def _repr_html_(self) -> str:
        return page.compact(self)

    def _texts(self) -> Sequence[Sequence[str]] | None:
        """The texts that the index has, or the examples themselves where these are texts."""
        if self.texts is not None or self.examples is None:
            return self.texts
        found = [[_text_of(example) for example in row] for row in self.examples]
        return found if all(text is not None for row in found for text in row) else None  # type: ignore[return-value]


def _text_of(example: Any) -> str | None:
    if isinstance(example, str):
        return example
    text = example.get("text") if isinstance(example, dict) else None
    return text if isinstance(text, str) else None


def _aligned(lines: list[list[str]]) -> list[list[str]]:
    """Numbers to the right, the last column as it is."""
    widths = [max(len(cells[k]) for cells in lines) for k in range(len(lines[0]) - 1)]
    return [[*(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)), cells[-1]] for cells in lines]


def _short(text: str, most: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
