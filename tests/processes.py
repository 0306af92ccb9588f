"""Processes that form one group over gloo, started once and used by many tests."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Ranks:
    """So many processes, each a rank of one group. They start with the first check, and again after one that failed:
    the others may wait for ever in a collective call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, check: Callable[..., Any], *args: Any, seconds: float = 200.0) -> list[Any]:
        """`check(rank, *args)` in every process: what each has returned. The first error is raised here, as text."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((check, args))
        found: dict[int, Any] = {}
        until = time.monotonic() + seconds
        while len(found) < self.count:
            for rank, pipe in enumerate(self._pipes):
                if rank not in found and pipe.poll(0.02):
                    is_fine, found[rank] = self._answer(rank, pipe)
                    if not is_fine:
                        self.stop()
                        raise AssertionError(f"rank {rank} of {self.count}: {found[rank]}")
            if time.monotonic() > until:
                self.stop()
                raise AssertionError(f"no answer after {seconds} s from ranks {set(range(self.count)) - set(found)}")
        return [found[rank] for rank in range(self.count)]

    def _answer(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except EOFError:
            return False, "the process has ended"

    def _start(self) -> None:
        context, port = mp.get_context("spawn"), free_port()
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


@contextlib.contextmanager
def started(*counts: int) -> Iterator[dict[int, Ranks]]:
    """{count: ranks}, ended afterwards."""
    groups = {count: Ranks(count) for count in counts}
    try:
        yield groups
    finally:
        for ranks in groups.values():
            ranks.stop()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    """One process: it does what it is sent until it is ended."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "tests",
    }  # as torchrun has it, which trainers read  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    while True:
        check, args = pipe.recv()
        try:
            answer = True, check(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
