"""The calls of compiled models in a block. The first runs eagerly and is learnt, as that of any model. The second is a
rehearsal: what torch has taken down of the model (which may use other operations to the same end) runs eagerly and is
learnt. Later ones run compiled, with taps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.compiled.compile import compiled_with_taps, rehearsing, reuses_memory, taken_down
from unsum.compiled.instrument import Instrumentation, tracing
from unsum.compiled.pattern import NotLasting, Pattern, Unknown, Untappable, leaf_of, made, pattern
from unsum.compiled.remembered import Key, Memory, Record, memory_of
from unsum.compiled.tapped import Tapped
from unsum.errors import UnsupportedError
from unsum.graph.nodes import Edge, Node, edge_of, is_leaf
from unsum.kernels import fused
from unsum.kernels.product import wide
from unsum.nested import leaves
from unsum.plan.memory import watch_again
from unsum.plan.plan import Meeting, Plan
from unsum.reducers.tap import Tap
from unsum.seams.compiling import flattened
from unsum.sites import unwrapped
from unsum.step.calls import Look
from unsum.step.forward import Forward

log = logging.getLogger("unsum")

_TRIES = 2  # rehearsals of a call whose nodes are others when it is compiled


@dataclass
class _Candidate:
    """An eager call that may run compiled some time."""

    key: Key
    module: nn.Module
    is_rehearsal: bool = False
    made: tuple[list[Node], list[Edge]] | None = None  # its nodes and its outputs, when it is over


class Tapping:
    """What a block does with calls of compiled models."""

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],  # of modules, by id
        wanted: Mapping[str, nn.Parameter],
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
        self._candidate: _Candidate | None = None
        self._calls: dict[int, Tapped] = {}

    # ---- forward --------------------------------------------------------------------------------------------------

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a compiled module with taps; `seams.NOTHING` if it is to run eagerly."""
        inner = unwrapped(module)
        name = self._names.get(id(inner))
        if name is None or not torch.is_grad_enabled() or self._has_no_forms():
            return seams.NOTHING
        look = self._forward.look(name, args, kwargs)
        if look.n is None:
            return seams.NOTHING
        key = Key((name, look.rest, _others(args, kwargs)), look.sizes)
        memory = memory_of(self._model)
        self._candidate = None
        assert self._forms is not None
        wanted = (key.rest, tuple(form.key for form in self._forms))
        if key.rest in memory.refused or wanted in memory.refused:
            return seams.NOTHING
        try:
            if (known := memory.known(key)) is not None:
                try:
                    return self._compiled(memory, known, key, look, module, inner, args, kwargs)
                except Unknown:  # a rehearsal shows it, if it can be shown
                    memory.missed[wanted, key] = memory.missed.get((wanted, key), 0) + 1
                    if memory.missed[wanted, key] > _TRIES:
                        raise
                    watch_again(self._model)
            self._candidate = _Candidate(key, module)
            if key.rest in memory.rehearsed:
                return self._rehearse(memory, key, name, module, inner, args, kwargs)
        except Exception as error:
            self._candidate = None
            watch_again(self._model)
            memory.refused[wanted] = (str(_cause(error) or error) or type(error).__name__).splitlines()[0]
            log.warning("unsum: the compiled model runs eagerly in this block: %s", memory.refused[wanted])
        return seams.NOTHING

    def _rehearse(
        self, memory: Memory, key: Key, name: str, module: nn.Module, inner: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Run what torch takes down of the model, node by node."""
        assert self._candidate is not None
        self._candidate.is_rehearsal = True
        self._forward.before(name, module, args, kwargs, anew=True)
        self._forward.watching.turn(False)
        output = None
        try:
            with seams.aside(), rehearsing(self._forward.watching.sides):
                output = memory.rehearsed[key.rest](inner, args, kwargs)
        finally:
            self._forward.after(output)
        self.saw(output)
        return output

    def _compiled(
        self,
        memory: Memory,
        known: Pattern,
        key: Key,
        look: Look,
        module: nn.Module,
        inner: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        assert self._forms is not None and look.n is not None
        what = (key.rest, known.structure, tuple(f.key for f in self._forms), tuple(self._wanted), self._grad)
        record = memory.records.get(what) or Record(compiled_with_taps(module), known, reuses_memory(module))
        output = self._run(record, key.rest, inner, args, kwargs, look, memory.patterns.get(key, []))
        memory.records[what] = record
        log.debug("unsum: the compiled model ran compiled: %d samples", look.n)
        return output

    def _has_no_forms(self) -> bool:
        if self._forms is None:
            forms = [r.tap(self._wanted) if hasattr(r, "tap") else None for r in self._reducers]
            devices = {p.device for p in self._wanted.values()}
            is_one = len(devices) == 1 and not any(p.is_complex() for p in self._wanted.values())
            self._forms = [f for f in forms if f is not None] if is_one and None not in forms else []
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
        dtype = wide(first.dtype)
        shapes = [shape for form in self._forms for shape in form.shapes(n, positions)]
        taps = [_tap(shape, dtype, first.device) for shape in shapes]
        self._calls = {key: t for key, t in self._calls.items() if t.tap() is not None}
        waiting = sum(tapped.n for tapped in self._calls.values() if not tapped.is_begun)
        before = max(reducer.samples() for reducer in self._reducers) + waiting
        given = [tensor for form in self._forms for tensor in form.given(before, n, first.device)]
        frozen = frozenset() if self._grad else frozenset(id(p) for p in self._model.parameters())
        trace = Instrumentation(patterns, self._forms, self._wanted, frozen, len(taps), record.told)
        self._forward.watching.turn(False)
        for given_in in {parameter.dtype for parameter in self._wanted.values()}:
            fused.make_ready(first.device, given_in)
        try:
            with seams.aside(), tracing(trace):
                output, held = record.run(inner, [*taps, *given], args, kwargs)
        except Exception as error:
            if trace.is_unknown:
                raise Unknown(str(_cause(error) or error)) from error
            raise
        if held.grad_fn is None:
            raise Untappable("the backend does not differentiate what it compiles")
        record.told = trace.told
        tensors = [tensor for _, tensor in leaves(output)]
        cut, used = ([tensors[k] for k in sorted(which) if k < len(tensors) and tensors[k].grad_fn is not None]
                     for which in (record.pattern.cut, record.pattern.used))  # fmt: skip
        call = self._forward.passed(cut, n, positions)
        edges = frozenset(edge_of(tensor) for tensor in used)
        self._calls[id(taps[0])] = Tapped(call, n, before, record, key, edges, weakref.ref(taps[0]))
        return output

    # ---- learning -------------------------------------------------------------------------------------------------

    def saw(self, output: Any) -> None:
        """An eager call is over."""
        if self._candidate is None:
            return
        tensors = [tensor for _, tensor in leaves(output)]
        edges = [edge_of(tensor) for tensor in tensors]
        self._candidate.made = made(tensors, leaf_of(self._by_id)), edges

    def learn(self, plan: Plan, nodes: Sequence[Node]) -> None:
        """An eager call has a plan: later ones may run compiled."""
        candidate, self._candidate = self._candidate, None
        if candidate is None or candidate.made is None:
            return
        key, memory = candidate.key, memory_of(self._model)
        try:
            known = pattern(plan, nodes, *candidate.made, self._by_id)
            if candidate.is_rehearsal:
                memory.learnt(key, known)
            elif key.rest not in memory.rehearsed:
                memory.rehearsed[key.rest] = taken_down(candidate.module)
        except NotLasting as error:
            log.info("unsum: the compiled model runs eagerly in this batch: %s", error)
        except Untappable as error:
            memory.refused[key.rest] = str(error)
            log.info("unsum: the compiled model runs eagerly in this block: %s", error)

    # ---- backward -------------------------------------------------------------------------------------------------

    def begin(self, call: seams.Backward, nodes: Sequence[Node]) -> Tapped | None:
        """The tapped call that a backward goes through; None if there is none."""
        leaves = {node: self._calls[id(node.variable)] for node in nodes
                  if self._calls and is_leaf(node) and id(node.variable) in self._calls}  # fmt: skip
        if not leaves:
            return None
        if len(leaves) > 1:
            raise UnsupportedError(
                "one backward goes through several calls of a compiled model: their gradients belong together.\n"
                "  call backward for each, or use the model itself (compiled._orig_mod)"
            )
        ((leaf, tapped),) = leaves.items()
        assert self._forms is not None
        tapped.find(nodes, leaf, sum(form.taps for form in self._forms))
        try:
            tapped.refuse_others(call, self._by_id)
        except UnsupportedError:  # from now on it runs eagerly
            memory_of(self._model).refused[tapped.key] = "its loss changes"
            watch_again(self._model)
            raise
        tapped.wait()
        return tapped

    def refuse_other_order(self, tapped: Tapped) -> None:
        """Weights were given by the order of forwards, before it was known which have a backward."""
        taps = zip(self._reducers, self._forms or (), strict=True)
        if any(tap.in_order and reducer.before_now() != tapped.before for reducer, tap in taps):
            raise UnsupportedError(
                "WeightedSum(w): the weights are in the order of the forwards that have a backward, and another "
                "forward of the compiled model came between.\n  call backward right after each forward"
            )

    def only(self, nodes: Sequence[Node], tapped: Tapped) -> list[Tensor]:
        """The leaves to which torch is to bring gradients: not to the taps, which are read before; and if nobody wants
        the others, to one tap alone, or nothing would run."""
        return tapped.other_leaves(nodes) if self._grad else tapped.leaves()[:1]

    def end(self, tapped: Tapped, scale: Tensor | float | None) -> dict[str, dict[Meeting, None]]:
        """The backward is over: hand what has left to the reducers. Returns where each parameter met data."""
        values = tapped.taken()
        assert self._forms is not None
        for k, each in enumerate(self._forms):
            each.told = tapped.record.told[k]
            own, values = values[: each.taps], values[each.taps :]
            each.receive(own, scale)
        return tapped.record.pattern.meetings()


def _tap(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; of a large one there is just one number in memory."""
    zero = torch.zeros((), dtype=dtype, device=device).expand(shape)
    return (zero if zero.numel() > 1 << 16 else zero.contiguous()).requires_grad_()


def _others(args: Any, kwargs: Any) -> Hashable:
    """The arguments that are no tensors, and how all of them are nested."""
    values, spec = flattened((args, kwargs))
    return spec, tuple(repr(value) for value in values if not isinstance(value, Tensor))


def _cause(error: BaseException | None) -> Untappable | None:
    """Our own refusal among the errors in which torch wraps it."""
    while error is not None:
        if isinstance(error, Untappable):
            return error
        error = error.__cause__ or error.__context__
    return None
