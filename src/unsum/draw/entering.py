"""Where tensors enter that have no edge in the graph, because they need no gradient.

Nodes save what their derivative needs: a saved tensor with the memory of `x` shows that `x` enters there. After a
backward the saved tensors are gone, and some operations (a sum, a difference) never save any. Then shapes must tell:
if a named tensor fits exactly one open place, and that place exactly one such tensor, it is drawn there and the picture
says how it was found. Otherwise the picture says that it could not be told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from unsum.graph.nodes import Node, below, is_leaf
from unsum.svg import by


@dataclass(frozen=True)
class Entry:
    """A tensor without a gradient enters at a node."""

    node: Node
    name: str
    tensor: Tensor
    role: Literal["data", "parameter"]
    how: Literal["saved", "shape"]


@dataclass(frozen=True)
class Named:
    """A tensor without a gradient that the user, or the model, has a name for."""

    name: str
    tensor: Tensor
    role: Literal["data", "parameter"]
    beside: frozenset[int] = frozenset()  # ids of the other parameters of its module


def raw_saved(node: Node) -> Iterator[Any]:
    """What a node has saved, not unpacked: to unpack may compute a checkpoint again, or use up its one reading."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            value = getattr(node, name)
            yield from value if isinstance(value, tuple | list) else (value,)


def is_hooked(saved: Any) -> bool:
    """Whether a saved tensor went through somebody's hooks: a checkpoint's, or those that move it elsewhere."""
    return getattr(saved, "unpack_hook", None) is not None


def find(nodes: Sequence[Node], named: Sequence[Named]) -> tuple[list[Entry], list[str]]:
    """Where the named tensors enter, and notes on those of which it cannot be told."""
    by_memory = {memory: one for one in named if (memory := _memory(one.tensor)) is not None}
    entries: dict[tuple[Node, str], Entry] = {}
    for node in nodes:
        if is_leaf(node):
            continue
        for saved in raw_saved(node):
            tensor = None if is_hooked(saved) else getattr(saved, "data", None)
            one = by_memory.get(_memory(tensor) or 0) if isinstance(tensor, Tensor) else None
            if one is not None:
                entries[node, one.name] = Entry(node, one.name, one.tensor, one.role, "saved")
    placed = {entry.name for entry in entries.values()}
    left = [one for one in named if one.name not in placed]
    more, notes = _by_shape(nodes, left, [node for node, _ in entries])
    return [*entries.values(), *more], notes


def _memory(tensor: Tensor) -> int | None:
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return None


Place = tuple[Node, int]


def _by_shape(nodes: Sequence[Node], left: list[Named], taken: Sequence[Node]) -> tuple[list[Entry], list[str]]:
    places: dict[Place, Callable[[Tensor], bool]] = {}
    for node in nodes:
        gaps = [] if is_leaf(node) or not left else list(_open_places(node))
        if len(gaps) > taken.count(node):  # else it is known what enters there
            places.update(((node, slot), fits) for slot, fits in gaps)
    found: list[Entry] = []
    while True:
        fitting = {one.name: _fitting(one, places) for one in left}
        wanted: dict[Place, list[str]] = {}
        for name, own in fitting.items():
            for place in own:
                wanted.setdefault(place, []).append(name)
        one = next((o for o in left if len(f := fitting[o.name]) == 1 and len(wanted[f[0]]) == 1), None)
        if one is None:
            return found, [note for one in left if (note := _why(one, fitting[one.name]))]
        place = fitting[one.name][0]
        found.append(Entry(place[0], one.name, one.tensor, one.role, "shape"))
        places.pop(place)
        left = [other for other in left if other is not one]


def _why(one: Named, fits: list[Place]) -> str:
    if fits:
        where = ", ".join(dict.fromkeys(node.name() for node, _ in fits))
        return f"{one.name} ({by(tuple(one.tensor.shape))}): by its shape it may enter at {where}, so it is not drawn"
    if one.role == "parameter":
        return f"{one.name}: frozen, and not in the graph: nothing before it needs a gradient, or it is not used"
    return f"{one.name} ({by(tuple(one.tensor.shape))}): no node has kept it, and its shape fits nowhere"


def _fitting(one: Named, places: Mapping[Place, Callable[[Tensor], bool]]) -> list[Place]:
    fits = [place for place, accepts in places.items() if accepts(one.tensor)]
    if one.role == "data":
        return fits
    # A frozen bias stands beside its module's weight.
    return [(node, slot) for node, slot in fits if one.beside & _leaves_near(node)]


def _leaves_near(node: Node) -> set[int]:
    """The ids of the leaves that lead to a node, directly or through one view."""
    found = set()
    for _, child, _ in below(node):
        for _, deeper, _ in [(0, child, 0), *([] if is_leaf(child) else below(child))]:
            if is_leaf(deeper):
                found.add(id(deeper.variable))
    return found


def _open_places(node: Node) -> Iterator[tuple[int, Callable[[Tensor], bool]]]:
    """The arguments of a node that have no edge, and what shapes would fit there. -1: no argument with an edge."""
    name = node.name()
    shape = tuple(node._input_metadata[0].shape)
    children = [_shape(child, output) for _, child, output in below(node)]
    if name == "EmbeddingBackward0":
        yield -1, lambda t: not t.is_floating_point() and tuple(t.shape) == shape[:-1]
        return
    if name.startswith("NllLoss") and children:
        rows = prod(children[0]) // max(children[0][-1 if len(children[0]) < 2 else 1], 1)
        yield -1, lambda t: not t.is_floating_point() and t.numel() == rows
        return
    for slot, (child, _) in enumerate(node.next_functions):
        if child is None:
            yield slot, _fits(node, name, slot, shape, children)


def _shape(child: Node, output: int) -> tuple[int, ...]:
    return tuple(child.variable.shape if is_leaf(child) else child._input_metadata[output].shape)


_SIZES = {
    ("MmBackward0", 0): "_saved_self_sym_sizes",
    ("MmBackward0", 1): "_saved_mat2_sym_sizes",
    ("AddmmBackward0", 1): "_saved_mat1_sym_sizes",
    ("AddmmBackward0", 2): "_saved_mat2_sym_sizes",
}
_ALIKE = ("Add", "Sub", "Mul", "Div", "Rsub", "Addcmul", "Where", "Lerp", "Maximum", "Minimum", "Pow")


def _fits(
    node: Node, name: str, slot: int, shape: tuple[int, ...], children: list[tuple[int, ...]]
) -> Callable[[Tensor], bool]:
    if (name, slot) in _SIZES:
        sizes = tuple(getattr(node, _SIZES[name, slot], ()))
        return lambda t: t.numel() == prod(sizes) and t.dim() > 0 and t.shape[-1] in sizes[-1 if slot < 2 else 0 :]
    if name == "ConvolutionBackward0" and slot == 0 and children:
        groups = int(node._saved_groups)
        channels = children[0][1] * groups
        return lambda t: t.dim() == len(shape) and t.shape[0] == shape[0] and t.shape[1] == channels
    if name.startswith(_ALIKE):
        return lambda t: t.is_floating_point() and t.dim() > 0 and _spreads(tuple(t.shape), shape)
    if name == "AddmmBackward0" and slot == 0:
        return lambda t: t.is_floating_point() and tuple(t.shape) in (shape, shape[-1:])
    if "Loss" in name or name.startswith(("BinaryCrossEntropy", "KlDiv")):
        return lambda t: t.is_floating_point() and children != [] and tuple(t.shape) == children[0]
    return lambda t: t.dim() > 0 and tuple(t.shape) in (shape, *children)


def _spreads(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is broadcast to the other."""
    try:
        return tuple(torch.broadcast_shapes(shape, to)) == to and prod(shape) > 1
    except RuntimeError:
        return False
