"""A walk through a graph whose structure was judged before: the same steps, with other sizes or other indices.

A walk (`walk`) asks at every node what the table knows and where values must decide. Once a structure is judged, both
are known: a trail goes straight to the functions of the table, and tells if one of them answers otherwise than then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unsum.graph.layout import Layout, Mapped
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.graph.owners import Owners
from unsum.seams.nodes import outputs_of
from unsum.travel.table import Answer, At, Journey, Travel, down, entry, start
from unsum.travel.walk import INDEXED, Walked, filled, may_mix, mixes, with_states


class Leg(NamedTuple):
    """A node at which the table speaks. Nodes are named by their places in the order of the graph."""

    place: int
    kind: str
    travel: Travel
    looks: bool  # whether it may mix samples whatever the gradients do
    edges: tuple[tuple[int, int, int], ...]  # that lead on to data: edge, place of the child, which of its outputs


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
        for place, kind, travel, looks, edges in self.steps:
            node, outs = nodes[place], owners[place]
            if "Rnn" in kind:
                outs = owners[place] = with_states(node, outs)
            first = None if outs is None else next((out for out in outs if out is not None), None)
            if first is None or outs is None or (looks and mixes(node, outs, journey)):
                return None
            if isinstance(first, Mapped):
                outs = owners[place] = filled(outs, journey)
                at = start(node, outs or [], journey)
                assert at is not None
            else:
                at = At(node, kind, outs, first, journey)
            at.kind = kind
            for edge, child, output in edges:
                shape = tuple(outputs_of(nodes[child])[output].shape)
                if isinstance(at.layout, Mapped):
                    answer = down(at, edge, shape)
                else:
                    at.edge, at.arg = edge, shape
                    answer = travel(at)
                if isinstance(answer, Answer) or not self._arrive(owners, child, output, answer, journey):
                    return None
        return owners

    def again(
        self, nodes: Sequence[Node], before: Sequence[Owners | None], journey: Journey
    ) -> dict[int, Owners] | None:
        """Of a graph with the sizes of one that was followed before: the owners that indices decide, by place. None if
        something else than these has changed."""
        moved = [_is_moved(outs) for outs in before]
        owners: list[Owners | None] = [None if far else outs for far, outs in zip(moved, before, strict=True)]
        found: dict[int, Owners] = {}
        for place, kind, _, looks, edges in self.steps:
            is_moved = moved[place]
            outs = owners[place]
            if looks and outs is not None and mixes(nodes[place], outs, journey):
                return None
            if not is_moved and kind not in INDEXED:
                continue
            if outs is None:
                return None
            if is_moved:
                found[place] = outs
            at = start(nodes[place], outs, journey)
            assert at is not None
            for edge, child, output in edges:
                answer = down(at, edge, tuple(outputs_of(nodes[child])[output].shape))
                known = before[child]
                if isinstance(answer, Answer) or known is None:
                    return None
                if not moved[child]:
                    if answer != known[output]:
                        return None
                elif self._arrive(owners, child, output, answer, journey):
                    found[child] = owners[child] or []
                else:
                    return None
        return found

    def _arrive(self, owners: list[Owners | None], place: int, output: int, layout: Layout, journey: Journey) -> bool:
        outs = owners[place]
        if outs is None:
            outs = owners[place] = [None] * self.widths[place]
        outs[output] = journey.joined(outs[output], layout)
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
            steps.append(Leg(place[node], kind, travel, looks, edges))
    return Trail(tuple(steps), tuple(0 if is_leaf(node) else len(outputs_of(node)) for node in nodes))


def _is_moved(outs: Owners | None) -> bool:
    return outs is not None and any(isinstance(out, Mapped) for out in outs)
