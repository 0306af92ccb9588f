"""Records in files: JSON lines, and Parquet through pyarrow."""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

from unsum.destination import writable
from unsum.errors import OptionError
from unsum.training.record import Record
from unsum.training.sinks.packages import package
from unsum.training.sinks.rows import table

ROWS, SECONDS = 64, 300.0  # a Parquet part is written after so many records, or so long after the part before


class File:
    """A sink that writes into a file of its own for each rank: `run.jsonl`, `run.rank1.jsonl`, …"""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of_rank(self, rank: int) -> Path:
        """Where the records of a rank go."""
        return self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}") if rank else self.path

    def __call__(self, record: Record) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.path)


class JsonLines(File):
    """Appends a line for each record, whole or not at all. The file is opened for each line: it may be moved away."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(writable(path, example="run.jsonl"))
        self._known: set[Path] = set()

    def __call__(self, record: Record) -> None:
        line = json.dumps(record.as_dict(), allow_nan=False, default=str, separators=(",", ":")) + "\n"
        path = self.of_rank(record.rank)
        with path.open("ab", buffering=0) as file:
            end = file.tell() if file.seekable() else 0
            if path not in self._known and end and not _ends_a_line(path):
                line = "\n" + line  # a line that was torn when its process was killed stays alone
            data = line.encode()
            try:
                written = file.write(data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written; is the disk full?", str(path))
            except BaseException:
                _cut_back(file, end)
                raise
        self._known.add(path)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _cut_back(file: Any, end: int) -> None:
    """Take away what was written after `end`. Nothing to take away in a pipe or a device."""
    try:
        if os.fstat(file.fileno()).st_size > end:
            file.truncate(end)
    except OSError:
        return  # the write's own error is the one to tell


class Parquet(File):
    """Writes a folder of Parquet files (parts) of up to 64 records each: a Parquet file cannot be appended to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        package("pyarrow.parquet", "pyarrow")
        where = Path(path)
        if where.exists() and not where.is_dir():
            raise OptionError(
                f"{where} is a file, and records go into a folder of Parquet files of that name (a Parquet file cannot "
                "be appended to); move it away, or choose another path"
            )
        super().__init__(where)
        writable(where / _UNFINISHED)
        self._held: list[Record] = []
        self._written = time.monotonic()
        weakref.finalize(self, _write_held, self._held, where)  # when it is let go, or at the interpreter's end

    def __call__(self, record: Record) -> None:
        if not any(record is held for held in self._held):  # one that is tried again is held already
            self._held.append(record)
        if len(self._held) >= ROWS or time.monotonic() - self._written >= SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is held back as one more part."""
        _write_held(self._held, self.path)
        self._written = time.monotonic()


_UNFINISHED = ".unfinished"


def _write_held(held: list[Record], path: Path) -> None:
    if held:
        write_part(held, File(path).of_rank(held[0].rank))
        held.clear()


def write_part(records: list[Record], folder: Path) -> Path:
    """Write records as the next part of a folder: under another name first, so that no reader sees half of it."""
    rows = table(records)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(each.stem[5:]) for each in folder.glob("part-*.parquet") if each.stem[5:].isdigit()]
    part, unfinished = folder / f"part-{max(numbers, default=-1) + 1:06d}.parquet", folder / _UNFINISHED
    try:
        package("pyarrow.parquet", "pyarrow").write_table(rows, unfinished)
        unfinished.replace(part)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return part


def jsonl(path: str | os.PathLike[str]) -> File:
    """A sink that appends each record to a file, as one line of JSON whose keys are those of `record.as_dict()`.

    A line is written whole or not at all, at once. A file that is there already is appended to. Under several
    processes rank 0 writes `run.jsonl`, rank 1 `run.rank1.jsonl`, and so on. `unsum watch run.jsonl` shows the file.

    Examples:
        >>> import tempfile
        >>> sink = jsonl(tempfile.mkdtemp() + "/run.jsonl")
        >>> sink(Record(step=0, loss=0.5))
        >>> sink.path.read_text()[:22]
        '{"step":0,"loss":0.5,"'
    """
    return JsonLines(path)


def parquet(path: str | os.PathLike[str]) -> File:
    """A sink that writes records into a folder of Parquet files, one row for each; `pip install pyarrow`.

    pandas, polars, DuckDB (`'run.parquet/*.parquet'`), Spark and `pyarrow.parquet.read_table` read such a folder as one
    table. A file is written after 64 records or five minutes, by `watch.flush()`, and when the process ends; a process
    that is killed loses what came since, never what is written. A folder that is there already is added to.
    Under several processes rank 1 writes `run.rank1.parquet`, and so on.

    Columns are the record's fields. `ids` and `outliers` are strings; `layers` is a list with a struct for each layer
    (`layer`, `output`, `grad_output`, `norm`, …); `texts` is a list of (`id`, `text`).

    Examples:
        >>> sink = parquet("run.parquet")  # doctest: +SKIP
        >>> watch = unsum.watch(model, to=[sink, "run.jsonl"])  # doctest: +SKIP
    """
    return Parquet(path)


_KNOWN = {".jsonl": JsonLines, ".parquet": Parquet}


def of(path: str | os.PathLike[str]) -> File:
    """The sink for a path, by its suffix."""
    make: Any = _KNOWN.get(Path(path).suffix.lower())
    if make is None:
        raise OptionError(f"to={os.fspath(path)!r}: the suffix says how records are written: .jsonl or .parquet")
    found: File = make(path)
    return found
