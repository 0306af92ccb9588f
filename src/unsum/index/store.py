"""The files of an index: shards as safetensors, plan and manifest as JSON. What is there is whole: a file appears by
renaming, when it has reached the disk."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsum.errors import NotInstalled, OptionError, UnsumError

FORMAT, VERSION = "unsum index", 1
PLAN, MANIFEST, CURVATURE = "plan.json", "manifest.json", "curvature.safetensors"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what reading a damaged file may raise
PACKAGES = ("safetensors", "numpy", "pyarrow")  # what an index needs beside torch
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCK = 1 << 20  # numbers whose squares are added at a time
_NUMPY = {
    torch.float16: "<f2", torch.bfloat16: "<u2", torch.float32: "<f4", torch.int32: "<i4", torch.int64: "<i8",
}  # fmt: skip


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:06d}.safetensors"


def texts_name(number: int) -> str:
    """The file with the ids and texts of a shard's examples."""
    return f"examples-{number:06d}.parquet"


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """A file that is there whole, or not at all, with a checksum of what it says."""
    told = {**content, "checksum": _crc(content)}
    put(folder, name, (json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """What a file says; None if there is none."""
    try:
        data = (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    remedy = "\n  call build again, which writes it anew" if name == MANIFEST else ""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise OptionError(f"{folder / name}: damaged ({error}){remedy}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OptionError(f"{folder / name}: not of an index that unsum built")
    version = found.get("version")
    if isinstance(version, int) and version > VERSION:
        raise OptionError(f"{folder}: built by a newer unsum (version {version} of the format)")
    if found.pop("checksum", None) != _crc(found):
        raise OptionError(f"{folder / name}: damaged, or changed since unsum wrote it (its checksum differs){remedy}")
    return found


def _crc(content: Mapping[str, Any], before: int = 0) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode(), before)


def scaled(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows (n, K) in a narrow dtype, and a power of two for each, by which it is multiplied: so neither large nor small
    gradients are lost."""
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    exponent = torch.where(largest > 0, torch.floor(torch.log2(largest.double().clamp_min(1e-300))), 0.0)
    scales = torch.exp2(exponent.clamp(-120, 120)).float()
    return (rows / scales[:, None]).to(dtype), scales


def write_shard(folder: Path, number: int, tensors: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """`rows` (n, K) with their `scales`; with rows for tokens, `examples` and `positions` as well. Adds `norms`."""
    whole = {name: value.contiguous() for name, value in tensors.items()}
    whole["norms"] = _norms(whole["rows"])
    told = {**told, "crc": _crc(told, checksum(whole))}
    data = needed("safetensors.torch").save(whole, metadata={"unsum": json.dumps(told, sort_keys=True)})
    put(folder, shard_name(number), data)


def _norms(rows: Tensor) -> Tensor:
    """(n,): the norm of each row as it is stored. By NumPy, whose sums do not depend on the number of threads."""
    numpy, found = needed("numpy"), torch.zeros(len(rows), dtype=torch.float32)
    some = max(1, _BLOCK // max(rows.shape[1], 1))
    for at in range(0, len(rows), some):
        squares = numpy.square(rows[at : at + some].double().numpy()).sum(1)
        found[at : at + some] = torch.from_numpy(numpy.sqrt(squares)).float()
    return found


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
        self.told: dict[str, Any] = json.loads(header.pop("__metadata__")["unsum"])
        if self.told["number"] != number:
            raise ValueError(f"{self.path}: it is shard {self.told['number']}")
        self._places = header
        self.rows, self.width = header["rows"]["shape"]
        self._held: tuple[Tensor, Tensor] | None = None
        self._held_norms: Tensor | None = None

    def stored(self) -> tuple[Tensor, Tensor]:
        """(rows, K) in the index's dtype, and (rows,) what each is multiplied by."""
        if self._held is None:
            self._held = self._mapped("rows", DTYPES[self.told["dtype"]]), self._mapped("scales", torch.float32)
        return self._held

    @property
    def has_norms(self) -> bool:
        """False in an index that was built before norms were kept."""
        return "norms" in self._places

    def norms(self) -> Tensor:
        """(rows,): the norms of rows as they are stored."""
        if self._held_norms is None:
            self._held_norms = self._mapped("norms", torch.float32)
        return self._held_norms

    def tokens(self) -> tuple[Tensor, Tensor]:
        """(rows,) and (rows,): which example of the shard a row belongs to, and at which position."""
        return self._mapped("examples", torch.int32), self._mapped("positions", torch.int32)

    def _mapped(self, name: str, dtype: torch.dtype) -> Tensor:
        place = self._places[name]
        if not self.rows:
            return torch.zeros(place["shape"], dtype=dtype)
        first = self._start + place["data_offsets"][0]
        values = needed("numpy").memmap(self.path, _NUMPY[dtype], "c", first, tuple(place["shape"]))
        found = torch.from_numpy(values)
        return found.view(torch.bfloat16) if dtype == torch.bfloat16 else found

    def is_whole(self) -> bool:
        """Whether every byte is what was written."""
        tensors = dict(zip(("rows", "scales"), self.stored(), strict=True))
        if self.has_norms:
            tensors["norms"] = self.norms()
        if "positions" in self._places:
            tensors |= zip(("examples", "positions"), self.tokens(), strict=True)
        return (
            _crc({name: value for name, value in self.told.items() if name != "crc"}, checksum(tensors))
            == self.told["crc"]
        )


def shard_at(folder: Path, number: int, *, every_byte: bool = True) -> Shard | None:
    """A shard that is whole; None if it is missing or damaged. Without `every_byte` its header and length decide."""
    try:
        found = Shard(folder, number)
        return found if not every_byte or found.is_whole() else None
    except DAMAGED:
        return None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= 100_000_000:
            raise ValueError(f"{path}: not a safetensors file")
        header = json.loads(file.read(size))
    end = max(place["data_offsets"][1] for name, place in header.items() if name != "__metadata__")
    if path.stat().st_size != 8 + size + end:
        raise ValueError(f"{path}: truncated")
    return header, 8 + size


def put(folder: Path, name: str, data: bytes) -> None:
    """Write beside it, wait for the disk, rename, wait for the folder."""
    beside = folder / f".{name}.{os.getpid()}.part"
    try:
        with telling(folder / name):
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, folder / name)
            sync(folder)
    except UnsumError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def damaged(path: Path, error: Exception) -> OptionError:
    """The error of who cannot read a file of an index."""
    return OptionError(
        f"{path}: damaged or missing ({str(error).splitlines()[0] if str(error) else type(error).__name__}).\n  "
        "i.verify() names all such, and unsum.index.build(...), called again, builds them anew"
    )


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """A write that fails is told with its file."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        remedy = "make room" if error.errno in _FULL else "see to it"
        raise UnsumError(
            f"cannot write {path}: {why}.\n  what was written before is whole: {remedy}, and call build again"
        ) from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, *patterns: str) -> None:
    """Remove what processes that were killed had begun to write; all of it, or what these patterns name."""
    for pattern in patterns or (".*.part", ".shard-*.lock", ".failed", ".stop-*"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def sweep_shard(folder: Path, number: int) -> None:
    """Remove what processes that were killed had begun to write of a shard; by who holds its lock."""
    sweep(folder, f".{shard_name(number)}.*.part", f".{texts_name(number)}.*.part")


def needed(name: str) -> Any:
    """A package that an index needs, imported; the error names all of them (the extra `index`)."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = name.partition(".")[0]
        raise NotInstalled(
            f"an index needs {missing}, which is not installed: pip install {' '.join(PACKAGES)}"
        ) from error
