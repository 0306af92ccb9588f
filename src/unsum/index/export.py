"""The rows of an index, written for other programs: FAISS, Arrow, Parquet, NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unsum.destination import writable
from unsum.errors import NotInstalled, OptionError
from unsum.index import store, texts
from unsum.index.stored import Stored
from unsum.progress import progress

FORMATS = ("faiss", "arrow", "parquet", "numpy")
_ROWS = 1 << 16  # at a time


def write(index: Stored, path: str | os.PathLike[str], format: str) -> None:
    """All rows, in float32, in order."""
    if format not in FORMATS:
        raise OptionError(f"export: format={format!r}: choose {', '.join(map(repr, FORMATS))}")
    where = writable(path, example=f"rows.{format}")
    beside = where.with_name(f".{where.name}.{os.getpid()}.part")
    try:
        if format == "faiss":
            _faiss(index, beside)
        elif format == "numpy":
            _numpy(index, beside)
        else:
            _arrow(index, beside, format)
        os.replace(beside, where)
    finally:
        beside.unlink(missing_ok=True)


def _parts(index: Stored) -> Any:
    some = max(1, min(_ROWS, (1 << 24) // max(index.info["width"], 1)))
    return progress(
        [(first, min(first + some, index.info["rows"])) for first in range(0, index.info["rows"], some)], "export"
    )


def _faiss(index: Stored, path: Path) -> None:
    try:
        faiss: Any = store.needed("faiss")
    except NotInstalled:
        raise NotInstalled("export to FAISS needs faiss, which is not installed: pip install faiss-cpu") from None
    found = faiss.IndexFlatIP(index.info["width"])
    for first, last in _parts(index):
        found.add(index.rows(first, last).numpy())
    faiss.write_index(found, str(path))


def _numpy(index: Stored, path: Path) -> None:
    numpy = store.needed("numpy")
    whole = numpy.lib.format.open_memmap(path, "w+", "<f4", (index.info["rows"], index.info["width"]))
    for first, last in _parts(index):
        whole[first:last] = index.rows(first, last).numpy()
    whole.flush()


def _arrow(index: Stored, path: Path, format: str) -> None:
    arrow = store.needed("pyarrow")
    width = index.info["width"]
    fields = [("example", arrow.int64()), ("position", arrow.int64())][: 2 if index.info["tokens"] else 1]
    told = [key for key, name in (("ids", "id"), ("text", "text")) if index.info["texts"][key]]
    columns = [{"ids": "id", "text": "text"}[key] for key in told]
    schema = arrow.schema(
        [*fields, *((name, arrow.string()) for name in columns), ("row", arrow.list_(arrow.float32(), width))]
    )
    if format == "parquet":
        writer: Any = store.needed("pyarrow.parquet").ParquetWriter(path, schema)
    else:
        writer = arrow.ipc.new_file(str(path), schema)
    with writer:
        first = begun = 0
        for number, shard in enumerate(progress(index.info["shards"], "export")):
            rows = index.rows(first, first + shard["rows"])
            examples, positions = index.tokens(first, first + shard["rows"])
            places = (examples - begun).tolist()
            named = texts.of_examples(index.folder, number, places) if columns else {}
            values = {"example": examples.numpy(), "position": positions.numpy(), **named}
            table = [arrow.array(values[name]) for name, _ in fields] + [arrow.array(named[name]) for name in columns]
            flat = arrow.array(rows.flatten().numpy())
            table.append(arrow.FixedSizeListArray.from_arrays(flat, width))
            writer.write_table(arrow.Table.from_arrays(table, schema=schema))
            first += shard["rows"]
            begun += shard["examples"]
