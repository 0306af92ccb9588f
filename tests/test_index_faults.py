"""Faults in the files of an index, planted one by one: what fails is told, and calling build again repairs it."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unsum
from curvature_nets import Examples, classified, ids, mlp, numbers
from index_checks import bytes_of, left_over
from unsum.errors import OptionError, UnsumError
from unsum.index import journal, store

X, Y = numbers(0, 23, 4), ids(1, 23, high=3)
DATA = Examples(X, Y)
OPTIONS: dict[str, Any] = {"project": 3, "batch_size": 2, "shard_size": 8, "dtype": "float32", "text": str}
FULL = OSError(errno.ENOSPC, "No space left on device")


def built(path: Path, losses: Any = classified, **options: Any) -> Any:
    unsum.index.build(mlp(), losses, DATA, path, **(OPTIONS | options))
    return unsum.index.open(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("index") / "whole"
    built(path)
    return bytes_of(path)


def repaired(path: Path, whole: dict[str, bytes]) -> None:
    """Called again, the build gives what it would have given, and leaves nothing else."""
    assert built(path).verify() == []
    assert bytes_of(path) == whole and left_over(path) == []


# ---- writes that fail ------------------------------------------------------------------------------------------------


class File:
    """A file whose writes pass through a function first."""

    def __init__(self, file: Any, write: Callable[[Any, bytes], int]) -> None:
        self._file, self._write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        return self._write(self._file, data)


def write_through(monkeypatch: pytest.MonkeyPatch, mode: str, write: Callable[[Any, bytes], int]) -> None:
    """Files that are opened in this way write through a function: "wb" shards and JSON, "ab+" journals."""
    opened = store.Path.open

    def open_ours(path: Path, *given: Any, **named: Any) -> Any:
        file = opened(path, *given, **named)
        return File(file, write) if given == (mode,) else file

    monkeypatch.setattr(store.Path, "open", open_ours)


def counted(at: int) -> Callable[[], bool]:
    """A function that says True at its so-manieth call."""
    left = iter(range(at - 1, -1, -1))
    return lambda: next(left, 1) == 0


@pytest.mark.parametrize("mode", ["wb", "ab+"])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_disk_that_is_full_in_the_middle_of_a_write(
    at: int, mode: str, tmp_path: Path, whole: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_now = counted(at)

    def write(file: Any, data: bytes) -> int:
        if is_now():
            file.write(data[: len(data) // 2])
            file.flush()
            raise FULL
        return int(file.write(data))

    write_through(monkeypatch, mode, write)
    with pytest.raises(UnsumError, match=r"cannot write .*No space left on device.*\n.*call build again"):
        built(tmp_path / "i")
    monkeypatch.undo()
    repaired(tmp_path / "i", whole)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("error", [FULL, OSError(errno.EIO, "Input/output error")], ids=["full", "broken"])
def test_a_rename_or_a_wait_for_the_disk_that_fails(
    error: OSError, at: int, call: str, tmp_path: Path, whole: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_now, real = counted(at), getattr(os, call)

    def failing(*given: Any) -> Any:
        if is_now():
            raise error
        return real(*given)

    monkeypatch.setattr(store.os, call, failing)
    monkeypatch.setattr(journal, "_PAUSE", 0.0)  # the journal waits for the disk after every record
    with pytest.raises(UnsumError, match=f"cannot write .*{error.strerror}"):
        built(tmp_path / "i")
    monkeypatch.undo()
    repaired(tmp_path / "i", whole)


@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_write_that_is_short_and_says_nothing(
    at: int, tmp_path: Path, whole: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and shards. A plan that is cut off is refused by name, and a manifest is written anew: below."""
    is_now = counted(at)
    write_through(monkeypatch, "wb", lambda file, data: int(file.write(data[: len(data) // 2] if is_now() else data)))
    unsum_error = None
    try:
        built(tmp_path / "i")
    except UnsumError as error:
        unsum_error = str(error)
    monkeypatch.undo()
    damaged = [] if unsum_error else unsum.index.open(tmp_path / "i").verify()
    assert damaged or "call build again" in str(unsum_error)
    repaired(tmp_path / "i", whole)


@pytest.mark.parametrize("limit", [700, 1000, 1060, 1300])
def test_a_limit_of_the_operating_system_on_files(limit: int, tmp_path: Path, whole: dict) -> None:
    """The kernel itself cuts writes short here, in whichever file comes first to that size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UnsumError, match="cannot write .*File too large"):
            built(tmp_path / "i")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    repaired(tmp_path / "i", whole)


def test_a_folder_in_which_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = store.Path.open

    def refused(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if mode != "r":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, mode, *given, **named)

    monkeypatch.setattr(store.Path, "open", refused)
    with pytest.raises(UnsumError, match=r"cannot write .*build\.lock: Permission denied"):
        built(tmp_path / "i")


# ---- journals --------------------------------------------------------------------------------------------------------


class Gone(Exception):
    """A build ends here."""


class Losses:
    """Counts the batches that go through the model; fails at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        self.count += 1
        if self.count == self.at:
            raise Gone
        return classified(model, batch)


FIRST = 2  # batches that a new build looks at before the first shard: for the size of a row, and for the audit
JOURNAL = ".shard-000000.rows"
HEAD = struct.calcsize("<QI")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a build that ended after three batches of the first shard."""
    path = tmp_path_factory.mktemp("index") / "begun"
    with pytest.raises(Gone):
        built(path, Losses(FIRST + 4))
    return {file.name: file.read_bytes() for file in path.iterdir()}


def records(data: bytes) -> list[int]:
    """Where records begin, and where the last ends."""
    found = [0]
    while found[-1] < len(data):
        found.append(found[-1] + HEAD + struct.unpack_from("<QI", data, found[-1])[0])
    return found


def resumed(path: Path, files: dict[str, bytes], tail: Callable[[bytes], bytes], whole: dict, known: int) -> None:
    """A build whose journal is changed: what is known of it is not made again, also after one more interruption."""
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(tail(data) if name == JOURNAL else data)
    left = 4 - known
    if left > 1:
        with pytest.raises(Gone):
            built(path, Losses(2))  # one more batch is kept
        left -= 1
    losses = Losses()
    built(path, losses)
    assert losses.count == left + 8  # and the other two shards, of four batches each
    assert bytes_of(path) == whole and left_over(path) == []


def test_a_build_goes_on_with_the_next_batch(tmp_path: Path, whole: dict, begun: dict) -> None:
    assert len(records(begun[JOURNAL])) == 4
    resumed(tmp_path / "i", begun, lambda data: data, whole, known=3)


@pytest.mark.parametrize("left", range(HEAD + 3))
def test_a_journal_that_ends_in_a_head(left: int, tmp_path: Path, whole: dict, begun: dict) -> None:
    """Cut off at every byte of the head of the third record, and in its first bytes."""
    end = records(begun[JOURNAL])[2] + left
    resumed(tmp_path / "i", begun, lambda data: data[:end], whole, known=2)


@pytest.mark.parametrize("record", range(3))
def test_a_journal_that_ends_in_a_record(record: int, tmp_path: Path, whole: dict, begun: dict) -> None:
    begin, end = records(begun[JOURNAL])[record : record + 2]
    resumed(tmp_path / "i", begun, lambda data: data[: begin + (end - begin) // 2], whole, known=record)


def tails() -> Iterator[Any]:
    draw = random.Random(0)
    for count in (1, HEAD - 1, HEAD, HEAD + 1, 500):
        yield pytest.param(bytes(count), id=f"{count} zeros")  # as some file systems leave it after a loss of power
        yield pytest.param(draw.randbytes(count), id=f"{count} random bytes")
    yield pytest.param(struct.pack("<QI", 1 << 60, 0) + bytes(40), id="a huge size")
    yield pytest.param(struct.pack("<QI", 8, 0) + bytes(8), id="a wrong checksum")


@pytest.mark.parametrize("tail", list(tails()))
def test_a_journal_whose_tail_is_garbage(tail: bytes, tmp_path: Path, whole: dict, begun: dict) -> None:
    resumed(tmp_path / "i", begun, lambda data: data + tail, whole, known=3)


@pytest.mark.parametrize("record", range(3))
def test_a_journal_with_a_bit_that_flipped(record: int, tmp_path: Path, whole: dict, begun: dict) -> None:
    begin, end = records(begun[JOURNAL])[record : record + 2]

    def flipped(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[(begin + end) // 2] ^= 4
        return bytes(changed)

    resumed(tmp_path / "i", begun, flipped, whole, known=record)


# ---- files that are damaged afterwards -------------------------------------------------------------------------------


def damage(file: Path, fault: str) -> None:
    data = bytearray(file.read_bytes())
    if fault == "a bit":
        data[-5] ^= 1
    file.write_bytes(bytes(data[: {"truncated": -7, "empty": 0}.get(fault, len(data))]))
    if fault == "missing":
        file.unlink()


@pytest.mark.parametrize("fault", ["a bit", "truncated", "missing", "empty"])
def test_a_damaged_shard_is_named_and_built_anew(fault: str, tmp_path: Path, whole: dict) -> None:
    i = built(tmp_path / "i")
    damage(tmp_path / "i" / "shard-000001.safetensors", fault)
    assert i.verify() == ["shard-000001.safetensors"]
    if fault != "a bit":
        with pytest.raises(OptionError, match="shard-000001"):
            i.rows(0, 23)
    losses = Losses()
    built(tmp_path / "i", losses)
    assert losses.count == 1 + 4  # the batch by which the loss is known again, and that shard alone
    repaired(tmp_path / "i", whole)


@pytest.mark.parametrize("fault", ["truncated", "missing", "empty"])
def test_texts_that_are_damaged_are_written_anew(fault: str, tmp_path: Path, whole: dict) -> None:
    i = built(tmp_path / "i")
    damage(tmp_path / "i" / "examples-000002.parquet", fault)
    assert i.verify() == ["examples-000002.parquet"]
    repaired(tmp_path / "i", whole)


@pytest.mark.parametrize("fault", ["truncated", "missing", "empty"])
def test_a_damaged_manifest_is_written_anew(fault: str, tmp_path: Path, whole: dict) -> None:
    built(tmp_path / "i")
    damage(tmp_path / "i" / "manifest.json", fault)
    repaired(tmp_path / "i", whole)


def test_a_damaged_plan_is_taken_from_the_manifest_or_refused(tmp_path: Path) -> None:
    built(tmp_path / "i")
    before = (tmp_path / "i" / "plan.json").read_bytes()
    damage(tmp_path / "i" / "plan.json", "truncated")
    built(tmp_path / "i")
    assert (tmp_path / "i" / "plan.json").read_bytes() == before
    (tmp_path / "i" / "manifest.json").unlink()
    damage(tmp_path / "i" / "plan.json", "truncated")
    with pytest.raises(OptionError, match=r"plan\.json: damaged"):
        built(tmp_path / "i")
    (tmp_path / "i" / "plan.json").unlink()
    with pytest.raises(OptionError, match=r"has shards and no plan\.json"):
        built(tmp_path / "i")


def test_the_rows_of_a_journal_are_compared_with_the_data(tmp_path: Path, begun: dict) -> None:
    (tmp_path / "i").mkdir()
    for name, data in begun.items():
        (tmp_path / "i" / name).write_bytes(data)
    other = X.clone()
    other[5] += 1  # not among the examples by which a data set is known
    with pytest.raises(OptionError, match="shard 0 was begun with other data"):
        unsum.index.build(mlp(), classified, Examples(other, Y), tmp_path / "i", **OPTIONS)
    assert json.loads((tmp_path / "i" / "plan.json").read_text())["data"]["examples"] == 23
