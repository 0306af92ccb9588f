"""What a capture holds, and how it is read."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import SiteError, UnknownSite
from unsum.flow.flow import Flow
from unsum.flow.keeping import Kept
from unsum.flow.picking import Spot, by_place, other_name
from unsum.flow.silence import why
from unsum.flow.trace import Event, Trace
from unsum.nested import format_path
from unsum.sites import Asked, Names, Place, Site, parse, site_name
from unsum.types import Kind, Path

Seen = tuple[Spot, Tensor, int, int | None]
"""A tensor that was kept by reference: where, what, its version, in which backward."""

_reading = threading.Lock()  # two threads may read one capture


@dataclass(slots=True)
class Entry:
    """One value of one call; of a gradient, in one backward."""

    spot: Spot
    kept: Kept
    backward: int | None  # which one, counted from 1; None in the forward
    shape: tuple[int, ...]
    dtype: torch.dtype


def entry(spot: Spot, kept: Kept, tensor: Tensor, backward: int | None) -> Entry:
    """The entry of what was kept of a tensor."""
    is_ragged = tensor.is_nested and tensor.layout == torch.strided  # such a tensor has no shape
    return Entry(spot, kept, backward, () if is_ragged else tensor.shape, tensor.dtype)


def _event(entry: Entry) -> Event:
    spot, module = entry.spot, entry.spot.place.thing
    kind = type(module).__name__ if isinstance(module, nn.Module) else ""
    return Event(str(spot), spot.call, entry.backward, tuple(entry.shape), entry.dtype, kind)


def _parse(asked: Asked, names: Names | None) -> Site:
    try:
        return parse(asked, None if names is None else names.model)
    except SiteError as error:
        raise UnknownSite(str(error)) from None


class Captured:
    """The result of `unsum.capture`: the values captured so far, under their sites.

    `got["fc1:input"]` is the value if there was one call; `got.calls("fc1:input")` has one value for each call;
    `got.items()` gives everything under concrete names; `got.trace()` shows the order in which values arrived.

    Examples:
        >>> import torch, unsum
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> with unsum.capture(model, "*:output") as got:
        ...     _ = model(torch.ones(4, 3))
        >>> got["0:output"].shape, len(got.calls("0:output"))
        (torch.Size([4, 2]), 1)
        >>> got.keys()
        ['0:output', '1:output']
    """

    def __init__(self, flow: Flow, seen: list[Entry | Seen]) -> None:
        self._flow, self._requests = flow, flow.requests
        self.acted = flow.acted
        self.seen = seen  # filled by the capture; made entries when they are read
        self._read = 0  # so many are entries
        self._places_read: dict[tuple[Place, Kind], list[Entry]] = {}

    @property
    def _entries(self) -> list[Entry]:
        with _reading:
            seen = self.seen
            for i in range(self._read, len(seen)):
                one = seen[i]
                if not isinstance(one, Entry):
                    spot, value, version, backward = one
                    one = seen[i] = entry(spot, Kept(value, version), value, backward)
                self._places_read.setdefault((one.spot.place, one.spot.kind), []).append(one)
                self._read = i + 1
            return seen[: self._read]  # type: ignore[return-value]

    @property
    def _by_place(self) -> dict[tuple[Place, Kind], list[Entry]]:
        _ = self._entries
        return self._places_read

    def answered(self, requests: int) -> set[int]:
        """Which of so many requests were answered."""
        numbers: set[int] = set()
        for one in self.seen:
            numbers.update(one.spot.asked if isinstance(one, Entry) else one[0].asked)
            if len(numbers) == requests:
                break
        return numbers

    # ---- reading --------------------------------------------------------------------------------------------------

    def __getitem__(self, asked: Asked) -> Any:
        """The value at a site with one call. Several calls, sites or tensors raise `SiteError`."""
        site = _parse(asked, self._requests.names)
        places = self._places(site)
        fired = [place for place in places if self._at(place, site)]
        if not fired:
            raise UnknownSite(self._why_nothing(site, places))
        if len(fired) > 1:
            names = ", ".join(repr(site_name(p.name, site.kind, site.call, site.path)) for p in fired[:4])
            more = ", ..." if len(fired) > 4 else ""
            raise SiteError(f"{site}: fits {len(fired)} sites ({names}{more}); use got.items(), or name one")
        rows = self._of(fired[0], site)
        if len(rows) > 1:
            what = "calls or backwards" if site.kind.startswith("grad") else "calls"
            raise SiteError(f"{site}: there are {len(rows)} {what}; use got.calls({str(site)!r}), or name one with @")
        assert rows[0] is not None
        return rows[0].kept.read(str(site))

    def calls(self, asked: Asked) -> list[Any]:
        """A list of the values at a site, one for each call. For gradients: one for each backward that reached the
        call, None if none did."""
        site = _parse(asked, self._requests.names)
        rows = [row for place in self._places(site) for row in self._of(place, site)]
        return [None if row is None else row.kept.read(str(site)) for row in rows]

    def items(self) -> Iterator[tuple[str, Any]]:
        """All values, under concrete names."""
        for entry in list(self._entries):
            name = self._name(entry)
            yield name, entry.kept.read(name)

    def values(self) -> list[Any]:
        """The values of `items`."""
        return [value for _, value in self.items()]

    def keys(self) -> list[str]:
        """The concrete names of all values, in the order in which they arrived."""
        return list(dict.fromkeys(self._name(entry) for entry in self._entries))

    def sites(self) -> list[str]:
        """The site of every value, in the order in which they came, whichever call each is of."""
        return [str(entry.spot) for entry in self._entries]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, asked: object) -> bool:
        try:
            site = parse(asked)  # type: ignore[arg-type]
            return any(row is not None for place in self._places(site) for row in self._of(place, site))
        except SiteError:
            return False

    def trace(self) -> Trace:
        """The record of which site fired when, forward and backward."""
        return Trace([_event(each) for each in self._entries])

    def __repr__(self) -> str:
        lines = [
            f"captured: {len(self)} site{'s' if len(self) != 1 else ''}" + (" so far" if self._flow.is_open else "")
        ]
        shapes = {self._name(entry): tuple(entry.shape) for entry in self._entries}
        return "\n".join([*lines, *(f"  {name}  {shape}" for name, shape in shapes.items())])

    # ---- finding --------------------------------------------------------------------------------------------------

    def _name(self, entry: Entry) -> str:
        spot = entry.spot
        several = self._flow.calls.count(spot.place) > 1
        return site_name(spot.place.name, spot.kind, spot.call if several else None, spot.shown)

    def _places(self, site: Site) -> list[Place]:
        """The places that a site names, among those asked for."""
        requests = self._requests
        if requests.names is None or requests.mark_in(site) is not None:
            wanted = requests.marks_in(site)
        else:
            try:
                things = requests.names.find(site).values()
            except SiteError as error:
                raise UnknownSite(str(error)) from None
            wanted = [place for thing in things if (place := requests.place_of(thing, site.kind)) is not None]
        if not wanted:
            raise UnknownSite(self._unasked(site))
        return wanted

    def _unasked(self, site: Site) -> str:
        asked = [str(request) for request in self._requests.asked]
        known = (
            [] if self._requests.names is None else [str(r) for r in self._requests.asked if isinstance(r.where, str)]
        )
        near = difflib.get_close_matches(str(site), [*known, *self.keys()], 3, 0.4)
        is_mark = self._requests.names is None or self._requests.mark_in(site) is not None
        first = f"{site}: {'no tensor of this name was marked' if is_mark else 'was not asked for'}"
        hint = f"\n  near: {', '.join(map(repr, dict.fromkeys(near)))}" if near else ""
        return f"{first}; asked for: {', '.join(map(repr, asked))}{hint}"

    def _at(self, place: Place, site: Site) -> list[Entry]:
        """The entries of one place that a site names, call by call."""
        entries = self._by_place.get((place, site.kind), [])
        if site.call is not None:
            entries = [e for e in entries if e.spot.call == site.call]
        exact = [e for e in entries if self._is_at(e.spot, site.path)]
        entries = exact or [e for e in entries if e.spot.path[: len(site.path)] == site.path]
        return sorted(entries, key=lambda e: e.spot.call)

    def _of(self, place: Place, site: Site) -> list[Entry | None]:
        """The entries of one place, call by call and backward by backward; None for a call without a gradient."""
        entries = self._at(place, site)
        paths = list(dict.fromkeys(by_place(e.spot) for e in entries))
        if len(paths) > 1:
            names = ", ".join(repr(site_name(place.name, site.kind, site.call, path)) for path in paths[:6])
            raise SiteError(f"{site}: holds {len(paths)} tensors; name one of them: {names}")
        if site.kind not in ("grad_input", "grad_output"):
            return list(entries)
        rows: list[Entry | None] = []
        for call in range(self._flow.calls.count(place)) if site.call is None else [site.call]:
            rows += [e for e in entries if e.spot.call == call] or [None]
        return rows

    def _is_at(self, spot: Spot, path: Path) -> bool:
        if path in (spot.path, spot.shown) or any(self._requests.asked[number].path == path for number in spot.asked):
            return True
        return spot.kind in ("input", "grad_input") and path != () and other_name(spot.place, path) == spot.path

    def __reduce__(self) -> str:
        raise TypeError("a capture cannot be copied or pickled; copy dict(got.items()) instead")

    def _why_nothing(self, site: Site, places: list[Place]) -> str:
        reason = why(self._flow, places[0], site)
        if self._flow.is_open and self._flow.calls.count(places[0]) and reason.startswith("no "):
            reason = "no backward has reached it yet"
        is_value = not site.kind.startswith("grad")
        if is_value and site.call is None and (entries := self._by_place.get((places[0], site.kind))):
            reason = f"it has no {format_path(site.path)}; what was captured there: {self._name(entries[0])!r}, ..."
        have = ", ".join(map(repr, self.keys()[:8])) or "nothing"
        return f"{site}: no value: {reason}\n  captured so far: {have}"
