"""Whose is each position of a tensor?

Nearly always the samples follow each other along one dimension, in blocks: that is a `Regular` layout, which costs
nothing to hold. After routing, sorting or packing it is a `Mapped` one: a whole number for every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

NOBODY, UNSEEN = -1, -2


@dataclass(frozen=True)
class Regular:
    """Position p along `dim` belongs to sample (p // block) mod n."""

    shape: tuple[int, ...]
    n: int
    dim: int
    block: int

    def along(self, device: torch.device | None = None) -> Tensor:
        """The samples along the dimension."""
        places = torch.arange(self.shape[self.dim], device=device)
        return places.div(self.block, rounding_mode="floor") % self.n

    def owner(self, device: torch.device | None = None) -> Tensor:
        """The sample of every position."""
        view = [-1 if d == self.dim else 1 for d in range(len(self.shape))]
        return self.along(device).view(view).expand(self.shape)

    def only(self, grad: Tensor, sample: int) -> Tensor | None:
        """The gradient with all other samples' positions set to zero; None if nothing is left."""
        if sample == NOBODY:
            return None
        left = torch.zeros_like(grad)
        split = (-1, self.n, self.block)
        own, all_ = left.unflatten(self.dim, split), grad.unflatten(self.dim, split)
        own.select(self.dim + 1, sample).copy_(all_.select(self.dim + 1, sample))
        return left


@dataclass(frozen=True, eq=False)
class Mapped:
    """The sample of every position along the first dimensions; NOBODY for what belongs to none, UNSEEN where the sweep
    has not come. Positions along the dimensions behind are of the same sample: a row of features costs one number."""

    map: Tensor  # int32
    behind: tuple[int, ...] = ()  # sizes of the dimensions that do not matter
    is_whole: bool = False  # whether every position is known to be of some sample
    held: Tensor | None = None  # (n, t): the rows of each sample, where all have as many; then `map` has one dimension

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.map.shape, *self.behind)

    def owner(self, device: torch.device | None = None) -> Tensor:
        """The sample of every position."""
        return self.beside(self.map.to(device)).expand(self.shape)

    def beside(self, rows: Tensor) -> Tensor:
        """What there is one of for each number of the map, with dimensions of size 1 for those behind."""
        return rows.view((*rows.shape, *(1 for _ in self.behind)))

    @cached_property
    def has_unseen(self) -> bool:
        """Whether there are positions of which nothing is known; looked up once."""
        return not self.is_whole and bool((self.map == UNSEEN).any())

    def rows(self) -> Tensor | None:
        """The sample of each row, if all that was seen in it is of one; UNSEEN where nothing was. None if not."""
        if not self.map.numel() or not self.map.dim():
            return None
        if self.map.dim() == 1:
            return self.map
        flat = self.map.reshape(len(self.map), -1)
        rows = flat.amax(1)
        return rows if bool(((flat == rows[:, None]) | (flat == UNSEEN)).all()) else None

    def narrowed(self) -> Mapped:
        """The same with as few numbers as can be: without last dimensions along which nothing changes."""
        map_, behind = self.map, self.behind
        while map_.dim() > 1 and map_.numel() and bool((map_ == map_[..., :1]).all()):
            map_, behind = map_[..., 0], (map_.shape[-1], *behind)
        return self if map_ is self.map else Mapped(map_.clone(), behind, self.is_whole)

    def with_behind(self, behind: tuple[int, ...]) -> Mapped:
        """The same rows of a tensor with these dimensions behind. (`replace` takes several times as long.)"""
        return Mapped(self.map, behind, self.is_whole, self.held)

    def widened(self, shape: tuple[int, ...]) -> Mapped:
        """For a tensor that has more dimensions behind."""
        return self.with_behind(tuple(shape[self.map.dim() :]))

    def only(self, grad: Tensor, sample: int) -> Tensor | None:
        """The gradient with all other samples' positions set to zero; None if nothing is left."""
        others = self.map.to(grad.device) != sample
        return None if bool(others.all()) else grad.clone().masked_fill_(self.beside(others), 0)


Layout = Regular | Mapped


def mapped(owner: Tensor) -> Mapped:
    """From a tensor with the sample of every position."""
    return Mapped(owner.to(torch.int32))


def regular(shape: tuple[int, ...], n: int) -> Iterator[Regular]:
    """The regular layouts that a shape permits, the likely ones first."""
    fitting = [(d, size // n) for d, size in enumerate(shape) if n and size and size % n == 0]
    for d, each in fitting:
        for block in {each: None, 1: None}:
            yield Regular(shape, n, d, block)
    for d, each in fitting:
        for block in range(each - 1, 1, -1):
            if each % block == 0:
                yield Regular(shape, n, d, block)


def same(one: Layout, other: Layout) -> bool:
    """Whether no position is said to be of one sample here and of another there."""
    if isinstance(one, Regular) and one == other:
        return True
    a, b = one.owner(), other.owner()
    return not bool(((a.cpu() != b.cpu()) & (a.cpu() >= 0) & (b.cpu() >= 0)).any())


def complete(owner: Tensor, n: int) -> Layout:
    """Positions that no gradient reached, from the others if these follow just one regular layout."""
    unseen = owner == UNSEEN
    if not owner.numel() or bool(unseen.all()):
        return mapped(owner)
    fitting: Regular | None = None
    known: Tensor | None = None
    for layout in regular(tuple(owner.shape), n):
        wanted = layout.owner(owner.device)
        if bool((unseen | (owner == wanted)).all()):
            if known is not None and not torch.equal(known, wanted):
                return mapped(owner)  # more than one layout fits: none is known
            fitting, known = fitting or layout, wanted
    return mapped(owner) if fitting is None else fitting


def along(rows: Tensor, dim: int, shape: tuple[int, ...], n: int) -> Layout:
    """From the owners along one dimension. A regular layout, if they follow one and lie where they can be looked at."""
    if rows.device.type == "cpu" and not bool((rows == UNSEEN).any()):
        found = complete(rows, n)
        if isinstance(found, Regular):
            return Regular(shape, n, dim, found.block)
    view = [-1 if d == dim else 1 for d in range(dim + 1)]
    return Mapped(rows.int().view(view).expand(shape[: dim + 1]), shape[dim + 1 :])


def reshaped(layout: Layout, shape: tuple[int, ...], n: int) -> Layout:
    """For the same numbers in the same order, in another shape."""
    if 0 in shape:
        return Mapped(torch.zeros((), dtype=torch.int32), shape, is_whole=True)  # of no numbers, all are anybody's
    if isinstance(layout, Regular):
        unit = prod(layout.shape[layout.dim + 1 :]) * layout.block
        each = prod(shape)
        for dim, size in enumerate(shape):
            each //= max(size, 1)
            if (size > 1 or n == 1) and unit % each == 0 and (size * each) % (n * unit) == 0:
                return Regular(shape, n, dim, unit // each)
        lead, behind = layout.dim + 1, layout.shape[layout.dim + 1 :]
        whole = Regular(layout.shape[:lead], n, layout.dim, layout.block)
        layout = Mapped(whole.owner().int(), behind, is_whole=True)
    inner, k = prod(layout.behind), len(shape)
    while k > 1 and inner % prod(shape[k - 1 :]) == 0:
        k -= 1
    times = inner // max(prod(shape[k:]), 1)
    if times == 1 and tuple(layout.map.shape) == tuple(shape[:k]):  # the very map: what knows it by that goes on to
        found = layout.with_behind(tuple(shape[k:]))
        return found if k == 1 or layout.map.device.type != "cpu" else found.narrowed()
    rows = layout.map.flatten()
    rows = rows.repeat_interleave(times) if times > 1 else rows
    held = layout.held if k == 1 and times == 1 and layout.map.dim() == 1 else None
    found = Mapped(rows.reshape(shape[:k]), shape[k:], layout.is_whole, held)
    return found.narrowed() if rows.device.type == "cpu" else found


def merged(one: Layout, other: Layout, n: int, holds: list[Tensor] | None) -> Layout | None:
    """Of a tensor that is used in two ways: where one of them says nothing of a position, the other does. None if they
    contradict each other; with `holds`, whether they do on a GPU is to be read there later."""
    if one is other or (isinstance(one, Regular) and one == other):
        return one
    if isinstance(one, Regular) and isinstance(other, Regular):
        return None
    maps = [each.map for each in (one, other) if isinstance(each, Mapped)]
    if len(maps) == 2 and maps[0] is maps[1] and one.shape == other.shape:
        known = next((each for each in (one, other) if isinstance(each, Mapped) and each.is_whole), None)
        if known is not None or maps[0].device.type != "cpu":  # elsewhere what nobody saw may be completed below
            return known or one
    if [map_.dim() for map_ in maps] == [0, 0] and maps[0].device.type == "cpu" and torch.equal(*maps):
        return one  # all of it is one sample's
    device = next((each.device for each in maps if each.device.type != "cpu"), torch.device("cpu"))
    a, b = one.owner(device), other.owner(device)
    clear = ((a == b) | (a == UNSEEN) | (b == UNSEEN)).all()
    if holds is not None and device.type != "cpu":
        holds.append(clear)
        whole = [each for each in (one, other) if isinstance(each, Regular) or each.is_whole]
        return whole[0] if whole else mapped(torch.where(a == UNSEEN, b, a)).narrowed()
    if not bool(clear):
        return None
    found = complete(torch.where(a == UNSEEN, b, a), n)
    return found if isinstance(found, Regular) else found.narrowed()
