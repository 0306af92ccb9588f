"""The rows of a shard under way: what each batch gave, in a file beside the shards, so that a build which was killed
goes on with the next batch.

A record is a length, a checksum and a safetensors file. What was cut off in the middle of a write does not fit its
checksum and is forgotten. A kill loses nothing that was written; of a machine that lost its power the last second may
be missing.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unsum.index.store import needed, telling

_HEAD = struct.Struct("<QI")  # bytes, their checksum
_PAUSE = 1.0  # seconds between two waits for the disk


@dataclass(frozen=True)
class Record:
    """What a batch gave: rows as they will be stored, and which data they were made of."""

    tensors: dict[str, Tensor]
    content: str


class Journal:
    """The records of a shard, in the order of its batches."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = _path(folder, number)
        with telling(self._path):
            self._file = self._path.open("ab+")
        self._synced = time.monotonic()

    def records(self) -> Iterator[Record]:
        """Those that are whole. What follows the last of them is cut off: call `add` only when all are read."""
        self._file.seek(0)
        good = 0
        while (record := self._next()) is not None:
            good = self._file.tell()
            yield record
        with telling(self._path):
            self._file.truncate(good)
            self._file.seek(good)

    def _next(self) -> Record | None:
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        size, checksum = _HEAD.unpack(head)
        if not 0 < size <= self._path.stat().st_size:  # after a loss of power, a file may end in zeros
            return None
        data = self._file.read(size)
        if len(data) < size or zlib.crc32(data) != checksum:
            return None
        text, _, body = data.partition(b"\n")
        return Record(needed("safetensors.torch").load(body), text.decode())

    def add(self, record: Record) -> None:
        """One more batch is done."""
        data = record.content.encode() + b"\n" + needed("safetensors.torch").save(record.tensors)
        with telling(self._path):
            self._file.write(_HEAD.pack(len(data), zlib.crc32(data)) + data)
            self._file.flush()
            if time.monotonic() - self._synced > _PAUSE:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    @staticmethod
    def remove(folder: Path, number: int) -> None:
        """The journal of a shard that is there, if it was left."""
        _path(folder, number).unlink(missing_ok=True)

    def close(self, *, done: bool) -> None:
        """`done`: the shard is there, and this file no longer needed."""
        with contextlib.suppress(OSError):  # of a write that has failed, and was told
            self._file.close()
        if done:
            self._path.unlink(missing_ok=True)


def _path(folder: Path, number: int) -> Path:
    return folder / f".shard-{number:06d}.rows"
