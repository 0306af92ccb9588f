"""A line on the terminal that says how far long work has come."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TextIO, TypeVar

T = TypeVar("T")

_WIDTH = 24
_PAUSE = 0.05  # seconds between two writings: a fast loop is not slowed down by its own line


class progress(Generic[T]):
    """Goes over `work`, or counts to it, and shows how far it is on standard error: only on a terminal, and not where
    the environment says `UNSUM_PROGRESS=off`.

    Examples:
        >>> [x * x for x in progress([1, 2, 3], "squares")]
        [1, 4, 9]
        >>> with progress(2, "steps") as line:
        ...     line.step("first")
        ...     line.step("second")
    """

    def __init__(
        self, work: Iterable[T] | int, label: str, *, shown: bool | None = None, stream: TextIO | None = None
    ) -> None:
        self._work: Iterable[T] = () if isinstance(work, int) else work
        self._total = work if isinstance(work, int) else len(work) if isinstance(work, Sized) else None
        self._label, self._stream = label, stream or sys.stderr
        self._shown = is_shown(self._stream) if shown is None else shown
        self._done, self._written, self._note = 0, float("-inf"), ""

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self._work:
                yield item
                self.step()

    def __enter__(self) -> progress[T]:
        self._write(force=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write(force=True)
            self._stream.write("\n")
            self._stream.flush()

    def step(self, note: str | None = None, by: int = 1) -> None:
        """One more is done, or `by` more; `note` says what comes now."""
        self._done += by
        self.say(note if note is not None else self._note)

    def say(self, note: str) -> None:
        """What is being done."""
        changed, self._note = note != self._note, note
        self._write(force=changed or self._done == self._total)

    def show(self, note: str) -> None:
        """The same for what changes all the time (a speed): written now and then."""
        self._note = note
        self._write(force=self._done == self._total)

    def _write(self, *, force: bool = False) -> None:
        if not self._shown or (not force and time.monotonic() - self._written < _PAUSE):
            return
        self._written = time.monotonic()
        if self._total is None:
            bar = f"{self._done}"
        else:
            full = round(_WIDTH * min(self._done, self._total) / max(self._total, 1))
            bar = f"{'█' * full}{'·' * (_WIDTH - full)} {self._done}/{self._total}"
        self._stream.write(f"\r\x1b[2K{self._label} {bar}{f'  {self._note}' if self._note else ''}")
        self._stream.flush()


def is_shown(stream: TextIO) -> bool:
    """Whether a progress line has a place on this stream."""
    return stream.isatty() and os.environ.get("UNSUM_PROGRESS", "").lower() not in ("off", "0", "no", "false")
