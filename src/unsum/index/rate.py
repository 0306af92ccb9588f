"""How fast a build goes: what is done, how many a second, how long it will take, how many bytes."""

from __future__ import annotations

import time


class Rate:
    """Counts what is done in this run. What was there before counts as done, not as speed."""

    def __init__(self, total: int | None, unit: str) -> None:
        self._total, self._unit = total, unit
        self._began = time.monotonic()
        self.done = self._here = self._bytes = 0

    def before(self, count: int) -> None:
        """So many were there."""
        self.done += count

    def add(self, count: int, size: int) -> None:
        """So many more are made, of so many bytes."""
        self.done += count
        self._here += count
        self._bytes += size

    def __str__(self) -> str:
        passed = time.monotonic() - self._began
        speed = self._here / passed if passed > 0 else 0.0
        parts = [f"{speed:,.1f} {self._unit}/s" if speed < 10 else f"{speed:,.0f} {self._unit}/s", _size(self._bytes)]
        if self._total is not None and speed:
            parts.insert(1, f"{_clock((self._total - self.done) / speed)} left")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Examples:
        >>> _clock(75), _clock(4000)
        ('1:15', '1:06:40')
    """
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
