"""A map of layers by steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from unsum.report.charts import brief
from unsum.report.curves import Values, finite

LEVELS = 10  # shades


def layer_map(names: Sequence[str], rows: Sequence[Values], first: int, last: int, label: str) -> str:
    """A map: a row for each layer, a column for each group of steps, the stronger the colour the larger the number."""
    known = sorted(value for row in rows for value in finite(row) if value > 0)
    if not known:
        return '<p class="absent">No number above zero to draw.</p>'
    low, high = known[len(known) // 100], known[-1 - len(known) // 100]
    reach = math.log(high / low) or 1.0
    cells: dict[str, list[str]] = {}
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value is None:
                continue
            share = math.log(value / low) / reach if 0 < value < math.inf else 0.0
            kind = f"s{min(LEVELS - 1, max(0, int(share * LEVELS)))}" if math.isfinite(value) else "bad"
            cells.setdefault(kind, []).append(f"M{x} {y}h1v1h-1z")
    paths = "".join(f'<path class="{kind}" d="{"".join(each)}"/>' for kind, each in sorted(cells.items()))
    lasts = [next(iter(finite(row[::-1])), None) for row in rows]
    titles = "".join(
        f'<rect class="row" x="0" y="{y}" width="{len(row)}" height="1"><title>{escape(name or "(the model)")}: '
        f"{brief(min(finite(row), default=None))} to {brief(max(finite(row), default=None))}, "
        f"last {brief(lasts[y])}</title></rect>"
        for y, (name, row) in enumerate(zip(names, rows, strict=True))
    )
    tall = 18 if len(names) <= 30 else 13
    labels = "".join(f"<span><bdi>{escape(name or '(the model)')}</bdi></span>" for name in names)
    numbers = "".join(f"<span>{brief(value)}</span>" for value in lasts)
    bad = '<span class="cell">not finite</span>' if "bad" in cells else ""
    return (
        f'<div class="key"><span class="legend warm"><span>{brief(low)}</span><i></i><span>{brief(high)}</span></span>'
        f'<em>logarithmic scale</em>{bad}</div><div class="map" style="--row:{tall}px">'
        f'<div class="names">{labels}</div><svg style="height:{tall * len(rows)}px" '
        f'viewBox="0 0 {len(rows[0])} {len(rows)}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}" shape-rendering="crispEdges">{paths}{titles}</svg>'
        f'<div class="lasts">{numbers}</div><span></span><div class="below"><span>step {first:,}</span>'
        f"<span>{last:,}</span></div><span class=small>last</span></div>"
    )
