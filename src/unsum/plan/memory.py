"""What is remembered of a model, across blocks and without holding it: its plans, and the forwards that led to them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from unsum.graph.nodes import Node
from unsum.plan.plan import Plan

_KEPT = 128  # plans per model

_plans: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Plan]] = weakref.WeakKeyDictionary()
_forwards: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Seen]] = weakref.WeakKeyDictionary()


def recall(model: nn.Module, key: Hashable, found: Sequence[Node]) -> tuple[Plan, Sequence[Node]] | None:
    """The plan of a graph that was learnt before, by any block, and the graph's nodes in the order of the plan."""
    plans = _plans.get(model)
    plan = None if plans is None else plans.get(key)
    if plans is None or plan is None:
        return None
    nodes = plan.in_order(found)
    fitted = plan.fitted(nodes)
    if fitted is None:
        return None
    plans.move_to_end(key)
    return fitted, nodes


def remember(model: nn.Module, key: Hashable, plan: Plan) -> None:
    """Keep a plan for later blocks; the oldest go."""
    plans = _plans.setdefault(model, OrderedDict())
    plans[key] = plan
    while len(plans) > _KEPT:
        plans.popitem(last=False)
        _forwards.pop(model, None)  # or a forward would be known whose graph is not


def forget_plan(model: nn.Module, key: Hashable) -> None:
    """Forget one plan."""
    plans = _plans.get(model)
    if plans is not None:
        plans.pop(key, None)


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


def watch_again(model: nn.Module) -> None:
    """What calls of a model led to may have changed: they are watched anew."""
    _forwards.pop(model, None)


def forget(model: nn.Module) -> None:
    """Forget all plans of a model."""
    _plans.pop(model, None)
    _forwards.pop(model, None)
