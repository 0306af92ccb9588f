"""Convolutions of all kinds: 1 to 3 dimensions, groups, stride, dilation, transposed. Padding other than with zeros is
done before the node, so it needs no rule."""

from __future__ import annotations

from unsum.factors.scale import Scale
from unsum.factors.windows import Geometry, Windows
from unsum.graph.nodes import Node
from unsum.rules.registry import Call, rule
from unsum.seams.nodes import outputs_of


def _all_but_the_first(node: Node, shape: tuple[int, ...]) -> int:
    return len(outputs_of(node)[0].shape) - 1


@rule("ConvolutionBackward0", 1, _all_but_the_first)
def convolution(call: Call) -> Windows:
    """At every place of the output the weight meets a window of the input; transposed, the other way round."""
    geometry = Geometry(
        call.shape[2:], call.saved("stride"), call.saved("padding"), call.saved("dilation"), call.saved("groups")
    )
    x, delta = call.take(call.saved("input")), call.take(call.delta)
    if call.saved("transposed"):
        return Windows(delta, x, geometry, call.shape, turned=True)
    return Windows(x, delta, geometry, call.shape)


@rule("ConvolutionBackward0", 2, _all_but_the_first)
def convolution_bias(call: Call) -> Scale:
    """One bias per channel."""
    return Scale(call.take(call.delta), None, call.shape, over=(*call.shape, *(1 for _ in call.delta.shape[2:])))
