"""What must be read of a graph whose kinds of nodes and edges are known, to tell it from any other of these.

To read the shapes of a node takes longer than all else in a survey, and most shapes follow from others: a transposed
tensor is the one below it, turned; a view has the shape that the view above it says to have taken. Only the rest is
read. What follows, follows by what the operation is, whatever the numbers; kinds that are not named here are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from unsum.graph.nodes import Leaf, Node
from unsum.seams.nodes import saved_others

Pick = Callable[[Sequence[Node]], Sequence[Node]]
Read = Callable[[Node], Hashable]

# Kinds of which shapes and dtypes of all outputs follow from those at these edges and from the numbers that they have
# saved, if none of these edges is missing. (Not softmax or sum, which may be asked for another dtype; nor those that
# may take a tensor or a number which has no edge.)
_FOLLOWS = {
    **dict.fromkeys(
        (
            "TBackward0", "TransposeBackward0", "PermuteBackward0", "UnsqueezeBackward0", "SelectBackward0",
            "SliceBackward0", "UnbindBackward0", "CloneBackward0", "GeluBackward0", "ReluBackward0", "SiluBackward0",
            "TanhBackward0", "SigmoidBackward0", "NativeLayerNormBackward0", "NativeDropoutBackward0",
        ),
        (0,),
    ),
    **dict.fromkeys(("AddBackward0", "SubBackward0", "MulBackward0", "MmBackward0", "BmmBackward0"), (0, 1)),
    **dict.fromkeys(
        ("ScaledDotProductFlashAttentionBackward0", "ScaledDotProductFlashAttentionForCpuBackward0"), (0, 1, 2)
    ),
    "AddmmBackward0": (1, 2),
}  # fmt: skip

# Views, whose dtype is that below them; and kinds that have saved the shape of what they take at an edge.
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
_SAYS = {**dict.fromkeys(_VIEWS, (0,)), "AddmmBackward0": (1, 2)}

# Kinds whose (first) output has the shape of what they take at edge 0.
_KEEPS_SHAPE = (
    "GeluBackward0", "ReluBackward0", "SiluBackward0", "TanhBackward0", "SigmoidBackward0", "CloneBackward0",
    "NativeLayerNormBackward0", "NativeDropoutBackward0",
)  # fmt: skip

_readers: dict[type, Read | None] = {}  # what nodes of each kind save beside tensors


class Places(NamedTuple):
    """Which nodes of a graph are read, in the order of a survey."""

    shown: tuple[int, ...]
    viewed: tuple[int, ...]
    saved: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Skeleton:
    """Kinds and edges of a graph, and which of its nodes are to be read."""

    kinds: tuple[type, ...]
    edges: tuple[int | None, ...]  # of each node: child and which of its outputs, in turn
    leaves: Pick
    shown: Pick  # whose shapes and dtypes are read
    viewed: Pick  # views whose shapes are read: they have one output, with the dtype of what is below
    saved: tuple[tuple[Read, Pick], ...]  # what is read of the nodes of each kind
    places: Places  # which nodes these are
    number: int  # a hash of kinds and edges
    last: list[tuple[Any, ...]] = field(default_factory=list)  # the last signature of such a graph, if there was one

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Skeleton) and self.kinds == other.kinds and self.edges == other.edges


def skeleton(nodes: Sequence[Node], kinds: tuple[type, ...], edges: tuple[int | None, ...]) -> Skeleton:
    """Find out what to read."""
    groups: dict[type, list[int]] = {}
    for k, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(k)
    leaves = groups.pop(Leaf, [])
    saved = [(read, tuple(places)) for places in groups.values() if (read := reader(nodes[places[0]])) is not None]
    follows = _following(nodes, kinds, edges)
    rest = [k for k, kind in enumerate(kinds) if kind is not Leaf and k not in follows]
    below = list(_below(nodes, edges))
    viewed = [k for k in rest if kinds[k].__name__ in _VIEWS and below[k][0][0] is not None]
    shown = [k for k in rest if k not in viewed]
    told = tuple((read, picker(places)) for read, places in saved)
    places = Places(tuple(shown), tuple(viewed), tuple(each for _, each in saved))
    return Skeleton(kinds, edges, picker(leaves), picker(shown), picker(viewed), told, places, hash((kinds, edges)))


def _following(nodes: Sequence[Node], kinds: Sequence[type], edges: Sequence[int | None]) -> set[int]:
    """The nodes whose shapes and dtypes follow from others; in the end from leaves, which are all read."""
    found: set[int] = set()
    all_below = list(_below(nodes, edges))
    names = [kind.__name__ for kind in kinds]
    said: list[int] = []  # whose shapes those above have saved
    for name, below in zip(names, all_below, strict=True):
        for edge in _SAYS.get(name, ()):
            child, output = below[edge] if edge < len(below) else (None, None)
            if child is not None and output == 0:
                said.append(child)
    for k in said:  # which grows meanwhile
        below = all_below[k]
        child, output = below[0] if below else (None, None)
        if child is None:
            continue
        if names[k] in _VIEWS:
            found.add(k)  # with the dtype of what is below it
        elif names[k] in _KEEPS_SHAPE and output == 0:
            said.append(child)
    for k, (name, below) in enumerate(zip(names, all_below, strict=True)):
        from_edges = _FOLLOWS.get(name)
        if from_edges is not None and all(edge < len(below) and below[edge][0] is not None for edge in from_edges):
            found.add(k)
    return found


def _below(nodes: Sequence[Node], edges: Sequence[int | None]) -> Iterator[list[tuple[int | None, int | None]]]:
    start = 0
    for node in nodes:
        end = start + 2 * len(node.next_functions)
        yield list(zip(edges[start:end:2], edges[start + 1 : end : 2], strict=True))
        start = end


def picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the things at these places from a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda things: [things[k] for k in places]


def reader(node: Node) -> Read | None:
    """What reads all that a node of this kind has saved beside tensors; None if that is nothing."""
    kind = type(node)
    if kind not in _readers:
        _readers[kind] = _reader(node)
    return _readers[kind]


def _reader(node: Node) -> Read | None:
    kind = type(node)
    names = saved_others(node)
    if kind.__name__ != node.name():  # one type for nodes of several kinds
        return lambda node: (node.name(), *[_hashable(getattr(node, name)) for name in names])
    if not names:
        return None
    if all(not isinstance(getattr(node, name), list) and isinstance(getattr(node, name), Hashable) for name in names):
        return attrgetter(*names)
    return lambda node: tuple([_hashable(getattr(node, name)) for name in names])


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value if isinstance(value, Hashable) else repr(value)
