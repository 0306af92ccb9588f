"""One backward, sample by sample, inside the user's own: in hooks that run before the nodes do. The gradients are the
ones that really flow, and what the nodes have saved is still there.

At a meeting with a rule, δ and what the node has saved become factors, which are followed to the parameter. Without
one, the node is called again once for each sample with the rest of its gradient set to zero, and what comes out is
passed on, sample by sample, through the nodes without owners.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unsum import seams
from unsum.factors.dense import Dense
from unsum.factors.lookup import Lookup
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.graph.codes import TOLERANCE
from unsum.graph.layout import NOBODY, UNSEEN, Mapped
from unsum.graph.nodes import Node, below, is_custom, is_leaf
from unsum.graph.replay import Grads, replay
from unsum.graph.saved import Saved
from unsum.kernels.product import wide
from unsum.learn.additive import Split, Sums
from unsum.learn.audit import shape_of
from unsum.learn.setting import Setting
from unsum.plan.plan import Meeting, Plan, Route
from unsum.rules.registry import Call
from unsum.rules.to_parameter import cast, follow
from unsum.seams.nodes import outputs_of
from unsum.step import channels_last
from unsum.step.lanes import Lanes
from unsum.step.recordings import Digests

SHARED = -1  # the stream of what belongs to nobody

Streams = dict[int, list[Tensor | None]]  # sample -> a gradient for each output of a node


class Listener(Protocol):
    """What takes the parts of parameters' gradients as they come."""

    keeps: bool  # whether factors may outlive the backward

    def meet(self, parameter: Tensor, meetings: Mapping[Meeting, None], kind: Term) -> None:
        """The samples' gradients of a parameter, from these meetings."""
        ...

    def shared(self, parameter: Tensor, value: Tensor) -> None:
        """Nobody's part of a parameter's gradient."""
        ...

    def unknown(self, operation: str) -> None:
        """Positions of this operation got a gradient though nobody knows whose they are."""
        ...

    def lost(self, operation: str) -> None:
        """Gradients of samples have come to this operation, on their way to a parameter, and it has not run."""
        ...

    def lanes(self, plan: Plan, nodes: Sequence[Node]) -> Lanes | None:
        """Where meetings of this graph wait for others, if any does."""
        ...

    def digests(self, plan: Plan, nodes: Sequence[Node]) -> Digests | None:
        """What takes meetings by recordings, if numbers are all that is wanted."""
        ...


class Run:
    """Waits at the nodes of a plan while one backward runs."""

    # More than twelve attributes: the plan and its nodes, what is under way at nodes without owners, and the hooks.
    def __init__(self, plan: Plan, nodes: Sequence[Node], setting: Setting, to: Listener) -> None:
        self.plan, self._to, self._setting = plan, to, setting
        self._nodes = nodes
        self._mixed = {nodes[place] for place in plan.mixed}
        self._parameters = setting.parameters
        self.hidden = {nodes[place]: list(owners) for place, owners in plan.hidden.items()}
        self._streams: dict[Node, Streams] = {}
        self._origins: dict[Node, dict[Meeting, None]] = {}  # where the streams of a node without owners met data
        self._formed: dict[int, tuple[Tensor, Tensor, dict[Meeting, None]]] = {}  # parameter, gradients, from where
        self.sums = Sums()  # of custom Functions
        self._handles: list[seams.Handle] = []
        self._largest = 0.0  # gradient so far, where some positions were not seen: beside it, others are rounding
        self._doubts = plan.has_doubts
        self._lanes: Lanes | None = None
        self._digests: Digests | None = None
        self._pass: Callable[[int, Any], None] | None = None  # what waits at nodes without owners, while attached

    @cached_property
    def _streamed(self) -> dict[Node, int]:
        """The nodes through which gradients may pass formed."""
        return {self._nodes[place]: place for place in self.plan.streamed}

    def attach(self, saved: Saved | None = None) -> None:
        """Wait at the nodes that matter. `saved` is what keeps tensors that checkpoints unpack, if there are any."""
        for node in self.hidden:  # what it computes again inside is watched like a forward
            self._handles.append(seams.on_node(node, lambda grads: seams.watch(self._setting.sides)))
            self._handles.append(seams.after_node(node, lambda results, grads: seams.unwatch(self._setting.sides)))
        self._lanes = None if self._doubts else self._to.lanes(self.plan, self._nodes)
        self._digests = None if self._doubts else self._to.digests(self.plan, self._nodes)
        waits: Container[int] = () if self._lanes is None else self._lanes.places
        ruled: Container[int] = () if self._doubts else self.plan.ruled
        hooks: list[Callable[[int, Any], None]] = [self._waiting, self._ruled, self._owned, self._passed, self._nobodys]
        if saved is not None:
            hooks = [saved.read_by(hook) for hook in hooks]
        wait, rule, own, self._pass, nobodys = hooks  # one of each, not one for each node
        owned = [self._nodes[place] for place in self.plan.owned]
        ways: list[Callable[[Grads], Any]] = [
            partial(wait if place in waits else rule if place in ruled else own, place) for place in self.plan.owned
        ]
        first = next(iter(self._parameters.values()), None)
        if saved is None and first is not None and first.device.type in channels_last.DEVICES:
            ways = [channels_last.handing_on(node, way) for node, way in zip(owned, ways, strict=True)]
        self._handles += seams.on_nodes(owned, ways)
        for place in self.plan.nobodys:
            self._handles.append(seams.on_node(self._nodes[place], partial(nobodys, place)))

    def detach(self, *, failed: bool) -> None:
        """Hand over what was formed, and let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not failed:
            for node in self._streams:
                self._to.lost(node.name())
            for parameter, values, origins in self._formed.values():
                self._to.meet(parameter, origins, Dense(values))
        for kept in (self._streams, self._origins, self._formed):
            kept.clear()
        self._lanes = self._digests = self._pass = None

    def _is_wanted(self, child: Node) -> bool:
        return id(child.variable) in self._setting.wanted if is_leaf(child) else child in self._mixed

    # ---- meetings -------------------------------------------------------------------------------------------------

    def _waiting(self, place: int, grads: Grads) -> None:
        """The shortest way: the meeting leaves what others of its shape leave."""
        delta = grads[0]
        assert self._lanes is not None
        if delta is None or (len(grads) > 1 and not _is_alone(grads)) or not self._lanes.add(place, delta):
            (self._ruled if place in self.plan.ruled else self._owned)(place, grads)

    def _ruled(self, place: int, grads: Grads) -> None:
        """The short way, where rules lead straight to parameters and nothing is in doubt."""
        delta = grads[0]
        if delta is None or not delta.numel() or not _is_alone(grads):
            self._owned(place, grads)
            return
        if self._digests is not None and self._digests.take(place, delta):
            return
        node, memo, meet = self._nodes[place], {}, self._to.meet  # type: ignore[var-annotated]
        for route in self.plan.ruled[place]:
            kind = route.rule.make(Call(node, delta, route.by, route.shape, False, memo, self._to.keeps))
            if kind is None:
                self._replay(place, grads, [route.edge])
                continue
            parameter = self._parameters.get(route.parameter)  # type: ignore[arg-type]
            if parameter is not None:
                meet(parameter, route.met, route.finished(kind, parameter))

    def _owned(self, place: int, grads: Grads) -> None:
        node, owners = self._nodes[place], self.plan.owned[place]
        if all(grad is None or not grad.numel() for grad in grads):
            return  # an expert that no row was sent to, say
        for grad, layout in zip(grads, owners, strict=True):
            if grad is None or not grad.numel():
                continue
            if self._doubts:
                self._largest = max(self._largest, float(torch.where(grad.isfinite(), grad.abs(), 0).max()))
            if layout is None or (isinstance(layout, Mapped) and _is_unseen(layout, grad, self._largest)):
                self._to.unknown(node.name())
        memo: dict[str, Any] = {}
        wanted = [route for route in self.plan.routes.get(place, ()) if route.edge in self.plan.edges[place]]
        done = [route.edge for route in wanted if self._apply(route, node, grads, memo)]
        if rest := [edge for edge in self.plan.edges[place] if edge not in done]:
            self._replay(place, grads, rest)

    def _apply(self, route: Route, node: Node, grads: Grads, memo: dict[str, Any]) -> bool:
        """A rule's factors, followed to the parameter; False if it does not hold here."""
        delta, others = grads[0], grads[1:]
        if route.rule.several:
            delta = _zeros(node) if delta is None else delta
        elif delta is None or any(grad is not None for grad in others):
            return False
        call = Call(node, delta, route.by, route.shape, memo=memo, others=others)
        kind = route.rule.make(call)
        if kind is None:
            return False
        if isinstance(kind, Outer | Scale | Lookup) and (lengths := route.by.lengths) is not None:
            kind = replace(kind, lengths=lengths)
        if route.parameter is not None:
            parameter = self._parameters.get(route.parameter)
            if parameter is not None:
                self._to.meet(parameter, route.met, route.finished(kind, parameter))
            return True
        child, output = node.next_functions[route.edge]
        self._follow(kind, child, output, route.meeting)
        if route.by.nobodys(delta) is not None:
            for_nobody = route.rule.make(replace(call, only_nobodys=True))
            assert for_nobody is not None
            self._stream(SHARED, for_nobody.sum(), child, output, {route.meeting: None})
        return True

    def _follow(self, kind: Term, child: Node, output: int, meeting: Meeting) -> None:
        while not is_leaf(child):
            nexts = below(child)
            deeper, place = nexts[0][1:]
            followed = follow(kind, child, output, shape_of(deeper, place)) if len(nexts) == 1 else None
            if followed is None:  # formed, and passed on sample by sample
                for sample, value in enumerate(kind.per_sample()):
                    self._stream(sample, value, child, output, {meeting: None})
                return
            kind, child, output = followed, deeper, place
        self._to.meet(child.variable, {meeting: None}, cast(kind, child.variable.dtype))

    def _replay(self, place: int, grads: Grads, edges: Sequence[int]) -> None:
        node, owners = self._nodes[place], self.plan.owned[place]
        origins = {Meeting(node.name(), self.plan.modules[place], place, "replay"): None}
        split = Split(node, self.plan.modules[place], edges) if is_custom(node) else None
        ruled = {route.edge for route in self.plan.routes.get(place, ())}.intersection(edges)
        for sample in (*range(self.plan.n), NOBODY):
            part = [
                None if g is None or layout is None else layout.only(g, sample)
                for g, layout in zip(grads, owners, strict=True)
            ]
            if any(g is not None for g in part):
                results = self._hand_on(node, sample if sample != NOBODY else SHARED, part, origins, edges)
                if split is not None:
                    split.add(results)
                if any(results[edge] is None for edge in ruled):  # torch was told that a rule would bring it
                    self._to.lost(node.name())
        if split is not None and place not in self.plan.hidden:
            self.sums.add(split, grads)

    # ---- what belongs to nobody -----------------------------------------------------------------------------------

    def _passed(self, place: int, grads: Grads) -> None:
        node = self._nodes[place]
        edges = [edge for edge, child, _ in below(node) if self._is_wanted(child)]
        split = Split(node, "", edges) if is_custom(node) else None
        for sample, part in self._streams.pop(node, {}).items():
            results = self._hand_on(node, sample, part, self._origins.get(node, {}))
            if split is not None:
                split.add(results)
        if split is not None:
            self.sums.add(split, grads)

    def _nobodys(self, place: int, grads: Grads) -> None:
        self._hand_on(self._nodes[place], SHARED, grads, {})

    def _hand_on(
        self,
        node: Node,
        sample: int,
        grads: Grads,
        origins: Mapping[Meeting, None],
        edges: Sequence[int] | None = None,
    ) -> Grads:
        results = replay(node, grads)
        for edge, child, output in below(node):
            value = results[edge]
            if value is not None and self._is_wanted(child) and (edges is None or edge in edges):
                self._stream(sample, value, child, output, origins)
        return results

    def _stream(self, sample: int, value: Tensor, child: Node, output: int, origins: Mapping[Meeting, None]) -> None:
        """One sample's part of what flows to a parameter, or to a node on the way to one."""
        if is_leaf(child):
            self._form(child.variable, sample, value, origins)
            return
        value = value.to(outputs_of(child)[output].dtype)
        self._origins.setdefault(child, {}).update(origins)
        streams = self._streams.get(child)
        if streams is None:  # it runs later in this backward: few of the nodes through which they may pass get any
            streams = self._streams[child] = {}
            place = self._streamed.get(child)
            if place is not None and self._pass is not None:
                self._handles.append(seams.on_node(child, partial(self._pass, place)))
        outputs = streams.setdefault(sample, [None] * len(outputs_of(child)))
        known = outputs[output]
        outputs[output] = value if known is None else known + value

    def _form(self, parameter: Tensor, sample: int, value: Tensor, origins: Mapping[Meeting, None]) -> None:
        value = value.to(wide(parameter.dtype))
        if sample == SHARED:
            self._to.shared(parameter, value)
            return
        if id(parameter) not in self._formed:
            self._formed[id(parameter)] = (parameter, value.new_zeros(self.plan.n, *parameter.shape), {})
        _, values, known = self._formed[id(parameter)]
        known.update(origins)
        values[sample] += value


def _is_alone(grads: Grads) -> bool:
    """Whether only a node's first result got a gradient."""
    for grad in grads[1:]:  # noqa: SIM110 - for every meeting of every step: a generator takes longer
        if grad is not None:
            return False
    return True


def _zeros(node: Node) -> Tensor:
    """The gradient of a node's first result, if nobody uses that."""
    meta = outputs_of(node)[0]
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(tuple(meta.shape))


def _is_unseen(layout: Mapped, grad: Tensor, largest: float) -> bool:
    """Whether a gradient arrives where the sweep has not come; a NaN counts as one, rounding does not."""
    if not layout.has_unseen:
        return False
    small = 10 * TOLERANCE.get(grad.dtype, (0, 1e-3))[1]
    unseen = layout.beside(layout.map.to(grad.device) == UNSEEN)
    return bool((unseen & ~(grad.abs() <= small * largest)).any())
