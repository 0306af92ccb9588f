"""The backwards of calls that ran compiled with taps: each is begun, ended, or refused; what has left goes to the
reducers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from unsum import seams
from unsum.compiled.pattern import leaf_of
from unsum.compiled.remembered import refuse
from unsum.compiled.tapped import Guard, Outlet, Tapped, not_computed
from unsum.errors import UnsupportedError
from unsum.factors.factors import Factors, GroupFactors
from unsum.graph.nodes import Node, is_leaf
from unsum.plan.plan import Meeting
from unsum.reducers import SQ_NORMS
from unsum.reducers.tap import Tap


class TappedBackwards:
    """The tapped calls of a block whose backward may come."""

    def __init__(
        self,
        model: nn.Module,
        wanted: Mapping[str, nn.Parameter],
        own: Iterable[int],  # ids of all parameters of the model
        reducers: Sequence[Any],
        *,
        grad: bool,
    ) -> None:
        self._model, self._wanted, self._own = model, wanted, frozenset(own)
        self._by_id = {id(p): name for name, p in wanted.items()}
        self._reducers, self._grad = reducers, grad
        self.forms: Sequence[Tap] = ()  # of the reducers, once a compiled model was called
        self._calls: dict[int, tuple[Tapped, Outlet]] = {}  # by the id of the first tap

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """What the reducers ask for: their taps' keys."""
        return tuple(form.key for form in self.forms)

    @property
    def frozen(self) -> frozenset[int]:
        """The ids of the parameters whose gradients are not computed, since nobody wants them. With norms alone they
        are: they come with the norms, and a weighted backward may follow."""
        with_norms = all(getattr(reducer, "wants", None) == SQ_NORMS for reducer in self._reducers)
        return frozenset() if self._grad or with_norms else self._own

    def guard(self) -> Guard | None:
        """The hook that is to be put on the graphs of a call; None if they compute all gradients."""
        return Guard(self.frozen) if self.frozen else None

    def expect(self, tapped: Tapped) -> None:
        """Remember a call that has run compiled, and whose backward may come."""
        self._calls.update((id(outlet.tap()), (tapped, outlet)) for outlet in tapped.outlets)

    def samples(self) -> int:
        """How many samples come before those of a new call."""
        self._calls = {key: each for key, each in self._calls.items() if each[1].tap() is not None}
        calls = {id(tapped): tapped for tapped, _ in self._calls.values()}
        waiting = sum(tapped.n for tapped in calls.values() if not tapped.is_begun)
        return max(reducer.samples() for reducer in self._reducers) + waiting

    def begin(self, call: seams.Backward, nodes: Sequence[Node]) -> Tapped | None:
        """The tapped call that a backward goes through; None if there is none."""
        leaves = [(node, *self._calls[id(node.variable)]) for node in nodes
                  if self._calls and is_leaf(node) and id(node.variable) in self._calls]  # fmt: skip
        if not leaves:
            return None
        tapped = leaves[0][1]
        if any(other is not tapped for _, other, _ in leaves):
            raise UnsupportedError(
                "one backward goes through several calls of a compiled model: their gradients belong together.\n"
                "  call backward for each, or use the model itself (compiled._orig_mod)"
            )
        if len(leaves) < len(tapped.outlets):
            refuse(self._model, tapped.key, "its loss changes")
            raise UnsupportedError(
                "the loss does not come from all parts of the compiled model, as it did when it was learnt.\n"
                "  from now on the model runs eagerly in this block: call it again"
            )
        if not call.accumulates and not self.frozen.isdisjoint(map(id, call.inputs)):
            raise not_computed()
        self._refuse_some(call, nodes, tapped)
        for leaf, _, outlet in leaves:
            outlet.find(nodes, leaf)
        try:
            tapped.refuse_others(call, self._by_id)
        except UnsupportedError:
            refuse(self._model, tapped.key, "its loss changes")
            raise
        tapped.is_last = not call.retain_graph
        tapped.wait()
        return tapped

    def _refuse_some(self, call: seams.Backward, nodes: Sequence[Node], tapped: Tapped) -> None:
        """A backward towards some parameters does not come to all parts; as one graph, it comes to all parameters."""
        is_whole = len(tapped.outlets) == 1 and tapped.beside is None
        if not call.inputs or (is_whole and not any(form.together for form in self.forms)):
            return
        given = {id(each) for each in call.inputs}
        found = [id(node.variable) for node in nodes if is_leaf(node)]
        missing = [self._by_id[key] for key in found if key in self._by_id and key not in given]
        if missing and is_whole:
            refuse(self._model, (tapped.key, self.keys), "a backward was towards some of its parameters")
            raise UnsupportedError(
                f"a backward towards some parameters of a compiled model: {missing[0]} is not among them, and the "
                "norms that give the weights would count it.\n  from now on the model runs eagerly in this block: call "
                "it again"
            )
        if missing:
            raise UnsupportedError(
                f"a backward towards some parameters of a compiled model with graph breaks: {missing[0]} is not among "
                "them, and nothing would be known of it.\n  ask for all of them, or use the model itself "
                "(compiled._orig_mod)"
            )

    def ready(self, tapped: Tapped) -> None:
        """The reducers have begun. Raises if weights were given by the order of forwards, and another one has the
        backward."""
        for form in self.forms:
            form.begin(tapped.reducing.scale)
        self._refuse_other_order(tapped)
        if tapped.beside is not None:
            tapped.beside.begin(tapped.n, self._reducers, tapped.reducing.scale, leaf_of(self._by_id))

    def let_go(self, tapped: Tapped) -> None:
        """The backward is over, or has failed: nothing is waited for."""
        tapped.let_go()
        for form in self.forms:
            form.waits = False

    def _refuse_other_order(self, tapped: Tapped) -> None:
        """Weights were given by the order of forwards, before it was known which have a backward."""
        taps = zip(self._reducers, self.forms, strict=True)
        if any(tap.in_order and reducer.before_now() != tapped.before for reducer, tap in taps):
            raise UnsupportedError(
                "WeightedSum(w): the weights are in the order of the forwards that have a backward, and another "
                "forward of the compiled model came between.\n  call backward right after each forward"
            )

    def only(self, nodes: Sequence[Node], tapped: Tapped) -> Sequence[Tensor | GradientEdge]:
        """The leaves to which torch is to bring gradients: not to the taps, which are read before; and if nobody wants
        those of parameters, to data that asks for one, and where something has to run."""
        others = tapped.other_leaves(nodes)
        if self._grad:
            return others
        return [*tapped.ends(), *(leaf for leaf in others if id(leaf) not in self._own)]

    def end(self, tapped: Tapped, scale: Tensor | float | None) -> dict[str, dict[Meeting, None]]:
        """The backward is over: hand what has left to the reducers. Returns where each parameter met data."""
        if tapped.is_last:  # which holds nodes, and so what is left of the graph
            self._calls = {key: each for key, each in self._calls.items() if each[0] is not tapped}
        met: dict[str, dict[Meeting, None]] = {} if tapped.beside is None else tapped.beside.end()
        for outlet, values in zip(tapped.outlets, tapped.taken(), strict=True):
            for k, form in enumerate(outlet.forms):
                form.told = outlet.graph.told[k]
                own, values = values[: form.taps], values[form.taps :]
                form.receive(own, scale)
            met |= outlet.graph.pattern.meetings
        told = frozenset(met).union(*(outlet.names for outlet in tapped.outlets))
        for name, parameter in self._wanted.items():
            if name not in told:  # it is in no part: there, with zeros
                for reducer in self._reducers:
                    reducer.take(name, Factors(name, parameter, [GroupFactors(tapped.n)], is_over=False))
        return met
