"""`Watch`: opens and closes the steps of a training run, and keeps their records."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from unsum import seams
from unsum.errors import OptionError
from unsum.notebook import LARGEST, ShownPage, element, framed
from unsum.opened import Opened
from unsum.step.backward import Options
from unsum.training import to_record
from unsum.training.division import Division
from unsum.training.ids import NO_BATCH, Ids, Named
from unsum.training.observed import Packed
from unsum.training.observer import Looks, Observer, averaging_group
from unsum.training.optimizer_steps import OptimizerSteps, twice
from unsum.training.outliers import Outliers
from unsum.training.record import Record
from unsum.training.sinks import Sinks
from unsum.training.unreached import Unreached
from unsum.training.updates import Updates
from unsum.training.weakly import weakly
from unsum.user_warning import warn

_WAITING = 8  # steps whose numbers may be on their way from a GPU


@dataclass(eq=False)
class _Step:
    """A watched step whose record is not complete: its numbers are on their way, or its update is still to come."""

    number: int
    packed: Packed
    named: Named
    seconds: float | None
    awaits: set[int]  # the optimizers whose step is still to come
    updates: dict[str, Tensor] = field(default_factory=dict)  # how far they have moved parameters
    record: Record | None = None


class Watch:
    """What `unsum.watch` gives: `with watch:` around the forward and the backward of one step, however many
    micro-batches it has; then `watch.last` is the step's record, and `watch.history` has the last ones.

    Examples:
        >>> import torch, unsum
        >>> model = nn.Linear(3, 1)
        >>> watch = unsum.watch(model)
        >>> for _ in range(2):
        ...     with watch:
        ...         model(torch.ones(4, 3)).sum().backward()
        >>> watch.last.step, watch.last.norms
        (1, tensor([2., 2., 2., 2.], dtype=torch.float64))
        >>> watch.last.outliers, watch.last.nonfinite
        ([], None)
    """

    # More than twelve attributes: what is watched, where records go, what is under way.
    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        every: int,
        sinks: Sinks,
        optimizers: Sequence[Any],
        layers: bool,
        ids: Ids,
        outliers: Outliers,
        history: int,
    ) -> None:
        self._model, self._options, self._every, self._sinks = model, options, every, sinks
        self.division: Division = options.scaler  # what is taken out of the samples' gradients
        self._layers, self._ids, self._outliers = layers, ids, outliers
        self._looks = Looks(model)  # at what flows
        self._history: deque[Record] = deque(maxlen=history)
        self._steps: deque[_Step] = deque()  # whose records are not complete
        self._opened: tuple[Opened[Any], Observer] | None = None
        self._number, self._ended, self._is_under_way = -1, 0.0, False  # under way: a step, watched or not
        self._told: set[str] = set()
        self._unreached = Unreached()  # parameters without a gradient
        self._last_finite: int | None = None  # the last watched step before which all parameters were finite
        self.is_trainers = False  # a trainer's callback opens and closes the steps
        self._optimizer_steps = OptimizerSteps(model, weakly(self._has_stepped_again))
        atexit.register(weakly(self.flush))  # records whose numbers are on their way when the program ends
        self.group: Any = None  # the processes that average this model's gradients, where a trainer says so
        self._updates = Updates(model)
        self._moved: dict[str, Tensor] = {}  # by optimizers that step while the block is open
        self._stepped: set[int] = set()  # these
        for each in optimizers:
            self.follow(each)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def open(self, step: int | None = None) -> Watch:
        """A step begins. `step` is its number; without it, steps are counted from 0."""
        if self._opened is not None:
            raise OptionError("watch: a step is open already; close() it first")
        seams.refuse_capturing("unsum.watch")
        self._number = self._number + 1 if step is None else step
        self._is_under_way = True
        for earlier in self._steps:
            earlier.awaits.clear()  # a step that was skipped, by a GradScaler say, does not come any more
        if self._number % self._every:
            return self
        self._complete(wait=len(self._steps) >= _WAITING)
        has_norms = bool(self._history or self._steps)  # a run that goes on is not stopped by a refusal
        looks = self._looks.next() if self._layers else None
        fails = weakly(self._break_off) if self.is_trainers else None
        observer = Observer(self._model, self._options, looks, refuses=not has_norms, fails=fails)
        opened = Opened(observer, "unsum.watch", warns_unheld=not self.is_trainers)
        opened.open()
        self._opened = opened, observer
        self._optimizer_steps.open()
        return self

    def close(self) -> None:
        """The step is over. Safe to call twice."""
        error = None if self._opened is None else self._opened[0].raised()
        self.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> Watch:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        named = self._ids.take() if self._is_under_way else Named()  # a close too many leaves them to the next step
        self._is_under_way = False
        if self._opened is None:
            return
        (opened, observer), self._opened = self._opened, None
        self._optimizer_steps.close()
        moved, self._moved = self._moved, {}
        awaits, self._stepped = self._updates.numbers() - self._stepped, set()
        if moved:
            self._updates.forget()
        opened.__exit__(kind, error, trace)
        self._looks.has_checkpoints |= observer.has_checkpoints()
        if error is not None or not observer.has_seen():
            if error is None and observer.lacks_backward():
                self._tell("backward", "the model was called in a step without a backward, which has no record: call "
                           "loss.backward() inside the block, too")  # fmt: skip
            return
        if self._ids.lacks_batches():
            self._tell("ids", NO_BATCH)
        now = time.perf_counter()
        seconds, self._ended = now - self._ended if self._ended else None, now
        packed = observer.pack(self.group or averaging_group(self._model))
        self._steps.append(_Step(self._number, packed, named, seconds, awaits, moved))
        self._complete(wait=False)

    def _break_off(self) -> None:
        """A backward failed in a trainer, which ends the run without telling its callbacks."""
        error = RuntimeError("the backward failed")
        self.__exit__(type(error), error, None)

    def follow(self, optimizer: Any) -> None:
        """Record the updates of this optimizer too."""
        self._updates.follow(optimizer, self._before_update, self._after_update)

    # ---- records --------------------------------------------------------------------------------------------------

    @property
    def last(self) -> Record | None:
        """The record of the last watched step; None before the first."""
        return self.history[-1] if self._steps or self._history else None

    @property
    def history(self) -> list[Record]:
        """The records of the last watched steps."""
        return [*self._history, *map(self._read, self._steps)]

    def flush(self) -> None:
        """Complete all records, and let the sinks write what they hold back."""
        while self._steps:
            self._finish(self._steps.popleft())
        self._sinks.flush()

    def report(self, path: str | os.PathLike[str]) -> ShownPage:
        """Write a page on the run: norms over time, outliers with their texts, the noise scale, the layers. Returns its
        path, which shows the page in a notebook."""
        from unsum.training.page import write

        return write(self.history, path)

    def _repr_html_(self) -> str:
        """The page of `report`."""
        from unsum.training.page import page

        shown = page(self.history, "Training run") if self.last else ""
        told = f'<div class="note">{escape(repr(self))}</div>'
        return element(told + (framed(shown, "Training run") if 0 < len(shown) <= LARGEST else ""))

    def loader(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Go over a loader's batches, and take the samples' ids and texts from them."""
        for batch in loader:
            self._ids.note(batch)
            steps = self._number
            yield batch
            if steps == self._number and self._opened is None and self._ids.is_known():
                self._ids.stop()
                self._tell("ids", "the loop took another batch before a step of the first, so that nobody knows which "
                           "ids are whose: samples are counted by rows from now on")  # fmt: skip

    def note(self, batch: Any) -> None:
        """Take ids and texts from a batch of the step under way, or of the next one."""
        self._ids.note(batch)

    def _complete(self, *, wait: bool) -> None:
        """Finish the steps whose numbers are there; with `wait`, all of them."""
        while self._steps:
            step = self._steps[0]
            if step.awaits and len(self._steps) == 1 and not wait:
                return
            if not wait and not step.packed.copy.is_done():
                return
            self._finish(self._steps.popleft())

    def _finish(self, step: _Step) -> None:
        record = self._read(step)
        self._history.append(record)
        self._sinks.send(record)

    def _read(self, step: _Step) -> Record:
        """The record of a step, waiting for its numbers."""
        if step.record is None:
            seen = step.packed.unpack()
            step.record = to_record.record(seen, step.number, step.named, self._outliers, self._options.samples)
            step.record.seconds = step.seconds
            step.record.parameters, step.record.trainable = to_record.sizes(self._model)
            if step.record.refused is None and (told := self._unreached(seen)) is not None:
                self._tell("unreached", told)
            if step.record.nonfinite is None or not step.record.nonfinite.is_parameter:
                self._last_finite = step.number
            else:
                step.record.nonfinite = replace(step.record.nonfinite, last_finite=self._last_finite, every=self._every)
            if step.record.refused is not None:
                self._tell(step.record.refused, step.record.refused)
            elif (misfit := step.named.misfit(step.record.ids)) is not None:
                self._tell("ids", misfit)
            if step.record.nonfinite is not None:
                self._tell("nonfinite", f"a value is not finite in step {step.number}: {step.record.nonfinite}")
        if step.updates:
            to_record.put_updates(step.record, {name: float(value) for name, value in step.updates.items()})
            step.updates = {}
        return step.record

    def _tell(self, key: str, what: str) -> None:
        """Warn once."""
        if key not in self._told:
            self._told.add(key)
            warn(f"unsum.watch: {what}")

    def _has_stepped_again(self) -> None:
        if "optimizer" not in self._told:
            self._told.add("optimizer")
            warn(twice("unsum.watch", "watch", "Trainer(..., callbacks=[unsum.integrations.transformers.Watch()])"))

    # ---- the optimizer's step -------------------------------------------------------------------------------------

    def _before_update(self, optimizer: int, has_closure: bool) -> None:
        """An optimizer's step begins; with a closure, the forward and the backward may still be to come."""
        is_awaited = bool(self._steps) and optimizer in self._steps[-1].awaits
        comes = has_closure and (self._number + 1) % self._every == 0
        if self._opened is not None or is_awaited or comes:
            self._updates.copy(optimizer)

    def _after_update(self, optimizer: int) -> None:
        is_open, group = self._opened is not None, self.group or averaging_group(self._model)
        moved = self._updates.measure(optimizer, group, again=is_open)
        if is_open:
            self._moved |= moved
            self._stepped.add(optimizer)
        elif moved and self._steps and optimizer in self._steps[-1].awaits:
            self._steps[-1].updates |= moved
            self._steps[-1].awaits.discard(optimizer)
            self._complete(wait=False)

    def __repr__(self) -> str:
        return f"watch: {len(self._history) + len(self._steps)} records" + (f"; {self.last}" if self.last else "")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in ("setup", "state_key"):  # what trainers ask of their callbacks
            raise AttributeError(
                f"a watch has no {name!r}: it is no callback of a trainer.\n"
                "  write: Trainer(..., callbacks=[unsum.integrations.transformers.Watch()])\n"
                "     or: lightning.Trainer(callbacks=[unsum.integrations.lightning.Watch()])"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> str:
        raise TypeError("a watch belongs to this process, and cannot be copied or pickled; save its records")

    def __del__(self) -> None:
        if hasattr(self, "_optimizer_steps"):
            self._optimizer_steps.close()
        if getattr(self, "_steps", None) and sys.meta_path is not None:  # numbers that nobody has read yet
            self.flush()
