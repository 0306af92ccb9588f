"""A walk through a graph whose structure was judged before: the same steps, with other sizes or other indices.

A walk (`walk`) asks at every node what the table knows and where values must decide. Once a structure is judged, both
are known: a trail goes straight to the functions of the table, and tells if one of them answers otherwise than then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.autograd.function import BackwardCFunction

from unsum.graph.layout import Layout, Mapped
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.graph.owners import Owners
from unsum.seams.nodes import outputs_of
from unsum.travel.table import Answer, At, Journey, Travel, down, entry
from unsum.travel.walk import INDEXED, Walked, filled, may_mix, mixes, with_states


class Leg(NamedTuple):
    """A node at which the table speaks. Nodes are named by their places in the order of the graph."""

    place: int
    kind: str
    travel: Travel
    is_custom: bool  # a Function's node, of which the table knows more than the kind
    looks: bool  # whether it may mix samples whatever the gradients do
    edges: tuple[tuple[int, int, int], ...]  # that lead on to data: edge, place of the child, which of its outputs

    def answer(self, at: At, edge: int, child: Node, output: int) -> Layout | Answer:
        """What the table says of the argument at an edge, which is an output of this child."""
        shape = tuple(outputs_of(child)[output].shape)
        if self.is_custom or (isinstance(at.layout, Mapped) and not at.layout.map.dim()):
            return down(at, edge, shape)
        at.edge, at.arg = edge, shape
        return self.travel(at)


class Followed:
    """The owners of all nodes of a graph that was followed, by place. In a graph of the same sizes only those that
    indices decide are others."""

    def __init__(self, owners: Sequence[Owners | None], steps: Sequence[Leg]) -> None:
        self.moved = [outs is not None and any(isinstance(out, Mapped) for out in outs) for outs in owners]
        self.known = owners
        self.fixed = [None if far else outs for far, outs in zip(self.moved, owners, strict=True)]
        self.legs = [leg for leg in steps if leg.looks or self.decides(leg)]

    def decides(self, leg: Leg) -> bool:
        """Whether it must be asked again where the samples of its arguments are."""
        return self.moved[leg.place] or leg.kind in INDEXED


@dataclass(frozen=True)
class Trail:
    """The part of a walk that is the same for all graphs of a structure."""

    steps: tuple[Leg, ...]
    widths: tuple[int, ...]  # how many results each node has

    def follow(
        self, nodes: Sequence[Node], starts: Mapping[Edge, Layout], places: Sequence[tuple[int, int]], journey: Journey
    ) -> list[Owners | None] | None:
        """The owners of the nodes of a graph, by place; None if the table does not say them as it did when the
        structure was judged. `places` are those of the starts."""
        owners: list[Owners | None] = [None] * len(nodes)
        for (place, output), layout in zip(places, starts.values(), strict=True):
            if not self._arrive(owners, place, output, layout, journey):
                return None
        try:
            for leg in self.steps:
                at = self._at(leg, nodes, owners, journey)
                if at is None:
                    return None
                for edge, child, output in leg.edges:
                    answer = leg.answer(at, edge, nodes[child], output)
                    if isinstance(answer, Answer) or not self._arrive(owners, child, output, answer, journey):
                        return None
        except (AttributeError, IndexError):  # of these sizes the table does not know
            return None
        return owners

    def again(self, nodes: Sequence[Node], before: Followed, journey: Journey) -> dict[int, Owners] | None:
        """Of a graph with the sizes of one that was followed before: the owners that indices decide, by place. None if
        something else than these has changed."""
        owners: list[Owners | None] = list(before.fixed)
        found: dict[int, Owners] = {}
        try:
            for leg in before.legs:
                if not before.decides(leg):
                    outs = owners[leg.place]
                    if outs is not None and mixes(nodes[leg.place], outs, journey):
                        return None
                    continue
                at = self._at(leg, nodes, owners, journey)
                if at is None:
                    return None
                if before.moved[leg.place]:
                    found[leg.place] = owners[leg.place] or []
                for edge, child, output in leg.edges:
                    answer, known = leg.answer(at, edge, nodes[child], output), before.known[child]
                    if isinstance(answer, Answer) or known is None:
                        return None
                    if not before.moved[child]:
                        if answer != known[output]:
                            return None
                    elif self._arrive(owners, child, output, answer, journey):
                        found[child] = owners[child] or []
                    else:
                        return None
        except (AttributeError, IndexError):
            return None
        return found

    def _at(self, leg: Leg, nodes: Sequence[Node], owners: list[Owners | None], journey: Journey) -> At | None:
        """What the table is told of a node; None if nothing has arrived there, or it mixes samples."""
        node, outs = nodes[leg.place], owners[leg.place]
        if outs is None:
            return None
        if "Rnn" in leg.kind:
            outs = owners[leg.place] = with_states(node, outs) or outs
        first = outs[0] if outs[0] is not None else next((out for out in outs if out is not None), None)
        if first is None or (leg.looks and mixes(node, outs, journey)):
            return None
        if isinstance(first, Mapped) and (len(outs) > 1 or not first.is_whole):
            outs = owners[leg.place] = filled(outs, journey) or outs
            first = next(out for out in outs if out is not None)
        return At(node, leg.kind, outs, first, journey)

    def _arrive(self, owners: list[Owners | None], place: int, output: int, layout: Layout, journey: Journey) -> bool:
        outs = owners[place]
        if outs is None:
            outs = owners[place] = [None] * self.widths[place]
        known = outs[output]
        outs[output] = layout if known is None else journey.joined(known, layout)
        return outs[output] is not None


def trail(walked: Walked, place: Mapping[Node, int], nodes: Sequence[Node]) -> Trail | None:
    """The trail of a walk; None if values had to be asked somewhere."""
    if walked.asked:
        return None
    steps = []
    for node, owners in walked.owners.items():
        onward = [(edge, *node.next_functions[edge]) for edge in walked.said.get(node, ())]
        edges = tuple((edge, place[c], output) for edge, c, output in onward if walked.owners.get(c) is not None)
        kind, travel = entry(node.name())
        looks = owners is not None and may_mix(node)
        if travel is not None and (edges or looks):
            steps.append(Leg(place[node], kind, travel, isinstance(node, BackwardCFunction), looks, edges))
    return Trail(tuple(steps), tuple(0 if is_leaf(node) else len(outputs_of(node)) for node in nodes))
