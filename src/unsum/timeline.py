"""A trace as a picture: one lane for each place, time to the right, forward in grey and backward in coral."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unsum.svg import Svg, by, shorten, width_of

_LANE, _MARK, _MARGIN, _ROOM = 34.0, 22.0, 20.0, 190.0
_MOST = 400  # events; more would be a wall


def timeline(events: Sequence[Any], title: str) -> str:
    """The picture of events that have `site`, `call`, `backward` and `shape`, oldest first."""
    shown = events[:_MOST]
    lanes = list(dict.fromkeys(_place(event.site) for event in shown))
    names = max((width_of(shorten(lane, _ROOM, bold=True), bold=True) for lane in lanes), default=0.0)
    columns = _columns(shown)
    left = _MARGIN + names + 24
    wide = max(left + sum(columns) + _MARGIN, 340.0)
    tall = 52 + _LANE * len(lanes)
    svg = Svg()
    _lanes(svg, lanes, left, wide)
    _phases(svg, shown, columns, left, tall)
    x = left
    for k, event in enumerate(shown):
        lane = lanes.index(_place(event.site))
        _event(svg, k, event, x + columns[k] / 2, 44 + lane * _LANE, columns[k] - 6)
        x += columns[k]
    tall = _legend(svg, events, tall + 10)
    said = "; ".join(f"{k + 1}. {event}" for k, event in enumerate(shown[:60])) or "nothing fired"
    return svg.finish(title, f"Which site fired when, in order: {said}.", wide, tall)


def _place(site: str) -> str:
    return site.partition(":")[0] or "the model"


def _kind(site: str) -> str:
    return site.partition(":")[2]


def _columns(events: Sequence[Any]) -> list[float]:
    return [max(width_of(_kind(e.site), 10.5), width_of(by(e.shape), 10.5)) + 20 for e in events]


def _lanes(svg: Svg, lanes: Sequence[str], left: float, wide: float) -> None:
    for k, lane in enumerate(lanes):
        y = 44 + k * _LANE
        svg.open(lane, data_role="lane", data_name=lane)
        svg.text(_MARGIN, y + 19, shorten(lane, _ROOM, bold=True), "bold")
        svg.path(f"M{left - 8:.1f} {y + _LANE / 2 - 2:.1f}H{wide - _MARGIN:.1f}", "lane")
        svg.close()


def _phases(svg: Svg, events: Sequence[Any], columns: Sequence[float], left: float, tall: float) -> None:
    """Above the lanes: where the forward ends and each backward begins."""
    x, before = left, object()
    for event, column in zip(events, columns, strict=True):
        if event.backward != before:
            text = "forward →" if event.backward is None else f"← backward {event.backward}"
            svg.text(x + 3, 30, text, "small bold" + ("" if event.backward is None else " coral"))
            if x > left:
                svg.path(f"M{x:.1f} 18V{tall - 4:.1f}", "lane")
            before = event.backward
        x += column


def _event(svg: Svg, number: int, event: Any, middle: float, y: float, wide: float) -> None:
    is_back = event.backward is not None
    when = f"backward {event.backward}" if is_back else "forward"
    svg.open(
        f"{number + 1}. {event.site} {by(event.shape)}, {when}, call {event.call}", class_="event", data_role="event",
        data_site=event.site, data_shape=by(event.shape), data_direction="backward" if is_back else "forward",
        data_order=number, data_call=event.call,
    )  # fmt: skip
    svg.rect(middle - wide / 2, y, wide, 30, f"box {'event-backward' if is_back else 'event-forward'}", 6)
    svg.text(middle, y + 13, _kind(event.site), "middle tiny bold" + (" coral" if is_back else ""))
    svg.text(middle, y + 25, by(event.shape), "middle tiny faint")
    svg.close()


def _legend(svg: Svg, events: Sequence[Any], y: float) -> float:
    if len(events) > _MOST:
        svg.text(_MARGIN, y + 6, f"the first {_MOST} of {len(events)} events", "small faint")
        return y + 22
    return y + 4
