"""The block that `unsum.gradients` makes: it follows the forward, recalls or learns a plan, runs it in the user's own
backward, and hands over what comes."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.choice import choose, first_names
from unsum.compiled.tapping import Tapped, Tapping
from unsum.errors import OptionError, UnsupportedError
from unsum.gathered import Gradients
from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Edge, Node, ordered, place
from unsum.graph.saved import Saved
from unsum.graph.sides import Sides
from unsum.graph.state import buffers_aside
from unsum.keeping import current_scale
from unsum.plan.arrived import Arrived
from unsum.plan.forward import Forward
from unsum.plan.grads import Delivery
from unsum.plan.grouped import left_to_torch
from unsum.plan.intake import Intake, are_listened, listens_to_all
from unsum.plan.learn import inside, learn, number_of_samples
from unsum.plan.memory import Structure, forget_structure, recall, remember, watch_again
from unsum.plan.plan import Plan
from unsum.plan.refusals import unknown_samples
from unsum.plan.run import Run
from unsum.plan.setting import Setting
from unsum.plan.signature import Sizes, Survey, survey
from unsum.plan.structure import agrees, derived, sizes_of, starts_of
from unsum.reducers import SQ_NORMS, Reducer
from unsum.seams.modes import without_functions
from unsum.seams.nodes import current_node
from unsum.sites import Names, unwrapped

log = logging.getLogger("unsum")

_shown_by: weakref.WeakKeyDictionary[Any, weakref.ref[Gradients]] = weakref.WeakKeyDictionary()  # the last results


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    reducers: tuple[Reducer, ...]
    keep: bool  # hold the factors, reducers or not
    rules: bool  # rules may speak, or all is replayed
    strict: bool  # a rule that does not hold is an error
    samples: sample_maps.Samples
    exact: bool  # samples may interact
    verify: bool
    mean: bool  # the loss was a mean over samples
    params: str | Sequence[str]
    grad: bool
    scaler: Any


class GradientsBlock:
    """The block that `unsum.gradients` makes."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._names = Names(model)
        _refuse(self._names)
        self._model = self._names.model
        self._options = options
        self._open = False

    def __enter__(self) -> Gradients:
        if self._open:
            raise OptionError("this block is open already; make another one with unsum.gradients(...)")
        self._open = True
        options = self._options
        chosen = choose(self._names, options.params)
        self._found = Gradients(self._names, chosen, options.samples, options.reducers, keep=options.keep)
        self.acted = self._found.acted
        for reducer in options.reducers:
            if hasattr(reducer, "kept"):
                if (before := _shown_by.get(reducer, lambda: None)()) is not None:
                    before.keep_reducer(reducer)  # what an earlier block has shown, it goes on to show
                _shown_by[reducer] = weakref.ref(self._found)
            if hasattr(reducer, "reset"):
                reducer.reset()
        self._saved = Saved()
        self._sides = Sides(self._model, self._saved)
        self._forward = Forward(self._names, options.samples, self._sides, verify=options.verify)
        self._sides.rows = self._forward.rows
        self._setting = Setting(
            self._sides, self._forward.rows, self._forward.seeds, self._forward.mismatch,
            self._found.unique(), self._found.by_id, self._forward.module_of,
            exact=options.exact, rules=options.rules, strict=options.strict,
        )  # fmt: skip
        self._named: dict[int, str] = {}  # modules by id, if others than the model are called from outside
        self._tapping: Tapping | None = None  # if a compiled module is called
        self._tapped: Tapped | None = None  # the compiled call that the backward under way goes through
        self._learning = False
        self._backwards: list[Run | None] = []  # under way, the innermost last
        self._adding: list[bool] = []  # whether each of them adds to .grad
        self._intake: Intake | None = None
        self._delivery = Delivery()
        self._arrived = Arrived(self._setting.wanted, self._found.by_id)
        self._put_back: list[tuple[nn.Parameter, Tensor | None]] = []
        self._before: list[tuple[Any, Any]] = []  # reducers, and what they held before this backward
        self._is_checked = self._is_new = False
        self._unproven: Hashable = None  # the key of a plan that was learnt in the backward under way
        self._scale: Tensor | float | None = None
        self._unscale: Tensor | float | None = None
        self._calls: frozenset[int] = frozenset()
        self.passes = False  # whether calls inside the one under way need not be told
        self._blocks = seams.open_block(self)
        self._unwatch = seams.on_calls(self)
        self._forward.open()
        return self._found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forward.close()
        self.passes = False
        seams.close_block(self, self._blocks)
        self._unwatch()
        del self._unwatch  # which knows this object
        self._open = False

    def _taps(self) -> Tapping | None:
        options = self._options
        if self._tapping is not None:
            return self._tapping
        if not options.reducers or options.keep or not options.rules or options.exact or options.verify:
            return None
        wanted = {name: self._found.parameters[name] for name in self._found.by_id.values()}
        self._tapping = Tapping(
            self._model, self._module_names(), wanted, options.reducers, self._forward, grad=options.grad
        )
        return self._tapping

    def mark(self, tensor: Tensor) -> None:
        """Dimension 0 of this tensor is the samples."""
        self._forward.mark(tensor)

    # ---- forward --------------------------------------------------------------------------------------------------

    def _hears(self) -> bool:
        """Whether what arrives at a parameter now is part of the backward that is split."""
        if self._learning or self not in seams.here():
            return False
        return bool(self._adding) and (self._adding[-1] or len(self._adding) == 1)

    def _is_deaf(self) -> bool:
        # In a backward, a checkpoint runs its forward again: that is not a new call.
        return bool(self._learning or self._forward.is_verifying or self._adding or self not in seams.here())

    def _name_of(self, module: nn.Module) -> str | None:
        return "" if module is self._model else self._module_names().get(id(module))

    def _module_names(self) -> dict[int, str]:
        self._named = self._named or first_names(self._names.modules)
        return self._named

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        if self.passes:  # inside a call that is known
            return False
        name = self._name_of(module)
        if name is None and seams.is_compiled(module):  # what it calls was bound when it was compiled, and is not seen
            name = self._name_of(unwrapped(module))
        if name is None or self._is_deaf():
            return False
        self._forward.before(name, module, args, kwargs)
        self.passes = self._forward.passes
        return True

    def after_call(self, output: Any) -> None:
        self._forward.after(output)
        self.passes = False
        self._found.forwards = len(self._forward.made)
        if self._tapping is not None and output is not None and not self._forward.is_inside:
            self._tapping.saw(output)

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_deaf() or (tapping := self._taps()) is None:
            return seams.NOTHING
        with seams.alone(self) as is_alone:
            output = tapping.call(module, args, kwargs) if is_alone else seams.NOTHING
        self._found.forwards = len(self._forward.made)
        return output

    # ---- backward -------------------------------------------------------------------------------------------------

    def before_backward(self, call: seams.Backward) -> Sequence[Tensor] | None:
        self._adding.append(call.accumulates)
        self._backwards.append(None)
        if len(self._adding) > 1:
            self._inside(call)
            return None
        self._intake = None
        self._arrived.clear()
        seen = survey(_roots(call), self._found.by_id)
        known, calls = self._forward.find(seen.nodes)
        if self._tapping is not None and (tapped := self._tapping.begin(call, seen.nodes)) is not None:
            return self._begin_tapped(call, seen.nodes, tapped, calls)
        if not self._reaches(call, seen) and (self._setting.wanted or not known):
            return None  # of another model, or for something else than parameters
        if any(isinstance(grad, Tensor) and seams.is_batched(grad) for grad in call.grads):
            raise UnsupportedError("is_grads_batched=True: one backward after the other brings gradients by sample")
        if call.create_graph:
            raise UnsupportedError("create_graph=True: the gradients of a second backward are not those of .grad")
        plan, nodes = self._recall(call, seen, known, calls)
        if self._forward.verification is not None:
            self._forward.verification.refuse_mixing([(nodes[place], output) for place, output in plan.cut])
        self._calls, again = self._found.group(self._calls, plan.n)
        self._is_new = not again
        try:
            skipped = self._begin(call, nodes, plan, again)
        except BaseException:
            self._take_back()
            raise
        if not skipped:
            return None
        return [leaf for leaf, name in zip(seen.leaves, seen.names, strict=True) if name not in skipped]

    def _reaches(self, call: seams.Backward, seen: Survey) -> bool:
        """Whether this backward brings a gradient to any chosen parameter."""
        wanted = self._setting.wanted
        if call.inputs:
            return any(id(given) in wanted for given in call.inputs)
        return any(id(leaf) in wanted for leaf in seen.leaves)

    def _begin_tapped(
        self, call: seams.Backward, nodes: Sequence[Node], tapped: Tapped, calls: frozenset[int]
    ) -> Sequence[Tensor] | None:
        """A backward through a compiled call: what is wanted leaves through its taps."""
        assert self._tapping is not None
        self._tapped = tapped
        self._is_checked = False
        if calls != {tapped.call}:
            raise UnsupportedError(
                "the samples of this loss are not those of the compiled model's outputs alone: mark_samples, or "
                "another model's outputs, come between.\n  use the model itself (compiled._orig_mod) for it"
            )
        self._calls, again = self._found.group(calls, tapped.n)
        self._is_new = not again
        try:
            self._begin_reducers(tapped.n, again)
            self._tapping.refuse_other_order(tapped)
        except BaseException:
            self._take_back()
            raise
        return self._tapping.only(nodes, tapped) if call.accumulates and not call.inputs else None

    def _take_back(self) -> None:
        """A backward has failed: as if it had not begun. What was learnt in it is not proven, and what was known of its
        forward may be no longer so: a checkpoint was put around a part, say."""
        if self._unproven is not None:
            forget_structure(self._model, self._unproven)
            self._unproven = None
        watch_again(self._model)
        for reducer, held in self._before:
            reducer.restore(held)
        self._before = []
        self._delivery.forget()
        if self._is_new:
            self._found.drop(self._calls)

    def _begin(self, call: seams.Backward, nodes: Sequence[Node], plan: Plan, again: bool) -> frozenset[str]:
        """Wait at the plan's nodes; say which parameters torch need not bring gradients to."""
        options = self._options
        self._begin_reducers(plan.n, again)
        for reducer in options.reducers:
            if hasattr(reducer, "prepare"):
                reducer.prepare(
                    lambda: sizes_of(plan, nodes), lambda: [p.device for p in self._setting.wanted.values()]
                )
        skipped = self._skipped(call, plan, nodes)
        self._intake = Intake(
            plan, self._setting.wanted, self._found.by_id, options.reducers,
            keep=options.keep, scale=self._scale, check=self._is_checked,
            skipped=skipped if options.grad else frozenset(),
            only=None if not call.inputs else {id(given) for given in call.inputs if isinstance(given, Tensor)},
            deliver=self._delivery.put if options.grad else _drop,
        )  # fmt: skip
        self._start(plan, nodes)
        if len(call.roots) == 1:
            self.acted.by_plan(nodes[0], plan, len(nodes))
        if self._is_checked:
            self._arrived.attach(self._hears)
        if not options.grad:  # set aside, or torch would add to it in place
            self._put_back = [(p, p.grad) for p in self._names.parameters.values()]
            for parameter, _ in self._put_back:
                parameter.grad = None
        return skipped

    def _begin_reducers(self, n: int, again: bool) -> None:
        options = self._options
        loss_scale = None if options.scaler is None else current_scale(options.scaler)
        scale = None if loss_scale is None else 1 / loss_scale
        self._unscale = scale
        self._scale = scale if not options.mean else n * (1 if scale is None else scale)
        self._before = [(r, r.save()) for r in options.reducers if hasattr(r, "save")]
        for reducer in options.reducers:
            if hasattr(reducer, "select"):
                reducer.select(self._calls, self._forward.positions(self._calls))
            reducer.begin(n, again)

    def _skipped(self, call: seams.Backward, plan: Plan, nodes: Sequence[Node]) -> frozenset[str]:
        """The parameters whose gradient torch need not compute."""
        if call.inputs or not call.accumulates or self._is_checked or len(seams.here()) != 1:
            return frozenset()
        if not self._options.grad:
            skipped = plan.spare
        else:
            reducers = self._options.reducers
            skipped = plan.cheap if any(getattr(r, "sums", False) for r in reducers) else frozenset()
            if [getattr(r, "wants", None) for r in reducers] == [SQ_NORMS] and not self._options.keep:
                left = left_to_torch(plan, nodes, self._setting.wanted, self._found.by_id)
                skipped = skipped - left if left else skipped
        if not skipped or listens_to_all():
            return frozenset()
        wanted = self._setting.wanted
        if not are_listened(wanted.values()):
            return skipped
        return skipped.difference(self._found.by_id[key] for key, p in wanted.items() if are_listened([p]))

    def _recall(
        self, call: seams.Backward, seen: Survey, known: Mapping[Edge, Layout], calls: frozenset[int]
    ) -> tuple[Plan, Sequence[Node]]:
        """The plan of this graph, remembered or learnt, and the nodes in its order."""
        self._calls = calls or self._forward.pending()
        made = frozenset(call for call in calls if call in self._forward.made) or self._forward.pending()
        ids = self._options.samples.ids
        n = number_of_samples(known) if ids is None and known else self._forward.number_of_samples(self._calls)
        if n is None:
            raise unknown_samples(self._forward.mismatch())
        self._forward.had_backward(made)
        self._forward.rows.asked = made
        self._is_checked = not self._setting.rules
        key = self._key(call, seen, known, n)
        structure = recall(self._model, key) if self._setting.rules and n else None
        if structure is not None and not (structure.is_blind and self._forward.was_watched(made)):
            nodes = structure.plan.in_order(seen.nodes)
            plan = self._derive(structure, seen, nodes, known, n)
            if plan is not None:
                self._forward.learnt(None if self._saved.is_needed else key, made)
                self._learn_tap(plan, nodes)
                return plan, nodes
        self._is_checked = True
        self._sides.is_blind = not self._forward.was_watched(made)
        nodes = ordered(_roots(call))
        if structure is not None or self._sides.is_blind:  # whatever comes of it
            self._forward.always_watch(made)
        if self._sides.is_blind:
            watch_again(self._model)
            known = known if self._forward.is_marked else self._forward.by_evidence(nodes) or known
        with self._learn():
            plan, judged = learn(
                call.roots, call.grads, nodes, known, self._setting, n, made, marked=self._forward.is_marked
            )
        if judged is not None and self._setting.rules:
            plan = replace(
                plan, order=tuple(seen.at[node] for node in nodes), lasting=True, is_dynamic=judged.is_dynamic
            )
            if structure is None or structure.is_blind:
                self._unproven = key
                structure = Structure(plan, judged, self._sides.is_blind)
                remember(self._model, key, structure)
            if not judged.is_dynamic:
                structure.keep(Sizes(seen.signature, (n, *known.values())), plan)
        self._forward.learnt(key if plan.lasting and not self._saved.is_needed else None, made)
        self._learn_tap(plan, nodes)
        log.info(
            "unsum: learnt a graph of %d nodes: %d meetings, %d by rule; %s",
            len(nodes),
            len(plan.owned),
            sum(map(len, plan.routes.values())),
            "remembered" if plan.lasting else "to be learnt each time",
        )
        return plan, nodes

    def _key(self, call: seams.Backward, seen: Survey, known: Mapping[Edge, Layout], n: int) -> Hashable:
        """What a structure is remembered by. One sample is a case of its own: then all data is its."""
        cut = tuple([(seen.at[node], output, isinstance(owners, Regular)) for (node, output), owners in known.items()])
        roots = tuple([(seen.at.get(node), output) for node, output in map(place, call.roots)])
        marked = self._forward.is_marked
        return seen.signature[0], seen.names, cut, roots, self._setting.exact, n == 1, marked

    def _derive(
        self, structure: Structure, seen: Survey, nodes: Sequence[Node], known: Mapping[Edge, Layout], n: int
    ) -> Plan | None:
        """The plan of a graph whose structure is known; None if it does not follow from that."""
        sizes = Sizes(seen.signature, (n, *known.values()))
        plan = structure.sized.get(sizes)
        if plan is not None and not structure.judged.is_dynamic:
            return plan if agrees(structure.judged, plan.owned, nodes, self._forward.rows) else None
        starts = starts_of(structure.plan, nodes, known, n)
        if starts is None:
            return None
        with self._learn() if structure.judged.silent or self._saved.is_needed else contextlib.nullcontext():
            plan = derived(
                structure.plan, structure.judged, nodes, starts, n, self._found.by_id, self._forward.rows, plan
            )
        if plan is not None:
            structure.keep(sizes, plan)
        return plan

    def _learn_tap(self, plan: Plan, nodes: Sequence[Node]) -> None:
        if self._tapping is not None and len(self._calls) == 1:
            self._tapping.learn(plan, nodes)

    @contextlib.contextmanager
    def _learn(self) -> Iterator[None]:
        """Nodes are called by hand, and nothing of the model's is changed."""
        self._learning = True
        try:
            with (
                without_functions(),
                self._saved.once(keep=list(seams.here()) == [self]),
                buffers_aside(self._model),
            ):
                yield
        finally:
            self._learning = False

    def _inside(self, call: seams.Backward) -> None:
        """A node runs a backward of its own inside its backward: a reentrant checkpoint, a reversible network."""
        outer = next((run for run in reversed(self._backwards) if run is not None), None)
        if outer is None or not call.accumulates or self._intake is None:
            return
        waiting = outer.hidden.get(current_node())
        if waiting:
            nodes = ordered(_roots(call))
            with self._learn():
                plan = inside(call.roots, nodes, waiting.pop(0), self._intake.n, self._setting)
            self._start(plan, nodes)

    def _start(self, plan: Plan, nodes: Sequence[Node]) -> None:
        assert self._intake is not None
        self._arrived.rounding = max(self._arrived.rounding, plan.rounding)
        run = Run(plan, nodes, self._setting, self._intake)
        self._backwards[-1] = run
        run.attach()

    def after_backward(self, *, failed: bool) -> None:
        if self._adding:
            self._adding.pop()
            run = self._backwards.pop()
            if run is not None:
                run.detach(failed=failed)
        if self._adding:
            return
        self._arrived.detach()
        for parameter, stored in self._put_back:
            parameter.grad = stored
        self._put_back = []
        intake, self._intake = self._intake, None
        self._saved.forget()
        if self._tapped is not None:
            self._end_tapped(failed=failed)
            return
        if intake is None:
            return  # of another model: nothing was waited for
        if failed:
            self._take_back()
            return
        try:
            if self._is_checked:
                self._arrived.check(intake.found)
            intake.finish()
            self._delivery.finish()
            self._saved.forget()
        except BaseException:
            self._take_back()
            raise
        self._before = []
        self._unproven = None
        self._found.take_in(intake, self._calls, self._scale, self._unscale)

    def _end_tapped(self, *, failed: bool) -> None:
        assert self._tapping is not None and self._tapped is not None
        tapped, self._tapped = self._tapped, None
        try:
            if failed:
                self._tapping.let_go(tapped)
                self._take_back()
            else:
                self._found.tapped(self._tapping.end(tapped, self._scale))
        except BaseException:
            self._take_back()
            raise
        self._before = []


def _drop(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Nobody wants these in `.grad`."""


def _roots(call: seams.Backward) -> list[Node]:
    """The nodes from which a backward starts."""
    return [node for node, _ in map(place, call.roots) if node is not None]


def _refuse(names: Names) -> None:
    """Models of which no sample's gradient can be told."""
    for name, parameter in names.parameters.items():
        if parameter.is_meta and parameter.requires_grad:
            raise UnsupportedError(
                f"{name} is on the meta device and has no numbers: load it, or freeze it (requires_grad_(False))"
            )
    if "DTensor" not in {kind.__name__ for kind in set(map(type, names.parameters.values()))}:
        return
    for name, parameter in names.parameters.items():
        if type(parameter).__name__ == "DTensor":
            raise UnsupportedError(
                f"{name} is a DTensor, spread over several processes (tensor parallel or fully sharded): gradients by "
                "sample need whole parameters"
            )
