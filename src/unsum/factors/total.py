"""A parameter that is met more than once: a sum of factors, with exact cross terms; never a sum of norms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from unsum.factors.dense import Dense
from unsum.factors.lookup import Lookup
from unsum.factors.outer import Outer
from unsum.factors.routed import Routed
from unsum.factors.scale import Scale
from unsum.factors.windows import Windows
from unsum.kernels.product import TILE, rows

Term = Outer | Windows | Lookup | Scale | Routed | Dense


def total(parts: Sequence[Term]) -> list[Term]:
    """The same sum with as few parts as can be: those of one kind become one, with more positions."""
    if len(parts) < 2:
        return list(parts)
    alike: list[tuple[Any, list[Any]]] = []  # no dictionary: sizes are symbols while torch compiles
    for part in parts:
        key = type(part), part.joint
        same = next((held for known, held in alike if known == key), None)
        if same is None:
            alike.append((key, [part]))
        else:
            same.append(part)
    merged = [first.plus(*others) if others else first for _, (first, *others) in alike]
    return total(merged) if len(merged) < len(parts) else merged  # of other kinds, perhaps


def dense(parts: Sequence[Term]) -> Tensor:
    """(n, *shape)."""
    first, *others = [part.per_sample() for part in parts]
    for other in others:
        first = first + other
    return first


def sq_norms(parts: Sequence[Term]) -> Tensor:
    """(n,): of the sum."""
    parts = total(parts)
    if len(parts) == 1:
        return parts[0].sq_norms()
    crossed = [cross(one, other) for one, other in combinations(parts, 2)]
    if any(term is None for term in crossed):
        return Dense(dense(parts)).sq_norms()
    terms = [part.sq_norms() for part in parts] + [2 * term for term in crossed if term is not None]
    return sum(terms[1:], terms[0]).clamp_min(0)


def cross(one: Term, other: Term) -> Tensor | None:
    """(n,): ⟨G_n, G'_n⟩ of two kinds, where it takes no gradient formed."""
    if isinstance(one, Outer) and isinstance(other, Lookup):
        one, other = other, one
    if isinstance(one, Lookup) and isinstance(other, Outer) and other.groups == 1:
        rows, columns = (other.a, other.delta) if other.turned else (other.delta, other.a)
        if other.shape == (rows.shape[-1], columns.shape[-1]):
            return one.cross(other)
    return None


def dot(one: Sequence[Term], other: Sequence[Term]) -> Tensor:
    """(n, m): inner products of two sums."""
    one, other = total(one), total(other)
    if len(one) == len(other) == 1 and type(one[0]) is type(other[0]):
        mine: Any = one[0]
        if not isinstance(mine, Outer | Routed) or mine.turned == other[0].turned:  # type: ignore[union-attr]
            return mine.dot(other[0])  # type: ignore[no-any-return]
    return Dense(dense(one)).dot(Dense(dense(other)))


def dot_dense(parts: Sequence[Term], other: Tensor) -> Tensor:
    """(n, m): inner products with m tensors of the parameter's shape."""
    found = [_dot_dense(part, other) for part in total(parts)]
    return sum(found[1:], found[0])


def _dot_dense(part: Term, other: Tensor) -> Tensor:
    if isinstance(part, Lookup):
        return part.dot_dense(other)
    flat = rows(other).conj().T
    if isinstance(part, Outer) and part.groups == 1 and part.n > 1:
        some = max(1, TILE.get(other.device.type, 1 << 25) // max(len(flat), 1))  # gradients at a time
        return torch.cat([rows(each.per_sample()) @ flat for each in part.split(some)])
    return rows(part.per_sample()) @ flat


def token_dots(part: Term, other: Tensor) -> Tensor | None:
    """(n, t, m): inner products of each position's part with m tensors of the parameter's shape; None if it has no
    positions."""
    if isinstance(part, Lookup):
        return part.token_dots(other)
    if isinstance(part, Windows):
        part = part.outer()
    if isinstance(part, Outer) and part.groups == 1:
        return part.token_dots(other)
    each = part.tokens()
    return None if each is None else each.unsqueeze(-1).flatten(2) @ rows(other).conj().T


def token_projected(part: Term, matrices: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """(n, t, numbers): each position's part, projected from both sides, or as it is without matrices; None if it has no
    positions."""
    if isinstance(part, Windows):
        part = part.outer()
    if matrices is not None and (isinstance(part, Lookup) or (isinstance(part, Outer) and part.groups == 1)):
        apart = part.by_position()
        t = part.delta.shape[1]
        if len(part.shape) > 1:
            return apart.project(*matrices).flatten(1).unflatten(0, (part.n, t))
    each = part.tokens()
    if each is None:
        return None
    flat = each.flatten(0, 1)
    if matrices is None:
        return rows(flat).unflatten(0, each.shape[:2])
    left, right = matrices
    found = Dense(flat).project(left, right) if flat.dim() > 2 else flat @ left.to(flat).T
    return found.flatten(1).unflatten(0, each.shape[:2])
