"""The block that `unsum.gradients` makes: it follows the forward, recalls or learns a plan, runs it in the user's own
backward, and hands over what comes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from unsum import seams
from unsum.choice import choose, first_names
from unsum.compiled.kept_factors import Keeping
from unsum.compiled.tapped import Tapped
from unsum.compiled.tapping import Tapping
from unsum.errors import OptionError, UnsumError, UnsupportedError
from unsum.gathered import Gradients
from unsum.graph.nodes import Node
from unsum.graph.saved import Saved
from unsum.learn.routes import stranded
from unsum.learn.setting import Setting
from unsum.learn.sides import Sides
from unsum.plan.plan import Meeting, Plan
from unsum.plan.signature import survey
from unsum.seams.nodes import current_node
from unsum.sites import Names, unwrapped
from unsum.step.aside import GradAside
from unsum.step.backward import Options, Reducing, Step
from unsum.step.forward import Forward
from unsum.step.meetings import Run
from unsum.step.planner import Planned, Planner, roots_of

log = logging.getLogger("unsum")

_is_meta = attrgetter("is_meta")
_shown_by: weakref.WeakKeyDictionary[Any, weakref.ref[Gradients]] = weakref.WeakKeyDictionary()  # the last results


class GradientsBlock:
    """The block that `unsum.gradients` makes."""

    # More than twelve attributes: one for each part that a call or a backward is handed to, from open to close.
    def __init__(self, model: nn.Module, options: Options) -> None:
        self._names = Names(model)
        _refuse(self._names)
        self._model, self._options = self._names.model, options
        self._open = False

    def __enter__(self) -> Gradients:
        if self._open:
            raise OptionError("this block is open already; make another one with unsum.gradients(...)")
        seams.refuse_capturing("unsum.gradients")
        options = self._options
        if not self._names.are_still_right():  # since the block was made
            self._names = Names(self._model)
            _refuse(self._names)
        self._open = True
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
            if hasattr(reducer, "order_by"):
                reducer.order_by(chosen.named)
        self._saved = Saved()
        self._sides = Sides(self._model, self._saved)
        # What is remembered of calls is kept apart by purpose: other reducers or parameters lead to other graphs.
        purpose = (*map(type, options.reducers), frozenset(chosen.by_id))
        self._forward = Forward(self._names, options.samples, self._sides, purpose, verify=options.verify)
        inputs = self._forward.inputs
        self._sides.rows, self._sides.where = inputs.rows, self._forward.spans.innermost
        self._setting = Setting(
            self._model, self._sides, inputs.rows, inputs.seeds, self._forward.mismatch,
            chosen.unique, chosen.by_id, chosen.named, self._forward.spans.module_of,
            exact=options.exact, rules=options.rules, strict=options.strict,
            shared=inputs.shared, may_be_one=self._forward.may_be_one,
            is_said=getattr(options.samples, "is_said", False),
        )  # fmt: skip
        self._planner = Planner(
            self._model, self._forward, self._sides, self._saved, self._setting, options.samples.ids
        )
        self._named: dict[int, str] = {}  # modules by id, if others than the model are called from outside
        self._tapping: Tapping | None = None  # if a compiled module is called
        self._keeping: Keeping | None = None  # of these calls, if factors are kept
        self._under_way: list[tuple[bool, Run | None]] = []  # backwards: whether they add to .grad, and their hooks
        self._step: Step | Tapped | None = None  # the outermost of them
        self._aside: GradAside | None = None  # while one runs that brings no samples, and is not to change `.grad`
        self._over: list[AbstractContextManager[Any]] = []  # of the calls under way: hooks over a checkpoint's
        self.passes = False  # whether calls inside the one under way need not be told
        self._has_graphs = False  # whether a call was made whose backward may come
        self._blocks = seams.open_block(self)
        self._unwatch = seams.on_calls(self)
        self._forward.watching.open()
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
        if not options.rules or options.exact or options.verify or (options.keep and self._is_about_all()):
            return None
        wanted = {name: self._found.parameters[name] for name in self._found.by_id.values()}
        self._keeping = Keeping() if options.keep else None
        reducers = (*options.reducers, *([] if self._keeping is None else [self._keeping]))
        own = map(id, self._names.parameters.values())
        names = self._module_names()
        self._tapping = Tapping(self._model, names, wanted, own, reducers, self._forward, grad=options.grad)
        return self._tapping

    def _is_about_all(self) -> bool:
        """Whether all trainable parameters are chosen: their factors are held where they are, not copied."""
        return all(id(p) in self._found.by_id for p in self._names.parameters.values() if p.requires_grad)

    @property
    def model(self) -> nn.Module:
        """The model itself, inside what others have put around it."""
        return self._model

    @property
    def sets_grad_aside(self) -> bool:
        """Whether `.grad` is out of the way while a backward runs."""
        return not self._options.grad

    @property
    def lacks_backward(self) -> bool:
        """Whether the model was called, and no backward came."""
        return self._has_graphs and not self._found.backwards

    @property
    def last_call(self) -> int:
        """The number of the outermost call under way, or of the last one."""
        return self._forward.call

    @property
    def has_checkpoints(self) -> bool:
        """Whether a part of the model was under a checkpoint."""
        return self._saved.is_needed

    def mark(self, tensor: Tensor) -> None:
        """Dimension 0 of this tensor is the samples."""
        self._forward.mark(tensor)

    # ---- forward --------------------------------------------------------------------------------------------------

    def _hears(self) -> bool:
        """Whether what arrives at a parameter now is part of the backward that is split."""
        if self._planner.is_learning or self not in seams.here():
            return False
        return bool(self._under_way) and (self._under_way[-1][0] or len(self._under_way) == 1)

    def _is_deaf(self) -> bool:
        # In a backward, a checkpoint runs its forward again: that is not a new call.
        is_ours = self._planner.is_learning or self._forward.is_verifying or bool(self._under_way)
        return is_ours or self not in seams.here()

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
        self._has_graphs |= torch.is_grad_enabled()
        self.passes = self._forward.passes
        # What custom Functions save inside a checkpoint; of other operations `Sides` sees to it.
        over = self._saved.over_checkpoint()
        over.__enter__()
        self._over.append(over)
        return True

    def after_call(self, output: Any) -> None:
        if self._over:
            self._over.pop().__exit__(None, None, None)
        self._forward.after(output)
        self.passes = False
        self._found.forwards = len(self._forward.calls.made)
        if self._tapping is not None and output is None:
            self._tapping.raised()
        elif self._tapping is not None and not self._forward.is_inside:
            self._tapping.rehearsals.saw(output)

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_deaf() or (tapping := self._taps()) is None:
            return seams.NOTHING
        with seams.alone(self) as is_alone:
            output = tapping.call(module, args, kwargs) if is_alone else seams.NOTHING
        self._has_graphs |= output is not seams.NOTHING
        self._found.forwards = len(self._forward.calls.made)
        return output

    # ---- backward -------------------------------------------------------------------------------------------------

    def before_backward(self, call: seams.Backward) -> Sequence[Tensor | GradientEdge] | None:
        self._under_way.append((call.accumulates, None))
        if len(self._under_way) > 1:
            self._inside(call)
            return None
        self._step = None
        seen = survey(roots_of(call), self._found.by_id)
        self._forward.decide(call.roots, seen.nodes, self._found.by_id)
        known, calls = self._forward.find(seen.nodes)
        is_reached = self._reaches(call, seen.leaves) or (
            bool(known) and not call.inputs and _has_checkpoint(seen.nodes)
        )
        if not is_reached and (self._setting.wanted or not known):
            if not self._options.grad and self._adds_to_others(call, seen.leaves):
                self._aside = GradAside(self._names)
            return None  # of another model, or for something else than the chosen parameters
        if any(isinstance(grad, Tensor) and seams.is_batched(grad) for grad in call.grads):
            raise UnsupportedError(
                "per-sample gradients cannot be computed from torch.autograd.grad(..., is_grads_batched=True).",
                write="for row in rows: torch.autograd.grad(out, parameters, row, retain_graph=True)  # one by one",
            )
        if call.create_graph:
            raise UnsupportedError(
                "per-sample gradients cannot be computed from a backward with create_graph=True: a second backward "
                "would bring other gradients than those of .grad.",
                write="loss.backward()  # without create_graph=True; open the block after a gradient penalty is made",
            )
        if self._tapping is not None and (tapped := self._tapping.backwards.begin(call, seen.nodes)) is not None:
            return self._begin_tapped(call, seen.nodes, tapped, calls)
        try:
            planned = self._planner.plan(call, seen, known, calls)
        except UnsumError:
            if self._tapping is not None:
                self._tapping.rehearsals.forget()
            raise
        plan, nodes = planned.plan, planned.nodes
        if self._forward.verification is not None:
            self._forward.verification.refuse_mixing([(nodes[place], output) for place, output in plan.cut])
        if self._tapping is not None and len(planned.calls) == 1:
            self._tapping.rehearsals.learn(plan, nodes)
        reducing = Reducing(self._options, self._found, planned.calls, plan.n)
        try:
            reducing.begin(self._forward.calls.positions(planned.calls))
            self._step = Step(planned, call, self._setting, self._options, self._found, reducing)
            self._start(self._step, plan, nodes)
            skipped = self._step.begin(self._hears)
        except BaseException:
            self._take_back(reducing, planned)
            raise
        if len(call.roots) == 1:
            self.acted.by_plan(nodes[0], plan, len(nodes))
        if not skipped:
            return None
        others = frozenset() if self._options.grad else self._step.not_chosen(self._names.parameters.values())
        leaves = [
            leaf
            for leaf, name in zip(seen.leaves, seen.names, strict=True)
            if name not in skipped and id(leaf) not in others
        ]
        if (skipped, others) not in plan.stranded:
            plan.stranded[skipped, others] = stranded(nodes, plan.owned, skipped, others, self._setting.names)
        return [*leaves, *(GradientEdge(nodes[place], 0) for place in plan.stranded[skipped, others])]

    def _reaches(self, call: seams.Backward, leaves: Iterable[Tensor]) -> bool:
        """Whether this backward brings a gradient to any chosen parameter."""
        wanted = self._setting.wanted
        if call.inputs:
            return any(id(given) in wanted for given in call.inputs)
        return any(id(leaf) in wanted for leaf in leaves)

    def _adds_to_others(self, call: seams.Backward, leaves: Iterable[Tensor]) -> bool:
        """Whether this backward adds to `.grad` of parameters of the model that were not chosen."""
        own = set(map(id, self._names.parameters.values()))
        return call.accumulates and any(id(leaf) in own for leaf in call.inputs or leaves)

    def _begin_tapped(
        self, call: seams.Backward, nodes: Sequence[Node], tapped: Tapped, calls: frozenset[int]
    ) -> Sequence[Tensor | GradientEdge] | None:
        """A backward through a compiled call: what is wanted leaves through its taps."""
        assert self._tapping is not None
        if calls != {tapped.call}:
            raise UnsupportedError(
                "this loss has other samples than the compiled model's outputs: mark_samples, or another model's "
                "outputs, come between.",
                write="with unsum.gradients(compiled._orig_mod) as g: ...  # and call compiled._orig_mod in the block",
            )
        is_narrowed = not call.inputs and seams.is_alone_at_parameters(seams.here())  # by what `only` gives
        if not self._options.grad and call.accumulates and not is_narrowed:
            self._aside = GradAside(self._names)
        tapped.reducing = Reducing(self._options, self._found, calls, tapped.n)
        self._step = tapped
        try:
            tapped.reducing.begin(self._forward.calls.positions(tapped.reducing.calls))
            self._tapping.backwards.ready(tapped)
        except BaseException:
            self._take_back(tapped.reducing, None)
            raise
        return self._tapping.backwards.only(nodes, tapped) if call.accumulates and not call.inputs else None

    def _end_tapped(self, tapped: Tapped, met: dict[str, dict[Meeting, None]]) -> None:
        """What was wanted has left the compiled call; `met`: where each parameter met data."""
        if self._keeping is None:
            self._found.tapped(met)
            return
        reducing, brought = tapped.reducing, self._keeping.brought(tapped.n, self._found.by_id, met)
        self._found.take_in(brought, reducing.calls, reducing.scale, reducing.unscale)

    def _take_back(self, reducing: Reducing, planned: Planned | None) -> None:
        """A backward has failed: as if it had not begun."""
        self._planner.forget(planned)
        reducing.take_back()

    def _inside(self, call: seams.Backward) -> None:
        """A node runs a backward of its own inside its backward: a reentrant checkpoint, a reversible network."""
        if self._step is None and call.accumulates and not self._planner.is_learning:
            self._refuse_unseen(call)
        outer = next((run for _, run in reversed(self._under_way) if run is not None), None)
        if outer is None or not call.accumulates or not isinstance(self._step, Step):
            return
        waiting = outer.hidden.get(current_node())
        if waiting:
            self._start(self._step, *self._planner.inside(call, waiting.pop(0), self._step.n))

    def _refuse_unseen(self, call: seams.Backward) -> None:
        """Raise where the graph of a backward showed no chosen parameter, and a node of it runs a backward that reaches
        one."""
        if self._reaches(call, survey(roots_of(call), self._found.by_id).leaves):
            raise UnsupportedError(
                f"{current_node().name()}: runs a backward of its own, and only there parameters get gradients: which "
                "sample they belong to cannot be seen.",
                write="torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)",
            )

    def _start(self, step: Step, plan: Plan, nodes: Sequence[Node]) -> None:
        """Wait at the plan's nodes."""
        run = step.run(plan, nodes)
        self._under_way[-1] = self._under_way[-1][0], run
        run.attach(self._saved if self._saved.is_needed else None)

    def after_backward(self, *, failed: bool) -> None:
        if self._under_way:
            _, run = self._under_way.pop()
            if run is not None:
                run.detach(failed=failed)
        if self._under_way:
            return
        step, self._step = self._step, None
        if self._aside is not None:
            self._aside.put_back()
            self._aside = None
        self._saved.forget()
        if step is None:
            return  # of another model: nothing was waited for
        try:
            if isinstance(step, Step):
                step.end(failed=failed)
            elif self._tapping is not None:
                self._tapping.backwards.let_go(step)
                if not failed:
                    self._end_tapped(step, self._tapping.backwards.end(step, step.reducing.scale))
        except BaseException:
            failed = True
            raise
        finally:
            self._saved.forget()
            if failed:
                self._take_back(step.reducing, step.planned if isinstance(step, Step) else None)


def _has_checkpoint(nodes: Iterable[Node]) -> bool:
    """Whether a reentrant checkpoint is among these nodes: the parameters in it are not in this graph."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def _refuse(names: Names) -> None:
    """Models of which no sample's gradient can be told."""
    parameters = names.parameters.values()
    if any(map(_is_meta, parameters)):
        for name, parameter in names.parameters.items():
            if parameter.is_meta and parameter.requires_grad:
                raise UnsupportedError(
                    f"{name} is on the meta device and has no numbers: load it, or freeze it (requires_grad_(False))"
                )
    if any(kind.__name__ == "DTensor" for kind in set(map(type, parameters))):
        name = next(name for name, parameter in names.parameters.items() if type(parameter).__name__ == "DTensor")
        raise UnsupportedError(
            f"{name} is a DTensor, spread over several processes (tensor parallel): per-sample gradients need "
            "whole parameters.\n  fully_shard (FSDP2) and DDP are supported"
        )
