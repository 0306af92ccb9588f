"""Reducers whose weights come from the norms: what they hold in a backward, and the second one that some ask for."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from unsum import hooks
from unsum.graph.nodes import Node
from unsum.plan.again import Again, is_possible
from unsum.plan.plan import Plan
from unsum.plan.structure import sizes_of
from unsum.reducing import Reducer
from unsum.weighted import WeightedSum

log = logging.getLogger("unsum")


class Clipping:
    """The weighted sums of one block."""

    def __init__(
        self, reducers: Sequence[Reducer], wanted: Mapping[int, nn.Parameter], names: Mapping[int, str]
    ) -> None:
        self._reducers = [reducer for reducer in reducers if isinstance(reducer, WeightedSum) and reducer.clips]
        self._parameters = {name: wanted[key] for key, name in names.items()} if self._reducers else {}
        self._again: Again | None = None
        self._returning: list[tuple[WeightedSum, frozenset[str]]] = []  # and the parameters that a second one is for

    @property
    def returns(self) -> bool:
        """Whether there will be a second backward."""
        return self._again is not None

    def begin(self, plan: Plan, nodes: Sequence[Node], call: hooks.Backward, is_unheard: Callable[[], bool]) -> None:
        """Choose what is held in the backward that begins. A second one only where `is_unheard()`."""
        if not self._reducers:
            return
        sizes = sizes_of(plan, nodes)
        again = functools.cache(lambda: self._able(sizes, plan, nodes, call) if is_unheard() else frozenset())
        for reducer in self._reducers:
            names = reducer.decide(sizes, self._parameters, again)
            if names:
                self._returning.append((reducer, names))
            log.info("unsum: WeightedSum holds %s", dict(Counter(reducer.chosen.values())))
        if self._returning:
            self._again = Again(plan, nodes, call)
            self._again.attach()

    def _able(self, sizes: Collection[str], plan: Plan, nodes: Sequence[Node], call: hooks.Backward) -> frozenset[str]:
        """The parameters whose sums a second backward could bring; not those with hooks of their own."""
        if not is_possible(plan, nodes):
            return frozenset()
        asked = {id(given) for given in call.inputs} or {id(p) for p in self._parameters.values()}
        return frozenset(n for n in sizes if id(p := self._parameters[n]) in asked and not p._backward_hooks)

    def finish(self, scale: Tensor | float | None) -> None:
        """The backward is over, and the weights are known: here is the second one, for each that has asked."""
        returning = [(reducer, names, w) for reducer, names in self._returning if (w := reducer.weights) is not None]
        for k, (reducer, names, w) in enumerate(returning):
            assert self._again is not None
            parameters = {name: p for name, p in self._parameters.items() if name in names}
            sums = self._again.run(w, parameters, last=k == len(returning) - 1)
            for name, value in sums.items():
                reducer.add(name, value if scale is None else value * scale)
        self.leave()

    def leave(self) -> None:
        """Let go of everything."""
        if self._again is not None:
            self._again.detach()
        self._again, self._returning = None, []
