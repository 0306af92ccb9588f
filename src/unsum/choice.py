"""Which parameters a block is about, and the first name of each: remembered from block to block.

What is remembered is made of names and numbers alone, and holds for exactly these: in every block it is compared with
the names that the model has now, and with the identities of what they name."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

from torch import nn

from unsum.errors import OptionError
from unsum.sites import Names

_wanted = attrgetter("requires_grad")
_KEPT = 16  # choices of parameters for each model


@dataclass(frozen=True)
class _Choice:
    names: tuple[str, ...]
    pick: Any  # them from all parameters
    ids: tuple[int, ...]
    by_id: Mapping[int, str]
    firsts: tuple[str, ...]  # the first name of each
    pick_firsts: Any  # those under their first names, from all parameters


@dataclass(frozen=True, eq=False)
class _Known:
    """The parameters of a model, as names and numbers, and what follows from them."""

    tree: tuple[tuple[Any, ...], ...]
    choices: dict[tuple[tuple[str, ...], tuple[bool, ...]], _Choice] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Chosen:
    """What a block is about."""

    parameters: dict[str, nn.Parameter]  # those that are chosen and to be trained, under all their names
    unique: dict[int, nn.Parameter]  # the same by id, tied ones once
    by_id: Mapping[int, str]  # the first name of each
    named: dict[str, nn.Parameter]  # the same by that name


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def exactly(name: str) -> str:
    """A glob that chooses this name alone.

    Examples:
        >>> exactly("blocks[0].weight")
        'blocks[[]0].weight'
    """
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def choose(names: Names, params: str | Sequence[str]) -> Chosen:
    """The parameters that a glob, or one of several, chooses, if they are to be trained."""
    globs = (params,) if isinstance(params, str) else params
    if not isinstance(globs, list | tuple) or not globs or not all(isinstance(glob, str) for glob in globs):
        raise OptionError(
            f"params={params!r}: a glob that chooses parameters by name, such as 'blocks.*.weight', or a list of them"
        )
    parameters = list(names.parameters.values())
    known = _recall(names, parameters)
    key = tuple(globs), tuple(map(_wanted, parameters))
    choice = known.choices.get(key)
    if choice is None:
        if len(known.choices) >= _KEPT:
            known.choices.clear()
        choice = known.choices[key] = _chosen(names.parameters, globs)
    chosen = choice.pick(parameters)
    return Chosen(
        dict(zip(choice.names, chosen, strict=True)),
        dict(zip(choice.ids, chosen, strict=True)),
        choice.by_id,
        dict(zip(choice.firsts, choice.pick_firsts(parameters), strict=True)),
    )


def _recall(names: Names, parameters: Sequence[nn.Parameter]) -> _Known:
    tree = tuple(names.parameters), tuple(map(id, parameters))
    known = _known.get(names.model)
    if known is None or known.tree != tree:
        known = _known[names.model] = _Known(tree)
    return known


def _chosen(parameters: Mapping[str, nn.Parameter], globs: Sequence[str]) -> _Choice:
    fits: set[str] = set()
    for glob in globs:
        found = [glob] if glob in parameters else fnmatch.filter(parameters, glob)
        if not found and glob != "*":
            raise OptionError(f"params={glob!r} fits no parameter; there are: {', '.join(list(parameters)[:8])}")
        fits.update(found)
    chosen = {name: p for name, p in parameters.items() if name in fits and p.requires_grad}
    by_id = first_names(chosen)
    firsts, places = tuple(by_id.values()), {name: k for k, name in enumerate(parameters)}
    ids, pick = tuple(map(id, chosen.values())), _picker([places[name] for name in chosen])
    return _Choice(tuple(chosen), pick, ids, by_id, firsts, _picker([places[name] for name in firsts]))


def _picker(places: Sequence[int]) -> Any:
    return itemgetter(*places) if len(places) > 1 else lambda things: [things[k] for k in places]


def first_names(things: Mapping[str, object]) -> dict[int, str]:
    """The first name of each thing, by id."""
    found: dict[int, str] = {}
    for name, thing in things.items():
        found.setdefault(id(thing), name)
    return found
