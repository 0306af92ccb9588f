"""Answers a query: the scan over the rows, error bars, a second stage by whole gradients, the scores of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unsum.errors import OptionError
from unsum.index.best import Best, best_rows
from unsum.index.data import Collate, looked_at
from unsum.index.hits import Hits
from unsum.index.query import Asker
from unsum.index.scan import scan
from unsum.index.stored import Stored
from unsum.influence import Influence
from unsum.user_warning import warn


@dataclass(frozen=True)
class Answers:
    """An index, the data set behind it if that was given, and one who asks."""

    stored: Stored
    asker: Asker
    score: str
    data: Any
    collate: Collate | None

    def examples(self, asked: Tensor, k: int, device: torch.device) -> Hits:
        """The best examples for queries (q, K)."""
        best = self._best(asked.to(device), k, by_example=True)
        errors = None if self.stored.info["tokens"] else self._errors(asked, best.numbers)
        return Hits(best.numbers, best.scores, errors)

    def tokens(self, asked: Tensor, k: int, device: torch.device) -> Hits:
        """The best tokens."""
        best = self._best(asked.to(device), k, by_example=False)
        ids, positions = self.stored.places(best.numbers)
        return Hits(ids, best.scores, self._errors(asked, best.numbers), positions)

    def _best(self, asked: Tensor, k: int, *, by_example: bool) -> Best:
        """The highest scores, in one pass over the rows."""
        stored, cosine = self.stored, self.score == "cosine"
        if not by_example or not stored.info["tokens"]:
            return best_rows(stored.shards, stored.starts, asked, k, cosine=cosine)
        best = Best(len(asked), k)  # an example's score is the sum of its tokens' scores
        for found in scan(stored.shards, asked, cosine=cosine, whole=True):
            best.add(stored.first_examples[found.shard], stored.summed(found.shard, found.scores))
        return best

    def _errors(self, asked: Tensor, numbers: Tensor) -> Tensor | None:
        if not self.asker.has_errors or self.score == "influence":  # the rows' second moment mixes the sketches
            return None
        rows = self.stored.chosen(numbers)
        found = self.asker.errors(asked, rows)
        if self.score == "cosine":
            found = found / rows.norm(dim=-1).clamp_min(1e-300) / asked.norm(dim=1, keepdim=True).clamp_min(1e-300)
        return found

    def reranked(self, hits: Hits, batch: Any, k: int, *, tokens: bool) -> Hits:
        """The second stage: whole gradients of all queries' candidates together, then each query's own."""
        own = hits.ids.unique()
        exact = self.asker.exact(batch, self._looked_up(own, "rerank="), self.score, self.collate, tokens=tokens)
        place = torch.searchsorted(own, hits.ids)
        scores, order = exact.matrix.gather(1, place).topk(min(k, place.shape[1]), dim=1)
        return _with_tokens(Hits(hits.ids.gather(1, order), scores), exact, place.gather(1, order))

    def with_tokens(self, hits: Hits, asked: Tensor, batch: Any) -> Hits:
        """The score of every token of the hits: from the rows, or from whole gradients."""
        if self.stored.info["tokens"]:
            rows = [[self.stored.rows_of(int(e)).double() @ asked[q] for e in row] for q, row in enumerate(hits.ids)]
            return replace(hits, tokens=rows)
        own = hits.ids.unique()
        exact = self.asker.exact(batch, self._looked_up(own, "tokens="), self.score, self.collate, tokens=True)
        return _with_tokens(hits, exact, torch.searchsorted(own, hits.ids))

    def _looked_up(self, numbers: Tensor, what: str) -> list[Any]:
        if self.data is None:
            raise OptionError(f"query({what}): needs the data set: unsum.index.open(path, data), or data=")
        if not is_by_example(self.data, self.stored):
            raise OptionError(
                f"query({what}): the data has {len(self.data)} examples, and the index {self.stored.info['examples']}: "
                "it is not the data set that it was built from, or several documents are in one example"
            )
        if not is_same(self.data, self.stored):
            raise OptionError(f"query({what}): the data is not what the index was built from: other examples, or order")
        return [self.data[number] for number in numbers.tolist()]


def told(hits: Hits, stored: Stored, data: Any) -> Hits:
    """The same with ids, texts and examples, as far as there are."""
    named, examples = stored.named(hits.ids), None
    if data is not None and is_by_example(data, stored):
        examples = [[data[number] for number in row] for row in hits.ids.tolist()]
    return replace(hits, names=named.get("id"), texts=named.get("text"), examples=examples)


def fitting(data: Any, stored: Stored) -> Any:
    """A data set whose examples go with the rows. One that is not what the index was built from may be meant (texts
    beside tokens), so that a warning says it."""
    if data is None:
        return None
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise OptionError("data=: a list or a Dataset, whose examples can be asked for by number")
    known = stored.info["data"]
    if "examples" in known and len(data) != known["examples"]:
        raise OptionError(
            f"data=: not what the index was built from: it has {len(data)} examples, not {known['examples']}"
        )
    if not is_same(data, stored):
        warn(
            "data=: not what the index was built from: other examples, another order or another form. hits.examples "
            "are those of this data; rerank= and tokens= raise an error"
        )
    return data


def is_same(data: Any, stored: Stored) -> bool:
    """Whether some examples of the data are those that the index was built from."""
    known = stored.info["data"]
    return "examples" not in known or looked_at(data) == known["content"]


def is_by_example(data: Any, stored: Stored) -> bool:
    """Whether the data has one example for each of the index's."""
    return len(data) == stored.info["examples"]


def _with_tokens(hits: Hits, exact: Influence, place: Tensor) -> Hits:
    """[query][rank]: the scores of tokens, of what was computed for all queries together."""
    if exact.tokens is None:
        return hits
    by_token = [[exact.tokens[q, p] for p in row] for q, row in enumerate(place.tolist())]
    return replace(hits, tokens=by_token, left_out=exact.left_out)
