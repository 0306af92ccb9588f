"""The cut: the edges at which the loss's own code enters tensors whose samples are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered, place
from unsum.seams.nodes import outputs_of

# Scalars joined by addition do not meet: the two sides have nothing to do with each other.
JOINS = ("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0", "RsubBackward1")


@dataclass(frozen=True)
class Cut:
    """Where ownership starts, and what lies on either side."""

    starts: dict[Edge, Layout]  # the topmost places of known samples, with the owner of every position
    model: list[Node]  # what they lead to, in order
    loss: list[Node]  # what lies before, in order
    on_data: set[Node]  # those of the loss's nodes that lead to data


def find_cut(roots: Sequence[Any], known: Mapping[Edge, Layout], is_data: Any) -> Cut:
    """Cut the graph below these tensors at the places whose owners are known."""
    entered: dict[Edge, None] = {}
    from_loss: dict[Edge, set[Node]] = {}
    waiting: list[Node] = []
    for root in roots:
        edge = place(root)
        if edge in known:
            entered[edge] = None
            from_loss.setdefault(edge, set()).add(None)
        elif edge[0] is not None:
            waiting.append(edge[0])
    loss = dict.fromkeys(waiting)
    while waiting:
        node = waiting.pop()
        for _, child, output in below(node):
            if (child, output) in known:
                entered[child, output] = None
                from_loss.setdefault((child, output), set()).add(node)
            elif child not in loss and not is_leaf(child):
                loss[child] = None
                waiting.append(child)
    model = ordered([node for node, _ in entered])
    inside = {node for node in model if not is_leaf(node)}
    # An output that lies upstream of another one is entered from inside the model as well: it is no start.
    starts = {edge: known[edge] for edge in entered if any(node not in inside for node in from_loss[edge])}
    loss_order = [node for node in ordered(loss) if node in loss and node not in inside]
    on_data: set[Node] = set()
    for node in reversed(loss_order):
        children = [child for _, child, _ in below(node)]
        if is_data(node) or any(child in inside or child in on_data for child in children):
            on_data.add(node)
    return Cut(starts, model, loss_order, on_data)


def is_penalty(node: Node) -> bool:
    """Whether something may be joined here that belongs to nobody: scalars that are added up to the loss."""
    return node.name() in JOINS and tuple(outputs_of(node)[0].shape) == ()


def parameters_met_outside(cut: Cut, wanted: Mapping[int, str], is_weight: Any) -> list[tuple[Node, str]]:
    """Parameters that meet data in the loss's own code, where nobody knows the samples: (node, name)."""
    inside = set(cut.model)
    met = []
    for node in cut.loss:
        if node not in cut.on_data and not is_weight(node):
            # Not seen to depend on weights alone: it may use data that no samples are known of.
            met += [
                (node, wanted[id(c.variable)]) for _, c, _ in below(node) if is_leaf(c) and id(c.variable) in wanted
            ]
    for node in cut.on_data:
        if is_penalty(node):
            continue
        for _, child, _ in below(node):
            if child in cut.on_data or (child in inside and not is_leaf(child)):
                continue
            for leaf in ordered([child], stop=lambda n: n in cut.on_data or (n in inside and not is_leaf(n))):
                if is_leaf(leaf) and id(leaf.variable) in wanted:
                    met.append((node, wanted[id(leaf.variable)]))
    return met
