"""A grid of numbers, rows by columns, as a table of text and as a heat map in SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from unsum.svg import Svg, number, shorten, width_of

_MARGIN, _ROW, _ROOM = 20.0, 26.0, 300.0
_NARROW, _WIDE = 46.0, 110.0  # of a column with numbers in it
_BARE = 18.0  # of a column without, where there are many
_MOST = 24  # columns with numbers
_SEEN = 0.005  # of the strongest colour: less is not drawn
_STYLE = "# .cell { fill: var(--panel); }\n"
_COLUMNS, _ROWS = 12, 60  # of a table of text


def figures(values: Tensor, middle: float, *others: float) -> Callable[[float], str]:
    """How the numbers are written: with two figures of their largest distance from `middle`, so that they differ; and
    so that `others` differ from it.

    Examples:
        >>> import torch
        >>> said = figures(torch.tensor([0.5012, 0.5045]), 0.5)
        >>> said(0.5012), said(0.5045)
        ('0.5012', '0.5045')
    """
    gaps = [_furthest(values, middle), *(abs(other - middle) for other in others)]
    gap = min((gap for gap in gaps if gap and math.isfinite(gap)), default=0.0)
    places = max(0, 1 - math.floor(math.log10(gap))) if gap else 3
    largest = max((abs(v) for v in values.flatten().tolist() if math.isfinite(v)), default=0.0)
    if places > 6 or largest >= 1e5:
        return lambda value: f"{value:.3g}"
    return lambda value: f"{value:z.{places}f}" if math.isfinite(value) else number(value)  # z: no "-0"


def _furthest(values: Tensor, middle: float) -> float:
    return max((abs(v - middle) for v in values.flatten().tolist() if math.isfinite(v - middle)), default=0.0)


def table(rows: Sequence[str], columns: Sequence[int], values: Tensor, middle: float) -> str:
    """Lines of text; of very many rows or columns, the first and the last.

    Examples:
        >>> import torch
        >>> print(table(["a:output", "b:output"], [0, 1], torch.tensor([[0.5, -1.25], [0.0, 2.0]]), 0.5))
        site         0     1
        a:output   0.5  -1.2
        b:output   0.0   2.0
    """
    said = figures(values, middle)
    chosen = _ends(len(columns), _COLUMNS)
    lines = [["site", *("…" if k is None else str(columns[k]) for k in chosen)]]
    for row in _ends(len(rows), _ROWS):
        numbers = [] if row is None else values[row].tolist()
        cells = ["…" if k is None or row is None else said(numbers[k]) for k in chosen]
        lines.append(["…" if row is None else rows[row], *cells])
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    wide = max(widths[1:], default=0)
    return "\n".join(f"{name:<{widths[0]}}  {'  '.join(f'{cell:>{wide}}' for cell in cells)}" for name, *cells in lines)


def _ends(count: int, most: int) -> list[int | None]:
    if count <= most:
        return list(range(count))
    return [*range(most // 2), None, *range(count - most // 2, count)]


def grid(
    title: str,
    rows: Sequence[str],
    columns: Sequence[int],
    words: Sequence[str] | None,
    values: Tensor,
    clean: float,
    corrupt: float,
    what: str | None = None,
) -> str:
    """A heat map of `values` (rows, columns): coral above `corrupt`, blue below it, by the distance. `what` they are,
    if not the metric."""
    with_numbers = len(columns) <= _MOST
    said, furthest = figures(values, corrupt, clean), _furthest(values, corrupt)
    longest = max(width_of(said(value), 10.5) for value in values.flatten().tolist()) + 10
    head = [shorten(_visible(word), _WIDE - 8, 11.5) for word in words or []]
    column = max([_NARROW, longest, *(width_of(word, 11.5) + 10 for word in head)]) if with_numbers else _BARE
    names = [shorten(row, _ROOM) for row in rows]
    left = _MARGIN + max(map(width_of, names)) + 10
    top = 66.0 if words and with_numbers else 50.0
    if words and not with_numbers:  # there is no room for words beside each other: they stand upright
        top += max((width_of(word, 11.5) for word in head), default=0.0) + 6
    wide = max(left + column * len(columns) + _MARGIN, 460.0)
    svg = Svg()
    svg.text(
        _MARGIN,
        26,
        f"clean {said(clean)}, corrupt {said(corrupt)}: {what or 'the metric with one activation patched'}",
        "small",
    )
    for k, position in enumerate(columns):
        middle = left + (k + 0.5) * column
        if with_numbers or k % 10 == 0:
            svg.text(middle, top - 6, str(position), "tiny faint middle")
        if words and with_numbers:
            svg.text(middle, top - 20, head[k], "small middle")
        elif words:
            svg.text(middle + 4, top - 20, head[k], "small", upwards=True)
    for k, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = top + k * _ROW
        svg.text(left - 8, y + 17, name, "end")
        for c, value in enumerate(values[k].tolist()):
            told = f"{row}, position {columns[c]}{f' {words[c]!r}' if words else ''}: {value:.6g}"
            x = left + c * column
            svg.open(told, data_role="cell", data_site=row, data_position=columns[c], data_value=repr(value))
            svg.rect(x + 1, y + 1, column - 2, _ROW - 2, "cell", 3)
            share = abs(value - corrupt) / furthest if furthest and math.isfinite(value) else 0.0
            if share >= _SEEN:
                svg.rect(x + 1, y + 1, column - 2, _ROW - 2, _kind(value - corrupt), 3, opacity=f"{0.75 * share:.3f}")
            if with_numbers or not math.isfinite(value):
                svg.text(x + column / 2, y + 17, said(value) if with_numbers else "×", "tiny middle")
            svg.close()
    sides = [side for side in (-1, 1) if ((values - corrupt) * side >= _SEEN * furthest).any()] if furthest else []
    ends = {side: said(corrupt + side * furthest) for side in (-1, 0, 1)}
    tall = _legend(svg, left, top + len(rows) * _ROW + 22, sides, ends, clean - corrupt)
    told = "; ".join(f"{row}: {', '.join(map(said, line))}" for row, line in zip(rows, values.tolist(), strict=True))
    return svg.finish(title, f"Clean {said(clean)}, corrupt {said(corrupt)}. {told[:4000]}.", wide, tall, style=_STYLE)


def _legend(svg: Svg, x: float, y: float, sides: Sequence[int], ends: Mapping[int, str], to_clean: float) -> float:
    """Cells from the corrupt run's colour to the strongest, on the sides (-1: below, 1: above) that are drawn, and
    which of them leads to the clean run."""
    if not sides:
        svg.text(x, y + 4, "no patch changes the metric", "small faint")
        return y + 20
    first, last = 3 * min(0, *sides), 3 * max(0, *sides)
    for k in range(first, last + 1):
        svg.rect(x + 24 * (k - first), y, 24, 12, "cell", 0)
        if k:
            svg.rect(x + 24 * (k - first), y, 24, 12, _kind(k), 0, opacity=f"{0.25 * abs(k):.3f}")
    for side in sorted({0, *sides}):
        svg.text(x + 24 * (3 * side - first) + 12, y + 26, ends[side], "tiny middle")
    told = {-1: "blue: below the corrupt run", 1: "coral: above the corrupt run"}
    for line, side in enumerate(sides):
        towards = (
            "" if not to_clean else ", towards the clean run" if side * to_clean > 0 else ", away from the clean run"
        )
        svg.text(x, y + 44 + 14 * line, told[side] + towards, "tiny faint")
    return y + 44 + 14 * len(sides)


def _kind(distance: float) -> str:
    return "coral" if distance > 0 else "blue"


def _visible(word: str) -> str:
    """Of a token that is only space, something to be seen."""
    return word.strip() or word.replace("\n", "↵").replace(" ", "␣").replace("\t", "⇥") or "∅"
