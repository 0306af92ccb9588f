"""A call of a compiled model that ran with taps, from its forward to the end of its backward."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unsum import seams
from unsum.compiled.remembered import Record
from unsum.errors import UnsupportedError
from unsum.graph.nodes import Edge, Node, is_leaf, ordered, place


@dataclass
class Tapped:
    """A call that ran compiled. Its taps are leaves of the graph; what is wanted arrives there as their gradients."""

    call: int
    n: int
    before: int  # samples that come before, if backwards come in the order of forwards
    record: Record
    key: Hashable  # of calls like this one
    edges: frozenset[Edge]  # the places of the outputs that may lead to the loss
    tap: weakref.ref[Tensor]  # the first one: it lives as long as the graph
    is_begun: bool = False  # whether it had a backward
    reducing: Any = None  # the reducers, while it has one
    _at: tuple[Node, range] = (None, range(0))  # the node of the call, and where the taps are among its edges
    _values: list[Tensor | None] | None = None
    _handle: seams.Handle | None = None

    def find(self, nodes: Sequence[Node], first: Node, count: int) -> None:
        """Find the node of this call, and its taps, of which the first is this leaf, in the graph of a backward."""
        node = next(node for node in nodes if any(child is first for child, _ in node.next_functions))
        begin = next(k for k, (child, _) in enumerate(node.next_functions) if child is first)
        self._at = node, range(begin, begin + count)

    def refuse_others(self, call: seams.Backward, parameters: Mapping[int, str]) -> None:
        """What reaches parameters (names by id) beside the compiled call is not in the taps."""
        own, _ = self._at
        outside = ordered(
            [node for root in call.roots if (node := place(root)[0]) is not None], stop=lambda n: n is own
        )
        allowed = {edge for edge in self.edges if edge[0] is own}
        regenerated = {edge[0] for edge in self.edges} - {own}
        for node in outside:
            if node is own:
                continue
            if is_leaf(node) and id(node.variable) in parameters:
                raise UnsupportedError(
                    f"{parameters[id(node.variable)]} is used by the loss beside the compiled model, which was not so "
                    "when it was learnt.\n  from now on the model runs eagerly in this block: call it again"
                )
            for edge in node.next_functions:
                if edge[0] is own and edge not in allowed and node not in regenerated:
                    raise UnsupportedError(
                        "the loss uses an output of the compiled model that it did not use when it was learnt.\n"
                        "  from now on the model runs eagerly in this block: call it again"
                    )

    def wait(self) -> None:
        """The backward begins: take what the node hands to the taps."""
        self._values, self.is_begun = None, True
        self._handle = seams.after_node(self._at[0], lambda results, grads: self._take(results))

    def _take(self, results: Sequence[Tensor | None]) -> None:
        self._values = [results[k] for k in self._at[1]]

    def let_go(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def taken(self) -> list[Tensor]:
        """What has left through the taps."""
        self.let_go()
        values = self._values or []
        self._at, self._values = (None, range(0)), None
        found = [value.detach() for value in values if value is not None]
        if not found or len(found) < len(values):
            raise UnsupportedError("the compiled model's backward has left nothing in the tap")
        return [value.clone() for value in found] if self.record.reuses_memory else found

    def leaves(self) -> list[Tensor]:
        """The taps."""
        node, which = self._at
        return [node.next_functions[k][0].variable for k in which]

    def other_leaves(self, nodes: Sequence[Node]) -> list[Tensor]:
        """The leaves of a graph that are no taps of this call."""
        taps = {id(tap) for tap in self.leaves()}
        return [node.variable for node in nodes if is_leaf(node) and id(node.variable) not in taps]
