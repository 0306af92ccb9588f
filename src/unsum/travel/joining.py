"""Tensors that are cut, joined, padded, turned over, repeated: along the samples, owners are moved as numbers are."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.graph.layout import UNSEEN, Layout, Mapped, Regular
from unsum.graph.nodes import is_leaf, signed
from unsum.seams.nodes import outputs_of
from unsum.travel.table import MIXED, SILENT, Answer, At, of_each, travels


@travels("Slice")
def slices(at: At) -> Layout | Answer:
    """What lies outside the slice gets no gradient from here."""
    (dim,) = at.dims()
    if dim not in at.varies or at.arg[dim] == at.shape[dim]:
        return at.same()
    own = at.rows()
    if own is None or own[0] != dim:
        return SILENT
    size = at.arg[dim]
    places = range(size)[slice(*(None if p is None else signed(p) for p in map(at.saved, ("start", "end", "step"))))]
    return at.by_rows(_placed(own[1], places, size), dim) if len(places) == len(own[1]) else SILENT


def _placed(rows: Tensor, places: range, size: int) -> Tensor:
    whole = rows.new_full((size,), UNSEEN)
    whole[places.start : places.stop : places.step] = rows
    return whole


@travels("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Chunk", together=True)
def split(at: At) -> Layout | Answer:
    """Pieces along a dimension."""
    (dim,) = at.dims()
    if dim not in at.varies and not any(isinstance(out, Mapped) and not out.map.dim() for out in at.outs):
        return of_each(at, At.same)
    parts: list[Tensor] = []
    for out, meta in zip(at.outs, outputs_of(at.node), strict=True):
        own = _along(at, out, dim, meta.shape[dim])
        if own is None:
            return SILENT
        parts.append(own)
    device = parts[0].device if len({part.device for part in parts}) == 1 else torch.device("cpu")
    return at.by_rows(torch.cat([part.to(device) for part in parts]), dim)


def _along(at: At, out: Layout | None, dim: int, size: int) -> Tensor | None:
    """The owners of a result along a dimension of this size; None if they are not the same along all others."""
    if out is None:
        return torch.full((size,), UNSEEN, dtype=torch.int32)
    if isinstance(out, Mapped) and not out.map.dim():  # all of it is one sample's
        return out.map.expand(size)
    own = at.rows(out)
    return own[1] if own is not None and own[0] == dim else None


@travels("Cat")
def cat(at: At) -> Layout | Answer:
    """Each argument is a piece of the result."""
    (dim,) = at.dims()
    if dim not in at.varies:
        return at.same()
    own = at.rows()
    if own is None or own[0] != dim or len(at.arg) != len(at.shape):
        return SILENT
    before = 0
    for child, output in at.node.next_functions[: at.edge]:
        if child is None:
            return SILENT  # how long it was is not written anywhere
        before += (child.variable if is_leaf(child) else outputs_of(child)[output]).shape[dim]
    return at.by_rows(own[1][before : before + at.arg[dim]], dim)


@travels("Stack")
def stack(at: At) -> Layout | Answer:
    """Each argument is one slice of the result."""
    (dim,) = at.dims()
    if isinstance(at.layout, Regular) and at.layout.dim != dim:
        return at.along(at.layout.dim - (dim < at.layout.dim))
    own = at.rows()
    if own is None or own[0] != dim:
        return SILENT
    return Mapped(own[1][at.edge].clone(), at.arg)


@travels("Roll Flip")
def turn(at: At) -> Layout | Answer:
    """Numbers change places along some dimensions."""
    dims = at.dims("dims") if at.saved("dims") else []
    if not set(dims) & set(at.varies) and dims:
        return at.same()
    own = at.rows()
    if own is None or not dims:
        return SILENT
    rows = own[1]
    for k, dim in enumerate(dims):
        if dim == own[0]:
            rows = rows.flip(0) if at.kind == "Flip" else rows.roll(-signed(at.saved("shifts")[k]))
    return at.by_rows(rows, own[0])


@travels("ConstantPadNd")
def pad(at: At) -> Layout | Answer:
    """Numbers in front and behind, which are nobody's."""
    given = [signed(p) for p in at.saved("pad")]
    around = {len(at.shape) - 1 - k // 2: given[k : k + 2] for k in range(0, len(given), 2)}
    if not any(any(around.get(d, ())) for d in at.varies):
        return at.same()
    own = at.rows()
    if own is None:
        return SILENT
    front, back = around[own[0]]
    rows = own[1][max(front, 0) : len(own[1]) - max(back, 0)]
    short = [rows.new_full((max(-p, 0),), UNSEEN) for p in (front, back)]
    return at.by_rows(torch.cat([short[0], rows, short[1]]), own[0])


@travels("Repeat")
def repeat(at: At) -> Layout | Answer:
    """Copies side by side, each of which must be of the same samples."""
    missing = len(at.shape) - len(at.arg)
    if len(at.varies) != 1 or not isinstance(at.layout, Regular):
        return SILENT
    dim = at.layout.dim - missing
    if dim < 0 or (at.arg[dim] == 1 and at.shape[at.layout.dim] != 1):
        return MIXED
    size = at.arg[dim]
    if size and size % (at.layout.n * at.layout.block) == 0:
        return Regular(at.arg, at.layout.n, dim, at.layout.block)
    return SILENT


@travels("Unfold")
def unfold(at: At) -> Layout | Answer:
    """Windows along one dimension, whose numbers lie along a new last one."""
    (dim,) = at.dims("dimension", rank=len(at.arg))
    return at.same_if(all(d != dim and d < len(at.arg) for d in at.varies))


@travels("Diagonal")
def diagonal(at: At) -> Layout | Answer:
    """The diagonal is the last dimension of the result; the two that it came from are gone."""
    dims = {*at.dims("dim1", rank=len(at.arg)), *at.dims("dim2", rank=len(at.arg))}
    left = [d for d in range(len(at.arg)) if d not in dims]
    if not isinstance(at.layout, Regular) or at.layout.dim >= len(left):
        return SILENT
    return at.along(left[at.layout.dim])


@travels("DiagEmbed")
def diag_embed(at: At) -> Layout | Answer:
    """The last dimension becomes the diagonal of two."""
    dims = {*at.dims("dim1"), *at.dims("dim2")}
    left = [d for d in range(len(at.shape)) if d not in dims]
    if not isinstance(at.layout, Regular) or at.layout.dim in dims:
        return SILENT
    return at.along(left.index(at.layout.dim))
