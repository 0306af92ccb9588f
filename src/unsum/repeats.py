"""Neighbours that are alike, such as the blocks of a transformer: tables and pictures show one of them and say how many
there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def repeats(
    start: int, stop: int, is_next: Callable[[int, int, int], bool], periods: Sequence[int] = (1,)
) -> tuple[int, int]:
    """How many of the things numbered from `start` to `stop` repeat together, and how often: the run that covers most.
    `is_next(start, k, period)` says whether the `period` things from `k` on are the next repetition of the first.

    Examples:
        >>> said = "abababc"
        >>> repeats(0, 7, lambda first, k, period: said[first : first + period] == said[k : k + period], (1, 2))
        (2, 3)
    """
    best = (1, 1)
    for period in periods:
        times = 1
        while start + (times + 1) * period <= stop and is_next(start, start + times * period, period):
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def span(first: str, last: str, times: int) -> str:
    """The names of several that are alike.

    Examples:
        >>> span("h.1", "h.11", 11), span("h.0", "h.1", 2), span("h.1", "h.1", 1)
        ('h.1 … h.11', 'h.0, h.1', 'h.1')
    """
    return first if first == last else f"{first}{', ' if times == 2 else ' … '}{last}"
