"""The gradient norm by depth: a chart of all layers, in the order of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from unsum.report.charts import brief
from unsum.report.curves import Chart, Values
from unsum.report.data import Layer
from unsum.report.flags import GROWN, SHRUNK, reference

_WIDE, _NARROW = 1000, 250  # pixels across the chart at the least, on a desktop and on a phone
_LETTER, _GAP = 7.0, 12.0  # pixels of a letter under the axis, and between two names
_LATE = 0.9  # of the chart: a name that begins after it ends at its place instead
_NEAR = 30.0  # times: a limit is drawn where a norm is as near to it as this


def depth_chart(layers: Sequence[Layer]) -> str:
    """The norms of the gradients at the outputs of layers and of their parameters; empty if there are none. Layers are
    the modules that hold no other modules."""
    shown = _shown(layers)
    if not shown:
        return ""
    # Zero has no place on a logarithmic scale.
    flowing = [None if layer.gradient is None else layer.gradient.norm or None for _, layer in shown]
    stored = [layer.weight_gradient_norm or None for _, layer in shown]
    lines: list[tuple[str, str, Values]] = [
        ("flowing", "gradient at the layer's output", flowing),
        ("dots", "gradient of the layer's own parameters", stored),
    ]
    bad = [place for place, (_, layer) in enumerate(shown) if _is_bad(layer)]
    slots = [(f"#layer-{k}", _told(layer)) for k, layer in shown]
    chart = Chart(
        (0, len(shown) - 1), range(len(shown)), "Gradient norm of each layer, in the order of the forward", lines,
        level=_limit(layers, flowing), bad=bad, slots=slots, below=_axis([layer.name for _, layer in shown]),
    )  # fmt: skip
    zero = sum(layer.gradient is not None and layer.gradient.norm == 0 for _, layer in shown)
    note = f'<p class="small">At {zero:,} of {len(shown):,} layers the gradient is zero: there the line has gaps.</p>'
    return chart.html() + (note if zero else "")


def _shown(layers: Sequence[Layer]) -> list[tuple[int, Layer]]:
    """The layers that a gradient reaches, with their rows in the table. Of a layer's outputs (an LSTM has three) those
    that have one, or else the first; the norm of its parameters' gradient stands at the first of its calls."""
    met: set[str] = set()
    outputs: dict[str, list[tuple[int, Layer]]] = {}
    for k, layer in enumerate(layers):
        if layer.is_leaf:
            outputs.setdefault(layer.name.partition("[")[0], []).append((k, layer))
    found = []
    for rows in outputs.values():
        for k, layer in [row for row in rows if row[1].gradient is not None] or rows[:1]:
            own = None if layer.module in met else layer.weight_gradient_norm
            met.add(layer.module)
            if layer.gradient is not None or own is not None:
                found.append((k, replace(layer, weight_gradient_norm=own)))
    return found


def _is_bad(layer: Layer) -> bool:
    own = layer.weight_gradient_norm
    return (layer.gradient is not None and not layer.gradient.is_finite) or (own is not None and own != own)


def _told(layer: Layer) -> str:
    at = "no gradient came back" if layer.gradient is None else brief(layer.gradient.norm)
    own = "" if layer.weight_gradient_norm is None else f"; of its parameters: {brief(layer.weight_gradient_norm)}"
    return f"{layer.name or layer.kind}: gradient norm at its output: {at}{own}"


def _limit(layers: Sequence[Layer], norms: Values) -> tuple[str, float] | None:
    """The limit that some norm comes near to, below which gradients vanish or above which they explode."""
    against = reference(layers)
    known = [norm for norm in norms if norm]
    if against is None or not known:
        return None
    low, high = against[1] * SHRUNK, against[1] * GROWN
    if min(known) < _NEAR * low:
        return f"below: vanishing, {SHRUNK:g} of the last layer's", low
    return (f"above: exploding, {GROWN:g} times the last layer's", high) if max(known) > high / _NEAR else None


def _axis(names: Sequence[str]) -> str:
    """The blocks that the layers belong to, each where it begins, as far as they have room."""
    starts = [(k, block) for k, block in enumerate(map(_block, names)) if not k or block != _block(names[k - 1])]
    last = max(1, len(names) - 1)
    wide, narrow = (_with_room([(k / last, name) for k, name in starts], pixels) for pixels in (_WIDE, _NARROW))
    items = "".join(
        f'<span style="left:{100 * k / last:.4g}%" class="{_kind(k / last, place in narrow)}">{escape(name)}</span>'
        for place, (k, name) in enumerate(starts)
        if place in wide
    )
    return f'<div class="below blocks"><div>{items}</div><p>first layer</p><p>last layer</p></div>'


def _block(name: str) -> str:
    """The name as far as its first number: the block of a deep model; else its last part.

    Examples:
        >>> _block("transformer.h.3.mlp.c_fc"), _block("layer1.0.conv1"), _block("lm_head"), _block("4@1")
        ('h.3', 'layer1.0', 'lm_head', '4')
    """
    parts = name.partition("@")[0].partition("[")[0].split(".")
    at = next((k for k, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[max(0, at - 1) : at + 1]) if parts[at].isdecimal() else parts[at]


def _kind(share: float, is_everywhere: bool) -> str:
    return " ".join(["end"] * (share > _LATE) + ["wide"] * (not is_everywhere))


def _with_room(starts: Sequence[tuple[float, str]], pixels: int) -> set[int]:
    """Which names can stand beside each other, those of the longest blocks first; none beyond the right edge."""
    ends = [share for share, _ in starts[1:]] + [1.0]
    found: dict[int, tuple[float, float]] = {}
    for place in sorted(range(len(starts)), key=lambda k: starts[k][0] - ends[k]):
        share, length = starts[place][0], len(starts[place][1]) * _LETTER
        left = share * pixels - (length if share > _LATE else 0.0)
        right = left + length
        if (
            left >= 0
            and right <= pixels + _GAP
            and all(right + _GAP <= a or b + _GAP <= left for a, b in found.values())
        ):
            found[place] = left, right
    return set(found)
