"""`watch`: a record of every step of a training run, or of every k-th."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.errors import OptionError
from unsum.opened import Opened
from unsum.reducers import Norms
from unsum.sites import Names
from unsum.step.backward import Options
from unsum.training import to_record, updates
from unsum.training.division import Division
from unsum.training.ids import Ids, Named
from unsum.training.observed import Packed
from unsum.training.observer import Looks, Observer, averaging_group
from unsum.training.outliers import Outliers
from unsum.training.record import Record
from unsum.training.sinks import Sink, Sinks
from unsum.training.updates import Updates
from unsum.training.weakly import weakly

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
    """The result of `unsum.watch`: open `with watch:` around the forward and the backward of one step, however many
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
        atexit.register(weakly(self.flush))  # records whose numbers are on their way when the program ends
        self.group: Any = None  # the processes that average this model's gradients, where a trainer says so
        self._updates = Updates(model)
        self._moved: dict[str, Tensor] = {}  # by optimizers that step while the block is open
        self._stepped: set[int] = set()  # these
        for each in optimizers:
            self.follow(each)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def open(self, step: int | None = None) -> Watch:
        """Begin a step. `step` is its number; without it, steps are counted from 0."""
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
        observer = Observer(self._model, self._options, looks, refuses=not has_norms)
        opened = Opened(observer, "unsum.watch")
        opened.open()
        self._opened = opened, observer
        return self

    def close(self) -> None:
        """End the step. Calling it twice is allowed."""
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
        now = time.perf_counter()
        seconds, self._ended = now - self._ended if self._ended else None, now
        packed = observer.pack(self.group or averaging_group(self._model))
        self._steps.append(_Step(self._number, packed, named, seconds, awaits, moved))
        self._complete(wait=False)

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
        """Complete all records, and let the sinks write what they have buffered."""
        while self._steps:
            self._finish(self._steps.popleft())
        self._sinks.flush()

    def report(self, path: str | os.PathLike[str]) -> Any:
        """Write an HTML page about the run: norms over time, outliers with their texts, the noise scale, the layers."""
        from unsum.training.page import write

        return write(self.history, path)

    def loader(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over a loader's batches, and read the samples' ids and texts from them."""
        for batch in loader:
            self._ids.note(batch)
            steps = self._number
            yield batch
            if steps == self._number and self._opened is None and self._ids.is_known():
                self._ids.stop()
                self._tell("ids", "the loop took another batch before a step of the first, so that nobody knows which "
                           "ids are whose: samples are counted by rows from now on")  # fmt: skip

    def note(self, batch: Any) -> None:
        """Read ids and texts from a batch of the current step, or of the next one."""
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
            warnings.warn(f"unsum.watch: {what}", stacklevel=2)

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

    def __reduce__(self) -> str:
        raise TypeError("a watch belongs to this process, and cannot be copied or pickled; save its records")

    def __del__(self) -> None:
        if getattr(self, "_steps", None) and sys.meta_path is not None:  # numbers that nobody has read yet
            self.flush()


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    to: str | os.PathLike[str] | Sink | Sequence[str | os.PathLike[str] | Sink] | None = None,
    optimizer: Any = None,
    layers: bool = True,
    samples: sample_maps.Samples | Tensor | None = None,
    params: str | Sequence[str] = "*",
    loss_reduction: Literal["mean"] | None = None,
    scaler: Any = None,
    interacting: Literal["error", "exact"] = "error",
    ids: str | Callable[[Any], Sequence[int | str]] | None = None,
    text: str | Callable[[Any], Sequence[str]] | None = None,
    threshold: float = 5.0,
    window: int = 512,
    history: int = 10_000,
) -> Watch:
    """Record every step of a training run, or every k-th: losses, per-sample gradient norms, outliers, the gradient
    noise scale, statistics of every layer, and the place of the first value that is not finite. Gradients are the
    same as without `watch`, up to rounding.

    Args:
        model: Any module; also wrapped (DDP) or compiled.
        every: Watch every k-th step; the others cost nothing.
        to: Where records go: a path (`run.jsonl`, `run.parquet`), a function of a record, or a list of them.
            `unsum.sinks` has TensorBoard, Weights & Biases, MLflow, Trackio and the console.
        optimizer: If given, one or a list, each layer's record has the size of the optimizer's update over that of its
            weights. Costs a copy of the parameters during the optimizer's step.
        layers: False records no activations and no gradients at layers' outputs; norms of parameters are still
            recorded. The same holds for a compiled model. On a GPU, every eighth record has gradients at outputs.
        samples: Where the samples are, as in `unsum.gradients`.
        params: A glob of parameter names, or a list of globs: only these parameters.
        loss_reduction: "mean" says that each micro-batch's loss is a mean over its samples: norms are then those of
            each sample's own loss.
        scaler: A GradScaler; gradients are divided by its scale.
        interacting: "error" raises `InteractionError` in the first step if samples interact (batch norm in training);
            a later step that unsum refuses has no norms, and a warning says why. "exact" records the gradient of each
            sample's part of the loss.
        ids: How to find the samples' ids in a batch: a key, an attribute, or a function of the batch. Used by
            `watch.loader(loader)` and `watch.note(batch)`. Without it, the keys "id", "ids", "idx" and "index" are
            tried; otherwise ids are row numbers of the step.
        text: How to find the samples' texts, in the same way; records of outliers then contain them.
        threshold: How far an outlier is from the others (`unsum.training.outliers` states the rule).
        window: How many samples' norms the rule looks at.
        history: How many records `watch.history` keeps.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1)
        >>> w = watch(model, every=2)
        >>> for _ in range(4):
        ...     with w:
        ...         model(torch.ones(4, 3)).sum().backward()
        >>> [record.step for record in w.history]
        [0, 2]
    """
    for name, value in (("every", every), ("window", window), ("history", history)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"watch: {name}={value!r}: a whole number, 1 or more")
    if not isinstance(threshold, int | float) or not threshold > 0:
        raise OptionError(f"watch: threshold={threshold!r}: a positive number")
    if not isinstance(layers, bool):
        raise OptionError(f"watch: layers={layers!r}: True or False; params= chooses parameters")
    if interacting not in ("error", "exact"):
        raise OptionError(f"watch: interacting={interacting!r}: choose 'error' or 'exact'")
    if loss_reduction not in (None, "mean"):
        raise OptionError(f"watch: loss_reduction={loss_reduction!r}: None or 'mean'")
    Names(model)  # what is no module shows here
    options = Options(
        reducers=(Norms(),), keep=False, rules=True, strict=False, samples=sample_maps.read(samples),
        exact=interacting == "exact", verify=False, mean=loss_reduction == "mean", params=params, grad=True,
        scaler=Division(scaler),
    )  # fmt: skip
    return Watch(
        model, options, every=every, sinks=Sinks(to), optimizers=updates.read(optimizer), layers=layers,
        ids=Ids(ids, text), outliers=Outliers(threshold, window), history=history,
    )  # fmt: skip
