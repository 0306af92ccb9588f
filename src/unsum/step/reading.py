"""Which of the tensors that a model is given has the samples.

Where all of them agree in the size of the samples' dimension, there is one way to read a call. Where they differ (a
mask, class embeddings that all samples share, positions), there are several: what the model returns, and the loss goes
through, says which is right. For a model that returns its loss alone it is the one that is left without positions and
single rows. What was found out holds for later calls with arguments of the same kinds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Edge, Node
from unsum.learn.cut import find_cut, parameters_met_outside
from unsum.learn.refusals import several_numbers
from unsum.learn.sides import counts
from unsum.seams.nodes import outputs_of
from unsum.travel import Journey
from unsum.travel.climb import climb
from unsum.travel.walk import walk

_KEPT = 512
_WAYS = 4  # in which a call is read at most
_told: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Told]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Told:
    """What earlier calls have told of later ones: which of their tensors have the samples."""

    members: frozenset[int]  # the tensors that had n rows in every call
    multiples: frozenset[
        int
    ]  # those that had a multiple of n rows in every call: perhaps of all samples after each other


@dataclass(frozen=True)
class Reading:
    """A way to read a call: how many samples it has, and which tensors have them."""

    n: int
    members: frozenset[int]  # the tensors that have n samples
    counts: bool = False  # whether these are positions, which seldom are samples


def readings(given: Sequence[Tensor], k: int, told: Told | None) -> list[Reading]:
    """The ways to read a call that was given these tensors, the likely ones first: what earlier calls have told, then
    in the order of the tensors, positions last."""
    sizes = [int(t.shape[k]) if t.dim() > k else -1 for t in given]
    distinct = [size for size in dict.fromkeys(sizes) if size >= 0]
    own = {sizes[i] for i in told.members if i < len(sizes)} if told is not None else set()
    if told is not None and len(own) == 1 and (n := own.pop()) >= 0:
        way = Reading(n, told.members)
        if n != 1 or len(distinct) == 1:
            return [way]
        distinct.remove(n)  # one row may be for all samples of another tensor
        others = [Reading(size, frozenset(i for i, s in enumerate(sizes) if s == size)) for size in distinct]
        return [way, *others[: _WAYS - 1]]
    if len(distinct) > 1:
        real = {sizes[i] for i, t in enumerate(given) if t.is_floating_point() or not counts(t)}
        distinct.sort(key=lambda size: size not in real)
    else:
        real = set(distinct)
    return [
        Reading(n, frozenset(i for i, size in enumerate(sizes) if size == n), n not in real) for n in distinct[:_WAYS]
    ]


def told_by(model: nn.Module, alike: Hashable) -> Told | None:
    """What such calls have told before."""
    return _told.get(model, {}).get(alike)


def tell(model: nn.Module, alike: Hashable, reading: Reading, rows: Sequence[int]) -> None:
    """A call was read so, that was given tensors of so many rows. (Of one sample nothing follows: any tensor may have
    one row.)"""
    if reading.n < 2 or not reading.members:
        return
    known = _told.setdefault(model, {})
    if len(known) > _KEPT:
        known.clear()
    before = known.get(alike)
    multiples = frozenset(k for k, each in enumerate(rows) if each % reading.n == 0)
    if before is None:
        known[alike] = Told(reading.members, multiples)
    elif before.members & reading.members:
        known[alike] = Told(before.members & reading.members, before.multiples & multiples)


def forget(model: nn.Module, alike: Hashable) -> None:
    """What was told of such calls is no longer so."""
    _told.get(model, {}).pop(alike, None)


def goes_through(
    roots: Sequence[Any], returned: Mapping[Edge, Layout], names: Mapping[int, str], is_weight: Callable[[Any], bool]
) -> list[Layout]:
    """The topmost of these outputs, if the loss goes through them entirely: no parameter meets data beside them."""
    cut = find_cut(roots, returned, lambda node: False)
    return [] if parameters_met_outside(cut, names, is_weight) else list(cut.starts.values())


def chosen(
    ways: Sequence[Reading],
    roots: Sequence[Any],
    returned: Mapping[Edge, Layout],
    names: Mapping[int, str],
    is_weight: Callable[[Any], bool],
    fits: Callable[[int], bool],
    *,
    is_told: bool,
) -> int:
    """In which of these ways a call is to be read, from the outputs that lie between it and the loss; if there is none,
    in the only one that is likely, or that `fits` says may be. Refuses by raising where that cannot be told. `is_told`:
    earlier calls have told the first way."""

    def top(own: Mapping[Edge, Layout]) -> set[int]:
        return {layout.n for layout in goes_through(roots, own, names, is_weight) if isinstance(layout, Regular)}

    numbers = [way.n for way in ways]
    found = top(returned)
    if len(found) != 1:
        apart = {n: {e: o for e, o in returned.items() if isinstance(o, Regular) and o.n == n} for n in numbers}
        found = {n for n, own in apart.items() if own and top(own)}
    if len(found) == 1:
        return numbers.index(found.pop())
    several = [k for k, way in enumerate(ways) if not way.counts]
    if not found and not is_told and len(several) > 1:
        sizes = sorted(ways[k].n for k in several)
        are_apart = all(size % sizes[0] for size in sizes[1:])  # else rows may be those of samples after each other
        several = [k for k in several if fits(k)] if are_apart else []
        if len(several) == 1:
            return several[0]
        several = []
    if found or not (several or is_told):
        raise several_numbers(numbers)
    return 0


def stay_apart(
    roots: Sequence[Any],
    order: Sequence[Node],
    seeds: Mapping[Edge, Layout],
    n: int,
    is_data: Callable[[Node], bool],
) -> bool:
    """Whether samples stay apart in a loss whose samples only these inputs say."""
    cut = find_cut(roots, climb(order, seeds, n), is_data)
    is_loss = all(not len(meta.shape) for node in cut.loss for meta in outputs_of(node))
    return bool(cut.starts) and is_loss and not walk(cut.model, cut.starts, Journey(n), is_data).mixing
