"""The Hugging Face Trainer: `Watch`, a callback that records its steps with `unsum.watch`."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from unsum import training
from unsum.errors import OptionError
from unsum.integrations import carried

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("unsum.integrations.transformers needs transformers: pip install transformers") from error


class Watch(TrainerCallback):
    """A callback for the Trainer: per-sample gradient norms, outliers, noise scale and layers of its steps.

    Takes the options of `unsum.watch`, except the model; `optimizer=True` also records the sizes of updates. The watch
    itself is `callback.watch`, with `.last` and `.history`, from the begin of training on.
    `callback.collator(collate, ids="index")` lets records have the data set's own ids.

    Norms are those of each example's own loss. Models that use transformers' loss functions divide by
    `num_items_in_batch` (the tokens or examples of all micro-batches); unsum multiplies by it again, so an example's
    loss is the sum over its tokens, and `loss_reduction="mean"` raises `OptionError`. For other models unsum takes out
    the number of micro-batches, if the Trainer divides by it. A mean inside the model stays: pass
    `loss_reduction="mean"` if it is a mean over samples. The scale of a GradScaler is divided out too.

    The median and the largest norm, the noise scale and the number of outliers join the Trainer's own logs.

    Examples:
        >>> callback = Watch(every=10)  # for Trainer(..., callbacks=[callback])
        >>> callback
        Watch: no training step yet
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        if given:
            raise OptionError(
                f"Watch({type(given[0]).__name__}): options alone are given; the Trainer hands its model to the "
                "callback.",
                write="Trainer(model, args, ..., callbacks=[unsum.integrations.transformers.Watch()])",
            )
        if options.get("ids") is not None or options.get("text") is not None:
            raise OptionError(
                "Watch: ids= and text= are given to the collator, since a callback does not see the Trainer's batches "
                "(docs/watch.md, Hugging Face Trainer).",
                write='callback = Watch(); Trainer(..., data_collator=callback.collator(collate, ids="index"), '
                "callbacks=[callback])",
            )
        if options.get("accumulation") is not None:
            raise OptionError(
                "Watch: leave accumulation= out: the Trainer's own number (gradient_accumulation_steps) is used"
            )
        self._updates = bool(options.pop("optimizer", False))
        self._options = options
        self._watch: training.Watch | None = None
        self._carried: list[str] = []  # what the collator puts into batches
        self._cleaned: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose calls leave that out
        self._logged: int | None = None  # the last step whose record has joined the logs
        self._reads: Any = None  # what the model divides by, among the arguments of its call
        training.watch(nn.Linear(1, 1), **options)  # a wrong option shows here

    @property
    def watch(self) -> training.Watch:
        """The watch, with `.last` and `.history`, from the begin of training on."""
        if self._watch is None:
            raise OptionError(
                "this callback has not seen a training step: it is in no Trainer, or train() was not called.",
                write="Trainer(..., callbacks=[callback]).train()",
            )
        return self._watch

    def collator(
        self,
        collate: Callable[[list[Any]], Any],
        *,
        ids: carried.Where | None = None,
        text: carried.Where | None = None,
    ) -> carried.Carrying:
        """A collator for the Trainer that carries the examples' ids, and texts, to the records of its steps.

        Args:
            collate: The collator that makes batches (dicts) from examples.
            ids: A key of every example, or a function of one. A key is left out of what `collate` is given.
            text: Where examples have their texts, likewise: records of outliers then have them.

        The Trainer needs `remove_unused_columns=False`, or it takes the key away before the collator is called.
        """
        if ids is None and text is None:
            raise OptionError(
                "collator: neither ids= nor text= is given.", write='callback.collator(collate, ids="index")'
            )
        self._carried = [key for key, where in ((carried.IDS, ids), (carried.TEXTS, text)) if where is not None]
        return carried.Carrying(collate, ids=ids, text=text)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The Trainer is made; it may evaluate before it trains."""
        self._clean(model)

    def _clean(self, model: Any) -> None:
        if self._carried and isinstance(model, nn.Module) and model not in self._cleaned:
            self._cleaned.add(model)
            carried.drop_from_calls(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Training begins."""
        if self._watch is not None:
            self._watch.close()  # of a run that was broken off
        self._clean(model)
        options, self._logged = dict(self._options), None
        if carried.IDS in self._carried:
            options["ids"] = carried.IDS
        if carried.TEXTS in self._carried:
            options["text"] = carried.TEXTS
        if args.torch_compile:
            options["layers"] = False  # a compiled model shows no layers
        self._watch = training.watch(model, **options)
        self._watch.is_trainers = True
        optimizer = kwargs.get("optimizer")
        if self._updates and optimizer is not None:
            self.watch.follow(optimizer)
        division = self.watch.division
        ranks = 1
        self._reads = self._unless_mean(_number_of_items) if _divides(model) else _one_where_handed
        division.reads = self._reads
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.watch.group = torch.distributed.group.WORLD
            ranks = torch.distributed.get_world_size() if args.average_tokens_across_devices else 1
        division.times = 1 / ranks  # by which the Trainer multiplies the losses of models that are handed the number
        division.by_micro_batches = True  # by which it divides those of the others
        _put_first(self, inspect.currentframe())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins: its micro-batches come."""
        if self._watch is None:
            return
        self.watch.close()  # of a step that was broken off
        division = self.watch.division
        division.scaler = getattr(kwargs.get("optimizer"), "scaler", division.scaler)
        loop = _loop_of_trainer(inspect.currentframe())
        self._ask_trainer(loop)
        self._take_carried(loop.get("batch_samples", ()))
        self.watch.open(state.global_step)

    def _ask_trainer(self, loop: Mapping[str, Any]) -> None:
        """What this step's losses are divided by, beside the model's own way."""
        if "num_items_in_batch" not in loop:
            return
        trainer, number, division = loop["self"], loop["num_items_in_batch"], self.watch.division
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:  # as `training_step` decides, whatever a `compute_loss` of the user's own does
            is_scaled = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and number is not None
            )
        division.by_micro_batches = not is_scaled
        divides = trainer.compute_loss_func is not None  # which is given the number, whatever the model is handed
        division.reads = self._unless_mean(lambda _: number) if divides and number is not None else self._reads

    def _take_carried(self, batches: Sequence[Any]) -> None:
        """Take the ids of a step's micro-batches out of them, before the model is called."""
        for batch in batches if self._carried else ():
            found = carried.take(batch)
            if missing := [key for key in self._carried if key not in found]:
                what = "ids" if missing[0] == carried.IDS else "texts"
                raise OptionError(
                    f"Watch: the collator found no {what} in the examples of a training batch: they do not have them, "
                    "the Trainer took them away, or data_collator= is another one.",
                    write=[
                        "TrainingArguments(..., remove_unused_columns=False)",
                        'Trainer(..., data_collator=callback.collator(collate, ids="index"))  # a key of every example',
                    ],
                )
            self.watch.note(found)

    def _unless_mean(self, reads: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
        """The number that a loss is divided by; if there is one, the loss is no mean over the samples."""

        def read(kwargs: Mapping[str, Any]) -> Any:
            number = reads(kwargs)
            if number is not None and self._options.get("loss_reduction") == "mean":
                raise OptionError(
                    'Watch(loss_reduction="mean"): this model\'s loss is divided by num_items_in_batch, which is taken '
                    "out already: norms would be multiplied by the size of the micro-batch.",
                    write="Watch()  # without loss_reduction",
                )
            return number

        return read

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-batches of a step had their backward."""
        if self._watch is not None:
            self.watch.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The Trainer logs: what was recorded joins in."""
        record = None if self._watch is None else self._watch.last
        if record is None or not isinstance(logs, dict) or "loss" not in logs or record.step == self._logged:
            return
        self._logged, shown = record.step, record.headlines()
        logs.update(shown)
        if state.log_history:
            state.log_history[-1].update(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over."""
        if self._watch is not None:
            self._watch.close()
            self._watch.flush()

    def __repr__(self) -> str:
        return f"Watch: {'no training step yet' if self._watch is None else self._watch}"


def _loop_of_trainer(frame: FrameType | None) -> Mapping[str, Any]:
    """The variables of the Trainer's loop, which has called us: the Trainer, the micro-batches of the step and the
    number of items in them."""
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _inside(model: Any) -> Any:
    """The model itself, inside an adapter's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _divides(model: Any) -> bool:
    """Whether a model that is handed `num_items_in_batch` divides its loss by it: through transformers' own loss
    functions. Others average over each micro-batch."""
    try:
        for kind in type(_inside(model)).__mro__:
            source = inspect.getsource(vars(kind)["forward"]) if "forward" in vars(kind) else "super()"
            if "loss_function" in source or "super()" not in source:  # else the class above it computes the loss
                return "loss_function" in source or _hands_on(_inside(model), source)
    except (OSError, TypeError):
        pass
    return True


def _hands_on(model: nn.Module, source: str) -> bool:
    """Whether a forward hands labels, and all arguments that it does not name, to a part that divides."""
    named = inspect.signature(type(model).forward).parameters.values()
    rest = "".join(f"**{each.name}" for each in named if each.kind is each.VAR_KEYWORD)
    hidden = "labels" not in [each.name for each in named]  # among the rest
    for name, part in model.named_children():
        for given in re.findall(rf"self\.{re.escape(name)}\(([^()]*)\)", source):
            if rest and rest in given and (hidden or "labels" in given) and _divides(part):
                return True
    return False


def _number_of_items(kwargs: Mapping[str, Any]) -> Any:
    """What the Trainer tells the model to divide its loss by."""
    return kwargs.get("num_items_in_batch")


def _one_where_handed(kwargs: Mapping[str, Any]) -> float | None:
    """The same of a model that is told, and does not divide."""
    return None if kwargs.get("num_items_in_batch") is None else 1.0


def _put_first(callback: Watch, frame: FrameType | None) -> None:
    """Put the callback before those that write logs, so that what it adds to them is written: the Trainer calls them in
    the order of a list, which only its handler, our caller, holds."""
    handler: Any = None if frame is None or frame.f_back is None else frame.f_back.f_locals.get("self")
    known = getattr(handler, "callbacks", None)
    if isinstance(known, list) and callback in known:
        handler.callbacks = [callback, *(other for other in known if other is not callback)]
