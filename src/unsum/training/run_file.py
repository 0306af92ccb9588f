"""Records read back from a file of JSON lines."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from unsum.errors import OptionError
from unsum.training.record import Record


@dataclass
class Run:
    """The records of a run, in the order of their steps, and what was noticed while they were read."""

    path: Path
    records: list[Record]
    notes: list[str] = field(default_factory=list)


def read(path: str | os.PathLike[str]) -> Run:
    """Read a file that `to="run.jsonl"` has written. A line that is no record is left out, with a note.

    Where step numbers go back (a run that was resumed, or started again into the same file), the later records count.
    """
    where = Path(path)
    if where.suffix.lower() == ".parquet":
        raise OptionError(f"{where}: reads JSON lines (.jsonl); pyarrow, pandas or polars read Parquet")
    try:
        lines = where.read_bytes().splitlines()
    except FileNotFoundError:
        raise OptionError(f'no file {where}; unsum.watch(model, to="run.jsonl") writes one') from None
    except OSError as error:
        raise OptionError(f"cannot read {where}: {error.strerror or type(error).__name__}") from None
    found, damaged = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            record = _record(line)
            damaged += [number] if record is None else []
            found += [] if record is None else [record]
    if damaged and not found:
        raise OptionError(f"{where} holds no record of unsum.watch: line {damaged[0]} is not one")
    if not found:
        raise OptionError(f"{where} is empty: no step was watched yet")
    run = Run(where, _last_run(found))
    if damaged == [len(lines)]:
        run.notes.append("the last line is torn (a run under way, or a process that was killed) and is left out")
    elif damaged:
        named = ", ".join(map(str, damaged[:5])) + (" …" if len(damaged) > 5 else "")
        run.notes.append(f"{len(damaged)} damaged lines are left out: {named}")
    if len(run.records) < len(found):
        gone = len(found) - len(run.records)
        run.notes.append(f"step numbers go back (resumed, or started again): {gone} earlier records are left out")
    others = sorted(each.name for each in where.parent.glob(f"{where.stem}.rank*{where.suffix}"))
    if others:
        run.notes.append(f"this is rank 0; other ranks: {', '.join(others)}")
    return run


def _record(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
        return Record.from_dict(found) if isinstance(found, dict) and isinstance(found.get("step"), int) else None
    except (ValueError, TypeError, KeyError, AttributeError):  # what other programs may have written
        return None


def _last_run(records: list[Record]) -> list[Record]:
    """The records without those that later ones replace."""
    kept: list[Record] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept
