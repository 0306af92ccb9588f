"""From the arguments or the output of a call, the tensors that sites ask for."""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from unsum.errors import SiteError
from unsum.nested import find, format_path, leaves
from unsum.sites import Place, Site, site_name
from unsum.types import Kind, Path


class Spot(NamedTuple):
    """One tensor in one call of one place."""

    place: Place
    kind: Kind
    call: int
    path: Path  # where the tensor is in the arguments or the output
    shown: Path  # how it was asked for: `m:input` is the first tensor, wherever that is
    asked: tuple[int, ...]  # which of the requests it answers

    def __str__(self) -> str:
        return site_name(self.place.name, self.kind, None, self.shown)


def pick(
    place: Place,
    kind: Kind,
    call: int,
    value: Any,
    sites: Sequence[tuple[int, Site]],
    *,
    one: bool,
    absent: MutableMapping[tuple[Place, Any], str],
) -> list[tuple[Spot, Tensor]]:
    """The tensors of `value` that these numbered sites ask for; why a site finds none is noted in `absent`.

    A site without a path means every tensor of an output (with `one`, there must be a single one), and the first of the
    arguments.
    """
    first = _first_path(kind, value)
    if first is not None and all(not site.path for _, site in sites):  # the ordinary case: a tensor, asked for plainly
        tensor = value if first == () else value[0]
        return [(Spot(place, kind, call, first, (), tuple([number for number, _ in sites])), tensor)] if sites else []
    found: dict[Path, tuple[Spot, Tensor]] = {}
    for number, site in sites:
        try:
            tensors = _tensors(place, site, value, one)
        except LookupError as why:
            absent[place, site] = str(why)
            continue
        for path, shown, tensor in tensors:
            spot = Spot(place, kind, call, path, shown, (number,))
            if path in found:
                known = found[path][0]
                shown = min(shown, known.shown, key=len)
                spot = Spot(place, kind, call, path, shown, (*known.asked, number))
            found[path] = spot, tensor
    return list(found.values())


def _first_path(kind: Kind, value: Any) -> Path | None:
    """Where the tensor is that a plain site means, if that can be seen at a glance."""
    if kind in ("output", "grad_output"):
        return () if isinstance(value, Tensor) else None
    return (0,) if isinstance(value.get(0), Tensor) else None


def _tensors(place: Place, site: Site, value: Any, one: bool) -> list[tuple[Path, Path, Tensor]]:
    if isinstance(value, Tensor) and not site.path:
        return [((), (), value)]
    is_input = site.kind in ("input", "grad_input")
    path, part = _part(place, site, value, is_input)
    found = [(inner, inner, tensor) for inner, tensor in leaves(part, path)]
    if not found:
        raise LookupError(f"it was called, and no tensor is there; there are: {_paths(value)}")
    if is_input and not site.path:
        return [(found[0][0], (), found[0][2])]
    if one and len(found) > 1:
        names = ", ".join(repr(site_name(place.name, site.kind, site.call, inner)) for inner, _, _ in found[:6])
        raise SiteError(f"{site}: holds {len(found)} tensors; name one of them: {names}")
    return found


def _part(place: Place, site: Site, value: Any, is_input: bool) -> tuple[Path, Any]:
    for path in (site.path, other_name(place, site.path)) if is_input else (site.path,):
        try:
            return find(value, path)
        except LookupError:
            continue
    raise LookupError(f"it has no {format_path(site.path)}; it has: {_paths(value)}")


def other_name(place: Place, path: Path) -> Path:
    """An argument's other name: its place for its keyword, its keyword for its place."""
    if not path or not isinstance(place.thing, nn.Module):
        return path
    parameters = inspect.signature(place.thing.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = [p.name for p in parameters if p.kind is p.VAR_POSITIONAL]
    first = path[0]
    if isinstance(first, str) and first in names:
        return (names.index(first), *path[1:])
    if first in rest and len(path) > 1 and isinstance(path[1], int):
        return (len(names) + path[1], *path[2:])
    if isinstance(first, int) and 0 <= first < len(names):
        return (names[first], *path[1:])
    return path


def by_place(spot: Spot) -> Path:
    """Where a tensor is, with an argument's place for its keyword: a call by keyword is like one without."""
    if spot.kind in ("input", "grad_input") and spot.path and isinstance(spot.path[0], str):
        return other_name(spot.place, spot.path)
    return spot.path


def _paths(value: Any) -> str:
    return ", ".join(format_path(path) or "a single tensor" for path, _ in list(leaves(value))[:8]) or "no tensor"
