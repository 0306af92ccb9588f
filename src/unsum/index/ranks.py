"""The processes of `torch.distributed` that build an index together; one process alone is a group of one.

What fails in one process ends all of them with its message: nobody waits for a process that has given up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from unsum.errors import UnsumError
from unsum.seams.sharding import OtherRankFailed

Found = TypeVar("Found")

_FAILED = ".failed"  # in the folder while the others have not yet heard of it


class Ranks:
    """This process among the others."""

    def __init__(self, *, alone: bool = False) -> None:
        there = not alone and dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)

    def from_first(self, find: Callable[[], Found]) -> Found:
        """What the first process finds; what it refuses, all refuse."""
        found = self.together(lambda: find() if self.rank == 0 else None)
        if self.count == 1:
            return found  # type: ignore[return-value]
        told: list[Any] = [found]
        dist.broadcast_object_list(told, src=0)
        return told[0]  # type: ignore[no-any-return]

    def together(self, act: Callable[[], Found], is_fatal: Callable[[Exception], bool] | None = None) -> Found:
        """What `act` gives in this process. If it fails in one process, all raise. An error that `is_fatal` is raised
        at once: the others cannot be reached, and learn of it when this process ends."""
        if self.count == 1:
            return act()
        found: Any = None
        failed: Exception | None = None
        try:
            found = act()
        except Exception as error:
            if is_fatal is not None and is_fatal(error):
                raise
            failed = error
        told: list[Any] = [None] * self.count
        here = None if failed is None or isinstance(failed, OtherRankFailed) else (type(failed).__name__, str(failed))
        dist.all_gather_object(told, here)
        if here is not None:
            assert failed is not None
            raise failed
        for rank, text in enumerate(told):
            if text is not None:
                raise UnsumError(f"build: rank {rank} of {self.count} failed: {text[0]}: {text[1]}") from None
        if failed is not None:
            raise failed
        return found  # type: ignore[no-any-return]

    def same(self, value: Found, differ: Callable[[int, Found, Found], Exception]) -> Found:
        """A value that every process has; raises `differ(rank, the first one's, its own)` if one has another."""
        if self.count == 1:
            return value
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, value)
        for rank, other in enumerate(told):
            if other != told[0]:
                raise differ(rank, told[0], other)
        return value

    def tell(self, folder: Path) -> None:
        """This process has failed: leave word for the others, which are in the middle of their shards."""
        if self.count > 1:
            with contextlib.suppress(OSError):  # a full disk, say: then they hear of it when they are done
                (folder / _FAILED).touch()

    def listen(self, folder: Path) -> None:
        """Raise if another process has left word that it failed."""
        if self.count > 1 and (folder / _FAILED).exists():
            raise OtherRankFailed("build: another rank failed")

    def forget(self, folder: Path) -> None:
        """All have heard."""
        if self.count > 1 and self.rank == 0:
            with contextlib.suppress(OSError):
                (folder / _FAILED).unlink(missing_ok=True)
