"""A call of a compiled model that ran with taps, from its forward to the end of its backward."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from unsum import seams
from unsum.compiled.beside import Beside
from unsum.compiled.instrument import Graph
from unsum.errors import UnsupportedError
from unsum.graph.nodes import Edge, Node, is_leaf, ordered, place
from unsum.reducers.tap import Tap
from unsum.seams.nodes import current_node, will_run
from unsum.seams.tensors import copies


@dataclass
class Outlet:
    """The taps of one compiled graph. They are leaves of the call's graph; what is wanted arrives there as their
    gradients."""

    tap: weakref.ref[Tensor]  # the first one: it lives as long as the graph
    graph: Graph  # the one that ran
    forms: Sequence[Tap]
    taps: int  # how many
    names: frozenset[str]  # the parameters whose gradients they tell
    node: Node = None  # of the compiled graph, while there is a backward
    _at: range = range(0)  # where the taps are among its edges
    _values: list[Tensor | None] | None = None
    _handle: seams.Handle | None = None

    def find(self, nodes: Sequence[Node], first: Node) -> None:
        """Find the node of this graph, and its taps, of which the first is this leaf, in the graph of a backward."""
        self.node = next(node for node in nodes if any(child is first for child, _ in node.next_functions))
        begin = next(k for k, (child, _) in enumerate(self.node.next_functions) if child is first)
        self._at = range(begin, begin + self.taps)

    def wait(self) -> None:
        """The backward begins: take what the node hands to the taps."""
        self._values = None
        self._handle = seams.after_node(self.node, lambda results, grads: self._take(results))

    def _take(self, results: Sequence[Tensor | None]) -> None:
        self._values = [results[k] for k in self._at]

    def let_go(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def taken(self) -> list[Tensor]:
        """What has left through the taps."""
        self.let_go()
        values = self._values or []
        self.node, self._at, self._values = None, range(0), None
        found = [value.detach() for value in values if value is not None]
        if not found or len(found) < len(values):
            raise UnsupportedError("the compiled model's backward has left nothing in the tap")
        return found

    def leaves(self) -> list[Tensor]:
        """The taps."""
        nexts = self.node.next_functions  # each time it is asked for, torch makes all of it
        return [nexts[k][0].variable for k in self._at]


class Guard:
    """A hook on a compiled graph that computes no gradients of parameters, since its block wants none: raises if
    another backward than the block's comes there for them. (It holds nothing of the graph.)"""

    __slots__ = ("_frozen", "is_open")

    def __init__(self, frozen: frozenset[int]) -> None:
        self._frozen, self.is_open = frozen, False

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        if self.is_open:
            return
        for child, _ in current_node().next_functions:
            if child is not None and is_leaf(child) and id(child.variable) in self._frozen and will_run(child):
                raise not_computed()


def not_computed() -> UnsupportedError:
    """The error for a backward that asks for gradients that a compiled graph does not compute."""
    return UnsupportedError(
        "this call of the compiled model ran in a block that wants no .grad (grad=False, or clipping), and the "
        "gradients of parameters were left out when it was compiled: another backward would find zeros.",
        write=[
            "loss = loss_fn(compiled(x), y)  # call the model again, outside the block, and differentiate that",
            "with unsum.gradients(compiled, reducer) as g: ...  # with grad=True",
        ],
    )


@dataclass
class Tapped:
    """A call that ran compiled: as one graph, or in parts."""

    call: int
    n: int
    before: int  # samples that come before, if backwards come in the order of forwards
    outlets: Sequence[Outlet]  # of its graph, or of its parts
    reuses_memory: bool  # whether the next run overwrites what leaves
    key: Hashable  # of calls like this one
    edges: frozenset[Edge]  # the places of the outputs that may lead to the loss
    inside: frozenset[Node] = frozenset()  # nodes of its parts
    beside: Beside | None = None  # layers between its parts
    guard: Guard | None = None  # of its graphs, if gradients of parameters are not computed there
    is_begun: bool = False  # whether it had a backward
    is_last: bool = False  # whether the backward under way, or the last one, lets go of the graph
    reducing: Any = None  # the reducers, while it has one

    def refuse_others(self, call: seams.Backward, parameters: Mapping[int, str]) -> None:
        """What reaches parameters (names by id) beside the compiled call is not in the taps."""
        own = {outlet.node for outlet in self.outlets} | {node for node, _ in self.edges} | self.inside
        roots = [place(root) for root in call.roots]
        outside = ordered([node for node, _ in roots if node is not None], stop=lambda node: node in own)
        for node in outside:
            if node in own:
                continue
            if is_leaf(node) and id(node.variable) in parameters:
                raise UnsupportedError(
                    f"{parameters[id(node.variable)]} is used by the loss beside the compiled model, which was not so "
                    "when it was learnt.\n  from now on the model runs eagerly in this block: call it again"
                )
            for edge in node.next_functions:
                if edge[0] in own and edge not in self.edges:
                    raise UnsupportedError(
                        "the loss uses an output of the compiled model that it did not use when it was learnt.\n"
                        "  from now on the model runs eagerly in this block: call it again"
                    )

    def wait(self) -> None:
        """The backward begins."""
        self.is_begun = True
        if self.guard is not None:
            self.guard.is_open = True
        for outlet in self.outlets:
            outlet.wait()

    def let_go(self) -> None:
        """Take the hooks away."""
        if self.guard is not None:
            self.guard.is_open = False
        for outlet in self.outlets:
            outlet.let_go()
        if self.beside is not None:
            self.beside.let_go()

    def taken(self) -> list[list[Tensor]]:
        """What has left through the taps of each outlet."""
        found = [outlet.taken() for outlet in self.outlets]
        return [list(copies(values)) for values in found] if self.reuses_memory else found

    def ends(self) -> list[Tensor | GradientEdge]:
        """Where a backward has to come that brings no gradients: to a tap of each outlet, to layers between parts."""
        beside = [] if self.beside is None else self.beside.nodes()
        return [*(outlet.leaves()[0] for outlet in self.outlets), *(GradientEdge(node, 0) for node in beside)]

    def other_leaves(self, nodes: Sequence[Node]) -> list[Tensor]:
        """The leaves of a graph that are no taps of this call."""
        taps = {id(tap) for outlet in self.outlets for tap in outlet.leaves()}
        return [node.variable for node in nodes if is_leaf(node) and id(node.variable) not in taps]
