"""May owners be remembered? Only where the map of positions follows from shapes.

Most operations keep samples apart by their shapes (`steady`). Nodes with whole numbers among what they have saved
(routing, sorting, shuffling) move positions by them: those numbers are part of the layout, unless they cannot move a
position from sample to sample, or are followed (`moves`). Products that contract over positions of different samples
(one-hot dispatch) hide such numbers in floats, and of operations that are not known here nothing can be said: those
graphs are learnt each time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Node, below, is_leaf, signed
from unsum.graph.owners import Owners, Swept
from unsum.graph.saved import saved_by
from unsum.plan.moved import Moves
from unsum.plan.moves import find
from unsum.plan.plan import Indices
from unsum.plan.steady import PRODUCTS, is_steady

# Their whole numbers are places within a sample, or the state of a random number generator.
_WITHIN = (
    "MaxPool", "AdaptiveMaxPool", "FractionalMaxPool", "MaxUnpool", "NllLoss", "ScaledDotProduct", "EfficientAttention",
    "FlashAttention", "CudnnRnn", "MkldnnRnn", "GroupedMm",
)  # fmt: skip

log = logging.getLogger("unsum")


def lasting(
    nodes: Sequence[Node], swept: Swept, n: int, place: Mapping[Node, int], mixed: set[Node]
) -> tuple[tuple[Indices, ...], Moves] | None:
    """The numbers that must be the same for a plan to hold again, and those that may be others; None if it may never be
    used again."""
    if n == 1:  # then all that has an owner is that sample's
        return (), Moves()
    if swept.is_fragile:
        return None
    moves = find(nodes, swept.owners)
    if moves is None:
        return None
    moving = {move.place for move in moves.moves}
    found: list[Indices] = []
    for node, owners in swept.owners.items():
        if owners is None:
            continue
        data = [
            (edge, child, output) for edge, child, output in below(node) if not is_leaf(child) and child not in mixed
        ]
        children = [_layout(swept.owners, child, output) for _, child, output in data]
        if not data:
            continue
        if not is_steady(node, owners[0], children) or (
            node.name() in PRODUCTS and _contracts_samples(node, data, swept.owners)
        ):
            log.info(
                "unsum: nothing is remembered because of %s: its shapes alone do not keep samples apart", node.name()
            )
            return None
        if place[node] not in moving:
            for which, index in enumerate(saved_by(node)):
                if _is_index(node, index) and _moves(node, which, data, swept.owners):
                    found.append(Indices(place[node], which, index.detach().clone()))
    return tuple(found), moves


def _is_index(node: Node, saved: Tensor) -> bool:
    """Whole numbers; a mask only where it picks positions."""
    if saved.dtype == torch.bool:
        return node.name().startswith(("Index", "MaskedSelect", "MaskedScatter"))
    return not saved.is_floating_point() and not saved.is_complex()


def _layout(owners: Mapping[Node, Owners | None], child: Node, output: int) -> Layout | None:
    known = owners.get(child)
    return known[output] if known and len(known) > output else None


def _contracts_samples(node: Node, data: list[tuple[int, Node, int]], owners: Mapping[Node, Owners | None]) -> bool:
    """Whether a product sums over positions of several samples: zeros alone keep them apart."""
    left, right = PRODUCTS[node.name()]
    edges = {edge: (child, output) for edge, child, output in data}
    for edge, contracted in ((left, -1), (right, -2)):
        if edge not in edges:
            continue
        layout = _layout(owners, *edges[edge])
        dim = layout.dim if isinstance(layout, Regular) else 0  # rows that were moved are of one sample each
        if layout is None or dim == len(layout.shape) + contracted:
            return True
    return False


def _moves(node: Node, which: int, data: list[tuple[int, Node, int]], owners: Mapping[Node, Owners | None]) -> bool:
    """Whether these whole numbers may move positions from one sample to another."""
    name = node.name()
    if name.startswith(_WITHIN):
        return False
    layouts = [_layout(owners, child, output) for _, child, output in data]
    if not all(isinstance(layout, Regular) for layout in layouts):
        return True
    dims = {layout.dim for layout in layouts if isinstance(layout, Regular)}
    if name == "IndexBackward0":
        given = [k for k, index in enumerate(node._saved_indices) if index is not None]
        return given[which] in dims if len(given) > which and not _has_masks(node._saved_indices) else True
    dim = getattr(node, "_saved_dim", None)
    if isinstance(dim, int):
        return any(signed(dim) % len(layout.shape) in dims for layout in layouts if layout is not None)
    return True


def _has_masks(indices: tuple[Tensor | None, ...]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)
