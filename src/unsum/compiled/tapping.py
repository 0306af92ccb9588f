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
from unsum.compiled.raw_inputs import RawTensors
from unsum.compiled.rehearsal import Rehearsals, put_back
from unsum.compiled.remembered import Key, Memory, Record, memory_of, refuse
from unsum.compiled.tapped import Guard, Outlet, Tapped
from unsum.compiled.tapped_backwards import TappedBackwards
from unsum.graph.nodes import Node, edge_of
from unsum.kernels import fused
from unsum.kernels.product import wide
from unsum.nested import leaves
from unsum.plan.memory import watch_again
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
        self._reducers = reducers
        self._forms: list[Tap] | None = None
        self.rehearsals = Rehearsals(model, forward, self._by_id)
        self._by_names: dict[frozenset[str], list[Tap]] = {}  # taps for the parameters of parts
        self._zero: Tensor | None = None  # of which taps are made
        self.backwards = TappedBackwards(self._model, wanted, own, reducers, grad=grad)
        self._failed: Hashable = None  # the call under way, if an error has come of it, and it is made again eagerly

    # ---- forward --------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a compiled module with taps; `seams.NOTHING` if it is to run eagerly."""
        inner = unwrapped(module)
        name = self._names.get(id(inner))
        if (
            name is None or self._forward.is_inside
        ):  # a part that is compiled by itself: the watch over the call goes on
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
        wanted = (key.rest, self.backwards.keys)
        if not memory.refused.keys().isdisjoint((key, key.rest, wanted)):
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
                except Unknown as error:  # a rehearsal shows it, if it can be shown
                    log.info("unsum: the compiled model runs eagerly in this batch: %s", error)
                    memory.missed[wanted, key] = memory.missed.get((wanted, key), 0) + 1
                    if memory.missed[wanted, key] > _TRIES:
                        raise
                    watch_again(self._model)
            self.rehearsals.expect(key, module)
            if key.rest in memory.rehearsed:
                return self.rehearsals.run(name, inner, args, kwargs, self._refuse_parts)
        except Spoilt as error:
            refuse(self._model, key.rest, "it changes its inputs, and takes ways that were not learnt")
            found = error.__cause__
            if found is not None and cause(found) is None:
                raise found from found.__cause__  # the model's own error
            raise
        except Ambiguous as error:
            self.rehearsals.drop()
            watch_again(self._model)
            log.info("unsum: the compiled model runs eagerly in this batch: %s", error)
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
        forms = self.backwards.keys, chosen
        what = (key.rest, known.identity, forms, tuple(self._wanted), bool(self.backwards.frozen))
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
            self.backwards.forms = self._forms
        return not self._forms or (torch.distributed.is_available() and torch.distributed.is_initialized())

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
        before = self.backwards.samples()
        given = [tensor for form in self._forms for tensor in form.given(before, n, first.device)]
        trace = Instrumentation(
            patterns, self._forms, self._wanted, self.backwards.frozen, len(taps), in_cuda_graphs=record.reuses_memory
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
        if (guard := self.backwards.guard()) is not None:
            seams.on_node(held.grad_fn, guard)
        outlet = Outlet(weakref.ref(taps[0]), trace.graph, self._forms, len(taps), frozenset(self._wanted))
        learnt = trace.graph.pattern
        self._passed(output, learnt.cut, learnt.used, look, before, [outlet], record, key, guard)
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
        guard: Guard | None,
        inside: frozenset[Node] = frozenset(),
        beside: Beside | None = None,
    ) -> None:
        """A call has run compiled, and its backward may come."""
        assert look.n is not None
        tensors = [tensor for _, tensor in leaves(output)]
        at = lambda which: [tensors[k] for k in sorted(which) if k < len(tensors) and tensors[k].grad_fn is not None]
        call = self._forward.passed(at(cut), look.n, look.positions)
        edges = frozenset(edge_of(tensor) for tensor in at(used))
        self.backwards.expect(
            Tapped(call, look.n, before, outlets, record.reuses_memory, key, edges, inside, beside, guard)
        )

    def _tap(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros, all of which are one number in memory."""
        if self._zero is None:
            like = next(iter(self._wanted.values()))
            self._zero = torch.zeros((), dtype=wide(like.dtype), device=like.device)
        # One number lies in memory as its gradient does: torch warns otherwise.
        return (self._zero.view(shape) if prod(shape) == 1 else self._zero.expand(shape)).requires_grad_()

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
        what = (key.rest, "parts", sizes, self.backwards.keys, tuple(self._wanted), bool(self.backwards.frozen))
        record = memory.records.get(what) or Record(compiled_in_parts(module), reuses_memory(module))
        memory.keep(what, record, key.sizes)
        before = self.backwards.samples()
        call = outlets.Call(
            courses, bool(own), self._wanted, self._forms_of, self.backwards.frozen, look.n, look.positions,
            before, leaf_of(self._by_id), self._tap, record.reuses_memory, RawTensors(inner, args, kwargs, memory.seen),
            self.backwards.guard(),
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
            output, course.cut, course.used, look, before, call.outlets, record, key.rest, call.guard,
            call.inside(), beside,
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


def _others(args: Any, kwargs: Any) -> Hashable:
    """The arguments that are no tensors, and how all of them are nested."""
    values, spec = flattened((args, kwargs))
    return spec, tuple(repr(value) for value in values if not isinstance(value, Tensor))
