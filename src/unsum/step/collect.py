"""What one backward brings: factors are kept, or handed to reducers as soon as a parameter's are complete; weight
gradients that torch was spared are put where they belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import OptionError, UnknownSamples, UnsupportedError
from unsum.factors.factors import Factors, GroupFactors
from unsum.factors.outer import Outer
from unsum.factors.stacked import Layers
from unsum.factors.total import Term
from unsum.graph.nodes import Node
from unsum.learn.refusals import MARK
from unsum.plan.plan import Ends, Meeting, Plan, Route
from unsum.reducers import SQ_NORMS, Reducer, WeightedSum
from unsum.step.lanes import Lanes, Waiting, small, waits
from unsum.step.recordings import Digests
from unsum.step.unchanged import Held, are_changed, refuse_changed, versions


class Collector:
    """Takes the parts of parameters' gradients as they come. `eager`: False while torch writes a compiled model down,
    which has no use for meetings that wait."""

    # More than twelve attributes: what one backward is asked for, read once here instead of at every meeting, and what
    # it has brought so far.
    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        names: Mapping[int, str],
        reducers: Sequence[Reducer],
        *,
        keep: bool,
        scale: Tensor | float | None,
        check: bool,
        skipped: frozenset[str],
        only: Collection[int] | None,
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
        eager: bool = True,
    ) -> None:
        self.n = plan.n
        self.kinds: dict[int, list[Term]] = {}  # by the id of the parameter
        self.nobodys: dict[int, Tensor] = {}
        self.meetings: dict[int, Mapping[Meeting, None]] = {}
        self.versions: dict[int, Held] = {}  # of the tensors that are held, as they came
        self._unknown: dict[str, None] = {}
        self._lost: dict[str, None] = {}
        self._plan, self._parameters, self._names = plan, parameters, names
        self._reducers, self._keep, self._scale, self._check = reducers, keep, scale, check
        self._sums: dict[int, Tensor] = {}
        self._skipped, self._only, self._deliver = skipped, only, deliver
        self._came: dict[int, int] = {}
        self._done: set[int] = set()
        self._alone = frozenset() if keep or check else plan.alone
        self.clips = self._only_clips() if eager else None
        self._forming: list[Any] = [r for r in reducers if hasattr(r, "forms")]
        wants = tuple([getattr(reducer, "wants", None) for reducer in reducers])
        self._wants = wants if eager and None not in wants and not (keep or check) and only is None else ()
        self.keeps = not self._wants or bool(self._forming)
        self._lanes: list[Lanes] = []  # of this backward, and of those that nodes run inside it
        positions = not self._wants or any([getattr(reducer, "by_position", True) for reducer in reducers])  # noqa: C419
        self._waiting = None if positions else Waiting(self.n, scale, self._take_layers)

    # ---- what meetings hand over ----------------------------------------------------------------------------------

    def lanes(self, plan: Plan, nodes: Sequence[Node]) -> Lanes | None:
        """Where meetings of this graph wait for others; None if none does."""
        if not self._wants or not plan.together:
            return None
        parameters = self._parameters
        wait = waits(plan, nodes, parameters, self._skipped, norms_alone=self._wants == (SQ_NORMS,))
        if not wait.teams:
            return None
        lanes = Lanes(plan, nodes, parameters, wait, self._wants, self._scale, self)
        self._lanes.append(lanes)
        return lanes

    def digests(self, plan: Plan, nodes: Sequence[Node]) -> Digests | None:
        """What takes meetings by recordings, where numbers are read and nothing is held. Not when sizes are new: they
        may never come again."""
        if len(plan.uses) < 2:
            plan.uses.append(None)
        readers: Sequence[Any] = self._reducers
        parameters = self._parameters
        clips = self.clips
        if not self._wants or not plan.lasting or len(plan.uses) == 1:
            return None
        if clips is None and not all(hasattr(reader, "read") for reader in readers):
            return None

        def put(route: Route, name: str, values: Sequence[Tensor]) -> None:
            key = id(parameters[name])
            self._done.add(key)
            self.meetings[key] = route.met
            for reducer, value in zip(readers, values, strict=False):  # none of what waits
                reducer.receive((name,), value if self._scale is None else value * self._scale**reducer.power)

        def hold(route: Route, name: str, squares: Tensor, kind: Term) -> None:
            key, parameter = id(parameters[name]), parameters[name]
            self._done.add(key)
            self.meetings[key] = route.met
            share = GroupFactors(self.n, [kind], self._scale, versions(kind))
            assert clips is not None
            clips.hold(name, self._scaled(squares), Factors(name, parameter, [share], is_over=False))

        waiting, skipped = self._waiting, self._skipped
        readers = readers if clips is None else ()
        return Digests(plan, nodes, parameters, readers, clips, skipped, waiting, put, hold, self._deliver)

    def _only_clips(self) -> WeightedSum | None:
        """The only reducer, if it takes what is held of gradients until weights come from the norms."""
        first: Any = self._reducers[0] if len(self._reducers) == 1 else None
        return first if getattr(first, "takes_held", False) else None

    def forms(self, names: Sequence[str]) -> tuple[bool, bool]:
        """Whether the gradients of these parameters are to be formed, and whether sums of some are wanted."""
        assert self.clips is not None
        return all(map(self.clips.forms, names)), not self._skipped.isdisjoint(names)

    def take_held(self, ends: Ends, layers: Layers, sums: Tensor | None) -> None:
        """The gradients of these parameters as they are to be held, and their sums if they are wanted."""
        assert self.clips is not None
        self._arrived(ends)
        self.clips.take_layers(layers)
        self._deliver_sums(layers.names, sums)

    def take_squares(self, ends: Ends, squares: Tensor) -> None:
        """(layers, n): the squared norms of these parameters."""
        norms: Any = self._reducers[0]
        self._arrived(ends)
        norms.receive(ends.names, self._scaled(squares))

    def take_layers(self, ends: Ends, layers: Layers) -> None:
        """The gradients of these parameters."""
        self._arrived(ends)
        self._take_layers(layers)

    def compare(self, layers: Layers, last: Layers) -> None:
        """Raise if what a reducer reads of the last of these layers is not what it reads of it alone."""
        for reducer in self._reducers:
            read: Any = getattr(reducer, "read_layers", None)
            if read is None:
                continue
            found, wanted = read(layers), read(last)
            loose = 1e-6 if wanted.dtype == torch.float64 else 5e-2
            is_alike = found.shape[:2] == (len(layers.names), self.n) and found[-1:].shape == wanted.shape
            if is_alike and not bool((found[-1:].isfinite() & wanted.isfinite()).all()):
                continue  # a sample that is not finite, a loss scale that is too large: NaN here may be inf there
            if not is_alike or not bool((found[-1:] - wanted).norm() <= loose * wanted.norm().nan_to_num(torch.inf)):
                raise OptionError(
                    f"{type(reducer).__name__}: `read` gives (n, …), one row for each sample, whatever the number of "
                    "samples.\n  a reducer that reads otherwise says wants = None, and `take` is called"
                )

    def _arrived(self, ends: Ends) -> None:
        """All that comes to these parameters is there."""
        parameters = self._parameters
        keys = [id(parameters[name]) for name in ends.names]
        self._done.update(keys)
        self.meetings.update(zip(keys, ends.met, strict=True))

    def _take_layers(self, layers: Layers) -> None:
        wanted = [name in self._skipped for name in layers.names] if self._skipped else []
        forming = [r for r in self._forming if all(map(r.forms, layers.names))]
        formed = layers.formed() if forming else layers  # norms come with it
        sums = formed.sums() if any(wanted) else None
        reducers: Sequence[Any] = self._reducers
        for reducer in reducers:
            reducer.take_layers(formed if reducer in forming else layers)
        self._deliver_sums(layers.names, sums)

    def _deliver_sums(self, names: Sequence[str], sums: Tensor | None) -> None:
        """The weight gradients that torch was spared, of these parameters."""
        if sums is not None:
            given = [(name, own) for name, own in zip(names, sums.unbind(), strict=True) if name in self._skipped]
            self._deliver([self._parameters[name] for name, _ in given], [each for _, each in given])

    def meet(self, parameter: Tensor, meetings: Mapping[Meeting, None], kind: Term) -> None:
        """The samples' gradients of a parameter, from these meetings."""
        key = id(parameter)
        name = self._names.get(key)
        if name is None or (self._only is not None and key not in self._only):
            return
        if name in self._alone:
            self._done.add(key)
            self.meetings[key] = meetings
            if self._waiting is not None and (values := small(kind)) is not None:
                self._waiting.add(name, self._parameters[name], values)
            elif self._wants == (SQ_NORMS,):
                self._norms_of(name, kind)
            else:
                self._hand_over(key, [kind], versions(kind) if self._forming else [])
            return
        self.kinds.setdefault(key, []).append(kind)
        self.versions.setdefault(key, []).extend(versions(kind))
        self.meetings[key] = {**self.meetings.get(key, {}), **meetings}
        self._came[key] = self._came.get(key, 0) + 1
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

    def lost(self, operation: str) -> None:
        """Gradients of samples have come to this operation, on their way to a parameter, and it has not run."""
        self._lost[operation] = None

    def finish(self) -> None:
        """The backward is over."""
        if self._lost:
            raise UnsupportedError(
                f"the gradients of samples were lost at {', '.join(self._lost)}, between data and a parameter: the "
                "graph is not like the one that was learnt.",
                write='with unsum.gradients(model, engine="graph") as g: ...',
            )
        if self._unknown:
            raise UnknownSamples(
                "cannot tell which sample some positions belong to: they got a gradient now, and had none when unsum "
                "first saw this model (or everything there is NaN).",
                at=", ".join(self._unknown),
                write=MARK,
            )
        for key in list(self.kinds):
            if key not in self._done:
                self._complete(key)
        for waiting in (*self._lanes, self._waiting):
            if waiting is not None:
                waiting.flush()
        self._lanes, self._waiting = [], None  # which know this object: a circle would hold the graph until it is found
        is_all = self._names.keys() <= self._done
        left = [] if is_all else [name for key, name in self._names.items() if key not in self._done]
        for reducer in self._reducers:
            for name in left:  # there, with zeros
                reducer.take(name, Factors(name, self._parameters[name], [GroupFactors(self.n)], is_over=False))
            reducer.end(list(left))

    def found(self, key: int) -> Tensor | None:
        """The sum of all that came to a parameter, samples' and nobody's; None if nothing is held of it."""
        parts = [self._sums[key]] if key in self._sums else [kind.sum() for kind in self.kinds.get(key, [])]
        parts += [self.nobodys[key]] if key in self.nobodys else []
        return sum(parts[1:], parts[0]) if parts else None

    def _norms_of(self, name: str, kind: Term) -> None:
        """Norms are all that is wanted."""
        norms = self._reducers[0]
        if name in self._skipped:
            sq, summed = kind.norms_and_sum(in_parts=True) if isinstance(kind, Outer) else kind.norms_and_sum()
            self._deliver([self._parameters[name]], [summed])
        else:
            sq = kind.sq_norms()
        norms.receive((name,), self._scaled(sq))  # type: ignore[attr-defined]

    def _scaled(self, sq_norms: Tensor) -> Tensor:
        return sq_norms if self._scale is None else sq_norms * self._scale**2

    def _complete(self, key: int) -> None:
        self._done.add(key)
        if are_changed(self.versions[key]):
            refuse_changed(self._names[key])
        self._hand_over(key, self.kinds[key], self.versions[key])
        if not self._keep:
            if self._check:
                self._sums[key] = sum(kind.sum() for kind in self.kinds[key])  # type: ignore[assignment]
            del self.kinds[key], self.versions[key]

    def _hand_over(self, key: int, kinds: list[Term], held: Held) -> None:
        """All factors of a parameter, to the reducers."""
        name = self._names[key]
        parameter = self._parameters[name]
        factors = formed = Factors(name, parameter, [GroupFactors(self.n, kinds, self._scale, held)], is_over=False)
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
