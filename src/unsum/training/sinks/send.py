"""`Sinks`: hands each record to every sink of a run. A sink that fails never stops training."""

from __future__ import annotations

import inspect
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from unsum.errors import OptionError
from unsum.training.record import Record
from unsum.training.sinks.files import File, of

Sink = Callable[[Record], None]

KEPT = 10_000  # records that wait for a sink which fails
_SLOW = 0.1  # seconds: a sink that takes longer to fail is left alone for `_PAUSE` times as long
_PAUSE = 20
_CHOICES = "a path (.jsonl, .parquet), a function of a record, one of unsum.sinks, or a list of these"


class Sinks:
    """The sinks of one run: None, a path, a function of a record, or a list of these.

    A sink that raises is told of in one warning. Its records wait, the last 10,000 of them, and are tried again with
    each later record and by `flush`.

    Examples:
        >>> seen = []
        >>> sinks = Sinks([seen.append])
        >>> sinks.send(Record(step=0))
        >>> [record.step for record in seen]
        [0]
        >>> Sinks("run.csv")
        Traceback (most recent call last):
        ...
        unsum.errors.OptionError: to='run.csv': the suffix says how records are written: .jsonl or .parquet
    """

    def __init__(self, to: Any) -> None:
        given = [] if to is None else list(to) if isinstance(to, list | tuple) and not callable(to) else [to]
        self._outlets = [_Outlet(_sink(each)) for each in given]

    def send(self, record: Record) -> None:
        """Hand a record to every sink. What a sink raises becomes a warning."""
        for outlet in self._outlets:
            outlet.send(record)

    def flush(self) -> None:
        """Try again what waits, and let each sink write what it holds back."""
        for outlet in self._outlets:
            outlet.flush()

    def __del__(self) -> None:
        if getattr(self, "_outlets", None) and sys.meta_path is not None:  # let go before the program's end
            self.flush()


class _Outlet:
    """One sink, and the records that it has not taken yet."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_shared = bool(getattr(sink, "only_rank_0", False))  # all ranks would write into one run
        self._in_order = isinstance(sink, File)
        self._waiting: deque[Record] = deque(maxlen=KEPT)
        self._refused: deque[Record] = deque(maxlen=KEPT)  # which the sink fails on, while it takes others
        self._again_at = 0.0
        self._is_told = False

    def send(self, record: Record) -> None:
        if self._is_shared and record.rank:
            return
        self._waiting.append(record)
        if time.monotonic() >= self._again_at:
            self._drain()

    def flush(self) -> None:
        self._waiting.extendleft(reversed(self._refused))
        self._refused.clear()
        self._drain()
        flush = getattr(self._sink, "flush", None)
        if callable(flush):
            self._tried(flush)

    def _drain(self) -> None:
        while self._waiting:
            if self._tried(self._sink, self._waiting[0]):
                self._waiting.popleft()
            elif not self._in_order and len(self._waiting) > 1 and self._tried(self._sink, self._waiting[-1]):
                self._waiting.pop()  # the sink works, and the oldest record does not stop the others
                self._refused.append(self._waiting.popleft())
            else:
                return

    def _tried(self, call: Callable[..., Any], *args: Any) -> bool:
        """Call, and say whether it went well. KeyboardInterrupt and SystemExit pass."""
        began = time.monotonic()
        try:
            call(*args)
        except Exception as error:
            took = time.monotonic() - began
            self._again_at = began + (took + took * _PAUSE if took > _SLOW else 0.0)
            self._tell(error)
            return False
        return True

    def _tell(self, error: Exception) -> None:
        if not self._is_told:
            self._is_told = True
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            warnings.warn(
                f"unsum.watch: the sink {name_of(self._sink)} failed ({why}); training goes on. The last {KEPT:,} "
                "records are kept and tried again with each later one and at flush(); this warning appears once",
                stacklevel=6,
            )


def name_of(sink: Any) -> str:
    """A sink's name for messages.

    Examples:
        >>> name_of(print)
        'print'
    """
    if isinstance(sink, File) or hasattr(sink, "only_rank_0"):
        return repr(sink)
    return getattr(sink, "__qualname__", None) or type(sink).__qualname__


def _sink(given: Any) -> Sink:
    if isinstance(given, str | os.PathLike):
        return of(given)
    if not callable(given):
        held = f"{type(given).__name__} is no sink" if not isinstance(given, Sequence) else "a list in a list"
        raise OptionError(f"to={given!r}: {held}; give {_CHOICES}. {_hint(given)}".rstrip())
    if inspect.iscoroutinefunction(given):
        raise OptionError(f"to={name_of(given)}: an async function, which is never awaited; give a plain function")
    if isinstance(given, type):
        raise OptionError(f"to={given.__name__}: a class; give an instance that can be called with a record")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        return given  # some built-in functions do not say what they take
    try:
        signature.bind(Record(step=0))
    except TypeError:
        raise OptionError(
            f"to={name_of(given)}: called with one record, and its arguments are {signature}; give {_CHOICES}"
        ) from None
    return given


def _hint(given: Any) -> str:
    """For an object of a logger's, the factory that makes a sink of it."""
    home = type(given).__module__.partition(".")[0]
    if hasattr(given, "add_scalar"):
        return "A SummaryWriter: unsum.sinks.tensorboard(writer)"
    return f"A run of {home}: unsum.sinks.{home}(...)" if home in ("wandb", "mlflow", "trackio") else ""
