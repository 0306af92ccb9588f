"""Layers of a compiled model that run outside its compiled parts: their factors come in the backward itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from unsum import seams
from unsum.compiled.instrument import Instrumentation, Session
from unsum.compiled.parts import Course
from unsum.compiled.pattern import Leaf, Untappable, Way
from unsum.errors import UnsupportedError
from unsum.factors.total import Term
from unsum.graph.nodes import Node
from unsum.plan.plan import Meeting, Plan
from unsum.step.collect import Collector


class Beside(Session):
    """The meetings between the parts of one call, during its backward."""

    def __init__(
        self, course: Course, between: Sequence[Sequence[Node]], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        own = {name: parameter for name, parameter in parameters.items() if name in course.expected}
        super().__init__(Instrumentation([], [], own, frozenset(), 0), ())
        self.parameters, self._expected = own, course.expected
        self._at = [(between[met.wires][met.line], met.ways) for met in course.beside]
        self._handles: list[seams.Handle] = []
        self._came = 0

    def begin(self, n: int, reducers: Sequence[Any], scale: Tensor | float | None, leaf: Leaf) -> None:
        """The backward is about to begin."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._collector = Collector(
            Plan.empty(n, expected=dict(self._expected)), self.parameters, names, reducers,
            keep=False, scale=scale, check=False, skipped=frozenset(), only=None, deliver=self._deliver, eager=False,
        )  # fmt: skip
        self._came = 0
        self._handles = [seams.on_node(node, partial(self._taken, node, ways, n, leaf)) for node, ways in self._at]

    def _taken(self, node: Node, ways: Sequence[Way], n: int, leaf: Leaf, grads: Sequence[Tensor | None]) -> None:
        try:
            self._meet(node, ways, n, leaf, grads)
        except Untappable as error:
            raise UnsupportedError(f"a layer between the parts of a compiled model: {error}") from error
        self._came += 1

    def _arrive(self, name: str, way: Way, kind: Term) -> None:
        assert self._collector is not None
        self._collector.meet(self.parameters[name], {way.meeting: None}, kind)

    def nodes(self) -> list[Node]:
        """Where parameters meet data."""
        return [node for node, _ in self._at]

    def let_go(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def end(self) -> dict[str, dict[Meeting, None]]:
        """The backward is over. Returns where parameters met data."""
        assert self._collector is not None
        if self._came != len(self._at):
            raise UnsupportedError("a layer between the parts of a compiled model got no gradient in this backward")
        self._collector.finish()
        met = {name: dict(self._collector.meetings.get(id(p), {})) for name, p in self.parameters.items()}
        self._collector = None
        return met
