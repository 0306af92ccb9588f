"""What the records of a run say together: series over steps, outliers, layers. For the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median

from unsum.report.curves import finite
from unsum.training.record import Layer, Record


@dataclass(frozen=True)
class Spread:
    """The norms of a step's samples: finite ones."""

    low: float  # a quarter of the samples are below
    middle: float
    high: float  # three quarters are below
    largest: float


@dataclass(frozen=True)
class Outlier:
    """A sample of a step that stands out."""

    step: int
    id: int | str
    norm: float
    ratio: float  # its norm over the median of its step; NaN where there is none
    text: str


def spread(record: Record) -> Spread | None:
    """The norms of one step.

    Examples:
        >>> import torch
        >>> spread(Record(step=0, norms=torch.tensor([1.0, 2.0, 3.0, 4.0, 50.0])))
        Spread(low=2.0, middle=3.0, high=4.0, largest=50.0)
    """
    if record.norms is None:
        return None
    norms = record.norms.double()
    norms = norms[norms.isfinite()]
    if not len(norms):
        return None
    low, middle, high = (float(norms.quantile(share)) for share in (0.25, 0.5, 0.75))
    return Spread(low, middle, high, float(norms.max()))


def outliers(records: Sequence[Record]) -> list[Outlier]:
    """Every outlier of the run: those that are not finite first, then by how far they stand out."""
    found = []
    for record in records:
        if record.outliers and record.norms is not None:
            norms = dict(zip(record.ids, record.norms.tolist(), strict=False))
            own = spread(record)
            for key in record.outliers:
                norm = norms.get(key, math.nan)
                ratio = norm / own.middle if own is not None and own.middle else math.nan
                text = record.texts.get(key, record.texts.get(str(key), ""))
                found.append(Outlier(record.step, key, norm, ratio, text))
    return sorted(found, key=lambda each: (math.isfinite(each.norm), -each.ratio if math.isfinite(each.ratio) else 0.0))


def layer_names(records: Sequence[Record]) -> list[str]:
    """The layers of a run, in the model's order."""
    return list(dict.fromkeys(name for record in records for name in record.layers))


def layer_series(records: Sequence[Record], name: str, key: str) -> list[float | None]:
    """One number of a layer in every record."""
    return [getattr(record.layers[name], key) if name in record.layers else None for record in records]


def has(records: Sequence[Record], key: str) -> bool:
    """Whether some record has this number of a layer."""
    assert key in {each.name for each in fields(Layer)}
    return any(getattr(layer, key) is not None for record in records for layer in record.layers.values())


def first_nonfinite(records: Sequence[Record]) -> Record | None:
    """The first record with a value that is not finite."""
    return next((record for record in records if record.nonfinite is not None), None)


def ends(values: Sequence[float | None]) -> tuple[float, float] | None:
    """About where a series begins and ends: medians of its first and of its last five numbers.

    Examples:
        >>> ends([4.0, 3.0, None, 2.0, 1.0])
        (4.0, 1.0)
    """
    known = finite(values)
    if not known:
        return None
    few = _few(len(known))
    return median(known[:few]), median(known[-few:])


def _few(count: int) -> int:
    return min(5, max(1, count // 5))


def thinned(count: int, most: int) -> list[range]:
    """Groups of neighbouring records, at most so many.

    Examples:
        >>> thinned(5, 2)
        [range(0, 3), range(3, 5)]
    """
    size = max(1, -(-count // most))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def grouped(
    values: Sequence[float | None], groups: Sequence[range], take: Callable[[list[float]], float]
) -> list[float | None]:
    """One number for each group; None where a group has no finite one."""
    found = [finite([values[k] for k in group]) for group in groups]
    return [take(each) if each else None for each in found]


def smoothed(values: Sequence[float | None], reach: int) -> list[float | None]:
    """The median over `reach` neighbours on each side."""
    found = [finite(values[max(0, k - reach) : k + reach + 1]) for k in range(len(values))]
    return [median(each) if each else None for each in found]


def last_loss(records: Sequence[Record]) -> float | None:
    """The last loss, also if it is not finite."""
    return next((record.loss for record in reversed(records) if record.loss is not None), None)


def are_rows(records: Sequence[Record]) -> bool:
    """Whether samples go by their row in the step: the same number is another sample in another step."""
    return all(list(record.ids) == list(range(len(record.ids))) for record in records)


def _loss(records: Sequence[Record], brief: Callable[[float | None], str]) -> str:
    known = [(record.step, record.loss) for record in records if record.loss is not None]
    good = [k for k, (_, loss) in enumerate(known) if math.isfinite(loss)]
    if known and (not good or good[-1] < len(known) - 1):
        step, loss = known[good[-1] + 1] if good else known[0]
        before = f" ({brief(known[good[-1]][1])} before)" if good else ""
        return f" The loss is {brief(loss)} from step {step} on{before}."
    values = ends([loss for _, loss in known])
    few = _few(len(good))
    over = f" (medians of the first and the last {few} steps)" if few > 1 else ""
    return f" The loss went from {brief(values[0])} to {brief(values[1])}{over}." if values else ""


def sentence(records: Sequence[Record], brief: Callable[[float | None], str]) -> str:
    """The run in a few sentences."""
    first, last = records[0].step, records[-1].step
    steps = f"step {first}" if len(records) == 1 else f"steps {first} to {last}"
    every = (last - first) // (len(records) - 1) if len(records) > 1 else 1
    told = f"{len(records):,} step{'s' * (len(records) > 1)} watched ({steps}{f', every {every}th' * (every > 1)})"
    sizes = [len(record.ids) for record in records if record.ids]
    told += f", {round(median(sizes)):,} samples in each." if sizes else "."
    told += _loss(records, brief) if len(records) > 1 else ""
    far = sum(len(record.outliers) for record in records)
    times = "once" if far == 1 else f"{far:,} times"
    told += f" A sample stood out by its gradient {times}." if far else " No sample stood out."
    bad = sum(record.nonfinite is not None for record in records)
    told += f" In {bad:,} step{'s' * (bad != 1)} a value was not finite." if bad else " Every value was finite."
    refused = sum(record.refused is not None for record in records)
    return told + (f" {refused:,} step{'s' * (refused != 1)} have no norms." if refused else "")
