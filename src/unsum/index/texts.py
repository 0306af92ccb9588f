"""The ids and texts of examples, beside the shards, as Parquet: so that hits can be read."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsum.errors import OptionError
from unsum.fingerprint import content
from unsum.index import store
from unsum.index.data import Part

_LOOKED_AT = 64  # entries of a list of ids

Source = Callable[[Any], Any] | str | Sequence[Any] | None


@dataclass(frozen=True)
class Named:
    """The ids and texts of a batch, and where its examples stand in the shard."""

    numbers: Sequence[int] | None
    ids: list[str] | None
    texts: list[str] | None


def wanted(plan: Mapping[str, Any]) -> bool:
    """Whether an index has ids or texts."""
    return bool(plan["texts"]["ids"] or plan["texts"]["text"])


def check(source: Any, what: str, data: Any) -> None:
    """Raise if this says no ids or texts, or not those of this data."""
    if source is None or callable(source) or isinstance(source, str):
        return
    if not isinstance(source, Sized) or not hasattr(source, "__getitem__") or isinstance(source, Mapping):
        raise OptionError(f"{what}={source!r}: a list, a function of an example, or the name of a part of it")
    if isinstance(data, Sized) and hasattr(data, "__getitem__") and len(source) != len(data):
        raise OptionError(f"{what}=: a list of {len(source)}, and the data has {len(data)} examples")


def read(part: Part, rows: int, ids: Source, text: Source, first: int) -> Named:
    """Those of a batch."""
    return Named(part.numbers, _of(part, rows, ids, "ids", first), _of(part, rows, text, "text", first))


def _of(part: Part, rows: int, source: Source, what: str, first: int) -> list[str] | None:
    if source is None:
        return None
    if part.examples is None or (part.numbers is None and not callable(source) and not isinstance(source, str)):
        found = _asked(part.batch, source, what)
        if not isinstance(found, list | tuple) and not hasattr(found, "tolist"):
            raise OptionError(f"{what}=: one for each example of a batch is needed, got a {type(found).__name__}")
        found = found.tolist() if hasattr(found, "tolist") else list(found)
    elif callable(source) or isinstance(source, str):
        found = [_asked(example, source, what) for example in part.examples]
    else:
        found = [source[first + k] for k in part.numbers or ()]
    if len(found) != rows:
        raise OptionError(
            f"{what}=: {len(found)} for a batch of {rows} rows; for packed documents give a function of the batch, and "
            "the data as batches: a DataLoader"
        )
    return [_valid(value.item() if hasattr(value, "item") else value, what) for value in found]


def _valid(value: Any, what: str) -> str:
    """As a string that a file can hold: half of a pair of code units, as scraped JSON has them, becomes U+FFFD."""
    if value is None:
        raise OptionError(f"{what}=: got None for an example; give each one a value")
    return str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def mark(source: Source, first: Part | None) -> str | None:
    """What tells ids or texts from others: written down in the plan, and compared when a build goes on. Of a function,
    what it says of the first batch."""
    if source is None:
        return None
    if isinstance(source, str):
        return f"part {source}"
    if callable(source):
        if first is None:
            return "function"
        told = source(first.batch) if first.examples is None else [source(example) for example in first.examples]
        return f"function {content(_plain(told))}"
    places = sorted({k * (len(source) - 1) // (_LOOKED_AT - 1) for k in range(_LOOKED_AT)}) if len(source) else []
    return f"list of {len(source)} {content([str(source[k]) for k in places])}"


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [str(one) for one in value] if isinstance(value, list | tuple) else str(value)


def _asked(example: Any, source: Any, what: str) -> Any:
    if callable(source):
        return source(example)
    if not isinstance(source, str):
        raise OptionError(f"{what}=: a list goes with data whose examples have numbers; give a function of the batch")
    try:
        return example[source] if isinstance(example, Mapping) else getattr(example, source)
    except (KeyError, AttributeError):
        raise OptionError(
            f"{what}={source!r}: the examples have no such part; a function of an example also goes"
        ) from None


def write(folder: Path, number: int, named: Sequence[Named]) -> int:
    """The ids and texts of a shard, in the order of its examples; gives the file's checksum."""
    arrow, parquet = store.needed("pyarrow"), store.needed("pyarrow.parquet")
    numbers: list[int] = []
    columns: dict[str, list[str]] = {"id": [], "text": []}
    for each in named:
        some = each.ids if each.ids is not None else each.texts or []
        numbers += each.numbers if each.numbers is not None else range(len(numbers), len(numbers) + len(some))
        columns["id"] += each.ids or []
        columns["text"] += each.texts or []
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    table = arrow.table({name: [values[k] for k in order] for name, values in columns.items() if values})
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    store.put(folder, store.texts_name(number), sink.getvalue())
    return zlib.crc32(sink.getvalue())


def of_examples(folder: Path, shard: int, places: Sequence[int]) -> dict[str, list[str]]:
    """{"id": …, "text": …} of some examples of a shard, as far as there are."""
    parquet, path = store.needed("pyarrow.parquet"), folder / store.texts_name(shard)
    try:
        table = parquet.read_table(path, memory_map=True)
    except store.DAMAGED as error:
        raise store.damaged(path, error) from error
    return {name: table.column(name).take(list(places)).to_pylist() for name in table.column_names}


def is_whole(folder: Path, shard: int, told: Mapping[str, Any]) -> bool:
    """Whether the ids and texts of a shard are those that it was written with."""
    try:
        return zlib.crc32((folder / store.texts_name(shard)).read_bytes()) == told.get("texts")
    except OSError:
        return False


def shard_at(folder: Path, number: int, plan: Mapping[str, Any], mark: str, *, every_byte: bool) -> store.Shard | None:
    """A shard of this plan that is whole, with its ids and texts where the index has them; None if it is missing or
    damaged."""
    found = store.shard_at(folder, number, every_byte=every_byte)
    if found is None or found.told.get("plan") != mark:
        return None
    return found if not wanted(plan) or is_whole(folder, number, found.told) else None
