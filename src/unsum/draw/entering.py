"""Where tensors enter that have no edge in the graph, because they need no gradient.

Nodes save what their derivative needs: a saved tensor with the memory of `x` shows that `x` enters there, unless it is
part of the graph itself (what the node made, or an argument with an edge). After a backward the saved tensors are gone,
and some operations (a sum, a difference) never save any. Then shapes must tell: if a named tensor fits exactly one open
place, and that place exactly one such tensor, it is drawn there and the picture says how it was found. Otherwise the
picture says that it could not be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.draw.openings import Opening, is_hooked, openings, operation_name, spoken
from unsum.graph.nodes import Node, below, is_leaf
from unsum.seams.nodes import SAVED, packed
from unsum.svg import by


@dataclass(frozen=True)
class Entrance:
    """A tensor without a gradient enters at a node."""

    node: Node
    name: str
    tensor: Tensor
    role: Literal["data", "parameter"]
    how: Literal["saved", "shape"]


@dataclass(frozen=True)
class Named:
    """A tensor without a gradient that the user, or the model, has a name for."""

    name: str
    tensor: Tensor
    role: Literal["data", "parameter"]
    beside: frozenset[int] = frozenset()  # ids of the other parameters of its module


FROZEN = "frozen, and not found in the graph: nothing before it needs a gradient, it is not used, or no node keeps it"


def raw_saved(node: Node) -> Iterator[Any]:
    """What a node has saved, not unpacked: to unpack may compute a checkpoint again, or use up its one reading."""
    for _, value in packed(node):
        yield from value if isinstance(value, tuple | list) else () if value is None else (value,)


def find(nodes: Sequence[Node], named: Sequence[Named]) -> tuple[list[Entrance], list[str]]:
    """Where the named tensors enter, and notes on those of which it cannot be told."""
    by_memory: dict[int | None, list[Named]] = {}
    for one in named:
        by_memory.setdefault(_memory(one.tensor), []).append(one)
    entries: dict[tuple[Node, int], Entrance] = {}
    for node in nodes:
        for tensor in () if is_leaf(node) else _data_saved(node):
            match = _same(tensor, by_memory)
            if match is not None:
                entries[node, id(match)] = Entrance(node, match.name, match.tensor, match.role, "saved")
    placed = {key for _, key in entries}
    left = [one for one in named if id(one) not in placed]
    places = _openings(nodes, list(entries.values())) if named else {}
    more, notes = _by_shape(places, left, _near(entries.values()))
    again = [_again(one, places) for one in named if id(one) in placed and one.role == "data"]
    return [*entries.values(), *more], [*notes, *filter(None, again)]


def _data_saved(node: Node) -> Iterator[Tensor]:
    """What a node has saved of what is not in the graph: its own results, and arguments with an edge, say that they
    require a gradient."""
    for name, raw in packed(node):
        if name.startswith(f"{SAVED}result"):
            continue
        if any(is_hooked(saved) for saved in (raw if isinstance(raw, tuple | list) else (raw,))):
            continue  # to unpack would call the hooks
        try:
            found = getattr(node, "saved_tensors" if isinstance(node, BackwardCFunction) else name)
        except RuntimeError:  # freed, or changed in place since
            continue
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                yield tensor


def _near(entries: Iterable[Entrance]) -> dict[Node, set[int]]:
    """The ids of the tensors that are known to enter at nodes."""
    found: dict[Node, set[int]] = {}
    for entry in entries:
        found.setdefault(entry.node, set()).add(id(entry.tensor))
    return found


def _again(one: Named, places: Mapping[Opening, Callable[[Tensor], bool]]) -> str:
    """A note on a tensor that was found, and may enter at other places too."""
    fits = list(
        dict.fromkeys(spoken(operation_name(node)) for (node, _), accepts in places.items() if accepts(one.tensor))
    )
    if not fits:
        return ""
    keep = "it keeps" if len(fits) == 1 else "they keep"
    return f"{one.name} may also enter at {', '.join(fits)}: {keep} no data that would tell"


def _same(tensor: Tensor, by_memory: Mapping[int | None, list[Named]]) -> Named | None:
    """Which of the named tensors it is. Several may share their memory (`ids[:, :-1]` and `ids[:, 1:]`): then the one
    that begins at the same place, and if need be has the same shape; otherwise it cannot be told."""
    memory = _memory(tensor)
    known = [] if memory is None else by_memory.get(memory, [])
    if len(known) > 1:
        known = [one for one in known if one.tensor.data_ptr() == tensor.data_ptr()]
    if len(known) > 1:
        known = [one for one in known if one.tensor.shape == tensor.shape]
    if memory is not None and not known:
        known = [one for key, group in by_memory.items() if key for one in group if _is_copy(tensor, one.tensor)]
    return known[0] if len(known) == 1 else None


def _is_copy(kept: Tensor, named: Tensor) -> bool:
    """Whether a tensor holds the numbers of another: made contiguous, or cast as autocast does."""
    if kept.numel() != named.numel() or kept.is_floating_point() != named.is_floating_point():
        return False
    for way in (kept, kept.t()) if kept.dim() == 2 else (kept,):
        like = named.detach().reshape(way.shape)
        corner = (slice(0, 4),) * way.dim()
        if torch.equal(way[corner], like[corner].to(way)) and torch.equal(way, like.to(way)):
            return bool((way != way.flatten()[0]).any())  # what is the same everywhere proves nothing
    return False


def _memory(tensor: Tensor) -> int | None:
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return None


def _openings(nodes: Sequence[Node], known: Sequence[Entrance]) -> dict[Opening, Callable[[Tensor], bool]]:
    """Where something enters that nobody knows, and what shapes would fit there."""
    taken = [entry.node for entry in known]
    places: dict[Opening, Callable[[Tensor], bool]] = {}
    for node in nodes:
        gaps = [] if is_leaf(node) else list(openings(node))
        told = max(0, sum(child is None for child, _ in node.next_functions) - len(gaps))
        if len(gaps) > taken.count(node) - told:  # else it is known what enters there
            places.update(((node, slot), fits) for slot, fits in gaps)
    return places


def _by_shape(
    places: dict[Opening, Callable[[Tensor], bool]], left: list[Named], near: Mapping[Node, set[int]]
) -> tuple[list[Entrance], list[str]]:
    """Place the rest by their shapes; what is placed is taken out of `places`."""
    found: list[Entrance] = []
    while True:
        fitting = {id(one): _fitting(one, places, near) for one in left}
        wanted: dict[Opening, int] = {}
        for own in fitting.values():
            for place in own:
                wanted[place] = wanted.get(place, 0) + 1
        one = next((o for o in left if len(f := fitting[id(o)]) == 1 and wanted[f[0]] == 1), None)
        if one is None:
            return found, [note for one in left if (note := _why(one, fitting[id(one)]))]
        place = fitting[id(one)][0]
        found.append(Entrance(place[0], one.name, one.tensor, one.role, "shape"))
        places.pop(place)
        left = [other for other in left if other is not one]


def _why(one: Named, fits: list[Opening]) -> str:
    what = f"{one.name} ({by(tuple(one.tensor.shape))})"
    if fits:
        where = ", ".join(dict.fromkeys(spoken(operation_name(node)) for node, _ in fits))
        return f"{what}: by its shape it may enter at {where}, so it is not drawn"
    if one.role == "parameter":
        return f"{one.name}: {FROZEN}"
    return f"{what}: it could not be found: no node has kept it as it is, and by its shape it fits no open place"


def _fitting(
    one: Named, places: Mapping[Opening, Callable[[Tensor], bool]], near: Mapping[Node, set[int]]
) -> list[Opening]:
    fits = [place for place, accepts in places.items() if accepts(one.tensor)]
    if one.role == "data":
        return fits
    # A frozen bias stands beside its module's weight.
    return [(node, slot) for node, slot in fits if one.beside & (_leaves_near(node) | near.get(node, set()))]


def _leaves_near(node: Node) -> set[int]:
    """The ids of the leaves that lead to a node, directly or through one view."""
    found = set()
    for _, child, _ in below(node):
        for _, deeper, _ in [(0, child, 0), *([] if is_leaf(child) else below(child))]:
            if is_leaf(deeper):
                found.add(id(deeper.variable))
    return found
