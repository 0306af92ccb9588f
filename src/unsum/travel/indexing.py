"""Rows that whole numbers move: whose they are is evaluated from the indices that nodes have saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from unsum.graph.layout import UNSEEN, Layout, Mapped, Regular, complete
from unsum.travel.table import SILENT, Answer, At, Taken, travels

Indices = list[Tensor | None]


@travels("Gather ScatterReduce")
def gather(at: At) -> Layout | Answer:
    """Along one dimension; the others keep their places."""
    return at.same_if(at.dims()[0] not in at.varies)


@travels("IndexFill")
def fill(at: At) -> Layout | Answer:
    """What was filled in is nobody's."""
    return at.same_if(at.edge == 0)


@travels("IndexAdd IndexCopy")
def index_add(at: At) -> Layout | Answer:
    """Rows of a source are added to, or take the place of, rows of the result."""
    (dim,) = at.dims()
    if at.edge == 0 or dim not in at.varies:
        return at.same()
    index = at.saved("index").detach().reshape(-1)
    if isinstance(at.layout, Regular):
        rows = _rows(at.shape[dim], at.journey.n, at.layout.block, index.device)
    elif (own := at.rows()) is not None and own[0] == dim:
        rows = own[1].to(index.device)
    else:
        return SILENT
    index = index.long()
    rows = rows[index]
    if isinstance(at.layout, Regular) and not dim and at.journey.n * at.layout.block == at.shape[0]:
        at.journey.taken[id(rows)] = Taken(rows, index, at.shape[0])
    return _moved(at, rows, dim, own=True)


@travels("Scatter ScatterAdd")
def scatter(at: At) -> Layout | Answer:
    """Like it, number by number."""
    if at.edge == 0:
        return at.same()
    if at.dims()[0] in at.varies:
        return SILENT
    index = at.saved("index")
    return at.same_if(tuple(index.shape) == at.arg)


@travels("IndexSelect")
def index_select(at: At) -> Layout | Answer:
    """Rows along one dimension."""
    (dim,) = at.dims()
    if dim not in at.varies:
        return at.same()
    return _sent(at, [None] * dim + [at.saved("index").detach().reshape(-1)])


@travels("Index UnsafeIndex")
def index(at: At) -> Layout | Answer:
    """x[i, :, j]: the dimensions of the indices take the place of those that are indexed."""
    return _sent(at, _expanded(at.saved("indices")))


@travels("IndexPut IndexPutImpl UnsafeIndexPut")
def index_put(at: At) -> Layout | Answer:
    """x[i] = values."""
    if at.edge == 0:
        return at.same()
    indices = _expanded(at.saved("indices"))
    given = [k for k, each in enumerate(indices) if each is not None]
    if given != list(range(len(given))):  # where others lie between the indices, these come first in the values
        is_block = bool(given) and given == list(range(given[0], given[-1] + 1))
        return at.same_if(is_block and all(d < given[0] for d in at.varies) and len(at.arg) == len(at.shape))
    lead = len(given)
    broad = torch.broadcast_tensors(*[each for each in indices if each is not None])
    if at.arg != (*broad[0].shape, *at.shape[lead:]) or any(d >= lead for d in at.varies):
        return SILENT
    layout = at.layout
    device = broad[0].device
    owner = layout.owner(device) if isinstance(layout, Regular) else layout.beside(layout.map.to(device))
    rows = owner.expand(at.shape).flatten(lead)[..., 0] if len(at.shape) > lead else owner.expand(at.shape)
    taken = rows[tuple(each.long() for each in broad)]
    if taken.dim() == 1:
        return _moved(at, taken, 0, own=True)
    return Mapped(taken.int(), at.arg[taken.dim() :], is_whole=isinstance(layout, Regular) or layout.is_whole)


def _expanded(indices: tuple[Tensor | None, ...]) -> Indices:
    """A mask stands for the places where it is true."""
    found: Indices = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8):
            found += each.detach().nonzero().unbind(1)
        else:
            found.append(None if each is None else each.detach())
    return found


def _sent_again(at: At, index: Tensor, *, others: bool) -> Layout | None:
    """The same for rows that were judged before, in as few steps as can be: this is done in every batch. `others`:
    whether there are indices of further dimensions, which matter only where samples are no blocks of rows."""
    layout, n, size = at.layout, at.journey.n, at.arg[0]
    expected = (at.journey.expected or {}).get((at.node, at.edge), "")
    if isinstance(layout, Regular):
        if layout.dim:
            return None
        rows = _rows(layout.shape[0], n, layout.block, index.device)
    elif layout.map.dim() == 1:
        rows = layout.map
    else:
        return None
    in_blocks = expected == "0" and size % n == 0
    taken = at.journey.taken.get(id(rows))
    if in_blocks and taken is not None and taken.size == size and _are_the_same(taken.index, index):
        return Regular(at.arg, n, 0, size // n)  # they go back to where they were taken from
    index = index % size  # negative ones count from the end
    if in_blocks:
        at.journey.holds.append((_rows(size, n, size // n, index.device)[index] == rows).all())
        return Regular(at.arg, n, 0, size // n)
    if expected != "rows" or others:
        return None
    sent = rows.new_full((size,), UNSEEN).scatter_(0, index, rows)
    at.journey.holds.append((sent >= 0).all())
    if len(index) != size:
        at.journey.holds.append((sent[index] == rows).all())
    return Mapped(sent, at.arg[1:], is_whole=True, held=_held(at, index, size))


def _are_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return bool(one.numel()) and (one.data_ptr(), one.shape, one.stride()) == (
        other.data_ptr(), other.shape, other.stride(),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _rows(size: int, n: int, block: int, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) // block % n).int()


def _sent(at: At, indices: Indices) -> Layout | Answer:
    """The argument of which rows were taken: what arrives at a row of the result is sent to the row it came from."""
    given = [each for each in indices if each is not None]
    if at.journey.expected is not None and indices[0] is not None and _are_rows(given, indices):
        again = _sent_again(at, given[0].long(), others=len(given) > 1)
        if again is not None:
            return again
    dims = [k for k, each in enumerate(indices) if each is not None]
    count = len(dims)
    shape = torch.broadcast_shapes(*[each.shape for each in given])
    is_block = dims == list(range(dims[0], dims[0] + count))
    first = dims[0] if is_block else 0  # of the index's dimensions in the result
    last = first + len(shape)
    layout = at.layout
    if isinstance(layout, Regular) and not first <= layout.dim < last:
        if not is_block:
            return SILENT
        return at.along(layout.dim if layout.dim < first else layout.dim - len(shape) + count)
    if not is_block or (isinstance(layout, Mapped) and (layout.map.dim() > last or first)):
        return at.same_if(isinstance(layout, Mapped) and layout.map.dim() <= first and is_block)
    device = given[0].device
    if isinstance(layout, Regular):
        view = [-1 if d == layout.dim else 1 for d in range(first, last)]
        owner = layout.along(device).int().view(view).expand(shape)
    else:
        owner = layout.map.to(device).view((*layout.map.shape, *(1 for _ in shape[layout.map.dim() :]))).expand(shape)
    sizes = at.arg[first : first + count]
    places = [each.long().expand(shape) for each in given]
    flat = torch.zeros((), dtype=torch.long, device=device)
    for place, size in zip(places, sizes, strict=True):
        flat = flat * size + place % max(size, 1)  # negative ones count from the end
    flat, owner = flat.flatten(), owner.flatten()
    total = 1
    for size in sizes:
        total *= size
    sent = owner.new_full((total,), UNSEEN).scatter_(0, flat, owner)
    clear = (sent[flat] == owner).all()  # a row that was taken for several samples is nobody's
    if at.journey.expected is not None:
        at.journey.holds.append(clear)
    elif not bool(clear):
        return SILENT
    held = _held(at, flat, total) if first == 0 and count == 1 else None
    if first:
        return _moved(at, sent, first) if count == 1 else SILENT
    if count == 1:
        return _moved(at, sent, 0, held)
    return _settled(at, Mapped(sent.view(sizes), at.arg[count:]))


def _are_rows(given: Sequence[Tensor], indices: Indices) -> bool:
    """Whether the first dimensions are indexed, by as many numbers each, and no other."""
    if given[0].dim() != 1 or any(each is None for each in indices[: len(given)]):
        return False
    return len(given) == 1 or len({each.shape for each in given}) == 1


def _held(at: At, flat: Tensor, total: int) -> Tensor | None:
    """(n, t): the rows of each sample, where rows only change places and all samples have as many."""
    layout = at.layout
    if len(flat) != total or not total:
        return None
    if isinstance(layout, Regular):
        return flat.unflatten(0, (-1, layout.n, layout.block)).movedim(1, 0).flatten(1) if layout.dim == 0 else None
    return None if layout.held is None else flat[layout.held]


def _moved(at: At, rows: Tensor, dim: int, held: Tensor | None = None, *, own: bool = False) -> Layout | Answer:
    """Owners along a dimension of the argument. `own`: each is that of a row of the result."""
    if at.arg[dim] != len(rows):
        return SILENT
    is_whole = own and (isinstance(at.layout, Regular) or at.layout.is_whole)
    if dim:
        rows = rows.view((*(1 for _ in range(dim)), -1)).expand(at.arg[: dim + 1])
    return _settled(at, Mapped(rows.int(), at.arg[dim + 1 :], is_whole=is_whole, held=held))


def _settled(at: At, found: Mapped) -> Layout | Answer:
    """A regular layout, if it is one. In a graph that was judged before: if it was one then, to be confirmed later."""
    n, expected = at.journey.n, at.journey.expected
    if expected is None:
        whole = complete(found.map, n)
        if isinstance(whole, Regular):
            return Regular(at.arg, n, whole.dim, whole.block)
        is_whole = found.is_whole or bool((found.map >= 0).all())
        return Mapped(found.map, found.behind, is_whole, found.held if is_whole else None)
    wanted = expected.get((at.node, at.edge), "")
    if wanted == "rows":
        if not found.is_whole:
            at.journey.holds.append((found.map >= 0).all())
        return Mapped(found.map, found.behind, is_whole=True, held=found.held)
    if wanted.isdigit() and at.arg[int(wanted)] % max(n, 1) == 0:
        dim = int(wanted)
        regular = Regular(tuple(found.map.shape), n, dim, at.arg[dim] // max(n, 1))
        at.journey.holds.append(((found.map == regular.owner(found.map.device)) | (found.map == UNSEEN)).all())
        return Regular(at.arg, n, dim, regular.block)
    return found
