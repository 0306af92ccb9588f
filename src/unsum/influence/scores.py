"""What comes of `influence`: one score for every query and every training example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unsum.errors import OptionError


@dataclass(frozen=True, eq=False)
class Top:
    """The examples with the highest scores, of each query."""

    ids: Tensor  # (queries, k)
    scores: Tensor  # (queries, k)


@dataclass(frozen=True, eq=False)
class Influence:
    """Scores. Positive: training on the example lowers the query's loss."""

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
