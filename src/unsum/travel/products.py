"""Products: rows and columns are kept, what lies between is summed over."""

from __future__ import annotations

from unsum.graph.layout import Layout, Mapped
from unsum.travel.elementwise import elementwise
from unsum.travel.table import MIXED, SILENT, Answer, At, travels


@travels("Mm Addmm SparseAddmm")
def mm(at: At) -> Layout | Answer:
    """(rows, k) @ (k, columns)."""
    edge = at.edge - (at.kind != "Mm")
    if edge < 0:
        return elementwise(at)
    return _kept(at, edge)


@travels("matmul_with_hp_or_float8_args mx_mm")
def float8(at: At) -> Layout | Answer:
    """(…, k) times a matrix, in float8."""
    is_row = len(at.shape) - 1 not in at.varies
    return (at.same() if at.edge == 0 else MIXED) if is_row else SILENT


@travels("Bmm Baddbmm")
def bmm(at: At) -> Layout | Answer:
    """(b, rows, k) @ (b, k, columns)."""
    edge = at.edge - (at.kind != "Bmm")
    if edge < 0:
        return elementwise(at)
    return at.same() if list(at.varies) == [0] else _kept(at, edge)


def _kept(at: At, edge: int) -> Layout | Answer:
    """The left factor keeps the rows, the right one the columns."""
    last = max(at.varies, default=0)
    rows = len(at.shape) - 2
    if isinstance(at.layout, Mapped):
        if last > rows:
            return SILENT
        if edge == 0:
            return at.same()
        return MIXED if last == rows else at.same()
    if last < rows:
        return at.same()
    return at.same() if (last == rows) == (edge == 0) else MIXED


@travels("Mv")
def mv(at: At) -> Layout | Answer:
    """(rows, k) @ (k,)."""
    return at.same() if at.edge == 0 else MIXED


@travels("Addmv")
def addmv(at: At) -> Layout | Answer:
    """A vector, and a product with one."""
    return elementwise(at) if at.edge == 0 else at.same() if at.edge == 1 else MIXED


@travels("GroupedMm")
def grouped_mm(at: At) -> Layout | Answer:
    """Rows, each times one of several matrices."""
    if len(at.shape) != 2 or list(at.varies) != [0]:
        return SILENT
    return at.same() if at.edge == 0 else MIXED


@travels("Cdist EuclideanDist")
def cdist(at: At) -> Layout | Answer:
    """Every row of one against every row of the other."""
    (dim,) = at.varies if len(at.varies) == 1 else (-1,)
    rank = len(at.shape)
    if dim < 0 or len(at.arg) != rank:
        return SILENT
    if dim < rank - 2:
        return at.same()
    mine = dim == rank - 2 if at.edge == 0 else dim == rank - 1
    return at.along(rank - 2) if mine else MIXED


@travels("", prefixes="ScaledDotProduct")
def attention(at: At) -> Layout | Answer:
    """(…, L, E): queries, keys, values and a mask share what lies before the last two dimensions, spread or not."""
    rank = len(at.shape)
    if any(d >= rank - 2 for d in at.varies) or (at.edge < 3 and len(at.arg) != rank):
        return SILENT
    if len(at.arg) != rank or any(at.arg[d] == 1 for d in at.varies):
        offset = rank - len(at.arg)
        here = [d - offset for d in at.varies]
        if all(j < 0 or (at.arg[j] == 1 and at.shape[j + offset] != 1) for j in here):
            return MIXED
        return at.along(here[0]) if len(here) == 1 and here[0] >= 0 else SILENT
    return at.same()


@travels("EfficientAttention FlashAttention")
def attention_by_position(at: At) -> Layout | Answer:
    """(batch, L, heads, E)."""
    return at.same_if(list(at.varies) == [0] and len(at.shape) == 4)
