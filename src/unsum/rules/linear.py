"""Matrix products: a weight meets its input once per position, an outer product each."""

from __future__ import annotations

from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.rules.registry import Call, rule


@rule("AddmmBackward0", 2)
def addmm(call: Call) -> Outer:
    """y = bias + a @ W."""
    return Outer(call.take(call.saved("mat1")), _scaled(call, "alpha"), call.shape, turned=True)


@rule("AddmmBackward0", 0)
def addmm_bias(call: Call) -> Scale:
    """The bias is added to every row."""
    return Scale(_scaled(call, "beta"), None, call.shape)


@rule("MmBackward0", 1)
def mm(call: Call) -> Outer:
    """y = a @ W."""
    return Outer(call.take(call.saved("self")), call.take(call.delta), call.shape, turned=True)


def _scaled(call: Call, name: str):  # type: ignore[no-untyped-def]
    factor = call.saved(name)
    delta = call.take(call.delta)
    return delta if factor == 1 else delta * factor
