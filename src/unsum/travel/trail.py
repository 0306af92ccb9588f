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
from unsum.travel.elementwise import elementwise
from unsum.travel.products import mm
from unsum.travel.table import Answer, At, Journey, Travel, ask, down, entry
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
        return ask(at, self.travel)


class Followed:
    """The owners of all nodes of a graph that was followed, by place. In a graph of the same sizes only those that
    indices decide are others."""

    def __init__(self, owners: Sequence[Owners | None], steps: Sequence[Leg]) -> None:
        self.moved = [outs is not None and any([isinstance(out, Mapped) for out in outs]) for outs in owners]  # noqa: C419
        self.known = owners
        self.fixed = [None if far else outs for far, outs in zip(self.moved, owners, strict=True)]
        decided = [(leg, self._decides(leg)) for leg in steps]
        # Whether each must be asked again where the samples of its arguments are; the others, whether it mixes them.
        self.legs = [(leg, decides) for leg, decides in decided if decides or leg.looks]
        self.passing = {leg.place for leg, decides in self.legs if decides and self._passes(leg)}

    def _decides(self, leg: Leg) -> bool:
        moved = self.moved
        return moved[leg.place] or leg.kind in INDEXED or any([moved[child] for _, child, _ in leg.edges])  # noqa: C419

    def _passes(self, leg: Leg) -> bool:
        """Whether rows pass by a node as they are: it works on each number, or is a product with a matrix."""
        outs, moved = self.known[leg.place], self.moved
        if leg.looks or leg.is_custom or outs is None or len(outs) != 1 or not _are_rows(outs[0]):
            return False
        first = 0 if leg.kind == "Mm" else 1  # the edge of the rows, in a product
        is_row_by_row = leg.travel is elementwise or (leg.travel is mm and all(e[0] == first for e in leg.edges))
        return is_row_by_row and all(moved[child] for _, child, _ in leg.edges)


def _are_rows(layout: Layout | None) -> bool:
    """Whether each row of a tensor is known to be of some sample."""
    return isinstance(layout, Mapped) and layout.is_whole and layout.map.dim() == 1


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
        """Of a graph that is like one that was followed before, but for rows that indices move: the owners that indices
        decide, by place. None if something else than these has changed."""
        owners: list[Owners | None] = list(before.fixed)
        found: dict[int, Owners] = {}
        try:
            for leg, decides in before.legs:
                if not decides:
                    outs = owners[leg.place]
                    if outs is not None and mixes(nodes[leg.place], outs, journey):
                        return None
                    continue
                if leg.place in before.passing and self._pass(leg, nodes, owners, found, journey):
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

    def _pass(
        self,
        leg: Leg,
        nodes: Sequence[Node],
        owners: list[Owners | None],
        found: dict[int, Owners],
        journey: Journey,
    ) -> bool:
        """Give the samples of a result's rows to the arguments, which have the same rows: what the table says too, in
        many more steps. False where an argument has other rows: then the table is asked."""
        outs = owners[leg.place]
        rows = None if outs is None else outs[0]
        if outs is None or not isinstance(rows, Mapped) or not _are_rows(rows):
            return False
        size, rank = len(rows.map), 1 + len(rows.behind)
        shapes = [tuple(outputs_of(nodes[child])[output].shape) for _, child, output in leg.edges]
        for shape in shapes:
            if len(shape) != rank or shape[0] != size:
                return False
        found[leg.place] = outs
        for (_, child, output), shape in zip(leg.edges, shapes, strict=True):
            if not self._arrive(owners, child, output, rows.with_behind(shape[1:]), journey):
                return False
            found[child] = owners[child] or []
        return True

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
