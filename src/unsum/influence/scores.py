"""What comes of `influence`: one score for every query and every training example."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor

from unsum.errors import OptionError
from unsum.notebook import element, table

_POSITIVE = "A positive score: training on the example lowers the query's loss."
_SHOWN = 5, 5  # queries, and examples of each, that a notebook shows


@dataclass(frozen=True, eq=False)
class Top:
    """The examples with the highest scores for each query.

    Examples:
        >>> best = Influence(torch.tensor([[0.1, 0.3, -0.2]])).top(2)
        >>> best.ids, best.scores
        (tensor([[1, 0]]), tensor([[0.3000, 0.1000]]))
    """

    ids: Tensor  # (queries, k)
    scores: Tensor  # (queries, k)

    def _repr_html_(self) -> str:
        both = zip(self.ids.tolist(), self.scores.tolist(), strict=True)
        rows = [
            (str(query), str(rank), str(example), f"{score:+.4g}".replace("-", "−"))
            for query, (ids, scores) in enumerate(both)
            for rank, (example, score) in enumerate(zip(ids, scores, strict=True), 1)
        ]
        drawn = table(["query", "rank", "example", "score"], rows, right=range(4), names=0)
        return element(f'{drawn}<div class="note">{_POSITIVE}</div>')


@dataclass(frozen=True, eq=False)
class Influence:
    """The result of `unsum.influence`: scores. A positive score: training on the example lowers the query's loss.

    Examples:
        >>> s = Influence(torch.tensor([[0.1, 0.3, -0.2]]))
        >>> s
        influence of 3 examples on 1 queries: s.matrix, s.top(k)
        >>> s.top(1).ids, Influence(-s.matrix).top(1).ids  # helped most, harmed most
        (tensor([[1]]), tensor([[2]]))
    """

    matrix: Tensor  # (queries, examples), float64, on the processor
    tokens: Tensor | None = None  # (queries, examples, positions), if they were asked for; 0 after an example's end
    left_out: tuple[str, ...] = ()  # parameters that have no positions, which `tokens` is without

    def top(self, k: int = 10) -> Top:
        """The k examples that helped each query most, best first. `-s.matrix` has those that harmed it."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise OptionError(f"top({k!r}): how many examples, 1 or more")
        found = torch.topk(self.matrix, min(k, self.matrix.shape[1]), dim=1)
        return Top(found.indices, found.values)

    def __repr__(self) -> str:
        queries, examples = self.matrix.shape
        return f"influence of {examples} examples on {queries} queries: s.matrix, s.top(k)"

    def _repr_html_(self) -> str:
        queries, k = _SHOWN
        best = self.top(k)
        first = Top(best.ids[:queries], best.scores[:queries])
        more = " Only the first queries are shown." if len(self.matrix) > queries else ""
        title = f'<div class="title">{escape(repr(self))}</div>'
        return element(f'{title}<div class="note">The examples that help most.{more}</div>') + first._repr_html_()
