"""An index on disk: shards as safetensors, a manifest in JSON. What is there is whole: files appear by renaming, when
they and their folder have reached the disk."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsum.errors import NotInstalled, OptionError, UnsumError, UnsupportedError

FORMAT, VERSION = "unsum index", 1
PLAN, MANIFEST = "plan.json", "manifest.json"  # what is to be built, and what was
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_NUMPY = {torch.float16: "<f2", torch.bfloat16: "<u2", torch.float32: "<f4"}


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:06d}.safetensors"


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """A file that is there whole, or not at all."""
    _put(folder, name, (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """What a file says; None if there is none."""
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{folder / name}: damaged ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OptionError(f"{folder / name}: not of an index that unsum built")
    if found["version"] > VERSION:
        raise OptionError(f"{folder}: built by a newer unsum (version {found['version']} of the format)")
    return found


def write_shard(folder: Path, number: int, rows: Tensor, told: Mapping[str, Any]) -> None:
    """Rows (n, K) in the index's dtype, each with a power of two by which it is multiplied."""
    stored, scales = scaled(rows, DTYPES[told["dtype"]])
    tensors = {"rows": stored.contiguous(), "scales": scales}
    told = {**told, "crc": checksum(tensors)}
    data = _needed("safetensors.torch").save(tensors, metadata={"unsum": json.dumps(told, sort_keys=True)})
    _put(folder, shard_name(number), data)


def scaled(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In a narrow dtype, with a power of two for each row, so that neither large nor small gradients are lost."""
    largest = rows.abs().amax(1)
    exponent = torch.where(largest > 0, torch.floor(torch.log2(largest.double().clamp_min(1e-300))), 0.0)
    scales = torch.exp2(exponent.clamp(-120, 120)).float()
    return (rows / scales[:, None]).to(dtype), scales


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Of all bytes."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy(), total)  # type: ignore[arg-type]
    return total


class Shard:
    """A shard that is there: its rows are mapped into memory, not read."""

    def __init__(self, folder: Path, number: int) -> None:
        self.path, self.number = folder / shard_name(number), number
        header, self._start = _header(self.path)
        self.told: dict[str, Any] = json.loads(header["__metadata__"]["unsum"])
        self._places = {name: header[name] for name in ("rows", "scales")}
        self.rows, self.width = self._places["rows"]["shape"]

    def stored(self) -> tuple[Tensor, Tensor]:
        """(rows, K) in the index's dtype, and (rows,) what each is multiplied by."""
        return self._mapped("rows", DTYPES[self.told["dtype"]]), self._mapped("scales", torch.float32)

    def _mapped(self, name: str, dtype: torch.dtype) -> Tensor:
        numpy = _needed("numpy")
        place = self._places[name]
        if not self.rows:
            return torch.zeros(place["shape"], dtype=dtype)
        first = self._start + place["data_offsets"][0]
        values = numpy.memmap(self.path, _NUMPY[dtype], "c", first, tuple(place["shape"]))
        found = torch.from_numpy(values)
        return found.view(torch.bfloat16) if dtype == torch.bfloat16 else found

    def is_whole(self) -> bool:
        """Whether every byte is what was written."""
        stored, scales = self.stored()
        return checksum({"rows": stored, "scales": scales}) == self.told["crc"]


def shard_at(folder: Path, number: int) -> Shard | None:
    """A shard that is whole; None if it is missing or damaged."""
    try:
        found = Shard(folder, number)
        return found if found.is_whole() else None
    except (OSError, ValueError, KeyError):
        return None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= 100_000_000:
            raise ValueError(f"{path}: no safetensors file")
        header = json.loads(file.read(size))
    end = max(place["data_offsets"][1] for name, place in header.items() if name != "__metadata__")
    if path.stat().st_size != 8 + size + end:
        raise ValueError(f"{path}: truncated")
    return header, 8 + size


def _put(folder: Path, name: str, data: bytes) -> None:
    """Write beside it, wait for the disk, rename, wait for the folder."""
    beside = folder / f".{name}.{os.getpid()}.part"
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, folder / name)
        _sync(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        why = error.strerror or type(error).__name__
        raise UnsumError(
            f"cannot write {folder / name}: {why}.\n  what was written before is whole: make room, and call build again"
        ) from error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """One builder at a time. The lock is the system's: it goes with the process that held it, however that ended."""
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError as error:
        raise UnsupportedError("builds lock their folder by fcntl, which this system does not have") from error
    path = folder / f".{name}.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise OptionError(
                f"{folder}: another process builds this index ({file.read().strip() or 'not known which'}).\n"
                "  wait for it, or stop it; what it has written stays"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
        file.truncate(0)


def sweep(folder: Path) -> None:
    """Remove what processes that were killed had begun to write."""
    for path in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            path.unlink()


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = name.partition(".")[0]
        raise NotInstalled(f"an index needs {missing}, which is not installed: pip install unsum[index]") from error
