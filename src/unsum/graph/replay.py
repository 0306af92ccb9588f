"""Calling a node of the graph again, with other gradients.

By linearity, a node that is given one sample's part of its gradient returns that sample's part of what it hands on.
Hooks are not run and nothing is accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.errors import UnsupportedError
from unsum.graph.nodes import Node, is_leaf

Grads = Sequence[Tensor | None]


def replay(node: Node, grads: Grads) -> list[Tensor | None]:
    """What the node sends along each of its edges, fitted to the tensor that it is the gradient of."""
    with torch.no_grad():
        results = _python(node, grads) if isinstance(node, BackwardCFunction) else _call(node, grads)
    fitted: list[Tensor | None] = []
    for (child, output), value in zip(node.next_functions, results, strict=True):
        fitted.append(None if child is None or value is None else fit(value, child, output))
    return fitted


def _call(node: Node, grads: Grads) -> Sequence[Tensor | None]:
    try:
        result = node(*grads)
    except RuntimeError as error:
        raise UnsupportedError(f"{node.name()} cannot be called again: {error}") from error
    return result if isinstance(result, tuple) else (result,)


def _python(node: Node, grads: Grads) -> Sequence[Tensor | None]:
    """A custom autograd.Function: its `apply` returns a result for every argument, tensors or not."""
    if "CheckpointFunction" in node.name():
        raise UnsupportedError(
            "a reentrant checkpoint runs a backward of its own inside, which cannot be called again.\n"
            "  use checkpoint(..., use_reentrant=False)"
        )
    full = [zeros(node, i) if grad is None else grad for i, grad in enumerate(grads)]
    result = node.apply(*full)
    results = result if isinstance(result, tuple) else (result,)
    needed = iter([r for r, needs in zip(results, node.needs_input_grad, strict=False) if needs])
    return [None if child is None else next(needed, None) for child, _ in node.next_functions]


def zeros(node: Node, output: int) -> Tensor:
    """A gradient of zeros for one of a node's outputs."""
    meta = node._input_metadata[output]
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def fit(value: Tensor, child: Node, output: int) -> Tensor:
    """A gradient as the engine would hand it on: dense, summed over what was broadcast, real where the tensor is."""
    like: Any = child.variable if is_leaf(child) else child._input_metadata[output]
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_complex() and not like.dtype.is_complex:
        value = value.real
    shape = tuple(like.shape)
    return (value if tuple(value.shape) == shape else value.sum_to_size(shape)).to(like.dtype)
