"""Is this the graph that was learnt? Names, edges, shapes, everything that nodes have saved which is no tensor (a
roll's shift, a select's index), and the parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from unsum.graph.nodes import Node, is_leaf

Signature = tuple[Hashable, ...]

_readers: dict[type, Callable[[Node], Hashable]] = {}  # what nodes of each kind save beside tensors


def signature(nodes: Sequence[Node], names: Mapping[int, str]) -> Signature:
    """Of a graph whose nodes are in order."""
    place: dict[Node | None, int | None] = {node: k for k, node in enumerate(nodes)}
    place[None] = None
    found: list[Hashable] = []
    for node in nodes:  # a thousand nodes or more, in every step: no calls that can be spared
        if is_leaf(node):
            leaf = node.variable
            found.append(names.get(id(leaf)) or (tuple(leaf.shape), leaf.dtype))
            continue
        found.append(
            (
                plain(node),
                tuple([(place[child], output) for child, output in node.next_functions]),
                tuple([(tuple(meta.shape), meta.dtype) for meta in node._input_metadata]),
            )
        )
    return tuple(found)


def plain(node: Node) -> Hashable:
    """The kind of a node, and what it has saved that is no tensor."""
    kind = type(node)
    read = _readers.get(kind)
    if read is None:
        read = _readers[kind] = _reader(node)
    return kind, read(node)


def _reader(node: Node) -> Callable[[Node], Hashable]:
    kind = type(node)
    names = [name for name in dir(node) if name.startswith("_saved_") and not hasattr(kind, f"_raw{name}")]
    if kind.__name__ != node.name():  # one type for nodes of several kinds
        return lambda node: (node.name(), *[_hashable(getattr(node, name)) for name in names])
    if not names:
        return lambda node: None
    read = attrgetter(*names)
    if all(not isinstance(getattr(node, name), list) and isinstance(getattr(node, name), Hashable) for name in names):
        return read
    return lambda node: tuple([_hashable(getattr(node, name)) for name in names])


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, Hashable) else repr(value)


def forward_key(
    modules: Sequence[torch.nn.Module], parameters: Sequence[torch.nn.Parameter], given: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    """What decides, before a forward, whether its graph is likely to be known: flags, shapes and dtypes."""
    return (
        tuple([module.training for module in modules]),
        tuple([parameter.requires_grad for parameter in parameters]),
        tuple([(tuple(t.shape), t.dtype, t.requires_grad) for t in given]),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
