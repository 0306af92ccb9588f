"""What was learnt of one layout of a graph. Nodes are named by their place in the order of the graph, so that a plan
holds no graph and fits every later graph with the same signature."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from unsum.factors.total import Term
from unsum.graph.layout import Layout, Mapped, Regular
from unsum.graph.nodes import Node
from unsum.graph.owners import Owners
from unsum.graph.positions import Positions
from unsum.reducers.holding import Sizes
from unsum.rules.registry import Rule
from unsum.rules.to_parameter import chosen, finished

if TYPE_CHECKING:
    from unsum.plan.teams import Team
    from unsum.travel.trail import Followed

Found = TypeVar("Found")
_KEPT = 256  # arrangements of one plan


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
    member: int | None = None  # which of several matrices side by side it is: an expert; None: the parameter itself

    def finished(self, kind: Term, parameter: Tensor) -> Term:
        """The factors of the parameter at its end, from those of the tensor at the edge."""
        if self.member is not None:
            return chosen(kind, self.member, parameter, turned=self.turned)
        return finished(kind, parameter, turned=self.turned)

    @cached_property
    def met(self) -> dict[Meeting, None]:
        """The meeting, as those of a parameter are held."""
        return {self.meeting: None}


class Ends:
    """The parameters at the ends of routes, in columns."""

    __slots__ = ("met", "names", "routes")

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self.names = tuple([str(route.parameter) for route in routes])
        self.met = tuple([route.met for route in routes])


@dataclass(frozen=True)
class Meeting:
    """A node at which a parameter met data."""

    operation: str
    module: str
    place: int  # which node it is, in the order of the graph
    how: str  # the rule's name, or "replay"


@dataclass(frozen=True)
class Plan:
    """Where parameters meet data in graphs of one layout. It has many fields, one for each question that a step asks:
    all are answered once, when the plan is made."""

    n: int
    owned: dict[int, Owners]  # nodes with owners that lead to a parameter or to the weight side
    edges: dict[int, tuple[int, ...]]  # those of the owned nodes that lead there
    mixed: frozenset[int]  # nodes that belong to nobody, on the way to a parameter
    streamed: frozenset[int]  # of these, those through which gradients pass formed, sample by sample
    modules: dict[int, str]  # in whose call the owned nodes were made
    cut: tuple[tuple[int, int], ...]  # where it starts: nodes, and which output of each
    layouts: tuple[Layout, ...]  # whose the positions are there
    nobodys: tuple[int, ...]  # what joins a parameter to the loss without any data
    hidden: dict[int, list[Owners]] = field(default_factory=dict)  # nodes that run backwards of their own
    routes: dict[int, tuple[Route, ...]] = field(default_factory=dict)  # audited rules, by place
    together: dict[int, Team] = field(default_factory=dict)  # meetings that may wait for others, mostly of their shape
    expected: dict[str, int] = field(default_factory=dict)  # how often factors come to a parameter
    sizes: Sizes = field(default_factory=Sizes)  # of these: what holding their gradients takes
    late: frozenset[str] = frozenset()  # parameters to which gradients come formed, when the backward is over
    reaches: dict[tuple[int, int], str] = field(default_factory=dict)  # the parameter at the end of a node's edge
    free: frozenset[str] = frozenset()  # parameters whose gradients come as factors alone
    dear: frozenset[str] = frozenset()  # parameters whose gradient does not come with their norms
    cheap: frozenset[str] = frozenset()  # parameters whose gradient comes with their norms: torch need not compute it
    spare: frozenset[str] = frozenset()  # of a compiled model: the gradients that torch need not compute
    stranded: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)  # by the parameters whose gradient is not
    # computed: the meetings that torch runs only if it is asked to
    rounding: float = 1e-9
    has_doubts: bool = False  # whether the sweep has not come to some positions of owned nodes
    lasting: bool = False  # whether it holds for later graphs with the same signature
    is_dynamic: bool = False  # whether whose some rows are is another matter in every batch
    tried: set[Hashable] = field(default_factory=set)  # the first of each team, once it was compared with itself alone
    grouped: dict[Hashable, Any] = field(default_factory=dict)  # by device: the teams whose norms come from one launch
    arranged: dict[Hashable, Any] = field(default_factory=dict)  # which meetings wait, and what goes to which launch
    recordings: dict[Hashable, dict[Any, Any]] = field(default_factory=dict)  # of meetings, by what is wanted
    uses: list[None] = field(default_factory=list)  # an entry for each of the first backwards that went by it
    followed: Followed | None = None  # the owners of all nodes, where some rows are another matter in every batch
    order: tuple[int, ...] = ()  # which of the nodes of a survey is at each place

    @staticmethod
    def empty(n: int, **fields: Any) -> Plan:
        """A plan without any meeting."""
        none = frozenset[int]()
        return Plan(n, {}, {}, none, none, {}, (), (), (), **fields)

    def in_order(self, found: Sequence[Node]) -> Sequence[Node]:
        """The nodes of a survey, each at its place."""
        return self._pick(found) if len(self.order) > 1 else [found[k] for k in self.order]

    def arrange(self, key: Hashable, found: Found) -> Found:
        """Keep how something is arranged for later backwards; where many were kept, all are let go of first."""
        if len(self.arranged) >= _KEPT:
            self.arranged.clear()
        self.arranged[key] = found
        return found

    @cached_property
    def _pick(self) -> Callable[[Sequence[Node]], tuple[Node, ...]]:
        return itemgetter(*self.order)

    @cached_property
    def alone(self) -> frozenset[str]:
        """The parameters to which factors come just once, and nothing else."""
        return frozenset(name for name, times in self.expected.items() if times == 1 and name not in self.late)

    @cached_property
    def ruled(self) -> dict[int, tuple[Route, ...]]:
        """The meetings that rules alone serve, each straight from the node's one result to a parameter, and how."""
        found: dict[int, tuple[Route, ...]] = {}
        for place, owners in self.owned.items():
            edges = set(self.edges[place])
            wanted = tuple(route for route in self.routes.get(place, ()) if route.edge in edges)
            straight = {route.edge for route in wanted if route.parameter is not None and not route.rule.several}
            if straight == edges and (isinstance(owners[0], Regular) or _is_even(owners[0])):
                found[place] = wanted
        return found


def _is_even(layout: Layout | None) -> bool:
    """Whether every row is known to be somebody's, as many to each."""
    return isinstance(layout, Mapped) and layout.is_whole and layout.held is not None


def has_doubts(owned: Mapping[int, Owners]) -> bool:
    """Whether the owners of some positions are not known."""
    return any(isinstance(layout, Mapped) and layout.has_unseen for each in owned.values() for layout in each)
