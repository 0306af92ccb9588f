"""A trace as a picture: a lane for each place, time to the right and then below, forward grey and backward coral."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unsum.svg import Svg, by, shorten, width_of

_LANE, _MARGIN, _ROOM = 34.0, 20.0, 190.0
_WIDE = 1150.0  # of events beside each other: with the names of lanes, a screen
_MOST = 400  # events; more would be a wall


@dataclass(frozen=True)
class _Strip:
    """What is drawn from left to right before it goes on below."""

    start: int  # the number of its first event
    events: Sequence[Any]
    columns: Sequence[float]
    lanes: Sequence[str]
    y: float

    @property
    def end(self) -> float:
        return self.y + 8 + _LANE * len(self.lanes)


def timeline(events: Sequence[Any], title: str) -> str:
    """The picture of events that have `site`, `call`, `backward` and `shape`, oldest first."""
    shown = events[:_MOST]
    names = max((width_of(shorten(_place(e.site), _ROOM, bold=True), bold=True) for e in shown), default=0.0)
    left = _MARGIN + names + 24
    strips = list(_strips(shown, 44.0))
    wide = max([left + sum(strip.columns) + _MARGIN for strip in strips] + [340.0])
    svg = Svg()
    for strip in strips:
        _lanes(svg, strip, left, wide)
        _phases(svg, strip, left)
        x = left
        for k, (event, column) in enumerate(zip(strip.events, strip.columns, strict=True)):
            y = strip.y + strip.lanes.index(_place(event.site)) * _LANE
            _event(svg, strip.start + k, event, x + column / 2, y, column - 6)
            x += column
    tall = _legend(svg, events, (strips[-1].end if strips else 52.0) + 10)
    said = "; ".join(f"{k + 1}. {event}" for k, event in enumerate(shown[:60])) or "nothing fired"
    return svg.finish(title, f"Which site fired when, in order: {said}.", wide, tall)


def _strips(events: Sequence[Any], y: float) -> Iterator[_Strip]:
    """As many events beside each other as fit on a screen; the lanes of those alone."""
    columns = _columns(events)
    start = 0
    while start < len(events):
        stop, room = start + 1, _WIDE - columns[start]
        while stop < len(events) and columns[stop] <= room:
            room -= columns[stop]
            stop += 1
        lanes = list(dict.fromkeys(_place(event.site) for event in events[start:stop]))
        strip = _Strip(start, events[start:stop], columns[start:stop], lanes, y)
        yield strip
        start, y = stop, strip.end + 48


def _place(site: str) -> str:
    return site.partition(":")[0] or "the model"


def _kind(site: str) -> str:
    return site.partition(":")[2]


def _columns(events: Sequence[Any]) -> list[float]:
    return [max(width_of(_kind(e.site), 10.5), width_of(by(e.shape), 10.5)) + 20 for e in events]


def _lanes(svg: Svg, strip: _Strip, left: float, wide: float) -> None:
    for k, lane in enumerate(strip.lanes):
        y = strip.y + k * _LANE
        svg.open(lane, data_role="lane", data_name=lane)
        svg.text(_MARGIN, y + 19, shorten(lane, _ROOM, bold=True), "bold")
        svg.path(f"M{left - 8:.1f} {y + _LANE / 2 - 2:.1f}H{wide - _MARGIN:.1f}", "lane")
        svg.close()


def _phases(svg: Svg, strip: _Strip, left: float) -> None:
    """Above the lanes: where the forward ends and each backward begins."""
    x, before = left, object()
    for event, column in zip(strip.events, strip.columns, strict=True):
        if event.backward != before:
            text = "forward →" if event.backward is None else f"← backward {event.backward}"
            svg.text(x + 3, strip.y - 14, text, "small bold" + ("" if event.backward is None else " coral"))
            if x > left:
                svg.path(f"M{x:.1f} {strip.y - 26:.1f}V{strip.end - 4:.1f}", "lane")
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
    svg.rect(middle - wide / 2, y, wide, 31, f"box {'event-backward' if is_back else 'event-forward'}", 6)
    svg.text(middle, y + 13, _kind(event.site), "middle tiny bold" + (" coral" if is_back else ""))
    svg.text(middle, y + 26, by(event.shape), "middle tiny faint")
    svg.close()


def _legend(svg: Svg, events: Sequence[Any], y: float) -> float:
    if len(events) > _MOST:
        svg.text(_MARGIN, y + 6, f"the first {_MOST} of {len(events)} events", "small faint")
        return y + 22
    return y + 4
