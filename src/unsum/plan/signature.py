"""Is this the graph that was learnt? Names, edges, shapes, everything that nodes have saved which is no tensor (a
roll's shift, a select's index), and the parameters by name: read in one walk, in every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from unsum.graph.nodes import Leaf, Node

Signature = tuple[Hashable, ...]

_readers: dict[type, Callable[[Node], Hashable]] = {}  # what nodes of each kind save beside tensors


@dataclass(frozen=True, eq=False)
class Survey:
    """A graph as it is found from its roots down."""

    nodes: list[Node]  # level by level: the order follows from the edges alone
    at: dict[Node | None, Any]  # where each is in that order
    leaves: list[Tensor]  # that get a gradient
    signature: Signature


@dataclass(frozen=True)
class Key:
    """What a plan is remembered by. Its hash leaves the signature out, which is long and compared in any case."""

    signature: Signature
    cut: Hashable
    roots: Hashable
    exact: bool

    def __hash__(self) -> int:
        return hash((len(self.signature), self.cut, self.roots, self.exact))


def survey(roots: Iterable[Node], names: Mapping[int, str]) -> Survey:
    """Walk the graph. Two graphs have the same signature only if they are alike, node by node.

    The signature is flat, since a thousand tuples in every step cost more than what is in them: of a node its kind and
    what it has saved, then pairs of whole numbers for edges, then pairs of shape and dtype; of a parameter its name."""
    nodes: list[Node] = list(dict.fromkeys(roots))
    at: dict[Node | None, Any] = {node: k for k, node in enumerate(nodes)}
    at[None] = None
    leaves: list[Tensor] = []
    found: list[Any] = []
    for node in nodes:  # which grows meanwhile
        kind = type(node)
        if kind is Leaf:
            leaf = node.variable
            leaves.append(leaf)
            found.append(names.get(id(leaf)) or (leaf.shape, leaf.dtype))
            continue
        read = _readers.get(kind)
        if read is None:
            read = _readers[kind] = _reader(node)
        found.append(kind)
        found.append(read(node))
        for child, output in node.next_functions:
            if child not in at:
                at[child] = len(nodes)
                nodes.append(child)
            found += (at[child], output)
        for meta in node._input_metadata:
            found += (tuple(meta.shape), meta.dtype)
    return Survey(nodes, at, leaves, tuple(found))


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
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
