"""Rows that belong to somebody each (a sample, a sample's rows at one expert), in any order: sorted into segments, and
products of every segment. Sizes of results follow from shapes, so that a GPU need not be waited for; only padding to
the longest segment takes one look at the numbers.

Squared norms of Σ_t δ_t ⊗ a_t over each segment, as of one matrix of several side by side:
- *gram*: by pairs of positions of a sample, of which those at different matrices do not count;
- *product*: the gradient of every segment is formed, in tiles that bound memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unsum.kernels.product import ALIGNED, TILE, squares, wide


def sort(owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows (r,), those of each of `count` owners after each other, in their own order; and where each owner's
    begin and the last one's end, (count + 1,). Rows of owners below 0 come first, others last."""
    found = torch.sort(owner.contiguous(), stable=True)
    bounds = torch.arange(count + 1, device=owner.device, dtype=owner.dtype)
    return found.indices, torch.searchsorted(found.values, bounds)


def padded(order: Tensor, bounds: Tensor) -> Tensor:
    """(count, longest): the rows of each owner, then -1. Waits for the device."""
    counts = bounds.diff()
    longest = int(counts.max()) if len(counts) and len(order) else 0
    along = torch.arange(longest, device=order.device)
    place = (bounds[:-1, None] + along).clamp_max(len(order) - 1)
    return torch.where(along < counts[:, None], order[place], -1)


def taken(flat: Tensor, index: Tensor, *, is_full: bool) -> Tensor:
    """(n, t, *features) of the rows that an index (n, t) names; zeros where it is -1."""
    if is_full:
        return flat[index]
    found = flat[index.clamp_min(0)]
    return found.masked_fill_((index < 0).view(*index.shape, *(1 for _ in found.shape[2:])), 0)


def products(delta: Tensor, a: Tensor, ends: Tensor) -> Tensor:
    """(segments, o, i): Σ δ_r ⊗ a_r over the rows of each segment; δ (r, o) and a (r, i) are in order, and each segment
    begins where the one before it ends."""
    if not has_kernel(delta, a):
        return products_twin(delta, a, ends)
    found = F.grouped_mm(delta.mT, a, offs=ends.to(torch.int32))
    return found.masked_fill_(_is_empty(ends)[:, None, None], 0)  # not all devices write those


def products_twin(delta: Tensor, a: Tensor, ends: Tensor) -> Tensor:
    """The same, segment by segment."""
    found = delta.new_zeros(len(ends), delta.shape[1], a.shape[1])
    first = 0
    for each, last in zip(found, ends.tolist(), strict=True):
        if last > first:
            torch.mm(delta[first:last].mT, a[first:last], out=each)
        first = max(first, last)
    return found


def _is_empty(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1)) <= 0


def has_kernel(delta: Tensor, a: Tensor) -> bool:
    """Whether torch has one kernel for all segments: others wait for the device, and go one by one."""
    if not hasattr(F, "grouped_mm") or a.device.type != "cuda" or torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    return all(
        t.dtype == torch.bfloat16
        and t.stride(1) == 1
        and t.stride(0) % 8 == t.shape[1] % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in (delta, a)
    )


def product_norms(delta: Tensor, a: Tensor, ends: Tensor) -> Tensor:
    """(segments,): squared norms of the products, which are formed some rows at a time."""
    count, (_, i), o = len(ends), a.shape, delta.shape[1]
    tile = TILE.get(a.device.type, 1 << 25)
    rows = o if count * o * i <= tile else max(ALIGNED, tile // max(count * i, 1) // ALIGNED * ALIGNED)
    sq = torch.zeros(count, dtype=wide(a.dtype), device=a.device)
    for first in range(0, o, rows):
        part = delta[:, first : first + rows]
        found = F.grouped_mm(part.mT, a, offs=ends.to(torch.int32)) if has_kernel(part, a) else None
        sq += squares(products_twin(part, a, ends) if found is None else found)
    return sq.masked_fill_(_is_empty(ends), 0)


def gram_norms(delta: Tensor, a: Tensor, matrix: Tensor) -> Tensor:
    """(n,): squared norms over all matrices, of δ (n, t, o) and a (n, t, i); `matrix` (n, t) says which one each
    position met, below 0 for none."""
    left, right = torch.bmm(a, a.mT), torch.bmm(delta, delta.mT)
    apart = (matrix[:, :, None] != matrix[:, None, :]) | (matrix < 0)[:, :, None]
    # Not times 0: what met nothing may be anything, also NaN.
    return (left.to(wide(a.dtype)) * right).masked_fill_(apart, 0).sum((1, 2))
