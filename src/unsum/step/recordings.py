"""Meetings that are reduced by recordings. Which rule speaks, which kernel serves and which way is cheapest is the same
in every step; what a meeting calls is written down once and then called again, with nothing decided anew.

The first meeting of a kind runs as always, the second is written down, the third runs both ways and is compared, number
by number; from the fourth on the recording runs alone. Where it does not fit (other strides, an address that is not
aligned), the meeting runs as always."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from unsum.factors.factors import Factors, GroupFactors
from unsum.factors.outer import Outer
from unsum.factors.total import Term
from unsum.graph.layout import Layout, Mapped, Regular
from unsum.graph.nodes import Node
from unsum.kernels import fused, recorded
from unsum.plan.plan import Plan, Route
from unsum.plan.signature import plain
from unsum.reducers import SQ_NORMS, Reading, WeightedSum
from unsum.rules.registry import Call
from unsum.step.held import Form, taken_apart
from unsum.step.lanes import Waiting, small

log = logging.getLogger("unsum")

PARTS = 1 << 20  # numbers, up to which parts of squared norms are left to be added up at the end
TRIES = 3  # recordings of one meeting, if strides differ from batch to batch


@dataclass(eq=False, slots=True)
class Recording:
    """What is known of the meetings of one kind."""

    stage: int = 0  # 0 never run, 1 run once, 2 written down, 3 compared; -1 not to be had
    program: recorded.Program | None = None
    read: Callable[[Node], Any] | None = None  # the saved tensors that it needs
    reads: int = 0
    maps: bool = False  # whether it needs whose the rows are, which differs from batch to batch
    waits: tuple[bool, ...] = ()  # of each parameter: whether what comes are gradients that wait for others
    squares: tuple[bool, ...] = ()  # of each tensor that comes: whether it is squared norms
    held: tuple[Form, ...] = ()  # of each parameter whose gradients are held: how they are made of what comes
    misses: int = 0


@dataclass(eq=False, slots=True)
class ServedMeeting:
    """A meeting: what is known of it, and whom it serves."""

    known: Recording
    wanted: list[tuple[Route, str, bool]]  # the ways to parameters, their names, whether the sum is wanted as well


class Digests:
    """The meetings of one backward that recordings serve. `put` gets a parameter's name and what its reducers read of
    it; `deliver` parameters and sums over samples. Where `clips` is given, the sum whose weights come from the norms,
    nothing is read: `hold` gets a parameter's squared norms, and what is to be held of its gradients."""

    def __init__(
        self,
        plan: Plan,
        nodes: Sequence[Node],
        parameters: Mapping[str, nn.Parameter],
        reducers: Sequence[Reading],
        clips: WeightedSum | None,
        skipped: frozenset[str],
        waiting: Waiting | None,
        put: Callable[[Route, str, Sequence[Tensor]], None],
        hold: Callable[[Route, str, Tensor, Term], None],
        deliver: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None],
    ) -> None:
        self._plan, self._nodes, self._parameters = plan, nodes, parameters
        self._reducers, self._clips, self._skipped, self._waiting = reducers, clips, skipped, waiting
        self._squared = [reducer.wants for reducer in reducers] == [SQ_NORMS]
        self._put, self._hold, self._deliver = put, hold, deliver
        forms: Hashable = tuple([reducer.wants for reducer in reducers]) if clips is None else clips.held_by_factors
        config = (waiting is None, forms, fused.is_installed(), skipped)
        self._by_name = any(reducer.by_name for reducer in reducers)
        self._served: dict[Any, Any] = plan.recordings.setdefault(config, {})

    def take(self, at: int, delta: Tensor) -> bool:
        """Whether this meeting is done; False if it is to run as always."""
        served = self._served.get(at)
        if served is None:
            served = self._find(at, delta)
        known = served.known
        if known.stage != 3:
            return self._prepare(served, at, delta)
        found = self._run(known, at, delta)
        if found is None:
            return self._missed(served, at, delta)
        self._hand(served, found)
        return True

    def _run(self, known: Recording, at: int, delta: Tensor) -> tuple[Tensor, ...] | None:
        assert known.program is not None
        if known.read is None:
            return known.program(delta)
        saved = known.read(self._nodes[at])
        if known.maps:
            return known.program(delta, *self._maps(at), *((saved,) if known.reads == 1 else saved))
        return known.program(delta, saved) if known.reads == 1 else known.program(delta, *saved)

    def _maps(self, at: int) -> list[Tensor]:
        """Whose the rows are, where that is no regular layout."""
        layout = self._plan.ruled[at][0].by.layout
        return [] if not isinstance(layout, Mapped) or layout.held is None else [layout.map, layout.held]

    def _missed(self, served: ServedMeeting, at: int, delta: Tensor) -> bool:
        """The recording does not fit (other strides): look for another, or start one."""
        other = self._alike(served, at, delta)
        if other is served.known or other.misses:
            other = Recording(misses=served.known.misses + 1)
            other.stage = 0 if other.misses < TRIES else -1
        served.known = other
        return False

    # ---- becoming one ---------------------------------------------------------------------------------------------

    def _find(self, at: int, delta: Tensor) -> ServedMeeting:
        """With what is known of all meetings alike."""
        wanted = self._wanted(at)
        if not all(name in self._plan.alone for _, name, _ in wanted) or delta.is_complex():
            served = self._served[at] = ServedMeeting(Recording(stage=-1), wanted)
            return served
        served = self._served[at] = ServedMeeting(Recording(), wanted)
        served.known = self._alike(served, at, delta)
        return served

    def _wanted(self, at: int) -> list[tuple[Route, str, bool]]:
        routes = [route for route in self._plan.ruled[at] if route.parameter in self._parameters]
        return [(route, str(route.parameter), route.parameter in self._skipped) for route in routes]

    def _alike(self, served: ServedMeeting, at: int, delta: Tensor) -> Recording:
        """What is known of all meetings like this one."""
        key: Hashable = (
            plain(self._nodes[at]), delta.stride(), delta.dtype, delta.device,
            tuple([self._key(*each) for each in served.wanted]),
        )  # fmt: skip
        return self._served.setdefault(key, Recording())  # type: ignore[no-any-return]

    def _key(self, route: Route, name: str, wants_sum: bool) -> Hashable:
        parameter = self._parameters[name]
        return (
            route.rule.name, route.edge, route.shape, route.turned, route.member,
            _as_key(route.by.layout), route.by.n, route.by.lead,
            parameter.shape, parameter.dtype, wants_sum, name if self._by_name else None,
            self._clips is not None and self._clips.forms(name),
        )  # fmt: skip

    def _prepare(self, served: ServedMeeting, at: int, delta: Tensor) -> bool:
        known = served.known
        if known.stage < 0:
            return False
        if known.stage == 0:
            known.stage = 1
            return False
        served.wanted = self._wanted(at)
        if known.stage == 1:
            return self._record(served, at, delta)
        found = self._run(known, at, delta)
        if found is None:
            return self._missed(served, at, delta)
        wanted = self._digest(served, self._nodes[at], delta)
        if all(map(_is_as, found, wanted, known.squares)):
            known.stage = 3
        else:
            known.stage = -1
            log.info("unsum: %s is not recorded: it did not give the same twice", self._nodes[at].name())
        self._hand(served, wanted)
        return True

    def _record(self, served: ServedMeeting, at: int, delta: Tensor) -> bool:
        known = served.known
        known.stage = -1
        node = _Noting(self._nodes[at])
        try:
            with recorded.Tape([delta, *self._maps(at)]) as tape:
                node.tape = tape
                found = self._digest(served, node, delta)
        except Exception as error:  # whatever it is, the usual way will say it
            log.info("unsum: %s is not recorded: %s", self._nodes[at].name(), error)
            return False
        parts = [_unsummed(tape, each) if sq else each for each, sq in zip(found, known.squares, strict=True)]
        known.program, names = recorded.record(tape, parts), list(node.found)
        if known.program is not None:
            known.stage, known.reads, known.maps = 2, len(names), bool(self._maps(at))
            known.read = attrgetter(*names) if names else None
        self._hand(served, found)
        return True

    def _digest(self, served: ServedMeeting, node: Any, delta: Tensor) -> list[Tensor]:
        """What is wanted of every parameter of a meeting, one after the other."""
        memo: dict[Any, Any] = {}
        found: list[Tensor] = []
        waits: list[bool] = []
        squares: list[bool] = []
        held: list[Form] = []
        for route, name, wants_sum in served.wanted:
            parameter = self._parameters[name]
            by = replace(route.by)  # without what was found out of it before
            kind = route.rule.make(Call(node, delta, by, route.shape, False, memo, is_kept=self._clips is not None))
            if kind is None:
                raise recorded.NotRecordable("a rule that does not hold")
            kind = route.finished(kind, parameter)
            formed = None if self._waiting is None else small(kind)
            waits.append(formed is not None)
            if formed is not None:
                found.append(formed)
                squares.append(False)
            elif self._clips is not None:
                found += _to_hold(kind, held, forms=self._clips.forms(name), wants_sum=wants_sum)
                squares += [False] * (len(found) - len(squares))
            elif not self._squared:
                factors = Factors(name, parameter, [GroupFactors(self._plan.n, [kind])], is_over=False)
                sums = [factors.norms_and_sum()[1]] if wants_sum else []
                found += [*[reducer.read(factors) for reducer in self._reducers], *sums]
                squares += [False] * (len(found) - len(squares))
            elif wants_sum:
                found += kind.norms_and_sum(in_parts=True) if isinstance(kind, Outer) else kind.norms_and_sum()
                squares += [True, False]
            else:
                found.append(kind.sq_norms())
                squares.append(True)
        served.known.waits, served.known.squares, served.known.held = tuple(waits), tuple(squares), tuple(held)
        return found

    def _hand(self, served: ServedMeeting, found: Sequence[Tensor]) -> None:
        """To whom it belongs."""
        at, count, held = 0, len(self._reducers), iter(served.known.held)
        for (route, name, wants_sum), waits in zip(served.wanted, served.known.waits, strict=True):
            if waits:
                self._put(route, name, ())
                assert self._waiting is not None
                self._waiting.add(name, self._parameters[name], found[at])
                at += 1
                continue
            if self._clips is None:
                self._put(route, name, found[at : at + count])
                at += count
            else:
                kept = next(held)
                end = at + 1 + len(kept.names)
                self._hold(route, name, found[at], kept.made(found[at + 1 : end]))
                at = end
            if wants_sum:
                self._deliver((self._parameters[name],), (found[at],))
                at += 1


def _to_hold(kind: Term, held: list[Form], *, forms: bool, wants_sum: bool) -> list[Tensor]:
    """Squared norms, the tensors of what is to be held, and the sum over samples if it is wanted. `held` gets its
    form."""
    made = kind.norms_and_each(want_sum=wants_sum) if forms else None
    if made is not None:
        squares, total, kind = made
    else:
        squares, total = kind.norms_and_sum() if wants_sum else (kind.sq_norms(), None)
    form, tensors = taken_apart(kind)
    held.append(form)
    return [squares, *tensors, *([] if total is None else [total])]


def _unsummed(tape: recorded.Tape, found: Tensor) -> Tensor:
    """Squared norms that were added up from parts at last, as these parts: they are added up when all are there."""
    if found.dim() != 1 or found.dtype != torch.float32:
        return found
    parts = tape.summed_from(found)
    return found if parts is None or parts.dtype != found.dtype or parts.numel() > PARTS else parts


def _is_as(found: Tensor, wanted: Tensor, is_squares: bool) -> bool:
    return recorded.is_same(found.sum(0) if is_squares and found.dim() > wanted.dim() else found, wanted)


def _as_key(layout: Layout) -> Hashable:
    return layout if isinstance(layout, Regular) else (layout.shape, layout.behind)


class _Noting:
    """A node that notes which of its saved tensors are read."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.found: dict[str, Tensor] = {}
        self.tape: recorded.Tape | None = None

    def __getattr__(self, name: str) -> Any:
        if name in self.found:
            return self.found[name]
        with recorded.unwritten():
            value = getattr(self._node, name)
        if isinstance(value, Tensor):
            assert self.tape is not None
            self.found[name] = value
            self.tape.given.append(value)
        elif isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            raise recorded.NotRecordable(f"{name} is several tensors")
        return value
