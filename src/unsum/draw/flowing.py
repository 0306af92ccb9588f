"""How large the gradients are that flow through a graph which can still be walked.

The nodes are called by hand, so that no hook of the user's fires and no `.grad` changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.draw.entering import is_hooked, raw_saved
from unsum.errors import OptionError
from unsum.graph.nodes import Edge, Node, is_leaf, place
from unsum.graph.replay import replay

Flows = dict[tuple[Node, int], float]

FREED = "Its size is not known: the backward has freed the graph (retain_graph=True keeps it)"
BEFORE = "Its size is known after a backward, or with flow=True"
HOOKED = "Its size is not known: a checkpoint, or hooks on saved tensors, would have to compute it again"
OPAQUE = "Its size is not known: a custom function is called again only with flow=True"
SHAPED = "Its size is not known: the loss is no scalar"


def obstacle(nodes: Sequence[Node]) -> str:
    """Why nodes cannot be called again; empty if they can."""
    hooked = freed = False
    for node in nodes:
        if is_leaf(node):
            continue
        hooked = hooked or any(is_hooked(saved) for saved in raw_saved(node))
    if hooked:
        return HOOKED
    for node in nodes:
        freed = freed or (not is_leaf(node) and _is_freed(node))
    return FREED if freed else ""


def _is_freed(node: Node) -> bool:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                getattr(node, name.removeprefix("_raw") if not isinstance(node, BackwardCFunction) else "saved_tensors")
            except RuntimeError:  # freed, or changed in place since
                return True
    return False


def flows_of(loss: Tensor, nodes: Sequence[Node], *, asked: bool | None, is_after: bool) -> tuple[Flows, str]:
    """The norm of what each node sends along each edge, and why there is none where there is none."""
    if asked is False or (asked is None and not is_after):
        return {}, BEFORE
    why = SHAPED if loss.numel() != 1 else obstacle(nodes)
    if not why and asked is None and any(isinstance(node, BackwardCFunction) for node in nodes):
        why = OPAQUE
    if why and asked:
        raise OptionError(f"flow=True: {why[0].lower()}{why[1:]}")
    if why:
        return {}, why
    with torch.random.fork_rng(), torch._C.DisableTorchFunction():
        return _flows(loss, nodes), ""


def _flows(loss: Tensor, nodes: Sequence[Node]) -> Flows:
    found: Flows = {}
    front: dict[Node, list[Tensor | None]] = {}

    def send(edge: Edge, value: Tensor) -> None:
        node, output = edge
        if not is_leaf(node):
            outputs = front.setdefault(node, [None] * len(node._input_metadata))
            known = outputs[output]
            outputs[output] = value if known is None else known + value

    send(place(loss), torch.ones_like(loss))
    for node in nodes:
        if node not in front:
            continue
        for slot, (edge, value) in enumerate(zip(node.next_functions, replay(node, front.pop(node)), strict=True)):
            if edge[0] is not None and value is not None:
                found[node, slot] = float(torch.linalg.vector_norm(value.detach().flatten().double()))
                send(edge, value)
    return found
