"""What is known of a graph that torch has compiled with sites: the calls, values and gradients in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from unsum.graph.nodes import Node, ordered
from unsum.seams.compiling import Shapes
from unsum.types import Kind, Path


@dataclass(frozen=True)
class Choice:
    """One tensor of a call that a block asks for."""

    kind: Kind
    path: Path  # where it is in the arguments or in the output
    shown: Path  # how it was asked for
    asked: tuple[int, ...]  # by which requests


@dataclass
class Value:
    """A value that is wanted: of which call, and where it is among the inputs or the outputs of the graph."""

    call: int
    choice: Choice
    among: Literal["inputs", "outputs"]
    place: int
    is_changed: bool = False  # in place, after it was seen


@dataclass
class Gradient:
    """A gradient that is wanted. In a backward it has come if one of these outputs of the model has got one."""

    call: int
    choice: Choice
    reached_from: frozenset[int] = frozenset()


@dataclass
class Traced:
    """One graph that torch has compiled with sites."""

    calls: list[int] = field(default_factory=list)  # the places that are called, in order
    values: list[Value] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)  # by tap
    order: list[int] = field(default_factory=list)  # the taps in the order in which gradients come
    silent: list[tuple[int, Kind]] = field(default_factory=list)  # places whose tensors need no gradient
    has_grad: bool = True  # whether gradients were on
    outputs: int = 0  # of the model itself
    inner: frozenset[int] = frozenset()  # of these, those from which others are computed
    shapes: Shapes | None = None  # of the taps
    kinds: list[tuple[torch.dtype, torch.device]] = field(default_factory=list)  # of the taps
    run: Callable[..., Any] = field(default=lambda *given: (), repr=False)
    _numbers: list[frozenset[int]] | None = None  # of each output, the outputs of the compiled node that lead to it

    def taps(self, given: Sequence[Any]) -> list[Tensor]:
        """Zeros, of which there is just one number in memory."""
        if self.shapes is None:
            return []
        made = zip(self.shapes.of(given), self.kinds, strict=True)
        return [
            torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
            for shape, (dtype, device) in made
        ]

    def find(self, node: Node, outputs: Sequence[Any]) -> None:
        """After the first run: by which outputs of the compiled node the model's outputs are reached."""
        if self._numbers is None:
            roots = [each.grad_fn if isinstance(each, Tensor) else None for each in outputs]
            self._numbers = [_numbers(node, each, root) for each, root in zip(outputs, roots, strict=True)]

    def come(self, grads: Sequence[Tensor | None]) -> list[int]:
        """The taps whose tensors are reached by a backward that has brought these gradients to the node, in order."""
        assert self._numbers is not None
        reached = {k for k, numbers in enumerate(self._numbers) if any(grads[number] is not None for number in numbers)}
        return [tap for tap in self.order if not reached.isdisjoint(self.gradients[tap].reached_from)]


def _numbers(node: Node, output: Any, root: Node) -> frozenset[int]:
    """The outputs of a node that lead to a tensor, which may be a view of one."""
    if root is None:
        return frozenset()
    if root is node:
        return frozenset({output.output_nr})
    found = ordered([root], stop=lambda each: each is node)
    return frozenset(
        number for each in found if each is not node for child, number in each.next_functions if child is node
    )
