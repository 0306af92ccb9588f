"""The calls of compiled models in a block. The first runs eagerly and is learnt, as that of any model. The second is a
rehearsal. Later ones run compiled, with taps: as one graph, or in the parts between graph breaks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from unsum import seams
from unsum.compiled import outlets
from unsum.compiled.beside import Beside
from unsum.compiled.compile import (
    calls_python,
    compiled_in_parts,
    compiled_with_taps,
    is_static,
    reuses_memory,
)
from unsum.compiled.instrument import Instrumentation, tracing
from unsum.compiled.parts import Course
from unsum.compiled.pattern import (
    HOOKS_AROUND,
    Ambiguous,
    OtherParameters,
    Pattern,
    Spoilt,
    Unknown,
    Untappable,
    cause,
    leaf_of,
    reason,
)
from unsum.compiled.rehearsal import Rehearsals, put_back
from unsum.compiled.remembered import Key, Memory, Record, memory_of
from unsum.compiled.tapped import Outlet, Tapped
from unsum.errors import UnsupportedError
from unsum.factors.factors import Factors, GroupFactors
from unsum.graph.nodes import Node, edge_of, is_leaf
from unsum.kernels import fused
from unsum.kernels.product import wide
from unsum.nested import leaves
from unsum.plan.memory import watch_again
from unsum.plan.plan import Meeting
from unsum.reducers.tap import Tap
from unsum.seams.compiling import flattened, is_too_often
from unsum.sites import unwrapped
from unsum.step.calls import Look
from unsum.step.forward import Forward

log = logging.getLogger("unsum")

_TRIES = 2  # rehearsals of a call whose nodes are others when it is compiled


class Tapping:
    """What a block does with calls of compiled models."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],  # of modules, by id
        wanted: Mapping[str, nn.Parameter],
        own: Iterable[int],  # ids of all parameters of the model
        reducers: Sequence[Any],
        forward: Forward,
        *,
        grad: bool,
    ) -> None:
        self._model, self._names, self._forward = model, names, forward
        self._wanted = wanted
        self._by_id = {id(p): name for name, p in wanted.items()}
        self._reducers, self._grad = reducers, grad
        self._forms: list[Tap] | None = None
        self.rehearsals = Rehearsals(model, forward, self._by_id)
        self._by_names: dict[frozenset[str], list[Tap]] = {}  # taps for the parameters of parts
        self._calls: dict[int, tuple[Tapped, Outlet]] = {}  # by the id of the first tap
        self._zero: Tensor | None = None  # of which taps are made
        self._own = frozenset(own)
        self._failed: Hashable = None  # the call under way, if an error has come of it, and it is made again eagerly

    # ---- forward --------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a compiled module with taps; `seams.NOTHING` if it is to run eagerly."""
        inner = unwrapped(module)
        name = self._names.get(id(inner))
        if name is None:
            return seams.NOTHING
        if seams.has_hooks_around(module):
            log.info("unsum: the compiled model runs eagerly in this block: %s", HOOKS_AROUND)
            return seams.NOTHING
        self._forward.watching.turn(False)  # what is done here is no part of the model; an eager call turns it on again
        if not torch.is_grad_enabled() or self._has_no_forms():
            return seams.NOTHING
        look, self._failed = self._forward.look(name, args, kwargs), None
        if look.n is None:
            return seams.NOTHING
        key = Key((name, look.rest, _others(args, kwargs)), look.sizes)
        memory = memory_of(self._model)
        self.rehearsals.drop()
        assert self._forms is not None
        wanted = (key.rest, self._keys())
        if key.rest in memory.refused or wanted in memory.refused:
            return seams.NOTHING
        if memory.ambiguous.get(key) == len(memory.patterns):  # nothing was learnt since
            return seams.NOTHING
        try:
            if (known := memory.known(key, frozenset(self._wanted))) is not None:
                try:
                    for each in memory.ways(key, known):
                        with suppress(OtherParameters):
                            return self._compiled(memory, each, key, look, module, inner, args, kwargs)
                    raise Unknown("it is compiled for other parameters")
                except Ambiguous as error:
                    memory.ambiguous[key] = len(memory.patterns)
                    log.info("unsum: the compiled model runs eagerly in this batch: %s", error)
                    return seams.NOTHING
                except Unknown:  # a rehearsal shows it, if it can be shown
                    memory.missed[wanted, key] = memory.missed.get((wanted, key), 0) + 1
                    if memory.missed[wanted, key] > _TRIES:
                        raise
                    watch_again(self._model)
            self.rehearsals.expect(key, module)
            if key.rest in memory.rehearsed:
                return self.rehearsals.run(name, inner, args, kwargs, self._refuse_parts)
        except Spoilt as error:
            self._refuse(key.rest, "it changes its inputs, and takes ways that were not learnt")
            found = error.__cause__
            if found is not None and cause(found) is None:
                raise found from found.__cause__  # the model's own error
            raise
        except Exception as error:
            self.rehearsals.drop()
            watch_again(self._model)
            memory.refused[wanted], self._failed = reason(error), wanted
            log.warning("unsum: the compiled model runs eagerly in this block: %s", memory.refused[wanted])
        return seams.NOTHING

    def raised(self) -> None:
        """A call has raised eagerly: if it had failed before, the error was the caller's (an input of a wrong size)."""
        if self._failed is not None:
            memory_of(self._model).refused.pop(self._failed, None)

    def _compiled(
        self,
        memory: Memory,
        known: Pattern | Course,
        key: Key,
        look: Look,
        module: nn.Module,
        inner: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        assert self._forms is not None and look.n is not None
        if isinstance(known, Course):
            return self._compiled_in_parts(memory, key, look, module, inner, args, kwargs)
        chosen = tuple(form.prepare(known.sizes, known.n, look.n) for form in self._forms)
        if any(form.calls_python for form in self._forms) and not calls_python(module):
            raise Untappable("Python (a function of the norms, or factors to keep) cannot run inside a CUDA graph")
        forms = self._keys(), chosen
        what = (key.rest, known.identity, forms, tuple(self._wanted), self._grad)
        while True:
            place = memory.place(what, key.sizes)
            record = memory.records.get(place) or Record(compiled_with_taps(module), reuses_memory(module))
            try:
                own = memory.of(key, frozenset(self._wanted))
                learnt = [each for each in own if isinstance(each, Pattern)]
                output = self._run(record, key.rest, inner, args, kwargs, look, learnt)
                break
            except Exception as error:
                if not is_too_often(error) or record.is_full or not record.sizes:
                    raise
                record.is_full = True
        memory.keep(place, record, key.sizes)
        log.debug("unsum: the compiled model ran compiled: %d samples", look.n)
        return output

    def _has_no_forms(self) -> bool:
        if self._forms is None:
            forms = [r.tap(self._wanted) if hasattr(r, "tap") else None for r in self._reducers]
            devices = {p.device for p in self._wanted.values()}
            is_one = len(devices) == 1 and not any(p.is_complex() for p in self._wanted.values())
            self._forms = [f for f in forms if f is not None] if is_one and None not in forms else []
        return not self._forms or (torch.distributed.is_available() and torch.distributed.is_initialized())

    def _keys(self) -> tuple[Hashable, ...]:
        """What is asked for."""
        return tuple(form.key for form in self._forms or ())

    def _run(
        self,
        record: Record,
        key: Hashable,
        inner: nn.Module,
        args: Any,
        kwargs: Any,
        look: Look,
        patterns: Sequence[Pattern],
    ) -> Any:
        n, positions = look.n, look.positions
        assert n is not None
        assert self._forms is not None
        first = next(iter(self._wanted.values()))
        shapes = [shape for form in self._forms for shape in form.shapes(n, positions)]
        taps = [self._tap(shape) for shape in shapes]
        before = self._before()
        given = [tensor for form in self._forms for tensor in form.given(before, n, first.device)]
        trace = Instrumentation(
            patterns, self._forms, self._wanted, self._frozen(), len(taps), in_cuda_graphs=record.reuses_memory
        )  # fmt: skip
        self._make_ready()
        try:
            with seams.aside(), tracing(trace):
                output, held = record.run(inner, [*taps, *given], args, kwargs)
        except Exception as error:
            if trace.is_unknown and not isinstance(error, OtherParameters):
                raise Unknown(str(cause(error) or error)) from error
            raise
        if held.grad_fn is None or trace.graph is None:
            raise Untappable("the backend does not differentiate what it compiles")
        outlet = Outlet(weakref.ref(taps[0]), trace.graph, self._forms, len(taps), frozenset(self._wanted))
        learnt = trace.graph.pattern
        self._passed(output, learnt.cut, learnt.used, look, before, [outlet], record, key)
        return output

    def _passed(
        self,
        output: Any,
        cut: frozenset[int],
        used: frozenset[int],
        look: Look,
        before: int,
        outlets: Sequence[Outlet],
        record: Record,
        key: Hashable,
        inside: frozenset[Node] = frozenset(),
        beside: Beside | None = None,
    ) -> None:
        """A call has run compiled, and its backward may come."""
        assert look.n is not None
        tensors = [tensor for _, tensor in leaves(output)]
        at = lambda which: [tensors[k] for k in sorted(which) if k < len(tensors) and tensors[k].grad_fn is not None]
        call = self._forward.passed(at(cut), look.n, look.positions)
        edges = frozenset(edge_of(tensor) for tensor in at(used))
        tapped = Tapped(call, look.n, before, outlets, record.reuses_memory, key, edges, inside, beside)
        self._calls.update((id(outlet.tap()), (tapped, outlet)) for outlet in outlets)

    def _tap(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros, all of which are one number in memory."""
        if self._zero is None:
            like = next(iter(self._wanted.values()))
            self._zero = torch.zeros((), dtype=wide(like.dtype), device=like.device)
        # One number lies in memory as its gradient does: torch warns otherwise.
        return (self._zero.view(shape) if prod(shape) == 1 else self._zero.expand(shape)).requires_grad_()

    def _before(self) -> int:
        """How many samples come before those of a new call."""
        self._calls = {key: each for key, each in self._calls.items() if each[1].tap() is not None}
        calls = {id(tapped): tapped for tapped, _ in self._calls.values()}
        waiting = sum(tapped.n for tapped in calls.values() if not tapped.is_begun)
        return max(reducer.samples() for reducer in self._reducers) + waiting

    def _frozen(self) -> frozenset[int]:
        return frozenset() if self._grad else self._own

    def _make_ready(self) -> None:
        self._forward.watching.turn(False)
        for parameter in {p.dtype: p for p in self._wanted.values()}.values():
            fused.make_ready(parameter.device, parameter.dtype)

    def _compiled_in_parts(
        self, memory: Memory, key: Key, look: Look, module: nn.Module, inner: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run a model that has graph breaks, each of its parts with taps."""
        assert self._forms is not None and look.n is not None
        self._refuse_parts()
        wanted = frozenset(self._wanted)
        own = memory.of(key, wanted)
        courses = [each for each in own or memory.alike(key, wanted) if isinstance(each, Course)]
        sizes = key.sizes if is_static(module) else None
        what = (key.rest, "parts", sizes, self._keys(), tuple(self._wanted), self._grad)
        record = memory.records.get(what) or Record(compiled_in_parts(module), reuses_memory(module))
        memory.keep(what, record, key.sizes)
        before = self._before()
        call = outlets.Call(
            courses, bool(own), self._wanted, self._forms_of, self._frozen(), look.n, look.positions,
            before, leaf_of(self._by_id), self._tap, record.reuses_memory,
        )  # fmt: skip
        self._make_ready()
        try:
            with put_back(inner, args, kwargs), seams.aside(), outlets.calling(call):
                output = record.run(inner, args, kwargs)
                course = call.finish([tensor for _, tensor in leaves(output)])
        except Exception as error:
            if not isinstance(error, Spoilt) and (call.is_unknown or call.is_ambiguous):
                kind = Ambiguous if call.is_ambiguous else Unknown
                raise kind(str(cause(error) or error)) from error
            raise
        beside = Beside(course, call.between, self._wanted) if course.beside else None
        self._passed(
            output, course.cut, course.used, look, before, call.outlets, record, key.rest, call.inside(), beside
        )  # fmt: skip
        log.debug("unsum: the compiled model ran compiled: %d samples, in %d parts", look.n, call.ran)
        return output

    def _refuse_parts(self) -> None:
        for reducer, form in zip(self._reducers, self._forms or (), strict=True):
            if not form.by_parts:
                raise Untappable(f"it has graph breaks, and {type(reducer).__name__} reads a model as a whole")

    def _forms_of(self, names: frozenset[str]) -> list[Tap]:
        """The reducers' taps for these parameters."""
        if names not in self._by_names:
            chosen = {name: parameter for name, parameter in self._wanted.items() if name in names}
            self._by_names[names] = [reducer.tap(chosen) for reducer in self._reducers]
        return self._by_names[names]

    # ---- backward -------------------------------------------------------------------------------------------------

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
            self._refuse(tapped.key, "its loss changes")
            raise UnsupportedError(
                "the loss does not come from all parts of the compiled model, as it did when it was learnt.\n"
                "  from now on the model runs eagerly in this block: call it again"
            )
        self._refuse_some(call, nodes, tapped)
        for leaf, _, outlet in leaves:
            outlet.find(nodes, leaf)
        try:
            tapped.refuse_others(call, self._by_id)
        except UnsupportedError:
            self._refuse(tapped.key, "its loss changes")
            raise
        tapped.is_last = not call.retain_graph
        tapped.wait()
        return tapped

    def _refuse_some(self, call: seams.Backward, nodes: Sequence[Node], tapped: Tapped) -> None:
        """A backward towards some parameters does not come to all parts; as one graph, it comes to all parameters."""
        is_whole = len(tapped.outlets) == 1 and tapped.beside is None
        if not call.inputs or (is_whole and not any(form.together for form in self._forms or ())):
            return
        given = {id(each) for each in call.inputs}
        found = [id(node.variable) for node in nodes if is_leaf(node)]
        missing = [self._by_id[key] for key in found if key in self._by_id and key not in given]
        if missing and is_whole:
            self._refuse((tapped.key, self._keys()), "a backward was towards some of its parameters")
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

    def _refuse(self, key: Hashable, why: str) -> None:
        """From now on such calls run eagerly."""
        memory_of(self._model).refused[key] = why
        watch_again(self._model)

    def ready(self, tapped: Tapped) -> None:
        """The reducers have begun. Raises if weights were given by the order of forwards, and another one has the
        backward."""
        for form in self._forms or ():
            form.begin(tapped.reducing.scale)
        self._refuse_other_order(tapped)
        if tapped.beside is not None:
            tapped.beside.begin(tapped.n, self._reducers, tapped.reducing.scale, leaf_of(self._by_id))

    def let_go(self, tapped: Tapped) -> None:
        """The backward is over, or has failed: nothing is waited for."""
        tapped.let_go()
        for form in self._forms or ():
            form.waits = False

    def _refuse_other_order(self, tapped: Tapped) -> None:
        """Weights were given by the order of forwards, before it was known which have a backward."""
        taps = zip(self._reducers, self._forms or (), strict=True)
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


def _others(args: Any, kwargs: Any) -> Hashable:
    """The arguments that are no tensors, and how all of them are nested."""
    values, spec = flattened((args, kwargs))
    return spec, tuple(repr(value) for value in values if not isinstance(value, Tensor))
