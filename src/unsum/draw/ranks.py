"""The layers of one group: the order in each that crosses few arrows, and places near to the neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

GAP = 22.0  # between neighbours in a layer
_SWEEPS = 12


@dataclass
class Item:
    """Something with a size: a leaf, or a group of items."""

    key: str
    width: float = 0.0
    height: float = 0.0
    children: list[Item] = field(default_factory=list)
    x: float = 0.0  # left upper corner; in the group around it until all is done
    y: float = 0.0
    stub: float = 0.0  # how far arrows that leave it go straight, beside the labels of its layer
    lead: float = 0.0  # how far it is below the top of its layer
    is_source: bool = False  # belongs next to what uses it: parameters and data
    is_group: bool = False
    least: float = 0.0  # the width that a group's name needs


@dataclass
class Slot:
    """A place in a layer: an item, or where an arrow passes."""

    item: Item | None
    width: float
    height: float
    x: float = 0.0  # its middle
    top: float = 0.0  # from where to where an arrow that passes is straight
    bottom: float = 0.0


class Edge(NamedTuple):
    """Part of a link, from one layer to the next."""

    start: Slot
    end: Slot
    shift: float  # by how much the end is to the right of the start if it is straight


Edges = list[Edge]
_Near = dict[int, list[tuple[Slot, float]]]  # slot -> its neighbours, and where it would be straight from there


def _neighbours(edges: Edges) -> tuple[_Near, _Near]:
    up: _Near = {}
    down: _Near = {}
    for start, end, shift in edges:
        down.setdefault(id(start), []).append((end, -shift))
        up.setdefault(id(end), []).append((start, shift))
    return up, down


def order(layers: list[list[Slot]], edges: Edges) -> None:
    """Sort each layer by the middle of its neighbours, up and down in turn; keep the order that crosses least."""
    up, down = _neighbours(edges)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, down)
    for sweep in range(8):
        if fewest == 0:
            break
        near = up if sweep % 2 == 0 else down
        for k in range(len(layers)) if sweep % 2 == 0 else reversed(range(len(layers))):
            _sort(layers, k, near)
        crossed = _crossings(layers, down)
        if crossed < fewest:
            best, fewest = [list(layer) for layer in layers], crossed
    for layer, order in zip(layers, best, strict=True):
        layer[:] = order


def _sort(layers: list[list[Slot]], k: int, near: _Near) -> None:
    beside = [layers[j] for j in (k - 1, k + 1) if 0 <= j < len(layers)]
    where = {id(slot): i for layer in beside for i, slot in enumerate(layer)}
    own = {id(slot): i for i, slot in enumerate(layers[k])}

    def middle(slot: Slot) -> float:
        places = [where[id(other)] for other, _ in near.get(id(slot), ())]
        return sum(places) / len(places) if places else own[id(slot)]

    layers[k].sort(key=middle)


def _crossings(layers: list[list[Slot]], down: _Near) -> int:
    total = 0
    for layer, below in pairwise(layers):
        where = {id(slot): k for k, slot in enumerate(below)}
        ends = [sorted(where[id(other)] for other, _ in down.get(id(slot), ())) for slot in layer]
        seen: list[int] = []
        for own in ends:
            total += sum(1 for end in own for other in seen if other > end)
            seen += own
    return total


def straighten(layers: list[list[Slot]], edges: Edges) -> None:
    """Move every slot towards its neighbours, as far as widths allow."""
    up, down = _neighbours(edges)
    for layer in layers:
        x = 0.0
        for slot in layer:
            slot.x = x + slot.width / 2
            x += slot.width + GAP
        for slot in layer:
            slot.x -= (x - GAP) / 2
    for sweep in range(_SWEEPS):
        for layer in reversed(layers) if sweep % 2 else layers:
            _pass(layer, down if sweep % 2 else up)
    for layer in layers:  # what computes goes straight down
        _pass(layer, up, only=_computes)
    for layer in reversed(layers):  # what it is given stands beside it
        _pass(layer, down, only=lambda slot: not _computes(slot) or id(slot) not in up)


def _computes(slot: Slot) -> bool:
    return slot.item is None or not slot.item.is_source


def _pass(layer: list[Slot], near: _Near, only: Callable[[Slot], bool] = lambda slot: True) -> None:
    """Move those of a layer's slots that are meant in line with these neighbours; others stay if they can."""
    wishes, weights = [], []
    for slot in layer:
        pulls = [(other.x + shift, _pull(slot, other)) for other, shift in near.get(id(slot), ()) if only(slot)]
        total = sum(weight for _, weight in pulls)
        wishes.append(sum(x * weight for x, weight in pulls) / total if total else slot.x)
        weights.append(total or (0.05 if only(slot) else 1000.0))
    _spread(layer, wishes, weights)


def _pull(slot: Slot, other: Slot) -> float:
    """How much one slot wants to be in line with the other: what computes stays in line, and so does what passes; an
    arrow that goes around bends towards what computes, and sources come last."""
    if other.item is not None and other.item.is_source:
        return 0.05
    return 4.0 if (slot.item is None) == (other.item is None) else 1.0


def _spread(layer: list[Slot], wishes: list[float], weights: list[float]) -> None:
    """The places nearest to the wishes (in squares) at which nothing overlaps: neighbours that would are pooled."""
    offsets, offset = [], 0.0
    for k, slot in enumerate(layer):
        if k:
            offset += (layer[k - 1].width + slot.width) / 2 + GAP
        offsets.append(offset)
    pools: list[list[float]] = []  # weight, weighted sum, how many
    for wish, weight, offset in zip(wishes, weights, offsets, strict=True):
        pools.append([weight, weight * (wish - offset), 1])
        while len(pools) > 1 and pools[-2][1] / pools[-2][0] > pools[-1][1] / pools[-1][0]:
            more = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], more, strict=True)]
    k = 0
    for weight, total, count in pools:
        for _ in range(int(count)):
            layer[k].x = total / weight + offsets[k]
            k += 1
