"""A line for each record on the terminal, with rich where it is installed."""

from __future__ import annotations

import sys
from typing import Any

from unsum.errors import OptionError
from unsum.training.record import Record


class Console:
    """A sink that writes lines to standard output."""

    only_rank_0 = True

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"sinks.console: every={every!r}: a whole number, 1 or more")
        self._every, self._count = every, -1

    def __call__(self, record: Record) -> None:
        self._count += 1
        if self._count % self._every and record.nonfinite is None:
            return
        rich = _rich()
        if rich is None:
            sys.stdout.write(f"{record}\n")
            sys.stdout.flush()
        else:
            rich.print(*_styled(record))

    def __repr__(self) -> str:
        return "unsum.sinks.console()"


def console(every: int = 1) -> Console:
    """A sink that prints one line for each record, or for every k-th; coloured where rich is installed.

    A record with a value that is not finite is always printed. Under several processes rank 0 prints.

    Examples:
        >>> sink = console(every=2)
        >>> for step in range(4):
        ...     sink(Record(step=step, loss=0.5))
        step 0  loss 0.5
        step 2  loss 0.5
    """
    return Console(every)


def _rich() -> Any:
    """A console of rich's on today's standard output, if rich is installed."""
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return None
    return RichConsole(highlight=False, soft_wrap=True)


def _styled(record: Record) -> list[Any]:
    """The parts of a record's line, each with its style."""
    from rich.text import Text

    styles = {"step": "dim", "outliers": "yellow", "NOT": "bold red", "no": "yellow"}
    line = Text("  ").join(Text(part, styles.get(part.partition(" ")[0], "")) for part in str(record).split("  "))
    return [line]
