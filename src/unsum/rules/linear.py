"""Matrix products: a weight meets its input once per position, an outer product each."""

from __future__ import annotations

from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.graph.layout import Regular
from unsum.kernels import fused
from unsum.rules.registry import Call, Once, left, rule, scaled


@rule("AddmmBackward0", 2, rows=("mat1",))
def addmm(call: Call) -> Outer:
    """y = bias + a @ W."""
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
def mm(call: Call) -> Outer:
    """y = a @ W."""
    return Outer(call.take(call.saved("self")), call.take(call.delta), call.shape, turned=True)


@rule("MmBackward0", 0, 0)
def mm_from_the_left(call: Call) -> Outer | None:
    """y = W @ a, samples along the columns."""
    return _columns(call, call.saved("mat2"), 1)


@rule("AddmmBackward0", 1, 0)
def addmm_from_the_left(call: Call) -> Outer | None:
    """y = bias + W @ a, samples along the columns."""
    return _columns(call, call.saved("mat2"), call.saved("alpha"))


def _columns(call: Call, a: Tensor, factor: float) -> Outer | None:
    layout = call.by.layout
    if not isinstance(layout, Regular) or layout.dim != 1 or call.only_nobodys:
        return None
    apart = lambda x: x.T.unflatten(0, (-1, layout.n, layout.block)).movedim(1, 0).flatten(1, 2)
    return Outer(apart(a), scaled(apart(call.delta), factor), call.shape)
