"""Small drawings, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

BARS = 2_000


def brief(value: float | None) -> str:
    """A number in few characters.

    Examples:
        >>> [brief(x) for x in (0.0, 1234567.0, -0.00012, 12.5, float("nan"))]
        ['0', '1.23e6', '−1.2e−4', '12.5', 'NaN']
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    else:
        digits, _, power = f"{value:.2e}".partition("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return text.replace("-", "−")


def plain(value: Any, digits: int = 6) -> Any:
    """What JSON can hold: numbers that are not finite become the strings that JavaScript reads back.

    Examples:
        >>> plain([1.23456789, float("nan"), float("-inf"), "a"])
        [1.23457, 'NaN', '-Infinity', 'a']
    """
    if isinstance(value, Tensor):
        return plain(value.tolist(), digits)
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {str(key): plain(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, digits) for part in value]
    return value


_HATCHED = (
    '<defs><pattern id="odd" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="odd-back" width="6" height="6"/><rect class="odd-line" width="3" height="6"/></pattern></defs>'
)


def bars(norms: Tensor, far: set[int], limit: float, ids: Sequence[int]) -> tuple[float, str]:
    """How high it reaches, and a bar for each sample; of one whose norm is not finite, a hatched one over the whole
    height. No text in it: it is stretched to the width of the page."""
    known = norms.nan_to_num(0.0, 0.0, 0.0).tolist()
    top = max([*known, limit if math.isfinite(limit) else 0.0]) or 1.0
    values = [value if math.isfinite(value) else 1.001 * top for value in norms.tolist()]
    step = -(-len(values) // BARS)  # of very many samples, a bar for the largest of some
    shown = [max(range(k, min(k + step, len(values))), key=values.__getitem__) for k in range(0, len(values), step)]
    width = 1000 / len(shown)
    parts = []
    for place, k in enumerate(shown):
        is_odd = not math.isfinite(float(norms[k]))
        kind = ' class=odd style="fill:url(#odd)"' if is_odd else " class=far" if k in far else ""
        height = min(100.0, max(0.6, 100 * values[k] / top))
        parts.append(
            f'<rect data-sample="{k}"{kind} x="{place * width:.5g}" y="{100 - height:.4g}" '
            f'width="{max(width * 0.82, 0.4):.4g}" height="{height:.4g}"/>'
        )
    if math.isfinite(limit):
        y = 100 - 100 * limit / top
        parts.append(f'<line class="limit" x1="0" x2="1000" y1="{y:.4g}" y2="{y:.4g}"/>')
    hatched = "" if bool(norms.isfinite().all()) else _HATCHED
    return top, (
        '<svg class="bars" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Gradient norm of each of {len(ids)} samples; the table below has the numbers">{hatched}'
        f"{''.join(parts)}</svg>"
    )
