"""The data of an index, cut into shards: which examples a shard has, and in which batches they are read.

A shard depends on nothing but the data and its number, so any process can make any shard. Where examples can be asked
for by number (a list, a Dataset, a Hugging Face data set, a DataLoader over one of these), only those of the shard are
read. Another iterable is read from its beginning, and what belongs to other shards is passed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from unsum.errors import OptionError
from unsum.examples import Examples, collated
from unsum.fingerprint import content
from unsum.nested import children

WINDOW = 1024  # examples among which those of like length are put together
_LOOKED_AT = 8  # examples that say whether a data set is the same
SHARDS = 64  # into which a data set is cut, unless its shards would be too large or too small
_BATCHES = 16  # in a shard, at the least

Collate = Callable[[list[Any]], Any]
Length = Callable[[Any], int]


@dataclass(frozen=True)
class Part:
    """Some examples that go through the model together."""

    batch: Any
    examples: Sequence[Any] | None = None  # as the data gives them, if it gives examples
    numbers: Sequence[int] | None = None  # where they stand in the shard; None: one after the other
    lengths: Sequence[int] | None = None  # how many positions each has, if that is known
    is_sorted: bool = False  # whether examples of like length were put together

    def number(self, k: int) -> int:
        """Where the k-th of them stands in the shard, if nothing came before those that have no numbers."""
        return self.numbers[k] if self.numbers is not None else k


class Cut(ABC):
    """Data in shards. `size` is how much of it a shard has: examples, or batches where the data gives batches."""

    unit: str  # what is counted
    total: int | None  # how many there are, if that is known
    least: int  # a shard is not cut smaller than so many, unless somebody says so
    size: int = 1 << 62  # until the plan says it
    needs_lengths = False  # whether the lengths of examples are wanted, where they can be known

    def shards(self) -> int | None:
        """How many shards; None if only the end will tell."""
        return None if self.total is None else -(-self.total // self.size)

    def until_the_end(self) -> None:  # noqa: B027
        """One process makes all shards: what the data says of its length is then not needed, and need not be right."""

    def before(self, shard: int) -> int | None:
        """How many examples the shards before this one have, if that is known."""
        return 0 if shard == 0 else None

    @abstractmethod
    def parts(self, shard: int) -> Iterator[Part]:
        """The batches of a shard, always the same."""

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """What tells this data and its batches from others: written down, and compared when a build goes on."""

    def first(self) -> Part | None:
        """The first batch; None if there is none."""
        return next(self.parts(0), None)


def cut(
    data: Any, *, batch_size: int, batch_tokens: int | None, collate: Collate | None, length: Length | None, what: str
) -> Cut:
    """The data, ready to be cut: `size` is still to be set."""
    for name, value in (("collate", collate), ("length", length)):
        if value is not None and not callable(value):
            raise OptionError(f"{name}={value!r}: a function, or None")
    examples = Examples(data, batch_size=batch_size, what=what)
    if examples.is_once or examples.is_shuffled:
        raise OptionError(f"{what}: the data must come in the same order again: no iterator, no shuffle=True")
    if isinstance(data, DataLoader):
        if collate is not None or batch_tokens is not None:
            raise OptionError(
                f"{what}: a DataLoader makes its batches itself: collate= and batch_tokens= are for a list or a "
                "Dataset.\n  give loader.dataset, with collate=loader.collate_fn"
            )
        return _Loaded(data) if _has_numbers(data.dataset) else _Streamed(data, examples, batch_size, collate, what)
    if examples.has_examples and _has_numbers(data):
        return _Listed(data, batch_size, batch_tokens, collate, length, what)
    if batch_tokens is not None:
        raise OptionError(f"{what}: batch_tokens= is for a list or a Dataset, whose examples have numbers")
    if collate is not None and not examples.has_examples:
        raise OptionError(f"{what}: this data gives batches: collate= is for data that gives examples")
    return _Streamed(data, examples, batch_size, collate, what)


def _has_numbers(data: Any) -> bool:
    return hasattr(data, "__getitem__") and isinstance(data, Sized) and not isinstance(data, IterableDataset)


class _Listed(Cut):
    """Examples that can be asked for by number."""

    unit = "examples"

    def __init__(
        self, data: Any, batch_size: int, tokens: int | None, collate: Collate | None, length: Length | None, what: str
    ) -> None:
        self._data, self._batch_size, self._tokens, self._what = data, batch_size, tokens, what
        self._collate, self._length = collate, length
        self.total: int = len(data)
        self.least = _BATCHES * batch_size if tokens is None else WINDOW

    def before(self, shard: int) -> int:
        return shard * self.size

    def parts(self, shard: int) -> Iterator[Part]:
        end = min((shard + 1) * self.size, self.total)
        step = self._batch_size if self._tokens is None else WINDOW
        for begin in range(shard * self.size, end, step):
            numbers = range(begin, min(begin + step, end))
            examples = [self._data[k] for k in numbers]
            lengths = self._lengths(examples) if self._tokens is not None or self.needs_lengths else None
            for some in self._grouped(lengths, len(examples)):
                chosen = [examples[k] for k in some]
                yield Part(
                    collated(chosen, self._collate, self._what),
                    chosen,
                    [begin - shard * self.size + k for k in some],
                    None if lengths is None else [lengths[k] for k in some],
                    self._tokens is not None,
                )

    def _grouped(self, lengths: Sequence[int] | None, count: int) -> list[Sequence[int]]:
        """Places in a window, batch by batch: all together, or the longest first, as many as the budget allows when
        each is made as long as the longest."""
        if self._tokens is None or lengths is None:
            return [range(count)]
        order = sorted(range(count), key=lambda k: (-lengths[k], k))
        groups: list[list[int]] = []
        for k in order:
            if not groups or (len(groups[-1]) + 1) * max(lengths[groups[-1][0]], 1) > self._tokens:
                groups.append([])
            groups[-1].append(k)
        return list(groups)

    def _lengths(self, examples: Sequence[Any]) -> list[int] | None:
        found: list[Any] = [
            length_of(example) if self._length is None else self._length(example) for example in examples
        ]
        if any(value is None for value in found):
            if self._tokens is not None:
                raise OptionError(
                    f"{self._what}: batch_tokens= needs the length of each example, and none is seen in a "
                    f"{type(examples[0]).__name__}.\n  give length=, a function from an example to a number"
                )
            return None
        for value in found:
            if not hasattr(value, "__index__") or int(value) < 0:
                raise OptionError(f"{self._what}: length= gave {value!r}: a whole number, 0 or more, is needed")
        return [int(value) for value in found]

    def told(self) -> dict[str, Any]:
        return {
            "examples": self.total,
            "content": looked_at(self._data),
            "batches": {"size": self._batch_size} if self._tokens is None else {"tokens": self._tokens},
        }


def looked_at(data: Any) -> str:
    """Of some examples of a data set, from the first to the last."""
    last = len(data) - 1
    return content(
        [data[k] for k in sorted({k * last // (_LOOKED_AT - 1) for k in range(_LOOKED_AT)}) if 0 <= k <= last]
    )


def length_of(example: Any) -> int | None:
    """How many positions an example has: of `input_ids` where it has them, else of the first sequence in it."""
    if isinstance(example, Mapping) and "input_ids" in example:
        return len(example["input_ids"])
    if isinstance(example, Tensor) or hasattr(example, "__array__"):
        return len(example) if getattr(example, "ndim", 0) else None
    if isinstance(example, list) and example and isinstance(example[0], int | float):
        return len(example)
    return next((found for _, part in children(example) if (found := length_of(part)) is not None), None)


class _Loaded(Cut):
    """A DataLoader over examples that have numbers: its batches can be asked for by number as well."""

    unit = "batches"

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self._chosen: list[Any] = list(sampler)
        self.total: int = len(self._chosen)
        self.least = _BATCHES
        self._are_groups = loader.batch_sampler is not None

    def before(self, shard: int) -> int | None:
        return sum(map(len, self._chosen[: shard * self.size])) if self._are_groups else super().before(shard)

    def parts(self, shard: int) -> Iterator[Part]:
        chosen = self._chosen[shard * self.size : (shard + 1) * self.size]
        loader = self._loader
        batches: Iterator[Any]
        if not loader.num_workers:
            make: Any = loader.collate_fn
            batches = (
                make([loader.dataset[k] for k in some] if self._are_groups else loader.dataset[some]) for some in chosen
            )
        else:
            how = {"batch_sampler": chosen} if self._are_groups else {"batch_size": None, "sampler": chosen}
            batches = _each(
                DataLoader(
                    loader.dataset, collate_fn=loader.collate_fn, num_workers=loader.num_workers,
                    worker_init_fn=loader.worker_init_fn, pin_memory=loader.pin_memory, timeout=loader.timeout,
                    multiprocessing_context=loader.multiprocessing_context, **how,
                )
            )  # fmt: skip
        for batch in batches:
            yield Part(batch)

    def told(self) -> dict[str, Any]:
        chosen = self._chosen
        places = sorted({k * (len(chosen) - 1) // (_LOOKED_AT - 1) for k in range(_LOOKED_AT)} if chosen else ())
        ends = [chosen[k][0] if self._are_groups else chosen[k] for k in places]
        return {
            "batches": self.total,
            "content": content([self._loader.dataset[k] for k in ends]),
            "order": content(chosen),
        }


def _each(batches: Iterable[Any]) -> Iterator[Any]:
    yield from batches


class _Streamed(Cut):
    """Batches that come one after the other."""

    unit = "batches"

    def __init__(self, data: Any, examples: Examples, batch_size: int, collate: Collate | None, what: str) -> None:
        self._data, self._examples = data, examples
        self._batch_size, self._collate, self._what = batch_size, collate, what
        self.total = examples.batches()
        self.least = _BATCHES
        self._at = 0
        self._is_all = False  # whether one process reads all of it
        self._running: Iterator[Any] | None = None  # goes on where the last shard ended

    def parts(self, shard: int) -> Iterator[Part]:
        begin = shard * self.size
        if self._running is None or self._at > begin:
            self._running, self._at = self._all(), 0
        for _ in islice(self._running, begin - self._at):
            self._at += 1
        for part in islice(self._running, self.size):
            self._at += 1
            yield part
        if shard + 1 == self.shards() and next(self._running, None) is not None:  # it would be left out
            raise OptionError(f"{self._what}: the data says that it has {self.total} batches (len()), and has more")

    def shards(self) -> int | None:
        return None if self._is_all else super().shards()

    def until_the_end(self) -> None:
        self._is_all = True

    def _all(self) -> Iterator[Part]:
        if not self._examples.has_examples:
            yield from map(Part, self._data)
            return
        running = iter(self._data)
        while chunk := list(islice(running, self._batch_size)):
            yield Part(collated(chunk, self._collate, self._what), chunk)

    def first(self) -> Part | None:
        return next(self._all(), None)

    def told(self) -> dict[str, Any]:
        first = self.first()
        return {"batches": self.total, "content": content(None if first is None else first.batch)}
