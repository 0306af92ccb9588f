"""The setting in which a graph is learnt: what a block knows of the forward, and what its user asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, below, is_leaf
from unsum.graph.saved import memory_of, saved_by
from unsum.learn.rows import Rows
from unsum.learn.sides import Sides, counts
from unsum.seams.tensors import memory_number


def numbers_saved_by(node: Node) -> Iterator[Tensor]:
    """The numbers that a node was given which were not computed with gradients: no ids, no masks, no single numbers."""
    for tensor in saved_by(node, results=False):
        if not tensor.requires_grad and tensor.numel() > 1 and (tensor.is_floating_point() or tensor.is_complex()):
            yield tensor


def _come_from_parameters(nodes: Sequence[Node]) -> bool:
    """Whether what these nodes were given came with gradients, from parameters, or is among what they have saved."""
    return all(
        isinstance(node.variable, nn.Parameter)
        if is_leaf(node)
        else all(child is not None for child, _ in node.next_functions)
        for node in nodes
    )


_LOOKS = ("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0", "PermuteBackward0")


@dataclass(frozen=True)
class Setting:
    """What a block knows of the forward, and what its user asked for. It has many fields, since it is the one object
    that everything which learns a graph is given."""

    model: nn.Module
    sides: Sides
    rows: Rows
    seeds: Callable[[Sequence[Node]], Mapping[Edge, Layout]]  # places in a graph whose samples are known otherwise
    mismatch: Callable[[], str]  # why `samples=` may not fit what the model was given
    wanted: Mapping[int, nn.Parameter]  # by id
    names: Mapping[int, str]
    parameters: Mapping[str, nn.Parameter]  # by these names
    module_of: Callable[[int], str]  # by the number of a node
    exact: bool  # samples may interact
    rules: bool  # whether rules may speak, or all is replayed
    strict: bool  # a rule that does not hold is an error
    shared: set[int] = field(default_factory=set)  # memory of inputs that have no samples
    may_be_one: Callable[[Edge], bool] = lambda edge: False  # whether an output may be that of one sample, in a list
    is_said: bool = False  # whether the user has said along which dimension samples lie

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

    @property
    def trusted_memory(self) -> set[int]:
        """Numbers of the memory of parameters, and of inputs without samples: no data, whatever is written there."""
        own = [memory_number(tensor) for tensor in self.model.parameters() if not is_lazy(tensor)]
        return self.shared | set(own)

    @property
    def own_memory(self) -> set[int]:
        """Numbers of the memory of parameters, buffers, other tensors that modules have, and inputs without samples."""
        own = [*self.model.parameters(), *self.model.buffers()]
        for module in self.model.modules():
            own += [value for value in vars(module).values() if isinstance(value, Tensor)]
        return self.shared | {memory_number(tensor) for tensor in own if not is_lazy(tensor)}

    def may_hide_data(self, nodes: Sequence[Node], n: int) -> bool:
        """Of a forward that was not watched: whether any of these nodes has saved something that may be data of n
        samples: no parameter, no buffer, no positions, not computed with gradients, with a dimension that n divides."""
        own = {memory_of(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        results = not _come_from_parameters(nodes)  # of parameters alone, they are no data (the norms of a weight)
        return any(
            any(size % n == 0 for size in tensor.shape) and (tensor.is_floating_point() or not counts(tensor))
            for node in nodes
            if not is_leaf(node)
            for tensor in saved_by(node, results=results)
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
