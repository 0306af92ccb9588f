"""What was learnt of one call of a model, so that its nodes are recognised where torch writes them down."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from unsum.compiled.raw_inputs import Lines
from unsum.errors import UnsupportedError
from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered
from unsum.graph.positions import Positions
from unsum.plan.plan import Meeting, Plan, Route
from unsum.plan.signature import plain
from unsum.plan.structure import sizes_of
from unsum.reducers.holding import Sizes
from unsum.rules.registry import Rule
from unsum.seams.nodes import number_of, outputs_of, saved_or
from unsum.seams.operators import hint, settled

HOOKS_AROUND = "hooks are registered on what torch.compile has returned, or on all modules"


class Untappable(Exception):
    """Why a call cannot run compiled. It runs eagerly then."""


class NotLasting(Untappable):
    """For now: zeros may have hidden something, or rows are sent elsewhere in each batch."""


class Unknown(Untappable):
    """What torch compiles was not learnt yet."""


class OtherParameters(Unknown):
    """What torch runs is compiled for other parameters than the call uses now."""


class Ambiguous(Untappable):
    """For these sizes: torch would compile for others as well, and which size is which cannot be told."""


class Spoilt(UnsupportedError):
    """A call in parts has failed, and cannot be made again."""


def cause(error: BaseException | None) -> Untappable | None:
    """Our own refusal among the errors in which torch wraps it."""
    while error is not None:
        if isinstance(error, Untappable):
            return error
        error = error.__cause__ or error.__context__
    return None


def reason(error: BaseException) -> str:
    """In one line, why a call cannot run compiled."""
    found = cause(error) or getattr(error, "inner_exception", None) or error  # torch wraps errors of a backend
    return (str(found) or type(found).__name__).splitlines()[0]


@dataclass(frozen=True)
class Along:
    """Samples lie along a dimension, however many there are."""

    dim: int
    how: Literal["outermost", "innermost", "between"]
    block: int  # how many positions of a sample lie side by side, where that does not follow from sizes

    def positions(self, shape: Sequence[int], n: int, lead: int) -> Positions:
        """How to take apart a tensor of this shape, with n samples. What was learnt of some sizes holds for others if
        sizes are sums and products of those that change: of a rounded one, two lengths may have had the same."""
        size = settled(shape[self.dim])
        block = size // n if self.how == "outermost" else self.block
        return Positions(Regular(tuple(shape), n, self.dim, block), n, lead)


@dataclass(frozen=True)
class Way:
    """A rule at one edge of a node, and the parameter to which it leads if nothing is to be followed."""

    edge: int
    rule: Rule
    along: Along
    lead: int
    shape: tuple[int, ...]  # of the tensor at the edge, if the parameter is known
    parameter: str | None
    turned: bool
    meeting: Meeting


@dataclass(frozen=True)
class Pattern:
    """The nodes of a call in the order in which they were made, and what is to be done at which."""

    nodes: tuple[Hashable, ...]  # kind, what is saved beside tensors, shapes, edges
    kinds: tuple[Hashable, ...]  # of these, what does not depend on sizes
    ways: dict[int, tuple[Way, ...]]
    expected: dict[str, int]  # how often factors come to a parameter
    spare: frozenset[str]  # parameters whose gradient is the sum of their factors
    cut: frozenset[int]  # at which of the call's output tensors samples are told apart
    used: frozenset[int]  # which of them lead to the loss
    n: int  # how many samples there were
    sizes: Sizes  # what holding the gradients of each parameter took
    wanted: frozenset[str]  # all parameters that were asked for
    inputs: Lines = ()  # what is done to inputs before a parameter meets them

    is_plain: ClassVar[bool] = True  # other sizes may follow from it

    @property
    def whole(self) -> Hashable:
        """All by which a call is recognised."""
        return self.nodes, self.inputs

    @cached_property
    def structure(self) -> Hashable:
        """What is the same for all sizes."""
        ways = tuple(
            (k, tuple((w.edge, w.rule.name, w.along, w.parameter) for w in ways)) for k, ways in self.ways.items()
        )
        return self.kinds, ways, self.spare, self.cut, self.used

    @cached_property
    def identity(self) -> Hashable:
        """The structure, of which the hash is computed once: it is looked up in every step."""
        return _HashedOnce(self.structure)

    @cached_property
    def meetings(self) -> dict[str, dict[Meeting, None]]:
        """Where each parameter meets data."""
        found: dict[str, dict[Meeting, None]] = {}
        for way in chain.from_iterable(self.ways.values()):
            if way.parameter is not None:
                found.setdefault(way.parameter, {})[way.meeting] = None
        return found


class _HashedOnce:
    """A value that computes its hash once."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _HashedOnce) and self.value == other.value)


# Torch may take down another operation of the same effect on positions. These leave no trace in a pattern:
_NOTHING = frozenset({"CloneBackward0", "AliasBackward0", "ContiguousBackward0"})
# These count as one, of which only edges and shapes are compared:
_SAME = {
    **dict.fromkeys(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"), "a view"),
    **dict.fromkeys(
        ("NativeBatchNormBackward0", "NativeBatchNormLegitNoTrainingBackward0", "CudnnBatchNormBackward0"),
        "a batch norm",
    ),
}


def _kind(node: Node) -> str | None:
    """What a node counts as, if others count as the same."""
    name = node.name()
    if name == "NativeDropoutBackward0" or (name == "MulBackward0" and len(below(node)) == 1):
        return "a product with numbers"
    return "an attention" if name.startswith("ScaledDotProduct") else _SAME.get(name)


def _is_nothing(node: Node) -> bool:
    """A copy; or a view or a slice of all there is."""
    name = node.name()
    if name in _NOTHING:
        return True
    if name != "SliceBackward0" and _SAME.get(name) != "a view":
        return False
    sizes = saved_or(node, "self_sym_sizes", None)
    return sizes is not None and numbers(tuple(sizes)) == numbers(tuple(outputs_of(node)[0].shape))


Leaf = Callable[[Node], str | None]  # the parameter at a leaf, "" for any other leaf, None for a node that is none


def made(outputs: Sequence[Tensor], leaf: Leaf) -> list[Node]:
    """The nodes that lead from a call's outputs to leaves, in the order in which they were made."""
    return made_below([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None], leaf)


def made_below(roots: Sequence[Node], leaf: Leaf) -> list[Node]:
    """The nodes that lead from these to leaves, in the order in which they were made."""
    found = ordered(roots, stop=lambda node: leaf(node) is not None)
    counted = (node for node in found if leaf(node) is None and not _is_nothing(node))
    return sorted(counted, key=lambda node: number_of(node))


def described(nodes: Sequence[Node], leaf: Leaf) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Of each node: all that can be told of it, and that part of it which does not depend on sizes."""
    place = {node: k for k, node in enumerate(nodes)}
    whole, kinds = [], []
    for node in nodes:
        kind = _kind(node)
        edges = tuple(
            _end(child, output, place, leaf)
            for child, output in node.next_functions
            if kind is None or child is not None
        )
        shapes = tuple(numbers(tuple(meta.shape)) for meta in outputs_of(node))
        if kind is None:
            whole.append((numbers(plain(node)), shapes, edges))
        else:
            whole.append((kind, shapes[0], edges))
        kinds.append((kind or node.name(), edges))
    return tuple(whole), tuple(kinds)


def _end(child: Node | None, output: int, place: Mapping[Node, int], leaf: Leaf) -> Hashable:
    """Where an edge leads: to which node, or which leaf."""
    while child is not None and child not in place and leaf(child) is None:  # a copy
        child, output = child.next_functions[0]
    return None if child is None else place[child] if child in place else leaf(child), output


def numbers(value: Any) -> Any:
    """The same with the numbers that stand for sizes put in."""
    if isinstance(value, tuple | list):
        return tuple(numbers(each) for each in value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return hint(value)
    return value


def along(layout: Layout | None, where: str) -> Along:
    """How samples lie, for any number of them."""
    if not isinstance(layout, Regular):
        raise Untappable(f"samples do not lie regularly at {where}")
    outer = layout.shape[layout.dim] // (layout.n * layout.block)
    if outer == 1:
        return Along(layout.dim, "outermost", 0)
    return Along(layout.dim, "innermost" if layout.block == 1 else "between", layout.block)


def pattern(
    plan: Plan,
    nodes: Sequence[Node],
    own: Sequence[Node],
    outputs: Sequence[Edge],
    names: Mapping[int, str],
    inputs: Lines,
) -> Pattern:
    """From a plan that was learnt eagerly. `nodes` is the graph, `own` those of the call, `outputs` the places of its
    output tensors. Raises where the plan needs more than rules within the call."""
    refuse(plan)
    leaf = leaf_of(names)
    place = {node: k for k, node in enumerate(own)}
    ways = ways_of(plan, nodes, own, plan.owned)
    if any(nodes[at] not in place for at in plan.mixed):
        raise Untappable("a parameter is used outside the call")
    found = {edge: k for k, edge in enumerate(outputs)}
    if any((nodes[at], output) not in found for at, output in plan.cut):
        raise Untappable("the loss's samples are not those of the call's outputs")
    whole, kinds = described(own, leaf)
    cut = frozenset(found[nodes[at], output] for at, output in plan.cut)
    within = set(own)
    entered = {edge for node in nodes if node not in within for edge in node.next_functions}
    used = cut | {k for k, edge in enumerate(outputs) if edge in entered}
    sizes, wanted = sizes_of(plan, nodes), frozenset(names.values())
    return Pattern(whole, kinds, ways, dict(plan.expected), plan.spare, cut, used, plan.n, sizes, wanted, inputs)


def ways_of(plan: Plan, nodes: Sequence[Node], own: Sequence[Node], at: Container[int]) -> dict[int, tuple[Way, ...]]:
    """What is to be done at which of the call's own nodes, of those at these places of the graph."""
    place = {node: k for k, node in enumerate(own)}
    ways: dict[int, tuple[Way, ...]] = {}
    for here in sorted((here for here in plan.owned if here in at), key=lambda here: place.get(nodes[here], -1)):
        node = nodes[here]
        if node not in place:
            raise Untappable(f"a parameter meets data outside the call, at {node.name()}")
        routes = [route for route in plan.routes.get(here, ()) if route.edge in plan.edges[here]]
        if {route.edge for route in routes} != set(plan.edges[here]):
            raise Untappable(f"there is no rule for {node.name()}{_in(plan.modules.get(here))}")
        if any(route.rule.several for route in routes):
            raise Untappable(f"{node.name()}{_in(plan.modules.get(here))} has several results")
        ways[place[node]] = tuple(_way(route) for route in routes)
    if plan.late or plan.streamed:
        raise Untappable("some gradients are formed sample by sample")
    return ways


def refuse(plan: Plan) -> None:
    """Raise where a plan needs more than rules, or does not last."""
    if not plan.lasting or plan.is_dynamic:
        raise NotLasting("its layout is learnt in every batch")
    reasons = {
        "an operation runs a backward of its own": plan.hidden,
        "the loss has a part that belongs to no sample": plan.nobodys,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Untappable(reason)


def _way(route: Route) -> Way:
    where = f"{route.meeting.operation}{_in(route.meeting.module)}"
    return Way(
        route.edge,
        route.rule,
        along(route.by.layout, where),
        route.by.lead,
        route.shape,
        route.parameter if route.member is None else None,  # one of several matrices: followed node by node
        route.turned,
        route.meeting,
    )


def _in(module: str | None) -> str:
    return f" in {module!r}" if module else ""


def leaf_of(names: Mapping[int, str]) -> Leaf:
    """Leaves of an ordinary graph."""
    return lambda node: names.get(id(node.variable), "") if is_leaf(node) else None
