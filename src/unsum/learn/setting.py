"""The setting in which a graph is learnt: what a block knows of the forward, and what its user asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, below, is_leaf
from unsum.graph.saved import memory_of, saved_by
from unsum.learn.rows import Rows
from unsum.learn.sides import Sides, counts

_LOOKS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "PermuteBackward0")


@dataclass(frozen=True)
class Setting:
    """What a block knows of the forward, and what its user asked for."""

    model: nn.Module
    sides: Sides
    rows: Rows
    seeds: Callable[[Sequence[Node]], Mapping[Edge, Layout]]  # places in a graph whose samples are known otherwise
    mismatch: Callable[[], str]  # why `samples=` may not fit what the model was given
    wanted: Mapping[int, nn.Parameter]  # by id
    names: Mapping[int, str]
    module_of: Callable[[int], str]  # by the number of a node
    exact: bool  # samples may interact
    rules: bool  # whether rules may speak, or all is replayed
    strict: bool  # a rule that does not hold is an error

    def is_data(self, node: Node) -> bool:
        """Whether what flows through this node was seen to depend on data."""
        return self.sides.is_data(node) or (self.sides.is_blind and self.rows.are_saved_by(node))

    def is_weight(self, node: Node) -> bool:
        """Whether what flows through this node depends on parameters alone."""
        return self.sides.is_weight(node) or (self.sides.is_blind and not self._has_saved_others(node))

    def _has_saved_others(self, node: Node) -> bool:
        """Whether a node has saved something that is no parameter, no number, and was not computed with gradients."""
        own = {memory_of(p) for p in self.wanted.values()}
        return any(
            not tensor.requires_grad and tensor.numel() > 1 and memory_of(tensor) not in own
            for tensor in saved_by(node)
        )

    def may_hide_data(self, nodes: Sequence[Node], n: int) -> bool:
        """Of a forward that was not watched: whether any of these nodes has saved something that may be data of n
        samples: no parameter, no buffer, no positions, not computed with gradients, with a dimension that n divides."""
        own = {memory_of(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        return any(
            any(size % n == 0 for size in tensor.shape) and (tensor.is_floating_point() or not counts(tensor))
            for node in nodes
            if not is_leaf(node)
            for tensor in saved_by(node)
            if tensor.numel() > 1 and not tensor.requires_grad and memory_of(tensor) not in own
        )

    def may_be_data(self, node: Node) -> bool:
        """Whether it was not seen that this node does not depend on data. Of a forward that was not watched, nothing
        was seen: what is no weight by its looks is data then."""
        return self.is_data(node) or (self.sides.is_blind and not self.leads_to_parameters(node))

    def leads_to_parameters(self, node: Node) -> bool:
        """Whether this is a parameter, turned, cast or viewed."""
        while not is_leaf(node):
            if len(nexts := below(node)) != 1 or node.name() not in _LOOKS:
                return False
            node = nexts[0][1]
        return isinstance(node.variable, nn.Parameter)
