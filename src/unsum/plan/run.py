"""One backward, sample by sample.

Where a node with owners hands something on to a parameter, or to a node without owners, it is called again once for
each sample with the rest of its gradient set to zero; what comes out is passed on, sample by sample, through the nodes
without owners. All this happens inside the user's own backward, in hooks that run before the nodes do: the gradients
are the ones that really flow, and what the nodes have saved is still there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from unsum import hooks
from unsum.errors import SamplesError
from unsum.graph.layout import NOBODY, UNSEEN, Mapped
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.replay import Grads, replay
from unsum.plan.learn import Plan, Setting

SHARED = -1  # the stream of what belongs to nobody

Streams = dict[int, list[Tensor | None]]  # sample -> a gradient for each output of a node


@dataclass(frozen=True)
class Meeting:
    """A node at which a parameter met data."""

    operation: str
    module: str
    place: int  # which node it is, counted from the cut


@dataclass
class Parts:
    """The gradients that one backward brought to parameters, apart: by sample, and nobody's. Keyed by id."""

    n: int
    per_sample: dict[int, Tensor] = field(default_factory=dict)
    shared: dict[int, Tensor] = field(default_factory=dict)
    meetings: dict[int, dict[Meeting, None]] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)  # what went wrong, to be said after the backward
    rounding: float = 1e-9  # how far sums may be off

    def arrive(self, origins: Mapping[Meeting, None], parameter: Tensor, sample: int, value: Tensor) -> None:
        """A part of a parameter's gradient."""
        key = id(parameter)
        value = value.to(wide(parameter.dtype))
        if sample == SHARED:
            self.shared[key] = self.shared[key] + value if key in self.shared else value
            return
        self.meetings.setdefault(key, {}).update(origins)
        if key not in self.per_sample:
            self.per_sample[key] = value.new_zeros(self.n, *parameter.shape)
        self.per_sample[key][sample] += value


class Run:
    """Waits at the nodes of a plan while one backward runs."""

    def __init__(self, plan: Plan, setting: Setting, parts: Parts) -> None:
        self.plan, self._parts = plan, parts
        self._wanted, self._module_of, self._sides = setting.wanted, setting.module_of, setting.sides
        parts.rounding = max([parts.rounding, *(_rounding(node) for node in plan.nodes if not is_leaf(node))])
        self._places = {node: place for place, node in enumerate(plan.nodes) if node in plan.owned}
        self._streams: dict[Node, Streams] = {}
        self._origins: dict[Node, dict[Meeting, None]] = {}  # where the streams of a node without owners met data
        self._handles: list[hooks.Handle] = []

    def attach(self) -> None:
        """Wait at the nodes that matter."""
        for node in self.plan.hidden:  # what it computes again inside is watched like a forward
            self._handles.append(hooks.on_node(node, lambda grads: hooks.watch(self._sides)))
            self._handles.append(hooks.after_node(node, lambda results, grads: hooks.unwatch(self._sides)))
        for nodes, then in (
            (self.plan.owned, self._owned), (self.plan.mixed, self._mixed), (self.plan.nobodys, self._nobodys)
        ):  # fmt: skip
            for node in nodes:
                self._handles.append(hooks.on_node(node, partial(then, node)))

    def detach(self) -> None:
        """Let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._streams.clear()
        self._origins.clear()

    def _is_wanted(self, child: Node) -> bool:
        return id(child.variable) in self._wanted if is_leaf(child) else child in self.plan.mixed

    def _owned(self, node: Node, grads: Grads) -> None:
        owners = self.plan.owned[node]
        for grad, layout in zip(grads, owners, strict=True):
            if grad is None or not grad.numel():
                continue
            if layout is None or (isinstance(layout, Mapped) and _is_unseen(layout.owner(grad.device), grad)):
                self._parts.unknown[node.name()] = None
        for sample in (*range(self._parts.n), NOBODY):
            part = [
                None if g is None or layout is None else layout.only(g, sample)
                for g, layout in zip(grads, owners, strict=True)
            ]
            if any(g is not None for g in part):
                self._hand_on(node, sample if sample != NOBODY else SHARED, part)

    def _mixed(self, node: Node, grads: Grads) -> None:
        for sample, part in self._streams.pop(node, {}).items():
            self._hand_on(node, sample, part)

    def _nobodys(self, node: Node, grads: Grads) -> None:
        self._hand_on(node, SHARED, grads)

    def _hand_on(self, node: Node, sample: int, grads: Grads) -> None:
        results = replay(node, grads)
        if node not in self._origins:
            place = self._places.get(node, 0)
            self._origins[node] = {Meeting(node.name(), self._module_of(node._sequence_nr()), place): None}
        origins = self._origins[node]
        for i, child, output in below(node):
            value = results[i]
            if value is None or not self._is_wanted(child):
                continue
            if is_leaf(child):
                self._parts.arrive(origins, child.variable, sample, value)
            else:
                self._origins.setdefault(child, {}).update(origins)
                streams = self._streams.setdefault(child, {})
                outputs = streams.setdefault(sample, [None] * len(child._input_metadata))
                known = outputs[output]
                outputs[output] = value if known is None else known + value


def _is_unseen(owner: Tensor, grad: Tensor) -> bool:
    """Whether a gradient arrives where the sweep has not come; a NaN counts as one."""
    size = grad.abs()
    finite = torch.where(size.isfinite(), size, 0)
    return bool(((owner == UNSEEN) & ~(size <= 1e-12 * finite.max())).any())


def _rounding(node: Node) -> float:
    """How far sums may be off where this node computes, relative to the largest gradient."""
    precise = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}
    return max(
        (precise.get(meta.dtype, 5e-2) for meta in node._input_metadata if meta.dtype.is_floating_point), default=0
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def unclear(names: Mapping[str, None]) -> SamplesError:
    """The error for positions that got a gradient though the sweep had not seen whose they are."""
    return SamplesError(
        f"the samples of some positions are unknown at {', '.join(names)}: they got a gradient though nothing led "
        "there when the graph was learnt (or everything there is NaN).\n  unsum.mark_samples(losses) names them"
    )
