"""What a block asks for: its sites, and the places that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unsum.errors import SiteError
from unsum.sites import Names, Place, Site
from unsum.types import Kind, Path

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
        self._ports: dict[tuple[Kind, tuple[int, ...], tuple[int, ...]], Port] = {}
        for number, site in enumerate(asked):
            self._resolve(number, site)

    def _resolve(self, number: int, site: Site) -> None:
        places = self.places[number] = {}
        if self.names is None:
            if not isinstance(site.where, str) or site.kind not in ("output", "grad_output"):
                raise SiteError(
                    f"{site}: without a model only marked tensors can be named, as 'name:output' or 'name:grad_output'"
                )
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

    def mark(self, name: str) -> Place | None:
        """The place of a mark of this name, if it is asked for."""
        if self.names is not None:
            return None
        place = self._marks.get(name)
        if place is None:
            place = self._marks[name] = Place(name)
            for number, site in enumerate(self.asked):
                assert isinstance(site.where, str)
                if site.where == name or fnmatchcase(name, site.where):
                    self.places[number][name] = place
                    kinds = self.wants.setdefault(place, {})
                    kinds[site.kind] = (*kinds.get(site.kind, ()), number)
        return place if place in self.wants else None

    @property
    def marked(self) -> list[str]:
        """The names of the tensors that were marked so far."""
        return list(self._marks)

    def place_of(self, thing: object, kind: Kind) -> Place | None:
        """The place of a module or parameter, if this kind is asked for there."""
        place = self._known.get(id(thing))
        return place if place is not None and kind in self.wants[place] else None

    def port(self, kinds: Mapping[Kind, tuple[int, ...]], kind: Kind, grad_kind: Kind) -> Port | None:
        """The requests for one side of the calls of a place; None if there are none."""
        values, grads = kinds.get(kind, ()), kinds.get(grad_kind, ())
        if not values and not grads:
            return None
        port = self._ports.get((kind, values, grads))
        if port is None:
            sites = [self.asked[number] for number in (*values, *grads)]
            is_plain = all(not site.path and site.call is None for site in sites)
            port = Port(kind, grad_kind, values, grads, (0,) if kind == "input" else (), is_plain)
            self._ports[kind, values, grads] = port
        return port
