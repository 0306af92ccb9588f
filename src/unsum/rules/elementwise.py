"""Parameters that are added to data, multiplied with it, or spread over it."""

from __future__ import annotations

from torch import Tensor

from unsum.factors.scale import Scale
from unsum.graph.layout import Regular
from unsum.graph.nodes import Node
from unsum.rules.registry import Call, rule, scaled
from unsum.seams.nodes import saved_or


def _own(node: Node, shape: tuple[int, ...]) -> int:
    """The last dimensions, from the first in which the parameter has more than one number."""
    return next((len(shape) - d for d, size in enumerate(shape) if size > 1), 0)


def _spread(call: Call, factor: float = 1) -> Scale:
    return Scale(scaled(call.take(call.delta), factor), None, call.shape)


def _times(call: Call, other: Tensor) -> Scale:
    x = call.take(other.expand(call.delta.shape))
    return Scale(call.take(call.delta), lambda: x, call.shape)


@rule("AddBackward0", 0, _own, rows=())
def add(call: Call) -> Scale:
    """p + x."""
    return _spread(call)


@rule("AddBackward0", 1, _own, rows=())
def added(call: Call) -> Scale:
    """x + alpha·p."""
    return _spread(call, saved_or(call.node, "alpha", 1))


@rule("SubBackward0", 0, _own, rows=())
def sub(call: Call) -> Scale:
    """p - x."""
    return _spread(call)


@rule("SubBackward0", 1, _own, rows=())
def subtracted(call: Call) -> Scale:
    """x - alpha·p."""
    return _spread(call, -saved_or(call.node, "alpha", 1))


@rule("ExpandBackward0", 0, _own, rows=())
def expand(call: Call) -> Scale:
    """p spread over samples and positions."""
    return _spread(call)


@rule("MulBackward0", 0, _own, rows=("other",))
def mul(call: Call) -> Scale | None:
    """p · x."""
    other = call.saved("other")
    return None if other is None else _times(call, other)


@rule("MulBackward0", 1, _own, rows=("self",))
def multiplied(call: Call) -> Scale | None:
    """x · p."""
    other = call.saved("self")
    return None if other is None else _times(call, other)


@rule("RepeatBackward0", 0, 0)
def repeat(call: Call) -> Scale | None:
    """p laid side by side with itself along the samples, as in instance norm and class tokens."""
    times, layout, shape = call.saved("repeats"), call.by.layout, call.shape
    unit = shape[0] if len(times) == len(shape) and shape else 1  # of the first dimension, in one copy
    if not isinstance(layout, Regular) or layout.dim != 0 or call.only_nobodys:
        return None
    if any(t != 1 for t in times[1:]) or layout.block % unit:
        return None
    copies = call.delta.reshape(-1, layout.n, layout.block // unit, *shape)
    return Scale(copies.movedim(1, 0).flatten(1, 2), None, shape)
