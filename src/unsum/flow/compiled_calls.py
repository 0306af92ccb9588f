"""Calls of a compiled model in a capture. The first ones run eagerly, past the gates; later ones run compiled, with
sites (`compiled/traced_sites.py`)."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.compiled.compile import compiled_with_sites, reuses_memory
from unsum.compiled.pattern import HOOKS_AROUND, Spoilt, Untappable, reason
from unsum.compiled.rehearsal import put_back
from unsum.compiled.traced import Choice, Traced
from unsum.compiled.traced_sites import asking, hooks
from unsum.flow.flow import Flow
from unsum.flow.picking import Spot, pick
from unsum.graph.nodes import Edge, Node, edge_of
from unsum.nested import leaves, nested
from unsum.seams.checkpoints import ModuleCall, saved_hooks
from unsum.seams.compiling import comparing_hooks, is_graph_break, is_too_often
from unsum.seams.nodes import current_backward
from unsum.seams.tensors import version_of
from unsum.sites import Place, unwrapped
from unsum.types import Kind, Path

log = logging.getLogger("unsum")

_EAGER = 2  # calls that run eagerly before a model is compiled with sites, which takes a while
_KEPT = 32  # sets of sites with which one model is compiled
_TIMES = 4  # how often a model is compiled anew for sizes or values that torch has seen too many of

_NO_GRAD = "it ran with gradients switched off (no_grad or inference_mode)"
_NO_NEED = "it needs no gradient: nothing before it requires one (frozen, or data)"


@dataclass
class _Record:
    """A model with a set of sites."""

    calls: int = 0
    times: int = 0  # it was compiled
    in_parts: bool = False  # whether it has graph breaks
    run: Callable[..., Any] | None = None
    hooks: list[tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=list)  # by the place's number
    refused: str | None = None  # why it cannot run compiled


_records: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, _Record]] = weakref.WeakKeyDictionary()


def _record(model: nn.Module, key: Hashable) -> _Record:
    known = _records.setdefault(model, OrderedDict())
    found = known.setdefault(key, _Record())
    known.move_to_end(key)
    while len(known) > _KEPT:
        known.popitem(last=False)
    return found


class CompiledCalls:
    """Runs the calls of a compiled model for a capture that is open."""

    passes = False

    def __init__(self, flow: Flow, captured: list[Any], *, copies: bool) -> None:
        self._flow, self._captured, self.copies = flow, captured, copies
        self.compares_versions = flow.seen is not None
        modules = [(place, place.thing) for place in flow.requests.wants]
        self._modules = {place: thing for place, thing in modules if isinstance(thing, nn.Module)}
        self._places = list(self._modules)
        self._leaving = [seams.called_after(module, flow.gates[place].key) for place, module in self._modules.items()]
        self._handles: list[Any] = []
        self._reuses_memory = False
        self._failed: Exception | None = None
        self._inner: set[Edge] = set()  # of the call under way: outputs of parts that do not get all of their gradient
        self._close = seams.on_calls(self)

    def close(self) -> None:
        """No longer look at calls, nor wait for gradients."""
        self._close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- told by modules --------------------------------------------------------------------------------------

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        return False

    def after_call(self, output: Any) -> None: ...

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inner = unwrapped(module)
        names = self._flow.requests.names
        if names is None or inner is not names.model or _is_elsewhere():
            return seams.NOTHING
        if seams.has_hooks_around(module):
            log.info("unsum: the compiled model runs eagerly in this block: %s", HOOKS_AROUND)
            return seams.NOTHING
        record = _record(module, self._key())
        record.calls += 1
        if record.calls <= _EAGER or record.refused is not None:
            return seams.NOTHING
        with seams.alone(self._flow) as is_alone:
            return self._call(record, module, inner, args, kwargs) if is_alone else seams.NOTHING

    def _key(self) -> Hashable:
        requests = self._flow.requests
        wants = tuple((place.name, tuple(requests.wants[place].items())) for place in self._places)
        return wants, tuple(site.path for site in requests.asked), self.copies, self.compares_versions

    def _call(self, record: _Record, module: nn.Module, inner: nn.Module, args: Any, kwargs: Any) -> Any:
        try:
            if record.run is None:
                record.run = compiled_with_sites(module, in_parts=record.in_parts)
                wants = [self._flow.requests.wants[place] for place in self._places]
                record.hooks = [
                    hooks(k, waits="grad_output" in each or "grad_input" in each) for k, each in enumerate(wants)
                ]
            self._reuses_memory = reuses_memory(module)
            with self._in_parts(inner, args, kwargs) if record.in_parts else nullcontext():
                with seams.aside(), self._traced_hooks(record), comparing_hooks(), asking(self):
                    output = record.run(inner, args, kwargs)
        except Exception as error:
            record.run = None
            if is_graph_break(error) and not record.in_parts:
                record.in_parts = True
                return self._call(record, module, inner, args, kwargs)
            if is_too_often(error) and record.times < _TIMES:
                record.times += 1
                return self._call(record, module, inner, args, kwargs)
            record.refused = reason(error)
            log.warning("unsum: the compiled model runs eagerly in this block: %s", record.refused)
            if isinstance(error, Spoilt):
                raise
            return seams.NOTHING
        finally:
            self._inner.clear()
        log.debug("unsum: the compiled model ran compiled, with %d sites", len(self._places))
        if (failed := self._failed) is not None:
            self._failed = None
            raise failed
        return output

    @contextmanager
    def _in_parts(self, inner: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """If a call in parts fails, some of which have run: the call is made again, and counts once."""
        seen, counts = len(self._captured), dict(self._flow.calls.counts)
        try:
            with put_back(inner, args, kwargs):
                yield
        except Exception:
            del self._captured[seen:]
            self._flow.calls.counts = counts
            for gate in self._flow.gates.values():
                gate.begun.clear()
            raise

    def _traced_hooks(self, record: _Record) -> AbstractContextManager[None]:
        gates = self._flow.gates
        return seams.other_hooks(
            (module, gates[place].key, *own)
            for (place, module), own in zip(self._modules.items(), record.hooks, strict=True)
        )

    # ---- told while torch compiles ----------------------------------------------------------------------------

    def choose(self, place: int, kinds: Sequence[Kind], found: Mapping[Path, Tensor]) -> Sequence[Choice]:
        where, requests = self._places[place], self._flow.requests
        value = nested(found)
        choices: list[Choice] = []
        for kind in kinds:
            sites = [(number, requests.asked[number]) for number in requests.wants[where].get(kind, ())]
            if not sites:
                continue
            absent: dict[tuple[Place, Any], str] = {}
            spots = pick(where, kind, 0, value, sites, one=False, absent=absent)
            if absent:
                raise Untappable(f"{where.name}: its {kind} is looked for in a part of its arguments or output")
            choices += [Choice(kind, spot.path, spot.shown, spot.asked) for spot, _ in spots]
        return choices

    # ---- told between the parts of a model with graph breaks --------------------------------------------------

    def enter(self, place: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with self._inside():
            return self._flow.gates[self._places[place]](module, args, kwargs)

    def leave(self, place: int, module: nn.Module, args: Any, output: Any) -> Any:
        waits = "grad_output" in self._flow.requests.wants[self._places[place]]
        if waits and any(edge_of(tensor) in self._inner for _, tensor in leaves(output)):
            raise Untappable("a compiled part computes something else from what a module around it returns")
        with self._inside():
            return self._leaving[place](module, args, output)

    def _inside(self) -> AbstractContextManager[None]:
        assert self._flow.blocks is not None
        return seams.inside(self._flow.blocks)

    # ---- told when it has run ---------------------------------------------------------------------------------

    def ran(self, traced: Traced, values: Sequence[Tensor], node: Node, taps: range, inner: Sequence[Edge]) -> None:
        flow = self._flow
        self._inner.update(inner)
        calls = [flow.begin(self._places[place]) for place in traced.calls]
        for value, tensor in zip(traced.values, values, strict=True):
            call = calls[value.call]
            spot = self._spot(traced, value.call, value.choice, call)
            if spot is not None and call is not None:
                is_own = value.among == "outputs" and self._reuses_memory  # the next run writes there
                self._receive(spot, tensor.clone() if is_own else tensor, call, is_changed=value.is_changed)
        for place, kind in traced.silent:
            flow.notes[self._places[place], kind] = _NO_NEED if traced.has_grad else _NO_GRAD
        if node is not None:
            spots = [self._spot(traced, each.call, each.choice, calls[each.call]) for each in traced.gradients]
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._handles.append(seams.after_node(node, partial(self._arrived, traced, spots, taps)))
        flow.receiver.called()

    def _spot(self, traced: Traced, number: int, choice: Choice, call: ModuleCall | None) -> Spot | None:
        """The spot of a call, if requests ask for this one."""
        if call is None:
            return None
        sites = self._flow.requests.asked
        asked = tuple([k for k in choice.asked if sites[k].call is None or sites[k].call == call.number])
        place = self._places[traced.calls[number]]
        return Spot(place, choice.kind, call.number, choice.path, choice.shown, asked) if asked else None

    def _receive(self, spot: Spot, tensor: Tensor, call: ModuleCall, *, is_changed: bool) -> None:
        seen = self._flow.seen
        if seen is not None and not tensor.is_inference():
            seen.append((spot, tensor.detach(), -1 if is_changed else version_of(tensor), None))
            return
        try:
            self._flow.receiver.value(spot, tensor, call)
        except Exception as error:  # of the user's own reduction: raised when the model has run
            self._failed = self._failed or error

    def _arrived(
        self, traced: Traced, spots: Sequence[Spot | None], taps: range, results: Sequence[Any], grads: Sequence[Any]
    ) -> tuple[Any, ...]:
        """The compiled backward has run. The taps themselves get nothing."""
        for tap in traced.come(grads):
            grad, spot = results[taps[tap]], spots[tap]
            if grad is not None and spot is not None:
                self._flow.expected.arrived(spot, grad.clone() if self._reuses_memory else grad)
        return tuple([None if k in taps else each for k, each in enumerate(results)])


def _is_elsewhere() -> bool:
    """Whether a call runs eagerly for where it is: in a backward, in a checkpoint, in one of several processes."""
    processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    return processes or current_backward() != -1 or saved_hooks(True) is not None or seams.is_traced()
