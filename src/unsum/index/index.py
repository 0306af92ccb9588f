"""`open`: an index that was built, and what can be asked of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum.check import LossFunction
from unsum.errors import OptionError
from unsum.examples import SamplesOfBatch
from unsum.index import alike, export, store, texts
from unsum.index.alike import Pairs
from unsum.index.answer import Answers, fitting, told
from unsum.index.data import Collate
from unsum.index.hits import Hits
from unsum.index.query import Asker
from unsum.index.stored import Stored
from unsum.progress import progress
from unsum.seams.modes import exactly


class Index:
    """The rows of a data set, mapped into memory. What `unsum.index.open` gives.

    Examples:
        >>> import tempfile, unsum
        >>> model, folder = nn.Linear(3, 1), tempfile.mkdtemp() + "/index"
        >>> loss = lambda m, x: m(x).square().sum(1)
        >>> unsum.index.build(model, loss, [torch.randn(3) for _ in range(20)], folder)
        >>> i = unsum.index.open(folder)
        >>> len(i), i.rows(0, 3).shape, i.verify()
        (20, torch.Size([3, 4]), [])
    """

    def __init__(self, folder: Path, data: Any = None, collate: Collate | None = None) -> None:
        manifest = store.read_json(folder, store.MANIFEST)
        if manifest is None:
            is_begun = (folder / store.PLAN).exists()
            why = "a build that is not done; call unsum.index.build(...) again to finish it" if is_begun else "no index"
            raise OptionError(f"{folder}: {why}")
        self.info: dict[str, Any] = manifest
        self._stored, self._collate = Stored(folder, manifest), collate
        self._data = fitting(data, self._stored)

    def __len__(self) -> int:
        return int(self.info["rows"])

    def __repr__(self) -> str:
        of = f"{self.info['examples']} examples" + (f", {len(self)} tokens" if self.info["tokens"] else "")
        return (
            f"index of {of}, K = {self.info['width']} ({self.info['dtype']}): "
            f"i.query(model, loss_fn, batch), i.rows(0, {len(self)}), i.info"
        )

    def files(self) -> list[Path]:
        """The files that the index consists of."""
        folder, named = self._stored.folder, [store.PLAN, store.MANIFEST, store.CURVATURE]
        for number, shard in enumerate(self.info["shards"]):
            named += [shard["file"], *([store.texts_name(number)] if texts.wanted(self.info) else [])]
        return [folder / name for name in named if (folder / name).exists()]

    def verify(self) -> list[str]:
        """The names of files that are damaged or missing. `build`, called again, builds them anew."""
        found = [self._stored.damaged(number) for number in progress(range(len(self.info["shards"])), "verify")]
        return [*self._stored.damaged_beside(), *(name for name in found if name is not None)]

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, K), in float32. With rows for tokens, `i.tokens(start, stop)` says which tokens they are."""
        return self._stored.rows(*self._between(start, stop))

    def tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(stop - start,) twice: the number of the example that each row belongs to, and the position in it."""
        return self._stored.tokens(*self._between(start, stop))

    def query(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        k: int = 10,
        score: Literal["dot", "cosine", "influence"] = "dot",
        *,
        by: Literal["example", "token"] = "example",
        rerank: int | None = None,
        tokens: bool = False,
        data: Any = None,
        samples: SamplesOfBatch = None,
        damping: float | None = None,
        device: torch.device | str | None = None,
    ) -> Hits:
        """The k examples with the highest scores for each sample of a batch. Positive: training on the example lowers
        the query's loss.

        Args:
            model: The model that the index was built with.
            loss_fn: `loss_fn(model, batch)` returns one loss for each query, (n,).
            batch: The queries.
            k: How many examples.
            score: "dot"; "cosine"; "influence": with the curvature that the index was built with, or else with the
                second moment of its own rows.
            by: What is found in an index with rows for tokens: examples, whose scores are the sums of their tokens', or
                single tokens.
            rerank: Two stages: the scan finds so many examples for each query, and their scores are computed again from
                whole gradients. Needs the data set.
            tokens: Also the score of every token of the hits: from the rows, or, where rows are of examples, from whole
                gradients, which needs the data set.
            data: The data set, a list or Dataset, if `open` was not given it: hits bring their examples along.
            samples: Where the samples of the batch are, as in `unsum.gradients`, or a function of the batch.
            damping: Of the second moment of rows: a number; None: 0.1 of its mean eigenvalue.
            device: Where rows are multiplied; None: where the model is.
        """
        self._check_query(k, score, by, rerank, tokens)
        if damping is not None and score != "influence":
            raise OptionError(f"query(damping={damping!r}): only score='influence' is damped")
        asker = Asker(self._stored, model, loss_fn, samples)
        answers = Answers(
            self._stored, asker, score, self._data if data is None else fitting(data, self._stored), self._collate
        )
        asked = asker.rows(batch)
        where = next(iter(model.parameters())).device if device is None else torch.device(device)
        with exactly():
            asked = asker.turned(asked, damping) if score == "influence" else asked
            find = answers.tokens if by == "token" else answers.examples
            hits = find(asked, max(k, rerank or 0), where)
        if by == "token":
            return told(hits, self._stored, answers.data)
        if rerank is not None:
            hits = answers.reranked(hits, batch, k, tokens=tokens)
        elif tokens:
            hits = answers.with_tokens(hits, asked, batch)
        return told(hits, self._stored, answers.data)

    def _check_query(self, k: Any, score: Any, by: Any, rerank: Any, tokens: Any) -> None:
        for name, value in (("k", k), ("rerank", rerank)):
            if value is None and name == "rerank":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"query({name}={value!r}): how many examples, 1 or more")
        if score not in ("dot", "cosine", "influence"):
            raise OptionError(f"score={score!r}: choose 'dot', 'cosine' or 'influence'")
        if by not in ("example", "token"):
            raise OptionError(f"by={by!r}: choose 'example' or 'token'")
        if by == "token" and (not self.info["tokens"] or rerank is not None):
            raise OptionError("by='token' is for an index that was built with tokens=True, without rerank=")
        if self.info["tokens"] and score == "cosine" and by == "example":
            raise OptionError(
                "score='cosine': tokens have cosines, their sums have none; give by='token', or build an index with "
                "rows for examples"
            )
        if not isinstance(tokens, bool):
            raise OptionError(f"tokens={tokens!r}: True or False")

    def self_influence(self) -> Tensor:
        """(rows,): the squared norm of each row: how far one small step on the example lowers its own loss."""
        return alike.norms(self._stored.shards).square()

    def outliers(self, threshold: float = 6.0) -> Hits:
        """Examples whose gradients are far longer than others': their numbers and the norms of their rows, (1, found),
        longest first. Far: the logarithm of the norm is above the median by more than `threshold` times 1.48 times the
        median deviation."""
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold > 0:
            raise OptionError(f"outliers({threshold!r}): a number above 0")
        norms = alike.norms(self._stored.shards)
        found = alike.stand_out(norms, threshold)
        ids, positions = self._stored.places(found[None])
        hits = Hits(ids, norms[found][None], positions=positions if self.info["tokens"] else None, are_norms=True)
        return told(hits, self._stored, self._data)

    def duplicates(self, threshold: float = 0.99) -> Pairs:
        """Pairs of examples whose rows have a cosine of `threshold` or more; `.clusters()` groups them. Every row is
        compared with every other: rows² · K operations, in parts that fit."""
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
            raise OptionError(f"duplicates({threshold!r}): a cosine, above 0 and at most 1")
        if self.info["tokens"]:
            raise OptionError("duplicates: this index has rows for tokens; build one with rows for examples")
        with exactly():
            return alike.duplicates(self._stored.shards, threshold)

    def export(self, path: str | os.PathLike[str], format: Literal["faiss", "arrow", "parquet", "numpy"]) -> None:
        """Write all rows for another program: a FAISS index of inner products, an Arrow or Parquet file with ids and
        texts, or a NumPy array."""
        export.write(self._stored, path, format)

    def _between(self, start: Any, stop: Any) -> tuple[int, int]:
        for value in (start, stop):
            if isinstance(value, bool) or not isinstance(value, int):
                raise OptionError(f"rows({start!r}, {stop!r}): whole numbers")
        if not 0 <= start <= stop <= len(self):
            raise OptionError(f"rows({start}, {stop}): there are {len(self)}")
        return start, stop


def open(
    path: str | os.PathLike[str], data: Any = None, *, collate: Collate | None = None, verify: bool = False
) -> Index:
    """An index that `unsum.index.build` made.

    Args:
        path: Its folder.
        data: The data set, a list or Dataset: then hits bring their examples along.
        collate: Makes a batch of a list of examples, as in `build`: for `rerank=` and `tokens=`.
        verify: Read every byte first, and raise an error that names damaged files. A query itself notices only what
            makes a file unreadable.

    Examples:
        >>> open("nowhere")
        Traceback (most recent call last):
        ...
        unsum.errors.OptionError: nowhere: no index
    """
    found = Index(Path(path), data, collate)
    if verify and (damaged := found.verify()):
        raise OptionError(
            f"{Path(path)}: damaged or missing: {', '.join(damaged)}.\n  unsum.index.build(...), called again, builds "
            "them anew"
        )
    return found
