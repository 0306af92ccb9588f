"""Records as rows of a table, for Parquet. Columns are the same in every run, so that files can be read together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from unsum.training.record import Layer, NonFinite, Record
from unsum.training.sinks.packages import package


def table(records: Sequence[Record]) -> Any:
    """A pyarrow table with one row for each record."""
    return package("pyarrow", "pyarrow").Table.from_pylist([row(record) for record in records], schema=schema())


def schema() -> Any:
    """The columns: a record's fields, in their order."""
    pa = package("pyarrow", "pyarrow")
    number, whole, text = pa.float64(), pa.int64(), pa.string()
    layer = pa.struct([("layer", text), *((each.name, number) for each in fields(Layer))])
    kinds = {
        "sample": text,
        "position": pa.list_(whole),
        "microbatch": whole,
        "rank": whole,
        "last_finite": whole,
        "every": whole,
    }
    nonfinite = pa.struct([(each.name, kinds.get(each.name, text)) for each in fields(NonFinite)])
    columns = {
        "step": whole, "norms": pa.list_(number), "ids": pa.list_(text), "outliers": pa.list_(text),
        "nonfinite": nonfinite, "layers": pa.list_(layer), "texts": pa.list_(pa.struct([("id", text), ("text", text)])),
        "refused": text, "rank": whole, "parameters": whole, "trainable": whole,
    }  # fmt: skip
    return pa.schema([(each.name, columns.get(each.name, number)) for each in fields(Record)])


def row(record: Record) -> dict[str, Any]:
    """A record as one row: what is not finite stays a number, which Parquet can hold.

    Examples:
        >>> row(Record(step=3, loss=float("inf"), ids=[7, "a"], layers={"fc": Layer(norm=1.0)}))["ids"]
        ['7', 'a']
    """
    found = {each.name: getattr(record, each.name) for each in fields(record)}
    found["norms"] = None if record.norms is None else record.norms.tolist()
    found |= {"ids": [str(each) for each in record.ids], "outliers": [str(each) for each in record.outliers]}
    found["layers"] = [{"layer": name, **vars(layer)} for name, layer in record.layers.items()]
    found["texts"] = [{"id": str(key), "text": text} for key, text in record.texts.items()]
    if record.nonfinite is not None:
        where = {each.name: getattr(record.nonfinite, each.name) for each in fields(NonFinite)}
        where["sample"] = None if where["sample"] is None else str(where["sample"])
        position = where["position"]
        where["position"] = [position] if isinstance(position, int) else None if position is None else list(position)
        found["nonfinite"] = where
    return found
