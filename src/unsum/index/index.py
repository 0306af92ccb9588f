"""`open`: an index that was built, and what can be asked of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum.check import LossFunction
from unsum.choice import exactly
from unsum.errors import OptionError, SamplesError, UnsupportedError
from unsum.examples import SamplesOfBatch
from unsum.fingerprint import changed
from unsum.index import store
from unsum.index.build import Maker, sketch_from
from unsum.progress import progress

_BLOCK = 1 << 24  # numbers that are read at a time
_PAIRED = 4096  # rows that are compared with as many others at a time
_WHOLE = 8192  # columns, up to which rows' second moment is one matrix
DAMPING = 0.1  # of the mean eigenvalue


@dataclass(frozen=True, eq=False)
class Hits:
    """The rows that answer queries best, best first.

    Examples:
        >>> import tempfile, unsum
        >>> model, folder = nn.Linear(3, 1), tempfile.mkdtemp() + "/index"
        >>> loss = lambda m, x: m(x).square().sum(1)
        >>> unsum.index.build(model, loss, [torch.randn(3) for _ in range(20)], folder)
        >>> i = unsum.index.open(folder)
        >>> i.query(model, loss, torch.randn(2, 3), k=5)
        the 5 best rows of 2 queries: hits.ids, hits.scores
    """

    ids: Tensor  # (queries, k): numbers of examples
    scores: Tensor  # (queries, k)
    examples: list[list[Any]] | None = None  # where the data set was given

    def __repr__(self) -> str:
        queries, k = self.ids.shape
        return f"the {k} best rows of {queries} queries: hits.ids, hits.scores" + (
            "" if self.examples is None else ", hits.examples"
        )

    def __str__(self) -> str:
        """A table: one line for each hit."""
        lines = ["query  rank  example  score"]
        for number, (row, scores) in enumerate(zip(self.ids.tolist(), self.scores.tolist(), strict=True)):
            for rank, (example, score) in enumerate(zip(row, scores, strict=True)):
                text = "" if self.examples is None else f"  {_short(self.examples[number][rank])}"
                lines.append(f"{number:5}  {rank + 1:4}  {example:7}  {score:.4g}{text}")
        return "\n".join(lines)


def _short(example: Any) -> str:
    text = " ".join(str(example).split())
    return text if len(text) <= 60 else text[:59] + "…"


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows that are nearly alike, most alike first."""

    ids: Tensor  # (pairs, 2): numbers of examples, the smaller one first
    scores: Tensor  # (pairs,): their cosines


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

    def __init__(self, folder: Path, data: Any = None) -> None:
        manifest = store.read_json(folder, store.MANIFEST)
        if manifest is None:
            under_way = (folder / store.PLAN).exists()
            raise OptionError(
                f"{folder}: "
                + (
                    "a build that is not done; call unsum.index.build(...) again to finish it"
                    if under_way
                    else "no index"
                )
            )
        self._folder, self._data, self.info = folder, data, manifest
        if data is not None and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise OptionError("open(data=...): a list or a Dataset, whose examples can be asked for by number")

    def __len__(self) -> int:
        return int(self.info["rows"])

    def __repr__(self) -> str:
        return (
            f"index of {len(self)} rows, K = {self.info['width']} ({self.info['dtype']}): "
            f"i.query(model, loss_fn, batch), i.rows(0, {len(self)}), i.info"
        )

    def verify(self) -> list[str]:
        """The names of shards that are damaged or missing. `build`, called again, builds them anew."""
        damaged = []
        for number, told in enumerate(progress(self.info["shards"], "verify")):
            shard = store.shard_at(self._folder, number)
            if shard is None or shard.told["crc"] != told["crc"] or shard.rows != told["rows"]:
                damaged.append(str(told["file"]))
        return damaged

    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, K), in float32."""
        for value in (start, stop):
            if isinstance(value, bool) or not isinstance(value, int):
                raise OptionError(f"rows({start!r}, {stop!r}): whole numbers")
        if not 0 <= start <= stop <= len(self):
            raise OptionError(f"rows({start}, {stop}): there are {len(self)}")
        found = [
            stored[max(start - first, 0) : stop - first].float() * scales[max(start - first, 0) : stop - first, None]
            for first, stored, scales in self._shards()
            if first < stop and first + len(stored) > start
        ]
        return torch.cat(found) if found else torch.zeros(0, self.info["width"])

    def query(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        k: int = 10,
        score: Literal["dot", "cosine", "influence"] = "dot",
        *,
        samples: SamplesOfBatch = None,
        damping: float | None = None,
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
            samples: Where the samples are, as in `unsum.gradients`, or a function of the batch.
            damping: Of the second moment of rows: a number; None: 0.1 of its mean eigenvalue.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise OptionError(f"query(k={k!r}): how many examples, 1 or more")
        if score not in ("dot", "cosine", "influence"):
            raise OptionError(f"score={score!r}: choose 'dot', 'cosine' or 'influence'")
        asked = self._asked(model, loss_fn, batch, samples)
        if score == "influence":
            asked = self._turned(asked, damping)
        found = self._best(asked, min(k, len(self)), cosine=score == "cosine")
        examples = None
        if self._data is not None:
            examples = [[self._data[int(number)] for number in row] for row in found[1]]
        return Hits(found[1], found[0], examples)

    def outliers(self, threshold: float = 6.0) -> Hits:
        """Examples whose gradients are far longer than others': their numbers and the norms of their rows, (1, found),
        longest first. Far: the logarithm of the norm is above the median by more than `threshold` times 1.48 times the
        median deviation."""
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold > 0:
            raise OptionError(f"outliers({threshold!r}): a number above 0")
        norms = torch.cat([stored.float().norm(dim=1) * scales for _, stored, scales in self._blocks()]).double()
        logs = norms.clamp_min(1e-300).log()
        middle = logs.median()
        wide = 1.4826 * (logs - middle).abs().median().clamp_min(1e-12)
        order = norms.argsort(descending=True, stable=True)
        found = order[((logs - middle) / wide > threshold)[order]]
        return Hits(found[None], norms[found][None])

    def duplicates(self, threshold: float = 0.99) -> Pairs:
        """Pairs of examples whose rows have a cosine of `threshold` or more. Every row is compared with every other:
        rows² · K operations, in parts that fit."""
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
            raise OptionError(f"duplicates({threshold!r}): a cosine, above 0 and at most 1")
        pairs, scores = [], []
        for first, stored, _ in self._blocks(_PAIRED):
            mine = _directions(stored)
            for begin, others, _ in self._blocks(_PAIRED):
                if begin + len(others) <= first:
                    continue
                cosines = mine @ _directions(others).T
                cosines = cosines.masked_fill_(_not_after(first, begin, cosines), -1.0)
                found = (cosines >= threshold).nonzero()
                pairs.append(found + torch.tensor([first, begin]))
                scores.append(cosines[found[:, 0], found[:, 1]].double())
        order = torch.cat(scores).argsort(descending=True, stable=True)
        return Pairs(torch.cat(pairs)[order], torch.cat(scores)[order])

    def _asked(self, model: nn.Module, loss_fn: LossFunction, batch: Any, samples: SamplesOfBatch) -> Tensor:
        """(queries, K), in float64."""
        sketch, curvature = sketch_from(self._folder, model, self.info["sketch"])
        maker = Maker(model, loss_fn, samples, sketch, [exactly(name) for name in self.info["parameters"]], curvature)
        off = changed(self.info["parameters"], maker.parameters)
        if off:
            raise UnsupportedError(
                f"the parameters changed since the index was built ({off[0]}{', ...' if len(off) > 1 else ''}): it is "
                "that of another model.\n  build another one, or load the weights that it was built with"
            )
        self._weights = sketch.weights()
        rows = maker.rows(batch, 0, "query")
        if not len(rows):
            raise SamplesError("query: the batch is empty")
        return rows.double()

    def _turned(self, asked: Tensor, damping: float | None) -> Tensor:
        """(P⁻¹ q): by the curvature's eigenvalues, or by the second moment of the rows."""
        if self._weights is not None:
            if damping is not None:
                raise OptionError("query(damping=...): the index has the damping of its curvature")
            return asked * self._weights
        parts = []
        for columns, moment in self._moments():
            mean = moment.diagonal().mean()
            damped = moment + (DAMPING * float(mean) if damping is None else damping) * torch.eye(len(moment)).double()
            parts.append(torch.linalg.solve(damped, asked[:, columns].T).T)
        return torch.cat(parts, 1)

    def _moments(self) -> list[tuple[slice, Tensor]]:
        """Σ r rᵀ / rows: of all columns, or of each parameter's where they are too many."""
        sizes = [self.info["width"]] if self.info["width"] <= _WHOLE else list(self.info["sketch"]["columns"].values())
        slices, first = [], 0
        for size in sizes:
            slices.append(slice(first, first + size))
            first += size
        totals = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]
        for _, stored, scales in self._blocks():
            rows = stored.float() * scales[:, None]
            for total, columns in zip(totals, slices, strict=True):
                total += (rows[:, columns].T @ rows[:, columns]).double()
        return [(columns, total / len(self)) for columns, total in zip(slices, totals, strict=True)]

    def _best(self, asked: Tensor, k: int, *, cosine: bool) -> tuple[Tensor, Tensor]:
        """Scores and numbers, (queries, k) each, in one pass over the rows."""
        query = asked / asked.norm(dim=1, keepdim=True).clamp_min(1e-300) if cosine else asked
        scores = torch.full((len(asked), 0), 0.0, dtype=torch.float64)
        numbers = torch.zeros(len(asked), 0, dtype=torch.long)
        query = query.float().T.contiguous()
        for first, stored, scales in self._blocks():
            rows = stored.float()
            found = (rows @ query).double()
            if cosine:
                found /= rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
            else:
                found *= scales[:, None].double()
            own = torch.arange(first, first + len(rows)).expand(len(asked), -1)
            scores, place = torch.cat([scores, found.T], 1).topk(min(k, scores.shape[1] + len(rows)), dim=1)
            numbers = torch.cat([numbers, own], 1).gather(1, place)
        return scores, numbers

    def _shards(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(the first row's number, rows, scales) of each shard."""
        first = 0
        for number, told in enumerate(self.info["shards"]):
            try:
                shard = store.Shard(self._folder, number)
            except (OSError, ValueError, KeyError) as error:
                raise OptionError(
                    f"{self._folder / told['file']}: damaged or missing ({error}).\n  i.verify() names all such, "
                    "and unsum.index.build(...), called again, builds them anew"
                ) from error
            yield (first, *shard.stored())
            first += shard.rows

    def _blocks(self, most: int = 1 << 62) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The same in parts that fit, of so many rows at most."""
        some = max(1, min(most, _BLOCK // max(self.info["width"], 1)))
        for first, stored, scales in self._shards():
            for begin in range(0, len(stored), some):
                part = slice(begin, begin + some)
                yield first + begin, stored[part], scales[part]


def _directions(stored: Tensor) -> Tensor:
    rows = stored.float()
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)


def _not_after(first: int, begin: int, table: Tensor) -> Tensor:
    """Where the second of a pair is not after the first."""
    mine, others = (torch.arange(start, start + size) for start, size in zip((first, begin), table.shape, strict=True))
    return others[None] <= mine[:, None]


def open(path: str | os.PathLike[str], data: Any = None) -> Index:
    """An index that `unsum.index.build` made.

    Args:
        path: Its folder.
        data: The data set, a list or Dataset: then hits bring their examples along.

    Examples:
        >>> open("nowhere")
        Traceback (most recent call last):
        ...
        unsum.errors.OptionError: nowhere: no index
    """
    return Index(Path(path), data)
