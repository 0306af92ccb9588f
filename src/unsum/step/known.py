"""Tensors whose samples are known, found again as nodes of a graph. No graph is held for it: a node is known by its
kind, its number and a token that dies with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.seams.nodes import Token, number_of, outputs_of, token

_CAST = "ToCopyBackward0"
Number = tuple[str, int, int]  # kind of node, its number, which of its outputs


@dataclass(frozen=True)
class Known:
    """A tensor whose samples are known."""

    token: weakref.ref[Token]
    owners: Layout
    call: int
    marked: bool = False  # by the user: goes before what the outputs say
    is_listed: bool = False  # one of as many tensors in a list as there are samples: perhaps that of one sample


def number(node: Node, output: int) -> Number:
    """What an output of a node is found by."""
    return node.name(), number_of(node), output


def copied(tensor: Tensor) -> Iterator[Edge]:
    """What a tensor is a copy of in another dtype, and what that is a copy of: the loss may use these."""
    assert tensor.grad_fn is not None
    edge: Edge = tensor.grad_fn, tensor.output_nr
    while edge[0].name() == _CAST:
        edge = edge[0].next_functions[0]
        if edge[0] is None or is_leaf(edge[0]):
            return
        yield edge


class KnownTensors:
    """The tensors of a block whose samples are known."""

    def __init__(self) -> None:
        self._known: dict[Number, Known] = {}
        self._alive = 64

    def add(self, tensor: Tensor, owners: Layout, call: int, *, marked: bool = False, is_listed: bool = False) -> bool:
        """Remember a tensor; True if some whose graphs are gone were forgotten, as in a long block."""
        node = tensor.grad_fn
        assert node is not None
        self._known[number(node, tensor.output_nr)] = Known(weakref.ref(token(node)), owners, call, marked, is_listed)
        for edge in () if marked else copied(tensor):
            below = Known(weakref.ref(token(edge[0])), owners, call, marked, is_listed)
            self._known.setdefault(number(*edge), below)
        if len(self._known) <= 2 * self._alive:
            return False
        self._known = {key: known for key, known in self._known.items() if known.token() is not None}
        self._alive = max(len(self._known), 64)
        return True

    def find(self, nodes: Sequence[Node]) -> dict[Edge, Known]:
        """Those of these nodes' outputs that are known."""
        alive = [key for key, known in self._known.items() if known.token() is not None]
        numbers = {which for _, which, _ in alive}
        found: dict[Edge, Known] = {}
        for node in nodes:
            if number_of(node) not in numbers or is_leaf(node):
                continue
            for output in range(len(outputs_of(node))):
                entry = self._known.get(number(node, output))
                if entry is not None and token(node) is entry.token():
                    found[node, output] = entry
            if len(found) == len(alive):  # as a rule near the roots: the model's output
                break
        return found

    def has_marks(self, nodes: Sequence[Node]) -> bool:
        """Whether the user has marked any of these."""
        return any(entry.marked for entry in self._known.values()) and any(
            entry.marked for entry in self.find(nodes).values()
        )

    def numbers(self, call: int) -> set[int]:
        """How many samples what a call has returned has, by its sizes."""
        return {
            each.owners.n for each in self._known.values() if each.call == call and isinstance(each.owners, Regular)
        }

    def hand_over(self, other: KnownTensors, call: int, n: int | None) -> None:
        """What a call has returned is known, if it has n samples; the rest is forgotten."""
        for key, each in list(self._known.items()):
            if each.call == call:
                del self._known[key]
                if isinstance(each.owners, Regular) and each.owners.n == n:
                    other._known[key] = each

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
