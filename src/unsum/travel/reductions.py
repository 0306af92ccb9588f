"""Dimensions that are reduced, and operations along some dimensions that leave the others alone."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.graph.layout import UNSEEN, Layout, Mapped, Regular
from unsum.travel.table import SILENT, Answer, At, of_each, travels


@travels(
    "Sum Mean Amax Amin Max Min Var Std VarMean StdMean Logsumexp Norm LinalgVectorNorm Prod Mode Median Nanmedian "
    "Kthvalue Nansum Aminmax"
)
def reduce(at: At) -> Layout | Answer:
    """What is reduced away was of the same sample; the other dimensions keep their order."""
    rank = len(at.arg)
    dims = set(at.dims(rank=rank))
    if not dims or (dims & set(at.varies) and len(at.shape) == rank):
        return SILENT
    if len(at.shape) == rank:
        return at.same()
    return _with_dims(at, dims)


def _with_dims(at: At, dims: set[int]) -> Layout | Answer:
    """The argument has these dimensions, and the result has not."""
    left = [d for d in range(len(at.arg)) if d not in dims]
    if len(left) != len(at.shape):
        return SILENT
    layout = at.layout
    if isinstance(layout, Regular):
        return at.along(left[layout.dim])
    lead = layout.map.dim()
    last = left[lead - 1] + 1
    if tuple(at.arg[d] for d in left[:lead]) != tuple(layout.map.shape):
        return SILENT
    sizes = [1 if d in dims else at.arg[d] for d in range(last)]
    return Mapped(layout.map.reshape(sizes).expand(at.arg[:last]), at.arg[last:], layout.is_whole)


@travels(
    "Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp Cummax Cummin FftC2C FftR2C FftC2R Glu "
    "Topk Sort LinalgCross MaskedSoftmax"
)
def within(at: At) -> Layout | Answer:
    """Along some dimensions numbers meet; along all others they keep their places."""
    return at.same_if(not set(at.dims()) & set(at.varies))


@travels("Select Unbind", together=True)
def select(at: At) -> Layout | Answer:
    """The argument has one dimension more. All of its slices along it lie alike, unless each is one sample's."""
    (dim,) = at.dims(rank=len(at.arg))
    if at.kind == "Unbind" and any(isinstance(out, Mapped) for out in at.outs):
        return _unbound(at, dim)
    return of_each(at, lambda at: _with_dims(at, {dim}))


def _unbound(at: At, dim: int) -> Layout | Answer:
    """Every sample by itself: the owners along the dimension are those of the results."""
    if any(isinstance(out, Regular) or (out is not None and out.map.dim()) for out in at.outs):
        return SILENT
    owners = [out.map if isinstance(out, Mapped) else None for out in at.outs]
    like = next(owner for owner in owners if owner is not None)
    return at.by_rows(_stacked(owners, like), dim)


def _stacked(owners: list[Tensor | None], like: Tensor) -> Tensor:
    return torch.stack([like.new_full((), UNSEEN) if owner is None else owner for owner in owners])


@travels("", prefixes="LinalgSolve LinalgInv Cholesky LinalgCholesky LinalgEigh LinalgEig LinalgSvd LinalgQr LinalgDet "
         "LinalgSlogdet LinalgSolveTriangular LinalgMatrixExp LinalgPinv LinalgLu TriangularSolve CholeskyInverse "
         "Trace LinalgHouseholder")  # fmt: skip
def matrices(at: At) -> Layout | Answer:
    """Matrices side by side: the last two dimensions of an argument are its own."""
    return at.same_if(all(d < len(at.arg) - 2 for d in at.varies))
