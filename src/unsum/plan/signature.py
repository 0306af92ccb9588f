"""Is this the graph that was learnt? Kinds, edges, shapes, everything that nodes have saved which is no tensor (a
roll's shift, a select's index), and the parameters by name: read in one walk, in every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor

from unsum.graph.nodes import Leaf, Node
from unsum.plan.skeleton import Read, Skeleton, reader, skeleton
from unsum.seams.modules import buffers_of
from unsum.seams.nodes import outputs_of

Signature = tuple[Hashable, ...]

_KEPT = 1024
_skeletons: OrderedDict[Hashable, Skeleton] = OrderedDict()
_variable, _shape, _dtype = attrgetter("variable"), attrgetter("shape"), attrgetter("dtype")
_training, _wanted = attrgetter("training"), attrgetter("requires_grad")


@dataclass(frozen=True, eq=False)
class Survey:
    """A graph as it is found from its roots down."""

    nodes: list[Node]  # level by level: the order follows from the edges alone
    at: dict[Node | None, Any]  # where each is in that order
    leaves: list[Tensor]  # that get a gradient
    names: tuple[str | None, ...]  # of these
    signature: Signature


@dataclass(frozen=True)
class Sizes:
    """What a derived plan is remembered by: the sizes of a graph and all numbers that its nodes have saved. Its hash
    takes the layouts at the cut alone: the rest is long, and compared in any case."""

    signature: Signature
    starts: Hashable

    def __hash__(self) -> int:
        return hash(self.starts)


def survey(roots: Iterable[Node], names: Mapping[int, str]) -> Survey:
    """Walk the graph. Two graphs have the same signature only if they are alike, node by node.

    The signature is in columns, since a thousand tuples in every step cost more than what is in them, and because
    columns are read and compared without a line of Python for each node."""
    nodes: list[Node] = list(dict.fromkeys(roots))
    at: dict[Node | None, Any] = {node: k for k, node in enumerate(nodes)}
    at[None] = None
    edges: list[Any] = []
    size, find, note, add = len(nodes), at.setdefault, edges.append, nodes.append
    for node in nodes:  # which grows meanwhile
        if type(node) is Leaf:
            continue
        for child, output in node.next_functions:
            place = find(child, size)
            if place == size:
                size += 1
                add(child)
            note(place)
            note(output)
    known = _known(nodes, tuple(map(type, nodes)), tuple(edges))
    leaves = list(map(_variable, known.leaves(nodes)))
    called = tuple(map(names.get, map(id, leaves)))
    return Survey(nodes, at, leaves, called, _signed(known, nodes, leaves, called))


def _signed(known: Skeleton, nodes: list[Node], leaves: list[Tensor], called: tuple[str | None, ...]) -> Signature:
    """The signature; the very one of the graph before if it is the same, so that a thousand objects need not be kept:
    Python's collector would come for them in every step."""
    last = known.last[0] if known.last else (known, (None,) * len(known.saved))
    told = [_column(read, pick(nodes), old) for (read, pick), old in zip(known.saved, last[1], strict=True)]
    shapes: list[Hashable] = []
    for node in known.shown(nodes):
        metas = outputs_of(node)
        shapes.append(len(metas))
        for meta in metas:  # not kept: torch takes longer to make the next while it is
            shapes.append(tuple(meta.shape))
            shapes.append(meta.dtype)
    for node in known.viewed(nodes):
        shapes.append(tuple(outputs_of(node)[0].shape))
    # A parameter's name says which it is, but its shape may have changed since.
    found = (known, tuple(told), tuple(shapes), called, tuple(map(_shape, leaves)), tuple(map(_dtype, leaves)))
    if found != last:
        known.last[:] = [found]
        return found
    return last


def _column(read: Read, nodes: Sequence[Node], old: tuple[Hashable, ...] | None) -> tuple[Hashable, ...]:
    if old is not None and all(map(eq, map(read, nodes), old)):
        return old
    return tuple(map(read, nodes))


def _known(nodes: Sequence[Node], kinds: tuple[type, ...], edges: tuple[int | None, ...]) -> Skeleton:
    found = _skeletons.get((kinds, edges))
    if found is None:
        found = _skeletons[kinds, edges] = skeleton(nodes, kinds, edges)
        while len(_skeletons) > _KEPT:
            _skeletons.popitem(last=False)
    return found


def plain(node: Node) -> Hashable:
    """The kind of a node, and what it has saved that is no tensor."""
    read = reader(node)
    return type(node), None if read is None else read(node)


def flags(
    modules: Sequence[torch.nn.Module], parameters: Sequence[torch.nn.Parameter], given: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    """What decides, before a forward, which structure its graph is likely to have: flags and dtypes, no sizes."""
    own = set(map(id, buffers_of(modules)))
    return (
        tuple(map(_training, modules)),
        tuple(map(_wanted, parameters)),
        tuple([(t.dim(), t.dtype, t.requires_grad, id(t) in own, _is_dense(t)) for t in given]),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie one after the other: what is made of others may be a copy, with no rows of it."""
    return tensor.layout == torch.strided and tensor.is_contiguous()


def sizes_of(given: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a call is given."""
    return tuple([tuple(t.shape) for t in given])
