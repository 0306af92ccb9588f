"""What a query needs of the model: the queries' own rows, turned by a curvature if influence is asked for, and scores
from whole gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from unsum.check import LossFunction
from unsum.choice import exactly
from unsum.curvature.vectors import is_number
from unsum.errors import EmptyData, OptionError, UnsupportedError
from unsum.examples import SamplesOfBatch, collated, is_loss_function
from unsum.index.alike import blocks
from unsum.index.data import Collate
from unsum.index.maker import Maker, sketch_from
from unsum.index.sketch import Projected
from unsum.index.store import Shard
from unsum.index.stored import Stored
from unsum.influence import Influence, influence

_WHOLE = 8192  # columns, up to which rows' second moment is one matrix
DAMPING = 0.1  # of the mean eigenvalue
_EXACT = 8  # examples that go through the model together in the second stage


class Asker:
    """A model that asks: it must be the one that the index was built with."""

    def __init__(self, stored: Stored, model: nn.Module, loss_fn: LossFunction, samples: SamplesOfBatch) -> None:
        if not is_loss_function(loss_fn):
            raise OptionError("query needs loss_fn(model, batch), which returns one loss for each query, (n,)")
        self._stored, self._model, self._loss_fn, self._samples = stored, model, loss_fn, samples
        self.sketch, self.curvature = sketch_from(stored.folder, model, stored.info)
        self._names = [exactly(name) for name in stored.info["parameters"]]

    def rows(self, batch: Any) -> Tensor:
        """(queries, K), in float64."""
        maker = Maker(self._model, self._loss_fn, self._samples, self.sketch, self._names)
        info, marks = self._stored.info, maker.marks()
        off = [name for name, mark in info["parameters"].items() if marks["parameters"][name] != mark]
        off += ["a frozen parameter or a buffer"] if marks["rest"] != info["rest"] else []
        if off:
            raise UnsupportedError(
                f"the parameters changed since the index was built ({off[0]}{', ...' if len(off) > 1 else ''}): it is "
                "that of another model.\n  build another one, or load the weights that it was built with"
            )
        rows = maker.first_rows(batch, "query")
        if not len(rows):
            raise EmptyData("query: the batch is empty.", write="i.query(model, loss_fn, next(iter(loader)))")
        return rows.double()

    def turned(self, asked: Tensor, damping: float | None) -> Tensor:
        """(P⁻¹ q): by the curvature's eigenvalues, or by the second moment of the rows."""
        weights = self.sketch.weights()
        if weights is not None:
            if damping is not None:
                raise OptionError("query(damping=...): the index has the damping of its curvature")
            return asked * weights
        if damping is not None and (not is_number(damping) or not 0 <= damping < math.inf):
            raise OptionError(f"query(damping={damping!r}): a number, 0 or more, or None")
        parts = []
        for columns, moment in moments(self._stored.shards, self._stored.info):
            added = DAMPING * float(moment.diagonal().mean()) if damping is None else damping
            damped = moment + added * torch.eye(len(moment), dtype=torch.float64)
            try:
                parts.append(torch.linalg.solve(damped, asked[:, columns].T).T)
            except RuntimeError:
                raise OptionError(f"query: the second moment of the rows is singular with damping={added:g}") from None
        return torch.cat(parts, 1)

    @property
    def has_errors(self) -> bool:
        """Whether rows have independent sketches."""
        return isinstance(self.sketch, Projected) and self.sketch.sketches > 1

    def errors(self, asked: Tensor, rows: Tensor) -> Tensor:
        """(queries, k): standard errors of inner products with rows (queries, k, K)."""
        assert isinstance(self.sketch, Projected)
        apart = self.sketch.apart(asked[:, None].expand_as(rows), rows)
        return apart.std(-1) / self.sketch.sketches**0.5

    def exact(
        self, batch: Any, examples: Sequence[Any], score: str, collate: Collate | None, *, tokens: bool
    ) -> Influence:
        """(queries, examples), from whole gradients; and the scores of tokens, if they are asked for."""
        curvature = self.curvature if score == "influence" else None
        if score == "influence" and curvature is None:
            raise OptionError(
                "rerank= and tokens= compute scores from whole gradients, and this index has no curvature for them.\n"
                '  choose score="dot" or "cosine", or build the index with curvature='
            )
        if self._samples is not None:
            raise OptionError("rerank= and tokens= are for queries and examples without samples=")
        made = lambda some: _batch(some, collate)
        train: DataLoader[Any] = DataLoader(list(examples), _EXACT, collate_fn=made)  # type: ignore[arg-type]
        return influence(
            self._model, self._loss_fn, train, iter([batch]), curvature, "cosine" if score == "cosine" else "dot",
            params=None if curvature is not None else self._names, tokens=tokens,
        )  # fmt: skip


def _batch(examples: list[Any], collate: Collate | None) -> Any:
    try:
        return collated(examples, collate, "query")
    except OptionError as error:
        raise OptionError(
            f"{str(error).splitlines()[0]}\n  give unsum.index.open(path, data, collate=...) what build was given"
        ) from error


def moments(shards: Sequence[Shard], info: Mapping[str, Any]) -> list[tuple[slice, Tensor]]:
    """Σ r rᵀ / rows: of all columns, or of each parameter's where they are too many."""
    sizes = [info["width"]] if info["width"] <= _WHOLE else list(info["columns"].values())
    slices, first = [], 0
    for size in sizes:
        slices.append(slice(first, first + size))
        first += size
    totals = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]
    largest = max((float(scales.max()) for _, _, scales in blocks(shards)), default=1.0)  # so that squares have a place
    for _, stored, scales in blocks(shards):
        rows = stored.float() * (scales / largest)[:, None]
        for total, columns in zip(totals, slices, strict=True):
            total += (rows[:, columns].T @ rows[:, columns]).double()
    return [(columns, total * (largest**2 / info["rows"])) for columns, total in zip(slices, totals, strict=True)]
