"""What one backward brings: factors are kept, or handed to reducers as soon as a parameter's are complete; weight
gradients that torch was spared are put where they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unsum.errors import SamplesError
from unsum.factors.factors import Factors, Share
from unsum.factors.outer import Outer
from unsum.factors.total import Kind
from unsum.graph.nodes import Node
from unsum.plan.plan import Meeting, Plan, Route
from unsum.reducers import SQ_NORMS, Reducer
from unsum.step.pool import Pool
from unsum.step.recordings import Digests, is_readable
from unsum.step.stacked import Together
from unsum.step.unchanged import Held, refuse_changed, versions


class Intake:
    """Takes the parts of parameters' gradients as they come."""

    def __init__(
        self,
        plan: Plan,
        wanted: Mapping[int, nn.Parameter],
        names: Mapping[int, str],
        reducers: Sequence[Reducer],
        *,
        keep: bool,
        scale: Tensor | float | None,
        check: bool,
        skipped: frozenset[str],
        only: Collection[int] | None,
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
        pooled: bool = True,
    ) -> None:
        self.n = plan.n
        self.kinds: dict[int, list[Kind]] = {}  # by the id of the parameter
        self.nobodys: dict[int, Tensor] = {}
        self.meetings: dict[int, Mapping[Meeting, None]] = {}
        self._unknown: dict[str, None] = {}
        self._plan, self._wanted, self._names = plan, wanted, names
        self._reducers, self._keep, self._scale, self._check = reducers, keep, scale, check
        self._sums: dict[int, Tensor] = {}
        self._skipped, self._only, self._deliver = skipped, only, deliver
        self.versions: dict[int, Held] = {}  # of the tensors that are held, as they came
        self._pooled = pooled
        self._pool: Pool | None = None
        norms: Any = reducers[0] if len(reducers) == 1 and pooled and not (keep or check) else None
        if getattr(norms, "wants", None) == SQ_NORMS:
            self._pool = Pool(lambda names, sq: norms.receive(names, self._scaled(sq)), deliver)
        self._forming: list[Any] = [r for r in reducers if hasattr(r, "forms")]
        self._alone = self._find_alone()
        self._together: Together | None = None
        self._came: dict[int, int] = {}
        self._done: set[int] = set()

    def gather(self, plan: Plan, nodes: Sequence[Node]) -> Container[int]:
        """The meetings of this graph that need only be handed to `wait`, if norms are all that is wanted."""
        if self._pool is None or not plan.together or self._only is not None:
            return ()
        keys = {name: key for key, name in self._names.items()}
        norms: Any = self._reducers[0]

        def put(routes: Sequence[Route], sq: Tensor) -> None:
            names = [str(route.parameter) for route in routes]
            met = {keys[name]: route.met for name, route in zip(names, routes, strict=True)}
            self._done |= met.keys()
            self.meetings |= met
            norms.receive(names, self._scaled(sq))

        parameters = {name: self._wanted[key] for name, key in keys.items()}
        self._together = Together(plan, nodes, parameters, self._skipped, put, self._deliver)
        return self._together.waits

    def digests(self, plan: Plan, nodes: Sequence[Node]) -> Digests | None:
        """The meetings of this graph that recordings may serve, if reducers read numbers and nothing is held. Not when
        sizes are new: they may never come again."""
        if len(plan.uses) < 2:
            plan.uses.append(None)
        held = self._keep or self._check or self._only is not None
        if held or not self._pooled or not plan.lasting or len(plan.uses) == 1 or not is_readable(self._reducers):
            return None
        keys = {name: key for key, name in self._names.items()}
        readers: Sequence[Any] = self._reducers

        def put(route: Route, name: str, values: Sequence[Tensor]) -> None:
            key = keys[name]
            self._done.add(key)
            self.meetings[key] = route.met
            for reducer, value in zip(readers, values, strict=False):  # none of what waits in the pool
                reducer.receive((name,), value if self._scale is None else value * self._scale**reducer.power)

        parameters = {name: self._wanted[key] for name, key in keys.items()}
        return Digests(plan, nodes, parameters, readers, self._skipped, self._pool, put, self._deliver)

    def wait(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits for others of its shape; if not, its factors are wanted."""
        assert self._together is not None
        return self._together.add(place, delta)

    def meet(self, parameter: Tensor, meetings: Mapping[Meeting, None], kind: Kind) -> None:
        """The samples' gradients of a parameter, from these meetings."""
        key = id(parameter)
        if key in self._alone:
            self._done.add(key)
            self.meetings[key] = meetings
            if self._pool is not None:
                self._norms_of(key, kind, self._pool)
            else:
                self._hand_over(key, [kind], versions(kind) if self._forming else [])
            return
        if key not in self._names or (self._only is not None and key not in self._only):
            return
        self.kinds.setdefault(key, []).append(kind)
        self.versions.setdefault(key, []).extend(versions(kind))
        self.meetings[key] = {**self.meetings.get(key, {}), **meetings}
        self._came[key] = self._came.get(key, 0) + 1
        name = self._names[key]
        if name not in self._plan.late and self._came[key] == self._plan.expected.get(name):
            self._complete(key)

    def pass_by(self, parameter: Tensor) -> None:
        """What was wanted of a parameter was had elsewhere."""
        self._done.add(id(parameter))

    def shared(self, parameter: Tensor, value: Tensor) -> None:
        """Nobody's part of a parameter's gradient."""
        key = id(parameter)
        if self._only is not None and key not in self._only:
            return
        self.nobodys[key] = self.nobodys[key] + value if key in self.nobodys else value

    def unknown(self, operation: str) -> None:
        """Positions of this operation got a gradient though nobody knows whose they are."""
        self._unknown[operation] = None

    def finish(self) -> None:
        """The backward is over."""
        if self._unknown:
            raise SamplesError(
                f"the samples of some positions are unknown at {', '.join(self._unknown)}: they got a gradient though "
                "nothing led there when the graph was learnt (or everything there is NaN).\n"
                "  unsum.mark_samples(losses) names them"
            )
        for key in list(self.kinds):
            if key not in self._done:
                self._complete(key)
        for waiting in (self._together, self._pool):
            if waiting is not None:
                waiting.flush()
        self._together = self._pool = None  # which know this object: a circle would hold the graph until it is found
        left = {key: name for key, name in self._names.items() if key not in self._done}
        for reducer in self._reducers:
            for key, name in left.items():  # there, with zeros
                reducer.take(name, Factors(name, self._wanted[key], [Share(self.n)], is_over=False))
            reducer.end(list(left.values()))

    def found(self, key: int) -> Tensor | None:
        """The sum of all that came to a parameter, samples' and nobody's; None if nothing is held of it."""
        parts = [self._sums[key]] if key in self._sums else [kind.sum() for kind in self.kinds.get(key, [])]
        parts += [self.nobodys[key]] if key in self.nobodys else []
        return sum(parts[1:], parts[0]) if parts else None

    def _find_alone(self) -> frozenset[int]:
        """The parameters whose factors come once, and are not held."""
        if self._keep or self._check:
            return frozenset()
        alone = self._plan.alone
        wanted = [key for key, name in self._names.items() if name in alone]
        return frozenset(key for key in wanted if self._only is None or key in self._only)

    def _norms_of(self, key: int, kind: Kind, pool: Pool) -> None:
        """Norms are all that is wanted."""
        name, parameter = self._names[key], self._wanted[key]
        norms: Any = self._reducers[0]
        wants_sum = name in self._skipped
        if pool.add(name, parameter, kind, wants_sum=wants_sum):
            return
        if wants_sum:
            sq, summed = kind.norms_and_sum(in_parts=True) if isinstance(kind, Outer) else kind.norms_and_sum()
            self._deliver([parameter], [summed])
        else:
            sq = kind.sq_norms()
        norms.receive((name,), self._scaled(sq))

    def _scaled(self, sq_norms: Tensor) -> Tensor:
        return sq_norms if self._scale is None else sq_norms * self._scale**2

    def _complete(self, key: int) -> None:
        self._done.add(key)
        refuse_changed(self._names[key], self.versions[key])
        self._hand_over(key, self.kinds[key], self.versions[key])
        if not self._keep:
            if self._check:
                self._sums[key] = sum(kind.sum() for kind in self.kinds[key])  # type: ignore[assignment]
            del self.kinds[key], self.versions[key]

    def _hand_over(self, key: int, kinds: list[Kind], held: Held) -> None:
        """All factors of a parameter, to the reducers."""
        name, parameter = self._names[key], self._wanted[key]
        factors = formed = Factors(name, parameter, [Share(self.n, kinds, self._scale, held)], is_over=False)
        if name in self._skipped:
            if any(reducer.forms(name) for reducer in self._forming):
                formed = factors.formed(want_sum=True)  # norms and sum come with it
            summed = factors.norms_and_sum()[1]
            self._deliver([parameter], [summed if self._scale is None else summed / self._scale])
        for reducer in self._forming:  # first: where they form gradients, norms come with it
            reducer.take(name, formed if reducer.forms(name) else factors)
        for other in self._reducers:
            if not hasattr(other, "forms"):
                other.take(name, factors)
