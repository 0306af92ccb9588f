"""A trace as a picture: a lane for each place, time to the right and then below, forward grey and backward coral. Of
blocks that are alike, all but the first share their lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsum.flow.folded import Shown, folded
from unsum.svg import Svg, by, shorten, width_of

_LANE, _MARGIN, _ROOM = 34.0, 20.0, 420.0
_WIDE = 1400.0  # of the names of lanes and the events beside them: a screen
_MOST = 400  # events; more would be a wall


@dataclass(frozen=True)
class _Strip:
    """What is drawn from left to right before it goes on below."""

    events: Sequence[Shown]
    columns: Sequence[float]
    lanes: Sequence[str]
    y: float

    @property
    def end(self) -> float:
        return self.y + 8 + _LANE * len(self.lanes)


def timeline(events: Sequence[Any], title: str) -> str:
    """The picture of events that have `site`, `call`, `backward`, `shape` and `type`, oldest first."""
    whole = folded(events)
    shown = whole[:_MOST]
    names = _names([each.lane for each in shown])
    left = _MARGIN + max((width_of(name, bold=True) for name in names.values()), default=0.0) + 24
    strips = list(_strips(shown, 44.0, _WIDE - left))
    wide = max([left + sum(strip.columns) + _MARGIN for strip in strips] + [340.0])
    svg = Svg()
    for strip in strips:
        _lanes(svg, strip, names, left, wide)
        _phases(svg, strip, left)
        x = left
        for each, column in zip(strip.events, strip.columns, strict=True):
            _event(svg, each, x + column / 2, strip.y + strip.lanes.index(each.lane) * _LANE, column - 6)
            x += column
    tall = _legend(svg, whole, len(events), (strips[-1].end if strips else 52.0) + 10)
    said = "; ".join(_said(each) for each in shown[:60]) or "nothing fired"
    return svg.finish(title, f"Which site fired when, in order: {said}.", wide, tall)


def _names(lanes: Sequence[str]) -> dict[str, str]:
    """The names of lanes as they are written: short, unless two would be written alike."""
    short = {lane: shorten(lane, _ROOM, bold=True) for lane in lanes}
    written = list(short.values())
    return {lane: name if written.count(name) == 1 else lane for lane, name in short.items()}


def _said(shown: Shown) -> str:
    """An event in words."""
    event, several = shown.event, f", the same in {shown.times} blocks" if shown.times > 1 else ""
    when = "forward" if event.backward is None else f"backward {event.backward}"
    site = f"{shown.lane}:{shown.kind}" if shown.path else event.site
    return f"{shown.number + 1}. {site} {by(event.shape)}, {when}, call {event.call}{several}"


def _strips(events: Sequence[Shown], y: float, wide: float) -> Iterator[_Strip]:
    """As many events beside each other as fit on a screen; the lanes of those alone."""
    columns = _columns(events)
    start = 0
    while start < len(events):
        stop, room = start + 1, wide - columns[start]
        while stop < len(events) and columns[stop] <= room:
            room -= columns[stop]
            stop += 1
        lanes = list(dict.fromkeys(each.lane for each in events[start:stop]))
        strip = _Strip(events[start:stop], columns[start:stop], lanes, y)
        yield strip
        start, y = stop, strip.end + 48


def _kind(shown: Shown) -> str:
    return shown.kind + (f" ×{shown.times}" if shown.times > 1 else "")


def _columns(events: Sequence[Shown]) -> list[float]:
    """How wide each event is; where the forward or a backward begins or ends, its name above has room too."""
    found = []
    for before, each, after in zip([None, *events], events, [*events[1:], None], strict=False):
        room = max(width_of(_kind(each), 10.5, bold=True), width_of(by(each.event.shape), 10.5)) + 20
        if not (before and after and before.event.backward == each.event.backward == after.event.backward):
            room = max(room, width_of(_phase(each), 11.5, bold=True) + 12)
        found.append(room)
    return found


def _phase(shown: Shown) -> str:
    return "forward →" if shown.event.backward is None else f"← backward {shown.event.backward}"


def _lanes(svg: Svg, strip: _Strip, names: Mapping[str, str], left: float, wide: float) -> None:
    for k, lane in enumerate(strip.lanes):
        y = strip.y + k * _LANE
        svg.open(lane, data_role="lane", data_name=lane)
        svg.text(_MARGIN, y + 19, names[lane], "bold")
        svg.path(f"M{left - 8:.1f} {y + _LANE / 2 - 2:.1f}H{wide - _MARGIN:.1f}", "lane")
        svg.close()


def _phases(svg: Svg, strip: _Strip, left: float) -> None:
    """Above the lanes: where the forward ends and each backward begins."""
    x, before = left, object()
    for each, column in zip(strip.events, strip.columns, strict=True):
        event = each.event
        if event.backward != before:
            svg.text(x + 3, strip.y - 14, _phase(each), "small bold" + ("" if event.backward is None else " coral"))
            if x > left:
                svg.path(f"M{x:.1f} {strip.y - 26:.1f}V{strip.end - 4:.1f}", "lane")
            before = event.backward
        x += column


def _event(svg: Svg, shown: Shown, middle: float, y: float, wide: float) -> None:
    event, is_back = shown.event, shown.event.backward is not None
    svg.open(
        _said(shown), class_="event", data_role="event", data_site=event.site, data_shape=by(event.shape),
        data_direction="backward" if is_back else "forward", data_order=shown.number, data_call=event.call,
        data_times=shown.times if shown.times > 1 else None,
    )  # fmt: skip
    svg.rect(middle - wide / 2, y, wide, 31, f"box {'event-backward' if is_back else 'event-forward'}", 6)
    svg.text(middle, y + 13, _kind(shown), "middle tiny bold" + (" coral" if is_back else ""))
    svg.text(middle, y + 26, by(event.shape), "middle tiny faint")
    svg.close()


def _legend(svg: Svg, whole: Sequence[Shown], events: int, y: float) -> float:
    notes = []
    if len(whole) < events:
        notes.append("×: the same event in so many blocks, one after the other")
    if len(whole) > _MOST:
        notes.append(f"the first {sum(each.times for each in whole[:_MOST])} of {events} events")
    for note in notes:
        svg.text(_MARGIN, y + 6, note, "small faint")
        y += 18
    return y + 4
