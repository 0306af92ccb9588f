"""What a compiled graph does with its inputs before any parameter meets them. In the graph of autograd this leaves no
node: `x.flip(0)` before the first layer is not to be told from `x` there. So what torch has taken down is compared, and
between the parts of a model with graph breaks, where nothing is taken down, which tensors come to which part."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.nested import leaves
from unsum.seams.operators import hint
from unsum.seams.tensors import memory_number

Lines = tuple[Hashable, ...]
"""One for each operation: what is called, and with what. Sizes are the numbers that they stood for."""


def lines_of(graph: torch.fx.GraphModule) -> Lines:
    """What a graph computes of its inputs without a gradient, in order."""
    places: dict[torch.fx.Node, Hashable] = {}  # of what is computed of inputs
    lines: list[Hashable] = []
    for node in graph.graph.nodes:
        for inner in _inside(graph, node):  # of a checkpoint, say
            lines.append(("inside", tuple([places.get(each) for each in node.all_input_nodes]), lines_of(inner)))
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


def _inside(graph: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """The graphs that an operation of this node runs."""
    named = [getattr(graph, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
    return [each for each in named if isinstance(each, torch.fx.GraphModule)]


class RawTensors:
    """The tensors without a history that come to the parts of one call: the model's own, given to the call, made by a
    part, or CONSTANT: seen in an earlier call, and still there. Others are MADE, between the parts perhaps, where
    nobody sees of what."""

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, seen: weakref.WeakValueDictionary[int, Tensor]
    ) -> None:
        self._seen = seen  # of earlier calls, by id
        self._held: list[Tensor] = []  # or another could have the id of one that is gone
        self._from: dict[int, Hashable] = {}
        own = [*model.parameters(), *model.buffers()]
        self._own, self._memory = set(map(id, own)), {memory_number(each) for each in own} - {-1}
        for k, (_, tensor) in enumerate(leaves((args, kwargs))):
            self._add(tensor, ("given", k))

    def _add(self, tensor: Tensor, where: Hashable) -> None:
        self._held.append(tensor)
        self._from.setdefault(id(tensor), where)

    def add(self, part: int, outputs: Sequence[Any]) -> None:
        """Take note of what a part has returned."""
        for k, each in enumerate(outputs):
            if isinstance(each, Tensor) and each.grad_fn is None:
                self._add(each, ("part", part, k))

    def describe(self, given: Sequence[Any]) -> tuple[Hashable, ...]:
        """Of each such tensor that a part is given: where it comes from. (Of single numbers, such as torch makes of a
        Python number, nothing is said: they have no rows.)"""
        raw = [each for each in given if isinstance(each, Tensor) and each.grad_fn is None]
        found = [(each, self._where(each)) for each in raw]
        return tuple([where for each, where in found if where is not MADE or each.numel() > 1])

    def _where(self, tensor: Tensor) -> Hashable:
        key = id(tensor)
        if key in self._own or memory_number(tensor) in self._memory:
            return "own"
        if key in self._from:
            return self._from[key]
        if self._seen.get(key) is tensor:
            return CONSTANT
        self._seen[key] = tensor
        self._add(tensor, MADE)
        return MADE


MADE, CONSTANT = None, "constant"


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
