"""Matrix products: a weight meets its input once per position, an outer product each."""

from __future__ import annotations

from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.graph.layout import Regular
from unsum.rules.registry import Call, rule, scaled


@rule("AddmmBackward0", 2, rows=("mat1",))
def addmm(call: Call) -> Outer:
    """y = bias + a @ W."""
    return Outer(
        call.take(call.saved("mat1")), scaled(call.take(call.delta), call.saved("alpha")), call.shape, turned=True
    )


@rule("AddmmBackward0", 0, rows=())
def addmm_bias(call: Call) -> Scale:
    """The bias is added to every row."""
    return Scale(scaled(call.take(call.delta), call.saved("beta")), None, call.shape)


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
