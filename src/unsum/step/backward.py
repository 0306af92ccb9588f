"""One backward of the user's, sample by sample: from the plan to what reducers, `.grad` and the block's result get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.gathered import Gradients
from unsum.graph.nodes import Node, is_leaf
from unsum.graph.rounded import rounding_of_sums
from unsum.learn.additive import Sums
from unsum.learn.setting import Setting
from unsum.plan.plan import Plan
from unsum.plan.structure import sizes_of
from unsum.reducers import SQ_NORMS, Reducer
from unsum.seams.modes import are_hooks_rounded
from unsum.seams.scaler import current_scale
from unsum.seams.tensors import have_hooks
from unsum.step.arrived import Arrived
from unsum.step.aside import GradAside
from unsum.step.collect import Collector
from unsum.step.deliver import Delivery
from unsum.step.launches import served
from unsum.step.meetings import Run
from unsum.step.planner import Planned

_dtype, _grad_dtype, _HAS_GRAD_DTYPE = attrgetter("dtype"), attrgetter("grad_dtype"), hasattr(Tensor, "grad_dtype")


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    reducers: tuple[Reducer, ...]
    keep: bool  # hold the factors, reducers or not
    rules: bool  # rules may speak, or all is replayed
    strict: bool  # a rule that does not hold is an error
    samples: sample_maps.Samples
    exact: bool  # samples may interact
    verify: bool
    mean: bool  # the loss was a mean over samples
    params: str | Sequence[str]
    grad: bool
    scaler: Any


class Reducing:
    """The reducers of a block during one backward, and the samples that it brings."""

    def __init__(self, options: Options, found: Gradients, calls: frozenset[int], n: int) -> None:
        self._options, self._found, self._n = options, found, n
        self.calls, again = found.group(calls, n)
        self._is_new = not again
        loss_scale = None if options.scaler is None else current_scale(options.scaler)
        self.unscale = None if loss_scale is None else 1 / loss_scale  # of what is nobody's
        factor = 1 if self.unscale is None else self.unscale
        self.scale: Tensor | float | None = n * factor if options.mean else self.unscale  # of the samples' gradients
        self._before: list[tuple[Any, Any]] = [(r, r.save()) for r in options.reducers if hasattr(r, "save")]

    def begin(self, positions: int | None) -> None:
        """The backward begins; the samples' inputs have so many positions, if that is known."""
        for reducer in self._options.reducers:
            if hasattr(reducer, "select"):
                reducer.select(self.calls, positions)
            reducer.begin(self._n, not self._is_new)

    def take_back(self) -> None:
        """The backward has failed: as if it had not begun."""
        for reducer, held in self._before:
            reducer.restore(held)
        if self._is_new:
            self._found.drop(self.calls)


class Step:
    """One backward, from its begin to its end."""

    def __init__(
        self,
        planned: Planned,
        call: seams.Backward,
        setting: Setting,
        options: Options,
        found: Gradients,
        reducing: Reducing,
    ) -> None:
        self.planned, self._call, self._setting = planned, call, setting
        self._options, self._found, self.reducing = options, found, reducing
        self._delivery = Delivery()
        self._arrived = Arrived(setting.wanted, setting.names) if planned.is_checked else None
        if self._arrived is not None and are_hooks_rounded():  # as autocast does what torch computes, not what we do
            self._arrived.rounding = rounding_of_sums(torch.bfloat16)
        self._aside: GradAside | None = None
        self._sums: list[Sums] = []  # of this backward, and of those that nodes run inside it
        plan, nodes = planned.plan, planned.nodes
        for reducer in options.reducers:
            if hasattr(reducer, "prepare"):
                reducer.prepare(lambda: sizes_of(plan, nodes), lambda: [p.device for p in setting.wanted.values()])
        self._skipped = self._find_skipped()
        self._collector = Collector(
            plan, setting.parameters, setting.names, options.reducers,
            keep=options.keep, scale=reducing.scale, check=planned.is_checked,
            skipped=self._skipped if options.grad else frozenset(),
            only=None if not call.inputs else {id(given) for given in call.inputs if isinstance(given, Tensor)},
            deliver=self._delivery.put if options.grad else _drop,
        )  # fmt: skip

    @property
    def n(self) -> int:
        """How many samples there are."""
        return self.planned.plan.n

    @property
    def leaves(self) -> set[int]:
        """The ids of the tensors to which torch brings gradients by itself, if only zeros."""
        if self._call.inputs:
            return set(map(id, self._call.inputs))
        return {id(node.variable) for node in self.planned.nodes if is_leaf(node)}

    @property
    def nobodys(self) -> dict[str, Tensor]:
        """{parameter: what belongs to no sample}, as this backward has brought it: not unscaled."""
        return {self._setting.names[key]: value for key, value in self._collector.nobodys.items()}

    def run(self, plan: Plan, nodes: Sequence[Node]) -> Run:
        """What waits at the nodes of a graph: of this backward, or of one that a node runs inside it."""
        if self._arrived is not None:
            self._arrived.rounding = max(self._arrived.rounding, plan.rounding)
            self._arrived.listen(plan, nodes)
        run = Run(plan, nodes, self._setting, self._collector)
        self._sums.append(run.sums)
        return run

    def begin(self, hears: Callable[[], bool]) -> frozenset[str]:
        """The user's backward begins. Returns the parameters to which torch need not bring gradients."""
        if self._arrived is not None:
            self._arrived.attach(hears)
        if not self._options.grad:
            self._aside = GradAside(self._found.names)
        return self._skipped

    def end(self, *, failed: bool) -> None:
        """The user's backward is over."""
        if self._arrived is not None:
            self._arrived.detach()
        if self._aside is not None:
            self._aside.put_back()
        if failed:
            return
        if self._arrived is not None:
            self._arrived.check(self._collector.found)
        for sums in self._sums:
            sums.check()
        with torch.no_grad():  # what is held may be tensors of the graph
            self._collector.finish()
            self._delivery.finish()
        self._found.take_in(self._collector, self.reducing.calls, self.reducing.scale, self.reducing.unscale)

    def _find_skipped(self) -> frozenset[str]:
        """The parameters whose gradient torch need not compute."""
        call, plan, options, wanted = self._call, self.planned.plan, self._options, self._setting.wanted
        if (
            call.inputs
            or not call.accumulates
            or self.planned.is_checked
            or not seams.is_alone_at_parameters(seams.here())
        ):
            return frozenset()
        if not options.grad:
            skipped = plan.free  # nodes that nothing would run then are run for themselves
        else:
            skipped = plan.cheap if any(getattr(r, "sums", False) for r in options.reducers) else frozenset()
            if [getattr(r, "wants", None) for r in options.reducers] == [SQ_NORMS] and not options.keep:
                skipped = skipped - served(plan, self.planned.nodes, self._setting.parameters).parameters
        if not skipped or _listens_to_all():
            return frozenset()
        if options.grad and seams.hear_of_backwards(self._found.names.modules.values()):
            return frozenset()  # which may read `.grad` of what the backward has come past
        if not _are_listened(list(wanted.values())):
            return skipped
        return skipped.difference(self._setting.names[key] for key, p in wanted.items() if _are_listened([p]))

    def not_chosen(self, parameters: Iterable[nn.Parameter]) -> frozenset[int]:
        """The ids of parameters whose gradients nobody wants and no hook of the user's waits for."""
        others = [p for p in parameters if id(p) not in self._setting.wanted]
        return frozenset(id(p) for p in others if not _are_listened([p]))


def _drop(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Nobody wants these in `.grad`."""


def _are_listened(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the gradient of any of these is left to torch: hooks of the user's wait for it, or it has another dtype
    than the parameter."""
    if have_hooks(parameters):
        return True
    return _HAS_GRAD_DTYPE and list(map(_grad_dtype, parameters)) != list(map(_dtype, parameters))


def _listens_to_all() -> bool:
    """Whether a process group may wait for gradients: its hooks cannot be seen from here."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
