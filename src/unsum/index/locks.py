"""Locks on an index: one process builds it, or several that each build shards of their own.

A lock is the operating system's: it goes with the process that held it, however that process ended, so none is ever
stale. What stands in the lock's file only says who holds it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from unsum.errors import OptionError, UnsupportedError
from unsum.index.store import telling


@contextlib.contextmanager
def building(folder: Path, *, alone: bool) -> Iterator[None]:
    """This process builds in the folder: alone, or beside others that build other shards."""
    with _locked(folder / ".build.lock", shared=not alone) as got:
        if not got:
            others = "another process builds this index" if alone else "a process builds the whole of this index"
            raise OptionError(
                f"{folder}: {others} ({_holder(folder / '.build.lock')}).\n"
                "  wait for it, or stop it; what it has written stays"
            )
        yield


@contextlib.contextmanager
def shard(folder: Path, number: int) -> Iterator[bool]:
    """This process makes a shard; False if another one does."""
    path = _shard_lock(folder, number)
    with _locked(path, shared=False) as got:
        yield got
        if got:
            path.unlink(missing_ok=True)


def maker_of(folder: Path, number: int) -> str:
    """Which process makes a shard."""
    return _holder(_shard_lock(folder, number))


def _shard_lock(folder: Path, number: int) -> Path:
    return folder / f".shard-{number:06d}.lock"


@contextlib.contextmanager
def short(folder: Path, name: str) -> Iterator[None]:
    """For a moment; who comes second waits."""
    with _locked(folder / f".{name}.lock", shared=False, wait=True):
        yield


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool, wait: bool = False) -> Iterator[bool]:
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError as error:
        raise UnsupportedError("builds lock their folder by fcntl, which this system does not have") from error
    with telling(path):
        opened = path.open("a+")
    with opened as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise UnsupportedError(
                f"{path.parent}: this file system has no locks ({error.strerror}); build on another one, and move the "
                "folder when it is done"
            ) from error
        if not shared:
            _say(file, f"process {os.getpid()} on {socket.gethostname()}")
        yield True
        if not shared:
            _say(file, "")


def _say(file: IO[str], text: str) -> None:
    """In the file that is locked, by its own handle: on NFS, closing another handle of it would end the lock."""
    with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), text.encode())


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "several processes build shards of it"
    except OSError:
        return "not known which"
