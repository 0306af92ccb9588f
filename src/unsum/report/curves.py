"""Curves over steps, or over layers.

Lines are SVG that is stretched to the page's width; words are HTML beside it, so that they keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from unsum.report.charts import brief

Values = Sequence[float | None]
NAMED = 12  # marks that may have their id beside them


def finite(values: Values) -> list[float]:
    """The numbers of a series that are finite."""
    return [value for value in values if value is not None and math.isfinite(value)]


@dataclass
class Chart:
    """Curves over steps. `steps` has the place of every point; a None is a gap."""

    span: tuple[int, int]  # the first step and the last
    steps: Sequence[int]
    label: str
    lines: list[tuple[str, str, Values]] = field(default_factory=list)  # kind, what it is, numbers
    band: tuple[str, Values, Values] | None = None  # what it is, from, to
    marks: list[tuple[int, float, str, str]] = field(default_factory=list)  # step, number, id, what hovering shows
    level: tuple[str, float] | None = None  # a dashed line at a number
    bad: Sequence[int] = ()  # steps at which something is not finite
    slots: Sequence[tuple[str, str]] = ()  # of each step: a link, and what pointing at its column shows
    below: str = ""  # what is written under it; the steps otherwise

    def html(self) -> str:
        """The chart with its legend and its axes."""
        known = [value for _, _, values in self.lines for value in finite(values)]
        known += [value for _, value, _, _ in self.marks if math.isfinite(value)]
        known += [] if self.band is None else finite([*self.band[1], *self.band[2]])
        known += [] if self.level is None or not known else [self.level[1]]
        if not known:
            return '<p class="absent">No finite number to draw.</p>'
        axis = Axis(known)
        parts = [f'<path class="grid" d="M0 {axis(tick):.4g}H1000"/>' for tick in axis.ticks]
        if self.band is not None:
            parts += self._band(axis, self.band[1], self.band[2])
        parts += [f'<path class="bad" d="M{self._x(step):.5g} 0V100"/>' for step in self.bad[:200]]
        if self.level is not None:
            parts.append(f'<path class="level" d="M0 {axis(self.level[1]):.4g}H1000"/>')
        parts += [f'<path class="line {kind}" d="{self._path(axis, values, kind)}"/>' for kind, _, values in self.lines]
        parts += self._slots()
        ticks = "".join(f'<span style="top:{axis(tick):.4g}%">{brief(tick)}</span>' for tick in axis.ticks)
        return (
            f'<figure class="curve">{self._legend(axis)}<div class="plot"><div class="ticks">{ticks}</div>'
            f'<div class="area"><svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(self.label)}">{"".join(parts)}</svg>{self._marked(axis)}</div></div>'
            f"{self.below or self._below()}</figure>"
        )

    def _x(self, step: int) -> float:
        first, last = self.span
        return 500.0 if first == last else 1000 * (step - first) / (last - first)

    def _path(self, axis: Axis, values: Values, kind: str) -> str:
        found, is_drawn = [], False
        for step, value in zip(self.steps, values, strict=True):
            if value is None or not axis.has(value):
                is_drawn = False
                continue
            # A point between gaps is a line of no length, which has round ends.
            found.append(f"{'L' if is_drawn else 'M'}{self._x(step):.5g} {axis(value):.4g}{'' if is_drawn else 'h0'}")
            is_drawn = kind != "dots"
        return "".join(found)

    def _slots(self) -> list[str]:
        """A column for each step, as wide as the space to its neighbours: it is pointed at, and leads somewhere."""
        width = 1000 / max(1, len(self.steps) - 1)
        return [
            f'<a class="slot" href="{link}" aria-label="{escape(tip)}"><rect x="{self._x(step) - width / 2:.5g}" '
            f'width="{width:.5g}" height="100"/></a>'
            for step, (link, tip) in zip(self.steps, self.slots, strict=False)
        ]

    def _band(self, axis: Axis, low: Values, high: Values) -> list[str]:
        runs: list[list[tuple[float, float, float]]] = [[]]
        for step, a, b in zip(self.steps, low, high, strict=True):
            if a is None or b is None or not axis.has(a):
                runs.append([])
            else:
                runs[-1].append((self._x(step), axis(a), axis(b)))
        found = []
        for run in runs:
            if run:
                there = "L".join(f"{x:.5g} {top:.4g}" for x, _, top in run)
                back = "L".join(f"{x:.5g} {bottom:.4g}" for x, bottom, _ in reversed(run))
                found.append(f'<path class="band" d="M{there}L{back}z"/>')
        return found

    def _marked(self, axis: Axis) -> str:
        """Points with their ids; an id is left out where it would lie on another one."""
        found = [(self._x(step) / 10, axis(value), name, hover) for step, value, name, hover in self._drawn(axis)]
        dots = [(x, y) for x, y, _, _ in found]
        taken = {True: list(dots), False: list(dots)}  # on a wide page, and on a phone
        parts: list[str] = []
        for k, (x, y, name, hover) in enumerate(found):
            sides = {wide: _free_side(x, y, 10 if wide else 32, taken[wide]) for wide in (True, False)}
            side = sides[True]
            shown = ""
            if side is not None and k < NAMED:
                taken[True] += [(x + side * reach, y) for reach in (3, 6, 9)]
                is_everywhere = sides[False] == side
                if is_everywhere:
                    taken[False] += [(x + side * reach, y) for reach in (8, 16, 24, 32)]
                kind = f"{'left' if side < 0 else 'right'}{'' if is_everywhere else ' wide'}"
                shown = f'<b class="{kind}">{escape(name if len(name) <= 14 else name[:13] + "…")}</b>'
            parts.append(f'<i style="left:{x:.4g}%;top:{y:.4g}%" title="{escape(hover)}">{shown}</i>')
        return "".join(parts)

    def _drawn(self, axis: Axis) -> list[tuple[int, float, str, str]]:
        return [mark for mark in self.marks if axis.has(mark[1])]

    def _legend(self, axis: Axis) -> str:
        items = [f'<span class="{kind}">{escape(what)}</span>' for kind, what, _ in self.lines if what]
        items += [] if self.band is None else [f'<span class="band">{escape(self.band[0])}</span>']
        items += ['<span class="mark">sample that stands out</span>'] if self._drawn(axis) else []
        items += [] if self.level is None else [f'<span class="level">{escape(self.level[0])}</span>']
        items += ['<span class="bad">a value is not finite</span>'] if self.bad else []
        items += ["<em>logarithmic scale</em>"] if axis.is_log else []
        return f'<figcaption class="key">{"".join(items)}</figcaption>'

    def _below(self) -> str:
        first, last = self.span
        if first == last:
            return f'<div class="below"><span></span><span>step {first:,}</span><span></span></div>'
        middle = f"<span>{(first + last) // 2:,}</span>" if last - first > 1 else "<span></span>"
        return f'<div class="below"><span>step {first:,}</span>{middle}<span>{last:,}</span></div>'


def _free_side(x: float, y: float, room: float, taken: Sequence[tuple[float, float]]) -> int | None:
    """Where a mark's id has room: to the right (1), to the left (-1) or nowhere. In hundredths of the chart."""
    for side in (1, -1):
        is_inside = 0 <= x + room * side <= 100
        if is_inside and not any(0 < (a - x) * side < room and abs(b - y) < 8 for a, b in taken):
            return side
    return None


class Axis:
    """Where numbers lie between bottom (100) and top (0); logarithmic where they differ by more than 20 times.

    Examples:
        >>> axis = Axis([1.0, 100.0])
        >>> axis.is_log, axis.ticks, axis(10.0)
        (True, [1.0, 10.0, 100.0], 50.0)
        >>> Axis([0.0, 1.0]).ticks
        [0.0, 0.5, 1.0]
    """

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(values), max(values)
        self.is_log = low > 0 and high / low > 20
        if self.is_log:
            self._low, self._high = math.log10(low), math.log10(high)
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            every = max(1, len(powers) // 4)
            few = self._high - self._low < 2
            found = [m * 10.0**power for power in powers[::every] for m in ((1, 3) if few else (1,))]
        else:
            margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
            self._low = 0.0 if 0 <= low < (high - low) / 2 else low - margin
            self._high = high + (margin if self._low < low or low == high else 0.0)
            size = 10.0 ** math.floor(math.log10((self._high - self._low) / 2))
            size = next(k * size for k in (5, 2.5, 2, 1) if (self._high - self._low) / (k * size) >= 2)
            first = math.ceil(self._low / size - 1e-9)
            found = [k * size for k in range(first, math.floor(self._high / size + 1e-9) + 1)]
        self.ticks = [tick for tick in found if -0.01 <= self(tick) <= 100.01]

    def has(self, value: float) -> bool:
        """Whether a number can be drawn."""
        return math.isfinite(value) and (value > 0 or not self.is_log)

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.is_log else value
        return 100 - round(100 * (place - self._low) / ((self._high - self._low) or 1.0), 6)
