"""Matrix products: a weight meets its input once per position, an outer product each."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.routed import Routed
from unsum.factors.scale import Scale
from unsum.graph.layout import Regular
from unsum.kernels import fused
from unsum.rules.registry import Call, Once, left, rule, scaled


@rule("AddmmBackward0", 2, rows=("mat1",))
def addmm(call: Call) -> Outer | Routed:
    """y = bias + a @ W."""
    if _is_routed(call, 2):
        return _rows(call, call.saved("mat1"), call.saved("alpha"))
    a, delta, alpha = call.take(call.saved("mat1")), call.take(call.delta), call.saved("alpha")
    if alpha == 1 and not call.only_nobodys:  # |δ|² of each position, for the bias, from the same pass
        call.memo["tokens"] = Once(
            lambda: [s.view(a.shape[:2]) for s in fused.token_sq_norms(a.flatten(0, 1), delta.flatten(0, 1))]
        )
    return Outer(a, scaled(delta, alpha), call.shape, turned=True, token_squares=left(call, "tokens", 0))


@rule("AddmmBackward0", 0, rows=())
def addmm_bias(call: Call) -> Scale:
    """The bias is added to every row."""
    beta = call.saved("beta")
    squares = left(call, "tokens", 1) if beta == 1 else None
    return Scale(scaled(call.take(call.delta), beta), None, call.shape, token_squares=squares)


@rule("MmBackward0", 1, rows=("self",))
def mm(call: Call) -> Outer | Routed:
    """y = a @ W."""
    if _is_routed(call, 1):
        return _rows(call, call.saved("self"), 1)
    return Outer(call.take(call.saved("self")), call.take(call.delta), call.shape, turned=True)


@rule("MmBackward0", 0, 0)
def mm_from_the_left(call: Call) -> Outer | None:
    """y = W @ a, samples along the columns."""
    return _columns(call, call.saved("mat2"), 1)


@rule("AddmmBackward0", 1, 0)
def addmm_from_the_left(call: Call) -> Outer | None:
    """y = bias + W @ a, samples along the columns."""
    return _columns(call, call.saved("mat2"), call.saved("alpha"))


def _is_routed(call: Call, edge: int) -> bool:
    """Whether W is one of several matrices side by side, an expert, and meets more rows of one sample than of another.
    Taken apart by sample, they would be padded, expert by expert."""
    by = call.by
    if by.is_full or by.lead != 1:
        return False
    child = call.node.next_functions[edge][0]
    while child is not None and child.name() in ("TBackward0", "TransposeBackward0", "ToCopyBackward0"):
        child = child.next_functions[0][0]
    return child is not None and child.name() in ("SelectBackward0", "UnbindBackward0")


def _rows(call: Call, a: Tensor, factor: float) -> Routed:
    """The rows as they lie, and whose each is."""
    sample, n = call.by.rows.to(a.device), call.by.n
    if call.only_nobodys:
        sample, n = torch.where(sample < 0, 0, -1), 1
    delta = scaled(call.delta, factor)
    return Routed(a, delta, sample, 0, n, 1, call.shape, turned=True)


def _columns(call: Call, a: Tensor, factor: float) -> Outer | None:
    layout = call.by.layout
    if not isinstance(layout, Regular) or layout.dim != 1 or call.only_nobodys:
        return None
    apart = lambda x: x.T.unflatten(0, (-1, layout.n, layout.block)).movedim(1, 0).flatten(1, 2)
    return Outer(apart(a), scaled(apart(call.delta), factor), call.shape)
