"""What was learnt of one layout of a graph. Nodes are named by their place in the order of the graph, so that a plan
holds no graph and fits every later graph with the same signature."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from unsum.graph.nodes import Node
from unsum.graph.owners import Owners
from unsum.graph.positions import Positions
from unsum.graph.saved import saved_by
from unsum.rules.registry import Rule


@dataclass(frozen=True)
class Indices:
    """Whole numbers that a node has saved and by which owners went: another batch may have others."""

    place: int
    which: int  # of the node's saved tensors
    value: Tensor


@dataclass(frozen=True)
class Route:
    """A rule at one edge of a node, and the way from there to the parameter if it needs no look at the graph."""

    edge: int
    rule: Rule
    by: Positions
    shape: tuple[int, ...]  # of the tensor at the edge
    meeting: Meeting
    parameter: str | None  # None if the way has to be followed node by node
    turned: bool = False  # whether the tensor at the edge is the parameter transposed


@dataclass(frozen=True)
class Meeting:
    """A node at which a parameter met data."""

    operation: str
    module: str
    place: int  # which node it is, in the order of the graph
    how: str  # the rule's name, or "replay"


@dataclass(frozen=True)
class Plan:
    """Where parameters meet data in graphs of one layout."""

    n: int
    owned: dict[int, Owners]  # nodes with owners that lead to a parameter or to the weight side
    mixed: frozenset[int]  # nodes that belong to nobody, on the way to a parameter
    streamed: frozenset[int]  # of these, those through which gradients pass formed, sample by sample
    modules: dict[int, str]  # in whose call the owned nodes were made
    nobodys: tuple[int, ...]  # what joins a parameter to the loss without any data
    hidden: dict[int, list[Owners]] = field(default_factory=dict)  # nodes that run backwards of their own
    routes: dict[int, tuple[Route, ...]] = field(default_factory=dict)  # audited rules, by place
    expected: dict[str, int] = field(default_factory=dict)  # how often factors come to a parameter
    late: frozenset[str] = frozenset()  # parameters to which gradients come formed, when the backward is over
    cheap: frozenset[str] = frozenset()  # parameters whose gradient comes with their norms: torch need not compute it
    spare: frozenset[str] = frozenset()  # parameters whose gradient torch need not compute if nobody wants it
    rounding: float = 1e-9
    lasting: bool = False  # whether it holds for later graphs with the same signature
    indices: tuple[Indices, ...] = ()  # if these are the same

    def fits(self, nodes: Sequence[Node]) -> bool:
        """Whether the indices by which owners went are still the same."""
        for known in self.indices:
            now = list(saved_by(nodes[known.place]))[known.which]
            if now.shape != known.value.shape or not torch.equal(now, known.value):
                return False
        return True


_KEPT = 32  # plans per model

_plans: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Plan]] = weakref.WeakKeyDictionary()
_forwards: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Seen]] = weakref.WeakKeyDictionary()


def recall(model: nn.Module, key: Hashable, nodes: Sequence[Node]) -> Plan | None:
    """The plan of a graph that was learnt before, by any block."""
    plans = _plans.get(model, OrderedDict())
    plan = plans.get(key)
    if plan is None or not plan.fits(nodes):
        return None
    plans.move_to_end(key)
    return plan


def remember(model: nn.Module, key: Hashable, plan: Plan) -> None:
    """Keep a plan for later blocks; the oldest go."""
    plans = _plans.setdefault(model, OrderedDict())
    plans[key] = plan
    while len(plans) > _KEPT:
        plans.popitem(last=False)


def is_in_a_loop(model: nn.Module) -> bool:
    """Whether any call of the model need not be watched again."""
    return any(seen.times > 1 for seen in _forwards.get(model, {}).values())


@dataclass(frozen=True)
class Seen:
    """What was found out by watching a call of a module."""

    is_data: bool  # whether it was given any data
    outputs: tuple[bool, ...] = ()  # which of its outputs have samples
    times: int = 0  # how often it led to a graph with a plan


def known_forward(model: nn.Module, key: Hashable) -> Seen | None:
    """What was seen of a call with these flags, shapes and dtypes, if it led to a graph with a plan twice: then this is
    a loop, and the call need not be watched again."""
    seen = _forwards.get(model, {}).get(key)
    return seen if seen is not None and seen.times > 1 else None


def know_forward(model: nn.Module, key: Hashable, seen: Seen | None) -> None:
    """Remember it; None to forget."""
    known = _forwards.setdefault(model, {})
    if seen is None:
        known.pop(key, None)
        return
    if len(known) > 4 * _KEPT:
        known.clear()
    before = known.get(key)
    known[key] = replace(seen, times=1 if before is None else before.times + 1)


def forget(model: nn.Module) -> None:
    """Forget all plans of a model."""
    _plans.pop(model, None)
    _forwards.pop(model, None)
