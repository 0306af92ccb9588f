"""What a compiled graph does with its inputs before any parameter meets them. In the graph of autograd this leaves no
node: `x.flip(0)` before the first layer is not to be told from `x` there. So what torch has taken down is compared."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from unsum.nested import leaves
from unsum.seams.operators import hint

Lines = tuple[Hashable, ...]
"""One for each operation: what is called, and with what. Sizes are the numbers that they stood for."""


def lines_of(graph: torch.fx.GraphModule) -> Lines:
    """What a graph computes of its inputs without a gradient, in order."""
    places: dict[torch.fx.Node, Hashable] = {}  # of what is computed of inputs
    lines: list[Hashable] = []
    for node in graph.graph.nodes:
        made = node.meta.get("example_value")
        tensors = [tensor for _, tensor in leaves(made)]
        if not tensors or any(tensor.requires_grad for tensor in tensors):
            continue
        if node.op == "placeholder":
            places[node] = "input"
        elif any(each in places for each in node.all_input_nodes):
            lines.append((node.op, _name(node.target), _told(node.args, places), _told(node.kwargs, places)))
            places[node] = len(lines)
    return tuple(lines)


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', type(target).__name__)}"


def _told(value: Any, places: Mapping[torch.fx.Node, Hashable]) -> Hashable:
    """An argument, with numbers for lines."""
    if isinstance(value, torch.fx.Node):
        made = value.meta.get("example_value")
        return ("line", places.get(value)) if isinstance(made, Tensor) else _told(made, places)
    if isinstance(value, tuple | list):
        return tuple([_told(each, places) for each in value])
    if isinstance(value, dict):
        return tuple([(key, _told(each, places)) for key, each in value.items()])
    if isinstance(value, slice):
        return "slice", _told((value.start, value.stop, value.step), places)
    return repr(hint(value))
