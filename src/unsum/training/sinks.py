"""Where records go. A sink is a function of a record; here are those for files and for loggers that people have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unsum.training.record import Record

Sink = Callable[[Record], None]


class Sinks:
    """The sinks of one run."""

    def __init__(self, to: Any) -> None:
        self._sinks: list[Sink] = []

    def send(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)

    def flush(self) -> None:
        pass
