"""A small line chart as SVG, light and dark, that can be read aloud."""

from __future__ import annotations

from html import escape
from math import log2

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 250, 60, 30, 46, 38
STYLE = """
svg{font:12px system-ui,sans-serif;color:#23272f}text{fill:currentColor}.rule{stroke:#c9ced6}
.line{fill:none;stroke:#d9432a;stroke-width:2}.dot{fill:#d9432a}.one{stroke:#7d8590;stroke-dasharray:4 3}
.value{paint-order:stroke;stroke:#fff;stroke-width:4px}
@media(prefers-color-scheme:dark){svg{color:#e4e7ec}.rule{stroke:#444b57}.line{stroke:#ff7d63}.dot{fill:#ff7d63}
.value{stroke:#1e2129}}
"""


def chart(title: str, axis: str, points: list[tuple[float, float]], limit: float) -> str:
    """Ratios over a quantity that doubles: x is shown as its logarithm, y from 1 to `limit` at least."""
    low, high = 0.9, max(limit, *(y for _, y in points)) + 0.1
    first, last = log2(points[0][0]), log2(points[-1][0])
    across = lambda x: LEFT + (log2(x) - first) / (last - first) * (WIDTH - LEFT - RIGHT)
    up = lambda y: HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    step = 0.25 if high < 2.2 else 0.5
    marks = [1 + k * step for k in range(int((high - 1) / step) + 1)]
    told = "; ".join(f"{axis} {x:g}: {y:.2f} times" for x, y in points)
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" {size} role="img" aria-label="{escape(title)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f"<style>{STYLE}</style><title>{escape(title)}</title><desc>{escape(told)}</desc>",
        f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>',
    ]
    for y in marks:
        kind = "one" if y == 1 else "rule"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}×</text>')
    values: list[str] = []  # over the line
    placed = [(across(x), up(y)) for x, y in points]
    for k, (x, y) in enumerate(points):
        at = f'text-anchor="middle" x="{across(x):.1f}"'
        below = 19 if _is_crossed(placed, k) else -9
        parts.append(f'<circle class="dot" cx="{across(x):.1f}" cy="{up(y):.1f}" r="4"/>')
        values.append(f'<text class="value" {at} y="{up(y) + below:.1f}">{y:.2f}</text>')
        parts.append(f'<text {at} y="{HEIGHT - 16}">{x:g}</text>')
    line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    parts += values
    parts.append(f'<text x="{LEFT - 24}" y="{HEIGHT - 16}" text-anchor="end">{escape(axis)}</text></svg>')
    return "\n".join(parts) + "\n"


def _is_crossed(placed: list[tuple[float, float]], k: int) -> bool:
    """Whether the line runs through a number above its point, and not through one below it."""
    (x, y), near = placed[k], [placed[j] for j in (k - 1, k + 1) if 0 <= j < len(placed)]
    rises = [(y - other) * 15 / abs(across - x) for across, other in near]  # at the number's edge
    return any(rise > 4 for rise in rises) and all(rise > -4 for rise in rises)
