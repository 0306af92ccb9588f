"""Nodes of the autograd graph, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.seams.sharding import POST_BACKWARD

Node = Any  # torch.autograd.graph.Node; its Python type says too little
Edge = tuple[Node, int]  # a node and which of its outputs: what one tensor is
Leaf: type = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)  # of such a node


def edge_of(tensor: Tensor) -> Edge:
    """The place of a tensor in the graph."""
    return tensor.grad_fn, tensor.output_nr


def place(root: Any) -> Edge:
    """The place of what somebody differentiates, or differentiates by: a tensor or a GradientEdge."""
    if not isinstance(root, Tensor):
        return root.node, root.output_nr
    if root.grad_fn is None and root.requires_grad:
        return torch.autograd.graph.get_gradient_edge(root).node, 0
    return edge_of(root)


def is_leaf(node: Node) -> bool:
    """Whether this is where a parameter (or any other leaf) gets its gradient."""
    return type(node) is Leaf or bool(node.name().endswith("AccumulateGrad"))


def is_custom(node: Node) -> bool:
    """Whether this is the node of somebody's own autograd.Function, of which nothing is known."""
    return isinstance(node, BackwardCFunction) and type(node).__name__ != POST_BACKWARD


def below(node: Node) -> list[tuple[int, Node, int]]:
    """Where a node sends gradients: (which of its results, node, which output of that node)."""
    return [(i, child, output) for i, (child, output) in enumerate(node.next_functions) if child is not None]


def ordered(roots: Iterable[Node], stop: Callable[[Node], bool] | None = None) -> list[Node]:
    """Every node that the roots lead to, each after all that lead to it; not past those at which to stop."""
    done: list[Node] = []
    seen: set[Node | None] = {None}
    waiting: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while waiting:
        node, left = waiting.pop()
        if left:
            done.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if stop is None or not stop(node):
                waiting += [(child, False) for child, _ in node.next_functions if child not in seen]
    return done[::-1]


def signed(saved: int) -> int:
    """A whole number that a node has saved: negative ones are saved as unsigned."""
    return saved - (1 << 64) if saved >= 1 << 63 else saved
