"""The processes of `torch.distributed` that build an index together; one process alone is a group of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from unsum.errors import UnsumError

Found = TypeVar("Found")


class Ranks:
    """This process among the others."""

    def __init__(self, *, alone: bool = False) -> None:
        there = not alone and dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)

    def from_first(self, find: Callable[[], Found]) -> Found:
        """What the first process finds; what it refuses, all refuse."""
        if self.count == 1:
            return find()
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told = [find(), None]
            except UnsumError as error:
                told = [None, error]
        dist.broadcast_object_list(told, src=0)
        if told[1] is not None:
            raise told[1]
        return told[0]  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            dist.barrier()
