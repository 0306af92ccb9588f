"""Poisson sampling: every example is in a batch with the same probability, independently of all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from unsum.errors import OptionError
from unsum.nested import children, leaves, put
from unsum.training.noise import Source
from unsum.types import Path

_DECIDED = ("shuffle", "sampler", "batch_sampler", "drop_last")  # options of a DataLoader that sampling decides


@dataclass(frozen=True, eq=False)
class Part:
    """A batch that was drawn, or a part of it."""

    rows: int  # of the batch so far, with this part
    is_last: bool  # whether the batch is complete


class Stepper(Protocol):
    """What takes a step after each batch."""

    def begin_sampling(self) -> None:
        """A loader begins."""
        ...

    def begin_part(self, part: Part) -> None:
        """A part is handed out."""
        ...

    def end_part(self, part: Part) -> None:
        """The next one is asked for."""
        ...


class PoissonLoader:
    """Batches drawn by Poisson sampling, `steps` in one pass. What `dp.loader` gives."""

    def __init__(
        self,
        dataset: Any,
        source: Source,
        stepper: Stepper,
        *,
        sample_rate: float,
        steps: int,
        batch_size: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        rank: int,
        ranks: int,
        options: dict[str, Any],
    ) -> None:
        _refuse(dataset, options)
        if batch_size is not None and (
            isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
        ):
            raise OptionError(
                f"unsum.private: batch_size={batch_size!r}: rows that a part has at most, 1 or more, or None"
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise OptionError(f"unsum.private: steps={steps!r}: a whole number, 1 or more")
        self._dataset, self._source, self._stepper = dataset, source, stepper
        self._rate, self.steps, self._most = sample_rate, steps, batch_size
        self._collate = default_collate if collate_fn is None else collate_fn
        self._own = range(rank, len(dataset), ranks)  # each rank has its part of the data
        self._options = options

    def __len__(self) -> int:
        """How many batches one pass has; each may come in several parts."""
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        self._stepper.begin_sampling()
        drawn: deque[Part] = deque()  # handed to torch's loader, which reads ahead, and not yet by it to us
        loader = DataLoader(
            self._dataset, batch_sampler=_Indices(lambda: self._draw(drawn)), collate_fn=self._collate, **self._options
        )  # type: ignore[call-overload]
        batches = iter(loader)
        while True:
            batch = next(batches, _DONE)
            while drawn and not drawn[0].rows:
                yield from self._hand_out(drawn.popleft(), self._empty())
            if batch is _DONE:
                return
            yield from self._hand_out(drawn.popleft(), batch)

    def _hand_out(self, part: Part, batch: Any) -> Iterator[Any]:
        self._stepper.begin_part(part)
        yield batch
        self._stepper.end_part(part)

    def _draw(self, drawn: deque[Part]) -> Iterator[list[int]]:
        """The places of each part's examples."""
        for _ in range(self.steps):
            chosen = (self._source.uniform(len(self._own)) < self._rate).nonzero().flatten().tolist()
            if not chosen:
                drawn.append(Part(0, is_last=True))
            most = self._most or len(chosen)
            for first in range(0, len(chosen), most or 1):
                places = [self._own[k] for k in chosen[first : first + most]]
                rows = first + len(places)
                drawn.append(Part(rows, is_last=rows == len(chosen)))
                yield places

    def _empty(self) -> Any:
        """A batch without examples: one example collated, of whose tensors no row is left."""
        return without_rows(self._collate([self._dataset[self._own[0] if self._own else 0]]))


_DONE = object()


class _Indices:
    """A batch sampler that is made of a function."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()


def without_rows(batch: Any) -> Any:
    """The same structure with 0 rows in every tensor, and no text in lists of texts.

    Examples:
        >>> without_rows({"x": torch.ones(1, 3), "name": ["first"]})
        {'x': tensor([], size=(0, 3)), 'name': []}
    """
    changes: dict[Path, Any] = {path: t[:0] for path, t in leaves(batch) if t.dim()}
    changes |= {path: value[:0] for path, value in _texts(batch, ())}
    return put(batch, changes)


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, list | tuple) and value and all(isinstance(each, str | bytes) for each in value):
        yield path, value
    elif not isinstance(value, Tensor):
        for step, child in children(value):
            yield from _texts(child, (*path, step))


def _refuse(dataset: Any, options: dict[str, Any]) -> None:
    """Raise for what cannot be sampled from."""
    if isinstance(dataset, DataLoader) or (hasattr(dataset, "batch_size") and hasattr(dataset, "__iter__")):
        raise OptionError(
            f"unsum.private: dp.loader({type(dataset).__name__}): a loader shuffles instead of sampling, and epsilon "
            "would not hold.\n  give the data set itself: dp.loader(loader.dataset, collate_fn=loader.collate_fn)"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise OptionError(
            f"unsum.private: dp.loader({type(dataset).__name__}): every example is drawn separately, so the data set "
            "must have a length and give its k-th example (len(dataset), dataset[k])"
        )
    if not len(dataset):
        raise OptionError("unsum.private: dp.loader(dataset): the data set has no examples")
    for name in _DECIDED:
        if name in options:
            raise OptionError(f"unsum.private: dp.loader({name}=): Poisson sampling decides which examples a batch has")


def steps_of(sample_rate: float) -> int:
    """How many batches one pass has: 1 / sample_rate, rounded, so that each example is drawn once on average."""
    return max(1, round(1 / sample_rate))


def world() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
