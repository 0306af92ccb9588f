"""Is this the graph that was learnt? Names, edges, shapes, everything that nodes have saved which is no tensor (a
roll's shift, a select's index), and the parameters by name."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from unsum.graph.nodes import Node, is_leaf

Signature = tuple[Hashable, ...]

_attributes: dict[type, tuple[str, ...]] = {}  # what nodes of each kind save beside tensors


def signature(nodes: Sequence[Node], names: Mapping[int, str]) -> Signature:
    """Of a graph whose nodes are in order."""
    place = {node: k for k, node in enumerate(nodes)}
    return tuple([_of(node, place, names) for node in nodes])


def _of(node: Node, place: Mapping[Node, int], names: Mapping[int, str]) -> Hashable:
    if is_leaf(node):
        leaf = node.variable
        return names.get(id(leaf)) or (tuple(leaf.shape), leaf.dtype)
    return (
        plain(node),
        tuple([(place[child], output) if child is not None else None for child, output in node.next_functions]),
        tuple([(tuple(meta.shape), meta.dtype) for meta in node._input_metadata]),
    )


def plain(node: Node) -> Hashable:
    """The kind of a node, and what it has saved that is no tensor."""
    kind = type(node)
    names = _attributes.get(kind)
    if names is None:
        names = _attributes[kind] = tuple(
            [name for name in dir(node) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
        )
    return (kind, node.name(), *[_plain(getattr(node, name)) for name in names])


def _plain(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, Hashable) else repr(value)


def forward_key(
    modules: Sequence[torch.nn.Module], parameters: Sequence[torch.nn.Parameter], given: Sequence[torch.Tensor]
) -> Hashable:
    """What decides, before a forward, whether its graph is likely to be known: flags, shapes and dtypes."""
    return (
        tuple([module.training for module in modules]),
        tuple([parameter.requires_grad for parameter in parameters]),
        tuple([(tuple(t.shape), t.dtype, t.requires_grad) for t in given]),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
