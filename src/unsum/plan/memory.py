"""What is remembered of a model, across blocks and without holding it: the structures of its graphs with their plans,
and the calls that led to them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node
from unsum.plan.frame import Frame
from unsum.plan.plan import Plan
from unsum.plan.signature import Signature
from unsum.plan.structure import Judged

_KEPT = 128  # structures per model, and plans per structure
_FRAMES = 4  # per structure
_TRIES = 16  # frames that are kept in a row without any graph that shares one

_structures: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Structure]] = weakref.WeakKeyDictionary()
CallKey = tuple[Hashable, ...]  # what calls are remembered by: first the purpose of their block
_calls: weakref.WeakKeyDictionary[nn.Module, dict[CallKey, CallHistory]] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Structure:
    """A structure that was judged: its plan as it was then, and those that were derived from it."""

    plan: Plan
    judged: Judged
    is_blind: bool  # whether its forward was not watched when it was judged
    sized: OrderedDict[Hashable, Plan] = field(default_factory=OrderedDict)
    frames: list[Frame] = field(default_factory=list)  # the last one first
    made: int = 0  # frames since a graph has last shared one
    is_outgrown: bool = False  # whether samples lie in a way now for which a rule of the plan does not speak

    def keep(self, sizes: Hashable, plan: Plan) -> None:
        """The plan for these sizes; the oldest go."""
        self.sized[sizes] = plan
        self.sized.move_to_end(sizes)
        while len(self.sized) > _KEPT:
            self.sized.popitem(last=False)

    def frame(self, signature: Signature, starts: Mapping[Edge, Layout], nodes: Sequence[Node]) -> Frame | None:
        """The kept frame that this graph shares; None if it shares none."""
        found = next((each for each in self.frames if each.fits(signature, starts, nodes)), None)
        if found is not None:
            self.made = 0
        return found

    def keep_frame(
        self, plan: Plan, signature: Signature, starts: Mapping[Edge, Layout], nodes: Sequence[Node]
    ) -> None:
        """Keep the frame of a graph in which indices move rows, for later graphs that differ in these rows alone. After
        so many frames that no later graph has shared, none is kept."""
        if plan.followed is not None and self.made < _TRIES:
            self.made += 1
            self.frames = [Frame(plan, signature, starts, nodes), *self.frames][:_FRAMES]


def recall(model: nn.Module, key: Hashable) -> Structure | None:
    """What is known of a structure, from any block."""
    known = _structures.get(model)
    found = None if known is None else known.get(key)
    if known is not None and found is not None:
        known.move_to_end(key)
    return found


def plans(model: nn.Module) -> list[Plan]:
    """All plans of a model that are at hand."""
    return [plan for structure in _structures.get(model, {}).values() for plan in structure.sized.values()]


def remember(model: nn.Module, key: Hashable, structure: Structure) -> None:
    """Keep it for later blocks; the oldest go."""
    known = _structures.setdefault(model, OrderedDict())
    known[key] = structure
    while len(known) > _KEPT:
        known.popitem(last=False)
        _calls.pop(model, None)  # or a call would be known whose graph is not


def forget_structure(model: nn.Module, key: Hashable) -> None:
    """Forget one structure."""
    known = _structures.get(model)
    if known is not None:
        known.pop(key, None)


@dataclass(frozen=True)
class Seen:
    """What was found out by watching a call of a module."""

    is_data: bool  # whether it was given any data
    outputs: tuple[bool, ...] = ()  # which of its outputs have samples


@dataclass(eq=False)
class CallHistory:
    """The calls of a module with the same flags and dtypes: what was seen of them, the sizes that they had, how often
    these led to a known graph, and the structures of these graphs."""

    seen: Seen
    sizes: OrderedDict[Hashable, int] = field(default_factory=OrderedDict)
    structures: set[Hashable] = field(default_factory=set)
    vary: bool = False  # whether one does not follow from another: then each is watched

    def need_no_watching(self, sizes: Hashable) -> bool:
        """Whether such a call will lead to a graph that is known: these sizes did so twice, or all sizes do."""
        if self.vary:
            return False
        return self.sizes.get(sizes, 0) > 1 or (len(self.structures) == 1 and len(self.sizes) > 1)


def known_call(model: nn.Module, key: CallKey, sizes: Hashable, *, exactly: bool) -> Seen | None:
    """What was seen of calls like this one, if it need not be watched; `exactly`: of calls with these very sizes."""
    calls = _calls.get(model, {}).get(key)
    if calls is None or (exactly and calls.sizes.get(sizes, 0) < 2):
        return None
    return calls.seen if calls.need_no_watching(sizes) else None


def meet_call(model: nn.Module, key: CallKey, seen: Seen) -> None:
    """A call was watched: from one of which something else was seen, nothing follows for others."""
    calls = _calls.setdefault(model, {}).setdefault(key, CallHistory(seen))
    calls.vary = calls.vary or calls.seen != seen


def know_call(model: nn.Module, key: CallKey, sizes: Hashable, seen: Seen, structure: Hashable) -> None:
    """A call has led to a graph of this structure."""
    known = _calls.setdefault(model, {})
    if len(known) > 4 * _KEPT:
        known.clear()
    calls = known.get(key)
    if calls is None:
        calls = known[key] = CallHistory(seen)
    calls.sizes[sizes] = calls.sizes.get(sizes, 0) + 1
    calls.structures.add(structure)
    while len(calls.sizes) > 4 * _KEPT:
        calls.sizes.popitem(last=False)


def always_watch(model: nn.Module, key: CallKey, seen: Seen) -> None:
    """What calls like this one lead to does not follow from what is known: each is watched from now on."""
    _calls.setdefault(model, {}).setdefault(key, CallHistory(seen)).vary = True


def forget_call(model: nn.Module, key: CallKey) -> None:
    """Calls like this one are watched anew."""
    calls = _calls.get(model, {})
    if key in calls and not calls[key].vary:
        del calls[key]


def is_in_a_loop(model: nn.Module, purpose: Hashable) -> bool:
    """Whether any call of the model in blocks of this purpose need not be watched again."""
    return any(
        max(calls.sizes.values(), default=0) > 1 or len(calls.sizes) > 1
        for key, calls in _calls.get(model, {}).items()
        if key[0] == purpose
    )


def watch_again(model: nn.Module) -> None:
    """What calls of a model led to may have changed: they are watched anew."""
    if model in _calls:
        _calls[model] = {key: calls for key, calls in _calls[model].items() if calls.vary}


def forget(model: nn.Module) -> None:
    """Forget all plans of a model."""
    for memory in (_structures, _calls):
        memory.pop(model, None)
