"""One backward, sample by sample.

Where a node with owners hands something on to a parameter, or to a node without owners, it is called again once for
each sample with the rest of its gradient set to zero; what comes out is passed on, sample by sample, through the nodes
without owners. All this happens inside the user's own backward, in hooks that run before the nodes do: the gradients
are the ones that really flow, and what the nodes have saved is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from unsum import hooks
from unsum.errors import SamplesError
from unsum.graph.cut import Cut, is_penalty
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.owners import NOBODY, UNSEEN, Owners
from unsum.graph.replay import Grads, replay

SHARED = -1  # the stream of what belongs to nobody

Streams = dict[int, list[Tensor | None]]  # sample -> a gradient for each output of a node


class Split:
    """The gradients that one backward brings to parameters, apart: by sample, and nobody's."""

    def __init__(
        self, cut: Cut, owners: Mapping[Node, Owners | None], n: int, wanted: Mapping[int, torch.nn.Parameter]
    ) -> None:
        self.n = n
        self.per_sample: dict[int, Tensor] = {}  # by the id of the parameter
        self.shared: dict[int, Tensor] = {}
        self.meetings: dict[int, dict[str, None]] = {}  # the operations at which each parameter met data
        self.unknown: list[str] = []  # what went wrong, to be said after the backward
        self.rounding = max((_rounding(node) for node in cut.model if not is_leaf(node)), default=1e-9)
        self._cut, self._owners, self._wanted = cut, owners, wanted
        self._streams: dict[Node, Streams] = {}
        self._origins: dict[Node, dict[str, None]] = {}  # where the streams of a node without owners met data
        self._handles: list[hooks.Handle] = []

    def attach(self) -> None:
        """Wait at the nodes that matter."""
        for node in self._cut.model:
            if node not in self._owners:
                continue
            if self._owners[node] is None:
                self._wait(node, self._mixed)
            elif any(self._is_wanted(child) for _, child, _ in below(node)):
                self._wait(node, self._owned)
        for node in self._cut.loss:
            if (node not in self._cut.on_data or is_penalty(node)) and any(
                self._is_wanted(child) for _, child, _ in below(node)
            ):
                self._wait(node, self._nobodys)

    def detach(self) -> None:
        """Let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._streams.clear()
        self._origins.clear()

    def _wait(self, node: Node, then: Callable[[Node, Grads], None]) -> None:
        self._handles.append(hooks.on_node(node, partial(then, node)))

    def _is_wanted(self, child: Node) -> bool:
        if is_leaf(child):
            return id(child.variable) in self._wanted
        return child in self._owners and self._owners[child] is None

    def _owned(self, node: Node, grads: Grads) -> None:
        owners = self._owners[node]
        assert owners is not None
        for grad, owner in zip(grads, owners, strict=True):
            if grad is None or not grad.numel():
                continue
            if owner is None or bool(((owner == UNSEEN) & (grad.abs() > 1e-12 * grad.abs().max())).any()):
                self.unknown.append(node.name())
        for sample in (*range(self.n), NOBODY):
            if not any(o is not None and bool((o == sample).any()) for o in owners):
                continue
            part = [
                None if g is None or o is None else g.clone().masked_fill_(o != sample, 0)
                for g, o in zip(grads, owners, strict=True)
            ]
            self._hand_on(node, sample if sample != NOBODY else SHARED, part)

    def _mixed(self, node: Node, grads: Grads) -> None:
        for sample, part in self._streams.pop(node, {}).items():
            self._hand_on(node, sample, part)

    def _nobodys(self, node: Node, grads: Grads) -> None:
        self._hand_on(node, SHARED, grads)

    def _hand_on(self, node: Node, sample: int, grads: Grads) -> None:
        results = replay(node, grads)
        origins = self._origins.get(node, {node.name(): None})
        for i, child, output in below(node):
            value = results[i]
            if value is None or not self._is_wanted(child):
                continue
            if is_leaf(child):
                self._arrive(origins, child.variable, sample, value)
            else:
                self._origins.setdefault(child, {}).update(origins)
                streams = self._streams.setdefault(child, {})
                outputs = streams.setdefault(sample, [None] * len(child._input_metadata))
                known = outputs[output]
                outputs[output] = value if known is None else known + value

    def _arrive(self, origins: Mapping[str, None], parameter: Tensor, sample: int, value: Tensor) -> None:
        key = id(parameter)
        self.meetings.setdefault(key, {}).update(origins)
        value = value.to(wide(parameter.dtype))
        if sample == SHARED:
            self.shared[key] = self.shared[key] + value if key in self.shared else value
            return
        if key not in self.per_sample:
            self.per_sample[key] = value.new_zeros(self.n, *parameter.shape)
        self.per_sample[key][sample] += value


def _rounding(node: Node) -> float:
    """How far sums may be off where this node computes, relative to the largest gradient."""
    precise = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}
    return max(
        (precise.get(meta.dtype, 5e-2) for meta in node._input_metadata if meta.dtype.is_floating_point), default=0
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def unclear(names: list[str]) -> SamplesError:
    """The error for positions that got a gradient though the sweep had not seen whose they are."""
    return SamplesError(
        f"the samples of some positions are unknown at {', '.join(dict.fromkeys(names))}: they got a gradient though "
        "nothing led there when the graph was learnt.\n  unsum.mark_samples(losses) names them"
    )
