"""Which rule speaks for which edge of which kind of node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unsum.factors.total import Term
from unsum.graph.layout import Layout
from unsum.graph.nodes import Node
from unsum.graph.positions import Positions, positions
from unsum.seams.nodes import saved_of


@dataclass(eq=False, slots=True)  # made at every meeting of every step: a frozen one takes three times as long
class Call:
    """One call of a node: the gradient of its first result, taken apart by `by`."""

    node: Node
    delta: Tensor
    by: Positions
    shape: tuple[int, ...]  # of the tensor at the edge
    only_nobodys: bool = False  # the positions that belong to no sample, as if they were one
    memo: dict[Any, Any] = field(default_factory=dict)  # what the rules for other edges of the node have left
    is_kept: bool = True  # whether factors may outlive the backward
    others: Sequence[Tensor | None] = ()  # the gradients of the node's other results, for a rule that takes several

    def take(self, tensor: Tensor) -> Tensor:
        """(n, t, *features) of a tensor whose first dimensions are those of the gradient."""
        if not self.only_nobodys:
            if tensor is not self.delta:
                return self.by.of(tensor)
            key = self.by.lead  # weight and bias read the same
            if key not in self.memo:
                self.memo[key] = self.by.of(tensor)
            return self.memo[key]  # type: ignore[no-any-return]
        taken = self.by.nobodys(tensor)
        assert taken is not None
        return taken

    def saved(self, name: str) -> Any:
        """What the node has saved."""
        value = saved_of(self.node, name)
        return value.detach() if isinstance(value, Tensor) else value


class Once:
    """A pass that is made when it is first asked for. (`functools.cache` takes as long as a small pass does.)"""

    __slots__ = ("_found", "_make")

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self._make: Callable[[], Sequence[Tensor]] | None = make
        self._found: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        if self._make is not None:
            self._found, self._make = self._make(), None
        return self._found


def left(call: Call, what: str, which: int) -> Callable[[], Tensor] | None:
    """What the rule for another edge of the node gets of a pass over both, if it is made."""
    found = call.memo.get(what)
    return None if found is None or call.only_nobodys else lambda: found()[which]


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """A tensor times a number, which nearly always is 1."""
    return tensor if factor == 1 else tensor * factor


@dataclass(frozen=True, eq=False)
class Rule:
    """How the gradients of the tensor at one edge are factored."""

    name: str
    features: Callable[[Node, tuple[int, ...]], int]  # how many last dimensions of the gradient are no positions
    make: Callable[[Call], Term | None]
    rows: tuple[str, ...] | None = None  # what it reads of the node, if layers of one shape may be taken together
    several: bool = False  # whether it takes the gradients of all of the node's results

    def applies(self, node: Node, layout: Layout, n: int, shape: tuple[int, ...]) -> Positions | None:
        """How to take the node's gradient apart; None if the rule does not hold here, or nothing is to be computed."""
        return None if 0 in shape else positions(layout, n, self.features(node, shape))


RULES: dict[tuple[str, int], Rule] = {}


def rule(
    operation: str,
    edge: int,
    features: int | Callable[[Node, tuple[int, ...]], int] = 1,
    *,
    rows: tuple[str, ...] | None = None,
    several: bool = False,
) -> Callable[[Callable[[Call], Term | None]], Callable[[Call], Term | None]]:
    """Say how the tensor at this edge of this kind of node gets its gradient. `features`: how many of the last
    dimensions of the node's gradient are features; the others are positions. `rows`: the saved tensors that
    the rule reads, if the first dimension of each is that of the gradient: then layers of one shape may be taken
    together, as one with more samples. `several`: the node has several results, and the rule takes the gradients of
    all of them (a recurrent layer: sequences, and the last states)."""

    def register(make: Callable[[Call], Term | None]) -> Callable[[Call], Term | None]:
        count = features if callable(features) else lambda node, shape: features
        RULES[operation, edge] = Rule(
            f"{(make.__module__ or '').rpartition('.')[2]}.{make.__name__}".lstrip("."), count, make, rows, several
        )
        return make

    return register


def find(node: Node, edge: int) -> Rule | None:
    """The rule for an edge of a node, if there is one."""
    return RULES.get((node.name(), edge))
