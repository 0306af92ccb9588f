"""What a block asks for: its sites, and the places that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unsum.errors import SiteError
from unsum.sites import Names, Place, Site
from unsum.types import Kind, Path

_MARK = "mark:"  # before a mark's name, where the other sites are those of a model

Wants = dict[Kind, tuple[int, ...]]
"""The numbers of the requests for each kind at one place."""


@dataclass(slots=True)  # a named tuple's fields take longer to read, in every call
class Port:
    """The requests for one side of a call, its arguments or its output. Places that are asked alike share one."""

    kind: Kind  # of the values: input, or output
    grad_kind: Kind
    values: tuple[int, ...]  # the numbers of the requests
    grads: tuple[int, ...]
    first: Path  # where the tensor is that a plain site means: the output itself, or the first argument
    is_plain: bool  # every request is for whole values, of every call
    is_put_down: bool  # plain, and nothing has to be found out before a receiver that holds references gets it

    def read(self, whole: Any) -> Any:
        """What is looked through: the output, or of the arguments and keywords one mapping."""
        if not self.first:
            return whole
        args, kwargs = whole
        return {**dict(enumerate(args)), **kwargs}


class Requests:
    """The sites that a block asks for, by number, and the places that each of them names."""

    def __init__(self, model: nn.Module | None, asked: Sequence[Site]) -> None:
        self.names = None if model is None else Names(model)
        self.asked = asked
        self.places: dict[int, dict[str, Place]] = {}  # request -> the places that it names
        self.wants: dict[Place, Wants] = {}
        self._known: dict[int, Place] = {}  # by the id of the module or parameter
        self._marks: dict[str, Place] = {}
        self._for_marks: list[tuple[int, Site, str]] = []  # requests for marks: number, site, the mark's name or a glob
        self._ports: dict[tuple[tuple[Kind, tuple[int, ...]], ...], tuple[Port | None, Port | None]] = {}
        for number, site in enumerate(asked):
            self._resolve(number, site)

    def _resolve(self, number: int, site: Site) -> None:
        places = self.places[number] = {}
        mark = self.mark_in(site)
        if mark is not None or self.names is None:
            if mark is None or site.kind not in ("output", "grad_output"):
                where = "a marked tensor" if self.names is not None else "without a model, a marked tensor"
                name = mark or "name"
                raise SiteError(
                    f"{site}: {where} has the sites '{name}:output' and '{name}:grad_output' alone.",
                    write=f"unsum.capture({'model' if self.names else None}, '{self.shown(name)}:grad_output')",
                )
            self._for_marks.append((number, site, mark))
            return
        known, wants, kind, alone = self._known, self.wants, site.kind, (number,)
        for name, thing in self.names.find(site).items():
            place = known.get(id(thing))
            if place is None:
                place = known[id(thing)] = Place(name, thing)
                wants[place] = {}
            places[name] = place
            kinds = wants[place]
            kinds[kind] = (*kinds[kind], number) if kind in kinds else alone

    def mark_in(self, site: Site) -> str | None:
        """The mark that a site names, or a glob of marks: beside a model as "mark:y:output", without one also as
        "y:output". None if it names modules or parameters."""
        if not isinstance(site.where, str):
            return None
        if site.where.startswith(_MARK):
            return site.where.removeprefix(_MARK)
        return site.where if self.names is None else None

    def shown(self, mark: str) -> str:
        """How a mark is written in the sites of this block."""
        return mark if self.names is None else _MARK + mark

    def mark(self, name: str) -> Place | None:
        """The place of a mark of this name, if it is asked for."""
        if not self._for_marks:
            return None
        place = self._marks.get(name)
        if place is None:
            place = self._marks[name] = Place(self.shown(name))
            for number, site, mark in self._for_marks:
                if mark == name or fnmatchcase(name, mark):
                    self.places[number][place.name] = place
                    kinds = self.wants.setdefault(place, {})
                    kinds[site.kind] = (*kinds.get(site.kind, ()), number)
        return place if place in self.wants else None

    def marks_in(self, site: Site) -> list[Place]:
        """The marks so far that a site names, among those asked for."""
        mark = self.mark_in(site)
        if mark is None:
            return []
        places = (self._marks[name] for name in self._marks if name == mark or fnmatchcase(name, mark))
        return [place for place in places if site.kind in self.wants.get(place, ())]

    @property
    def marked(self) -> list[str]:
        """The tensors that were marked so far, as sites write them."""
        return [self.shown(name) for name in self._marks]

    def place_of(self, thing: object, kind: Kind) -> Place | None:
        """The place of a module or parameter, if this kind is asked for there."""
        place = self._known.get(id(thing))
        return place if place is not None and kind in self.wants[place] else None

    def ports(self, kinds: Wants) -> tuple[Port | None, Port | None]:
        """The requests for the two sides of the calls of a place, arguments and output; None if there are none. Most
        places of a block are asked alike, and share what was made for the first."""
        key = tuple(kinds.items())
        ports = self._ports.get(key)
        if ports is None:
            ports = self._ports[key] = (
                self._port(kinds, "input", "grad_input"),
                self._port(kinds, "output", "grad_output"),
            )
        return ports

    def _port(self, kinds: Wants, kind: Kind, grad_kind: Kind) -> Port | None:
        values, grads = kinds.get(kind, ()), kinds.get(grad_kind, ())
        if not values and not grads:
            return None
        sites = [self.asked[number] for number in (*values, *grads)]
        is_plain = all(not site.path and site.call is None for site in sites)
        is_put_down = is_plain and (kind == "output" or not grads)  # a module's share of its input's takes more
        return Port(kind, grad_kind, values, grads, (0,) if kind == "input" else (), is_plain, is_put_down)
