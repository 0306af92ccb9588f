"""Norms and sums of the gradients δᵀa of many samples: `a` is (n, t, i), `delta` is (n, t, o).

Three ways to the norms, each exact:
- *product*: form every sample's gradient, in tiles that bound memory: 2·n·t·o·i operations, and the sum over samples,
  which is the weight's own gradient, comes with it;
- *gram*: Σ over pairs of positions of ⟨a, a'⟩⟨δ, δ'⟩: n·t²·(o + i) operations, no gradient is formed;
- *rank one*: one position per sample: |a|²·|δ|².
"""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor

from unsum.kernels import costs, fused
from unsum.kernels.twins import gram as gram
from unsum.kernels.twins import wide as wide
from unsum.seams.operators import hint, is_stand_in

Way = Literal["product", "gram", "rank one"]

TILE = {"cpu": 1 << 25, "cuda": 1 << 27}  # elements of one tile of per-sample gradients
ONE_PLACE = ([1, 1], [1, 1], [0, 0], [1, 1])  # kernel, stride, padding, dilation of a linear layer seen as windows
FEW = {"cuda": 1 << 34}  # products of numbers, up to which starting kernels is what takes time in compiled code
SHORT = 512  # positions, up to which pairs of them are best taken where they are read, as measured
ALIGNED = 128  # rows of a tile: others take slow kernels on a GPU


def choose(a: Tensor, delta: Tensor, *, want_sum: bool) -> Way:
    """The cheapest way to the norms; with `want_sum`, where the weight's gradient is needed as well."""
    (_, t, i), o = a.shape, delta.shape[-1]
    if t == 1:
        return "rank one"
    if want_sum and is_stand_in(a) and hint(a.shape[0] * t) * i * o < FEW.get(a.device.type, 0):
        return "product"  # fewer kernels
    return costs.cheaper(hint(t), i, o, a.device.type, want_sum=want_sum)


def rows(values: Tensor) -> Tensor:
    """(n, …) as (n, numbers), also where a sample has one number or there is no sample."""
    return values.reshape(values.shape[0], prod(values.shape[1:]))


def squares(values: Tensor) -> Tensor:
    """(n,): the squared norm of each row, accumulated in float32 at least."""
    flat = rows(values)
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten(1)
    return torch.linalg.vector_norm(flat, dim=1, dtype=wide(flat.dtype)).square()


def sq_norms(a: Tensor, delta: Tensor, way: Way | None = None) -> Tensor:
    """(n,): |δᵀa|² of each sample."""
    way = way or choose(a, delta, want_sum=False)
    if way == "rank one":
        return squares(a) * squares(delta)
    if way == "gram":
        if a.shape[1] <= SHORT and not is_stand_in(a) and fused.serves("gram_sq_norms", a[:, None], delta[:, None]):
            return fused.gram_sq_norms(a[:, None], delta[:, None], *ONE_PLACE)  # type: ignore[no-any-return]
        return gram(a, delta, a, delta)
    return norms_and_sum(a, delta, want_sum=False)[0]


def norms_and_sum(a: Tensor, delta: Tensor, *, want_sum: bool, in_parts: bool = False) -> tuple[Tensor, Tensor | None]:
    """The squared norms (n,) and, from the same product, the sum over samples (o, i). `in_parts`: squared norms may be
    (parts, n), still to be added up."""
    (n, _, i), o = a.shape, delta.shape[-1]
    if a.device.type == "cpu" and not is_stand_in(a) and (some := _at_once(n, o * i)) < n:
        return (
            _one_by_one(a, delta, want_sum=want_sum) if some == 1 else _some_at_once(a, delta, some, want_sum=want_sum)
        )
    if (
        want_sum
        and costs.is_fused(a.shape[1], i, o, a.device.type)
        and fused.serves("products", a[:, None], delta[:, None])
    ):
        return fused.products(a[:, None], delta[:, None], *ONE_PLACE, False)[:2]
    tile = TILE.get(a.device.type, 1 << 25)
    several = hint(n)
    rows = o if several * o * i <= tile else max(ALIGNED, tile // max(several * i, 1) // ALIGNED * ALIGNED)
    if rows >= o:
        each = torch.bmm(delta.mT, a)
        if not want_sum:
            return squares(each), None
        return fused.parts_and_sum(each) if in_parts else fused.norms_and_sum(each)
    sq = torch.zeros(n, dtype=wide(a.dtype), device=a.device)
    total = torch.empty(o, i, dtype=a.dtype, device=a.device) if want_sum else None
    for first in range(0, o, rows):
        each = torch.bmm(delta[..., first : first + rows].mT, a)
        if total is None:
            sq += squares(each)
            continue
        part, total[first : first + rows] = fused.norms_and_sum(each)
        sq += part
    return sq, total


def _at_once(n: int, size: int) -> int:
    """Of how many samples a processor forms gradients of so many numbers at once: as many as stay in its cache, and one
    by one where a product of its own keeps all threads busy. As measured."""
    if n * size <= 1 << 20:
        return n
    return 1 if torch.get_num_threads() == 1 else max(1, (1 << 20) // size)


def _some_at_once(a: Tensor, delta: Tensor, some: int, *, want_sum: bool) -> tuple[Tensor, Tensor | None]:
    """Several samples' gradients at a time."""
    found, total, each = [], None, None
    for first in range(0, len(a), some):
        part = slice(first, first + some)
        if each is None or len(each) != len(a[part]):
            each = torch.bmm(delta[part].mT, a[part])
        else:
            torch.bmm(delta[part].mT, a[part], out=each)
        found.append(squares(each))
        if want_sum:
            summed = each.sum(0, dtype=wide(a.dtype))
            total = summed if total is None else total.add_(summed)
    return torch.cat(found), total


def _one_by_one(a: Tensor, delta: Tensor, *, want_sum: bool) -> tuple[Tensor, Tensor | None]:
    """One sample's gradient at a time, in memory that stays in the processor's cache."""
    each = torch.mm(delta[0].T, a[0])
    total = each.to(wide(a.dtype), copy=True) if want_sum else None
    squares = [torch.linalg.vector_norm(each, dtype=wide(a.dtype))]
    for k in range(1, len(a)):
        torch.mm(delta[k].T, a[k], out=each)
        squares.append(torch.linalg.vector_norm(each, dtype=wide(a.dtype)))
        if total is not None:
            total.add_(each)
    return torch.stack(squares).square(), total


def norms_and_each(a: Tensor, delta: Tensor, *, want_sum: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The squared norms (n,), the sum over samples (o, i) if it is wanted, and the gradients themselves (n, o, i)."""
    (n, _, i), o = a.shape, delta.shape[-1]
    is_whole = a.device.type != "cpu" or is_stand_in(a)
    some = n if is_whole else _at_once(n, o * i)
    if is_whole or some == n:
        each = torch.bmm(delta.mT, a)
        return (*(fused.norms_and_sum(each) if want_sum else (squares(each), None)), each)
    each = a.new_empty(n, o, i)
    found, total = [], torch.zeros(o, i, dtype=wide(a.dtype), device=a.device) if want_sum else None
    for first in range(0, n, some):  # what is in the processor's cache is read there
        part = slice(first, first + some)
        torch.bmm(delta[part].mT, a[part], out=each[part])
        found.append(squares(each[part]))
        if total is not None:
            total.add_(each[part].sum(0, dtype=total.dtype) if some > 1 else each[first])
    return torch.cat(found), total, each


def dots(a: Tensor, delta: Tensor, other_a: Tensor, other_delta: Tensor) -> Tensor:
    """(n, m): ⟨δ_nᵀa_n, δ_mᵀa_m⟩. Forms the gradients or not, whichever takes fewer operations."""
    (n, t, i), o, (m, s, _) = a.shape, delta.shape[-1], other_a.shape
    if n * m * t * s * (o + i) < n * m * o * i + (n * t + m * s) * o * i:
        left = torch.einsum("nti,msi->nmts", a, other_a.conj())
        right = torch.einsum("nto,mso->nmts", delta, other_delta.conj())
        return (left.to(wide(a.dtype)) * right.to(wide(a.dtype))).sum((2, 3))
    found = torch.zeros(n, m, dtype=wide(a.dtype), device=a.device)
    rows = max(1, min(o, TILE.get(a.device.type, 1 << 25) // max((n + m) * i, 1)))
    for first in range(0, o, rows):
        part = slice(first, first + rows)
        mine = torch.bmm(delta[..., part].mT, a).flatten(1).to(wide(a.dtype))
        other = torch.bmm(other_delta[..., part].mT, other_a).flatten(1).to(wide(a.dtype))
        found += mine @ other.conj().T
    return found
