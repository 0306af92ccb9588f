"""Calls of compiled models that run eagerly and may run compiled later: the first is learnt as that of any model. The
second is a rehearsal: what torch has taken down of the model (which may use other operations to the same end), as one
graph or in parts, runs eagerly and is learnt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from unsum import seams
from unsum.compiled.compile import rehearsing, taken_down, taken_down_in_parts
from unsum.compiled.outlets import rehearsing_parts
from unsum.compiled.parts import Run, course
from unsum.compiled.pattern import Ambiguous, NotLasting, Spoilt, Untappable, leaf_of, made, pattern
from unsum.compiled.raw_inputs import MADE, Lines, RawTensors
from unsum.compiled.remembered import Key, memory_of
from unsum.graph.nodes import Edge, Node, edge_of, ordered
from unsum.learn.state import State
from unsum.nested import leaves
from unsum.plan.plan import Plan
from unsum.seams.compiling import is_compiled_graph, is_graph_break, is_too_often
from unsum.seams.nodes import number_of
from unsum.seams.tensors import version_of
from unsum.step.forward import Forward

log = logging.getLogger("unsum")


_TRIES = 2  # rehearsals of parts that are given tensors from elsewhere: constants are known from the second on


@dataclass
class _Candidate:
    """An eager call that may run compiled some time."""

    key: Key
    module: nn.Module
    is_rehearsal: bool = False
    made: tuple[list[Node], list[Edge]] | None = None  # its nodes and its outputs, when it is over
    runs: list[Run] | None = None  # its parts, if it has graph breaks
    inputs: Lines = ()  # what was done to its inputs before a parameter met them


class Rehearsals:
    """The eager calls of a block that may run compiled some time."""

    def __init__(self, model: nn.Module, forward: Forward, names: Mapping[int, str]) -> None:
        self._model, self._forward = model, forward
        self._names = names  # of parameters, by id
        self._candidate: _Candidate | None = None
        self._taught: tuple[Hashable, frozenset[tuple[int, int]]] | None = None  # the last one, and where it was cut

    def expect(self, key: Key, module: nn.Module) -> None:
        """A call like this one is about to run eagerly."""
        self._candidate, self._taught = _Candidate(key, module), None

    def drop(self) -> None:
        """The last call is of no interest."""
        self._candidate = self._taught = None

    def run(self, name: str, inner: nn.Module, args: Any, kwargs: Any, refuse_parts: Callable[[], None]) -> Any:
        """Run what torch takes down of the model, node by node."""
        assert self._candidate is not None
        self._candidate.is_rehearsal = True
        self._forward.before(name, self._candidate.module, args, kwargs, anew=True)
        self._forward.watching.turn(False)
        output = None
        try:
            with seams.aside():
                output = self._taken_down(self._candidate, inner, args, kwargs, refuse_parts)
        finally:
            self._forward.after(output)
        self.saw(output)
        return output

    def _taken_down(
        self, candidate: _Candidate, inner: nn.Module, args: Any, kwargs: Any, refuse_parts: Callable[[], None]
    ) -> Any:
        """What torch takes down as one graph, or in parts."""
        memory, key, module = memory_of(self._model), candidate.key, candidate.module
        watcher = self._forward.watching.sides
        if key.rest not in memory.in_parts:
            try:
                with rehearsing(watcher) as seen:
                    output = memory.rehearsed[key.rest](inner, args, kwargs)
                (candidate.inputs,) = seen
                return output
            except Exception as error:
                if not is_graph_break(error) and not is_too_often(error):
                    raise
                memory.rehearse(key.rest, taken_down(module))  # sizes that were learnt are not needed again
                memory.in_parts |= {key.rest} if is_graph_break(error) else set()
            return self._taken_down(candidate, inner, args, kwargs, refuse_parts)
        refuse_parts()
        with (
            rehearsing_parts(watcher, RawTensors(self._model, args, kwargs, memory.seen)) as runs,
            put_back(inner, args, kwargs),
        ):
            output = memory.rehearsal(key, lambda: taken_down_in_parts(module))(inner, args, kwargs)
            roots = [tensor.grad_fn for _, tensor in leaves(output) if tensor.grad_fn is not None]
            if any(is_compiled_graph(node) for node in ordered(roots)):
                raise Untappable("it has graph breaks, and calls something that is compiled by itself")
            if any(MADE in run.raw for run in runs):  # not watched: the call is made again, eagerly
                memory.made[key.rest] = times = memory.made.get(key.rest, 0) + 1
                kind = Untappable if times > _TRIES else Ambiguous
                raise kind("between its compiled parts a tensor is made, perhaps of the input's rows")
        candidate.runs = runs
        return output

    def saw(self, output: Any) -> None:
        """An eager call is over."""
        if self._candidate is None:
            return
        tensors = [tensor for _, tensor in leaves(output)]
        edges = [edge_of(tensor) for tensor in tensors]
        self._candidate.made = made(tensors, leaf_of(self._names)), edges

    def learn(self, plan: Plan, nodes: Sequence[Node]) -> None:
        """An eager call has a plan: later ones may run compiled."""
        candidate, self._candidate = self._candidate, None
        cut = frozenset((number_of(nodes[at]), output) for at, output in plan.cut)
        if candidate is None or candidate.made is None:
            self._refuse_another(cut)
            return
        key, memory = candidate.key, memory_of(self._model)
        self._taught = key.rest, cut
        try:
            if candidate.runs is not None:
                memory.learnt(key, course(plan, nodes, candidate.runs, *candidate.made, self._names))
                memory.forgive(key, frozenset(self._names.values()))
                return
            known = pattern(plan, nodes, *candidate.made, self._names, candidate.inputs)
            if candidate.is_rehearsal:
                memory.learnt(key, known)
            elif key.rest not in memory.rehearsed:
                memory.rehearse(key.rest, taken_down(candidate.module))
        except NotLasting as error:
            log.info("unsum: the compiled model runs eagerly in this batch: %s", error)
        except Untappable as error:
            # With one sample all that there is may be its: what cannot be followed there, can with several.
            memory.refused[key if plan.n == 1 else key.rest] = str(error)
            log.info("unsum: the compiled model runs eagerly in this block: %s", error)

    def _refuse_another(self, cut: frozenset[tuple[int, int]]) -> None:
        """A call has another backward, perhaps from other outputs: what leaves a compiled model is that of one loss."""
        if self._taught is not None and self._taught[1] != cut:
            memory_of(self._model).refused[self._taught[0]] = why = "losses of several outputs have a backward each"
            log.info("unsum: the compiled model runs eagerly in this block: %s", why)

    def forget(self) -> None:
        """An eager call has no plan. If it was a rehearsal of parts, between which nothing is watched, that may be why:
        such calls run eagerly from now on."""
        candidate, self._candidate = self._candidate, None
        if candidate is not None and candidate.runs is not None:
            memory_of(self._model).refused[candidate.key.rest] = "its samples could not be followed through its parts"


@contextmanager
def put_back(model: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """If a call in parts fails, some of which may have run, the state of the model is put back: the call is made again,
    eagerly. Inputs that were changed cannot be put back."""
    state = State(model, strict=False)
    given = [(tensor, version_of(tensor)) for _, tensor in leaves((args, kwargs))]
    try:
        yield
    except Exception as error:
        state.restore()
        if any(version_of(tensor) != version for tensor, version in given):
            raise Spoilt(
                "the compiled model went a way through its graph breaks that was not learnt yet, and has changed its "
                "inputs in place before.\n  from now on the model runs eagerly in this block: call it again"
            ) from error
        raise
