"""A second backward. The gradient of a parameter is linear in the gradients at the cut: what these bring when they are
multiplied by the weights of their samples is Σ w_n G_n, of any operation and without a rule, and nothing has to be held
for it but the gradients at the cut.

Linear it is unless somebody makes it otherwise (a hook that clips, a function whose backward rounds). So the two
backwards are compared where they end: at the meetings below which there is no other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from unsum import hooks
from unsum.errors import UnsupportedError
from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered, place
from unsum.graph.replay import Grads, fit
from unsum.kernels import fused
from unsum.kernels.product import wide
from unsum.plan.plan import Plan
from unsum.plan.unchanged import Held, refuse_changed, versions_of

log = logging.getLogger("unsum")


def is_possible(plan: Plan, nodes: Sequence[Node]) -> bool:
    """Whether everything of the samples comes through the cut, and through nodes that may be run twice."""
    if plan.hidden or any(node.name() == "BackwardHookFunctionBackward" for node in nodes):
        return False  # backwards inside, which see no second graph; hooks of modules
    starts = {(nodes[at], output) for at, output in plan.cut}
    inside = set(ordered([node for node, _ in starts]))
    if any(is_leaf(node) for node, _ in starts):
        return False
    return not any(
        child in inside and not is_leaf(child) and (child, output) not in starts
        for node in nodes
        if node not in inside
        for _, child, output in below(node)
    )


class Again:
    """Waits in a backward for what a second one starts from, and runs it."""

    def __init__(self, plan: Plan, nodes: Sequence[Node], call: hooks.Backward) -> None:
        self._plan, self._call = plan, call
        self._layouts: dict[Edge, Layout] = {
            (nodes[at], output): layout for (at, output), layout in zip(plan.cut, plan.layouts, strict=True)
        }
        self._arrived: dict[Edge, Tensor] = {}
        self._versions: Held = []
        self._handles: list[hooks.Handle] = []
        self._lasts = _lasts(plan, nodes)
        self._first: dict[int, tuple[Tensor, Tensor]] = {}
        self._second: dict[int, tuple[Tensor, Tensor]] = {}
        self._random: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._parents = [
            node for node in nodes if any((child, output) in self._layouts for _, child, output in below(node))
        ]

    def attach(self) -> None:
        """Wait for what the loss sends to the cut. Not at the cut itself: what hooks make of it, they make again."""
        inside = set(ordered([node for node, _ in self._layouts]))
        for node in self._parents:
            if node not in inside:
                self._handles.append(hooks.after_node(node, partial(self._sent, node)))
        for root, grad in zip(self._call.roots, self._call.grads, strict=True):
            if (edge := place(root)) in self._layouts:
                self._add(edge, torch.ones_like(root) if grad is None else grad)
        self._listen(self._first)

    def detach(self) -> None:
        """Wait no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listen(self, to: dict[int, tuple[Tensor, Tensor]]) -> None:
        for at, node in self._lasts.items():
            self._handles.append(hooks.on_node(node, partial(self._witness, at, to)))

    def _sent(self, node: Node, results: Grads, grads: Grads) -> None:
        for edge, child, output in below(node):
            value = results[edge]
            if value is not None and (child, output) in self._layouts:
                self._add((child, output), fit(value, child, output))

    def _add(self, edge: Edge, value: Tensor) -> None:
        self._arrived[edge] = self._arrived[edge] + value if edge in self._arrived else value
        self._versions += versions_of(value)

    # ---- the second one -------------------------------------------------------------------------------------------

    def run(self, w: Tensor, parameters: Mapping[str, nn.Parameter], *, last: bool) -> dict[str, Tensor]:
        """{parameter: Σ w_n G_n}, zeros where nothing comes; after the last one the graph is as the user wants it."""
        self.detach()
        refuse_changed("the model's output", self._versions)
        factor = _power(w) if torch.float16 in {grad.dtype for grad in self._arrived.values()} else None
        scaled = w if factor is None else w / factor  # a small weight must not be lost in float16
        grads = [weighted(grad, self._layouts[edge], scaled) for edge, grad in self._arrived.items()]
        edges = [GradientEdge(node, output) for node, output in self._arrived]
        if last:
            self._arrived.clear()
            self._versions.clear()
        self._second.clear()
        self._listen(self._second)
        try:
            found = hooks.unseen_backward(
                edges, grads, list(parameters.values()), retain_graph=self._call.retain_graph or not last
            )
        finally:
            self.detach()
        self._compare(scaled)
        if last and not self._call.retain_graph:
            self._free()
        sums = {}
        for (name, parameter), value in zip(parameters.items(), found, strict=True):
            value = torch.zeros_like(parameter) if value is None else value
            value = (value.to_dense() if value.layout != torch.strided else value).to(wide(parameter.dtype))
            sums[name] = value if factor is None else value * factor
        return sums

    def _free(self) -> None:
        """What the loss's own nodes have saved: they run once more, with no gradient, and compute nothing."""
        above = [
            (root, grad)
            for root, grad in zip(self._call.roots, self._call.grads, strict=True)
            if place(root)[0] is not None and place(root) not in self._layouts and not is_leaf(place(root)[0])
        ]
        if not above:
            return
        for node in {place(root)[0] for root, _ in above}:
            self._handles.append(hooks.on_node(node, lambda grads: tuple(None for _ in grads)))
        roots, grads = zip(*above, strict=True)
        edges = [GradientEdge(node, output) for node, output in self._layouts]
        try:
            hooks.unseen_backward(roots, grads, edges, retain_graph=False)
        except Exception as error:  # a function of the user's that cannot do without: the memory goes with the loss
            log.info("unsum: the graph of the loss is freed when the loss is: %s", error)
        finally:
            self.detach()

    # ---- was it linear? -------------------------------------------------------------------------------------------

    def _witness(self, at: int, to: dict[int, tuple[Tensor, Tensor]], grads: Grads) -> None:
        for grad, layout in zip(grads, self._plan.owned[at], strict=True):
            if grad is None or layout is None or not grad.numel() or grad.is_complex() or at in to:
                continue
            to[at] = self._summary(grad, layout)

    def _summary(self, grad: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(n,) twice: each sample's gradient along one direction, and how long it is."""
        n = self._plan.n
        if isinstance(layout, Regular):
            rows = grad.detach().unflatten(layout.dim, (-1, n, layout.block)).movedim(layout.dim + 1, 0).flatten(1)
            along = self._direction(rows.shape[1], rows)
            return (rows @ along).to(wide(grad.dtype)), torch.linalg.vector_norm(rows, dim=1, dtype=wide(grad.dtype))
        owner, values = layout.owner(grad.device).flatten().long(), grad.detach().flatten().to(wide(grad.dtype))
        known = (owner >= 0).nonzero()[:, 0]
        owner, values, along = owner[known], values[known], self._direction(len(values), values)[known]
        empty = values.new_zeros(n)
        return empty.index_add(0, owner, values * along), empty.index_add(0, owner, values.square()).sqrt()

    def _direction(self, size: int, like: Tensor) -> Tensor:
        key = size, like.dtype, like.device
        if key not in self._random:
            self._random[key] = torch.arange(size, device=like.device, dtype=torch.float32).mul_(1.7).cos_().to(like)
        return self._random[key]

    def _compare(self, w: Tensor) -> None:
        off: list[Tensor] = []
        sizes = {at: (w.to(length) * length).norm() for at, (_, length) in self._first.items() if at in self._second}
        most = max([size.cpu() for size in sizes.values()], default=torch.zeros(()))  # on several devices perhaps
        for at, size in sizes.items():
            along = self._first[at][0]
            wrong = (self._second[at][0] - w.to(along) * along).norm()
            off.append((wrong > self._tolerance() * size + self._noise() * most.to(size)).cpu())
        if off and bool(torch.stack(off).any()):
            raise UnsupportedError(
                "WeightedSum: a second backward with weighted gradients did not bring weighted gradients: a hook or a "
                "custom function changes them in a way that is not linear, or differs from one run to the next.\n"
                "  WeightedSum(w, memory=...) with more bytes holds factors instead"
            )

    def _noise(self) -> float:
        """What is left where gradients cancel, beside the largest: as of a gate whose choices are all the same."""
        return self._plan.rounding * (1e-3 if self._plan.rounding < 1e-2 else 0.1)

    def _tolerance(self) -> float:
        return 10 * self._plan.rounding if self._plan.rounding < 1e-2 else self._plan.rounding


def _lasts(plan: Plan, nodes: Sequence[Node]) -> dict[int, Node]:
    """The meetings below which there is no other: whatever happens to a gradient on its way is seen there."""
    met = {nodes[at]: at for at in plan.owned}
    above: set[Node] = set()  # nodes that lead to a meeting, or are one
    found: dict[int, Node] = {}
    for node in reversed(nodes):
        leads = any(child in above for _, child, _ in below(node))
        if node in met and not leads:
            found[met[node]] = node
        if node in met or leads:
            above.add(node)
    return found


def weighted(grad: Tensor, layout: Layout, w: Tensor) -> Tensor:
    """A gradient with every position multiplied by the weight of its sample; nobody's by zero."""
    w = w.to(grad.device)
    if isinstance(layout, Regular) and layout.dim == 0 and layout.shape[0] == layout.n * layout.block:
        return fused.scaled(grad.unflatten(0, (layout.n, layout.block)), w).flatten(0, 1)
    if isinstance(layout, Regular):
        shape = [-1 if d == layout.dim else 1 for d in range(len(layout.shape))]
        return (grad * w[layout.along().to(w.device)].view(shape)).to(grad.dtype)
    owner = layout.owner(grad.device).long()
    return (grad * torch.where(owner >= 0, w[owner.clamp_min(0)], 0)).to(grad.dtype)


def _power(w: Tensor) -> Tensor:
    """A power of two by which the weights are at most one."""
    most = w.abs().max().float()
    return torch.where(most.isfinite(), torch.ldexp(torch.ones_like(most), torch.frexp(most)[1]), 1.0).to(w.device)
