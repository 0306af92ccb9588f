"""What one backward brings: factors are kept, or handed to reducers as soon as a parameter's are complete; weight
gradients that torch was spared are put where they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence

import torch
from torch import Tensor, nn

from unsum.errors import SamplesError
from unsum.factors.factors import Factors, Share
from unsum.factors.total import Kind
from unsum.graph.nodes import Node
from unsum.plan.plan import Meeting, Plan
from unsum.plan.pool import Pool
from unsum.plan.together import Together
from unsum.plan.unchanged import Held, refuse_changed, versions
from unsum.reducers import Norms, Reducer
from unsum.weighted import WeightedSum


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
        self.meetings: dict[int, dict[Meeting, None]] = {}
        self._unknown: dict[str, None] = {}
        self._plan, self._wanted, self._names = plan, wanted, names
        self._reducers, self._keep, self._scale, self._check = reducers, keep, scale, check
        self._sums: dict[int, Tensor] = {}
        self._skipped, self._only, self._deliver = skipped, only, deliver
        self.versions: dict[int, Held] = {}  # of the tensors that are held, as they came
        self._pool: Pool | None = None
        if (
            len(reducers) == 1
            and isinstance(norms := reducers[0], Norms | WeightedSum)
            and pooled
            and not (keep or check)
        ):
            self._pool = Pool(lambda name, sq: norms.put(name, self._scaled(sq)), deliver)
        self._together: Together | None = None
        self._came: dict[int, int] = {}
        self._done: set[int] = set()

    def gather(self, plan: Plan, nodes: Sequence[Node]) -> Container[int]:
        """The meetings of this graph that need only be handed to `wait`, if norms are all that is wanted."""
        if self._pool is None or not plan.together or self._only is not None:
            return ()
        keys = {name: key for key, name in self._names.items()}
        norms = self._reducers[0]
        assert isinstance(norms, Norms | WeightedSum)
        if not all(norms.wants_norms_alone(name) for name in keys if name in plan.expected):
            return ()

        def put(name: str, meeting: Meeting, sq: Tensor) -> None:
            self._done.add(keys[name])
            self.meetings[keys[name]] = {meeting: None}
            norms.put(name, self._scaled(sq))

        parameters = {name: self._wanted[key] for name, key in keys.items()}
        self._together = Together(plan, nodes, parameters, self._skipped, put, self._deliver)
        return self._together.waits

    def wait(self, place: int, delta: Tensor) -> bool:
        """Whether this meeting waits for others of its shape; if not, its factors are wanted."""
        assert self._together is not None
        return self._together.add(place, delta)

    def meet(self, parameter: Tensor, meetings: Mapping[Meeting, None], kind: Kind) -> None:
        """The samples' gradients of a parameter, from these meetings."""
        key = id(parameter)
        if key not in self._names or (self._only is not None and key not in self._only):
            return
        if self._is_alone(key):
            self._norms_of(key, meetings, kind)
            return
        self.kinds.setdefault(key, []).append(kind)
        self.versions.setdefault(key, []).extend(versions(kind))
        self.meetings.setdefault(key, {}).update(meetings)
        self._came[key] = self._came.get(key, 0) + 1
        name = self._names[key]
        if name not in self._plan.late and self._came[key] == self._plan.expected.get(name):
            self._complete(key)

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

    def _is_alone(self, key: int) -> bool:
        """Whether norms are all that is wanted of a parameter, and its factors come once."""
        name = self._names[key]
        if self._pool is None or self._plan.expected.get(name) != 1 or name in self._plan.late:
            return False
        norms = self._reducers[0]
        return isinstance(norms, Norms | WeightedSum) and norms.wants_norms_alone(name)

    def _norms_of(self, key: int, meetings: Mapping[Meeting, None], kind: Kind) -> None:
        """The short way: nothing is held."""
        name, parameter, norms = self._names[key], self._wanted[key], self._reducers[0]
        assert self._pool is not None and isinstance(norms, Norms | WeightedSum)
        self._done.add(key)
        self.meetings[key] = dict(meetings)
        wants_sum = name in self._skipped
        if self._pool.add(name, parameter, kind, wants_sum=wants_sum):
            return
        if wants_sum:
            sq, summed = kind.norms_and_sum()
            self._deliver([parameter], [summed])
        else:
            sq = kind.sq_norms()
        norms.put(name, self._scaled(sq))

    def _scaled(self, sq_norms: Tensor) -> Tensor:
        return sq_norms if self._scale is None else sq_norms * self._scale**2

    def _complete(self, key: int) -> None:
        self._done.add(key)
        name, parameter = self._names[key], self._wanted[key]
        refuse_changed(name, self.versions[key])
        share = Share(self.n, self.kinds[key], self._scale, self.versions[key])
        factors = formed = Factors(name, parameter, [share], is_over=False)
        summing = [r for r in self._reducers if isinstance(r, WeightedSum)]
        if name in self._skipped:
            if any(reducer.forms(name) for reducer in summing):
                formed = factors.formed(want_sum=True)  # norms and sum come with it
            summed = factors.norms_and_sum()[1]
            self._deliver([parameter], [summed if self._scale is None else summed / self._scale])
        for reducer in summing:  # first: where they form gradients, norms come with it
            reducer.take(name, formed if reducer.forms(name) else factors)
        for other in self._reducers:
            if not isinstance(other, WeightedSum):
                other.take(name, factors)
        if not self._keep:
            if self._check:
                self._sums[key] = sum(kind.sum() for kind in self.kinds[key])  # type: ignore[assignment]
            del self.kinds[key], self.versions[key]


def is_listened(parameter: nn.Parameter) -> bool:
    """Whether somebody waits for a parameter's gradient: hooks of the user's, or a process group (whose hooks cannot be
    seen from here). Such a gradient is left to torch."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return True
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def accumulate(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Add to `.grad` as torch would: memory of its own, laid out as the parameter is."""
    sums: tuple[list[Tensor], list[Tensor]] = ([], [])
    copies: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.grad is not None:
            sums[0].append(parameter.grad)
            sums[1].append(value)
        elif value.dtype == parameter.dtype and value.stride() == parameter.stride() and not value._is_view():
            parameter.grad = value
        else:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
            copies[0].append(parameter.grad)
            copies[1].append(value)
    if copies[0]:
        torch._foreach_copy_(*copies)
    if sums[0]:
        torch._foreach_add_(*sums)
