"""The Hugging Face Trainer: `Watch`, a callback that records its steps with `unsum.watch`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from unsum import training
from unsum.errors import OptionError

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("unsum.integrations.transformers needs transformers: pip install transformers") from error


class Watch(TrainerCallback):
    """A callback for the Trainer: per-sample gradient norms, outliers, noise scale and layers of its steps.

    Takes the options of `unsum.watch`, except the model; `optimizer=True` also records the sizes of updates. The watch
    itself is `callback.watch`, with `.last` and `.history`.

    Norms are those of each example's own loss. Models that use transformers' loss functions divide by
    `num_items_in_batch` (the tokens or examples of all micro-batches); unsum multiplies by it again, so an example's
    loss is the sum over its tokens. For other models unsum takes out the number of micro-batches, if the Trainer
    divides by it. A mean inside the model stays: pass `loss_reduction="mean"` if it is a mean over samples. The scale
    of a GradScaler is divided out too.

    The median and the largest norm, the noise scale and the number of outliers join the Trainer's own logs.

    Examples:
        >>> callback = Watch(every=10)
        >>> callback.watch is None  # until training begins
        True
    """

    def __init__(self, **options: Any) -> None:
        if options.get("ids") is not None or options.get("text") is not None:
            raise OptionError(
                "Watch: a callback does not see the Trainer's batches: ids= and text= are for other loops. The page "
                "on watching shows a collator that notes which examples are in a batch"
            )
        self._updates = bool(options.pop("optimizer", False))
        self._options = options
        self.watch: training.Watch | None = None
        self._logged: int | None = None  # the last step whose record has joined the logs
        self._reads: Any = None  # what the model divides by, among the arguments of its call
        training.watch(nn.Linear(1, 1), **options)  # a wrong option shows here

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Training begins."""
        if self.watch is not None:
            self.watch.close()  # of a run that was broken off
        options, self._logged = dict(self._options), None
        if args.torch_compile:
            options["layers"] = False  # a compiled model shows no layers
        self.watch = training.watch(model, **options)
        optimizer = kwargs.get("optimizer")
        if self._updates and optimizer is not None:
            self.watch.follow(optimizer)
        division = self.watch.division
        ranks = 1
        self._reads = division.reads = _number_of_items if _divides(model) else _one_where_handed
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.watch.group = torch.distributed.group.WORLD
            ranks = torch.distributed.get_world_size() if args.average_tokens_across_devices else 1
        division.times = 1 / ranks  # by which the Trainer multiplies the losses of models that are handed the number
        division.by_micro_batches = True  # by which it divides those of the others
        _put_first(self, inspect.currentframe())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins: its micro-batches come."""
        if self.watch is None:
            return
        self.watch.close()  # of a step that was broken off
        division = self.watch.division
        division.scaler = getattr(kwargs.get("optimizer"), "scaler", division.scaler)
        self._ask_trainer(inspect.currentframe())
        self.watch.open(state.global_step)

    def _ask_trainer(self, frame: FrameType | None) -> None:
        """What this step's losses are divided by, beside the model's own way: the Trainer and the number of items are
        variables of the loop that has called us."""
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is None or self.watch is None or "num_items_in_batch" not in frame.f_locals:
            return
        trainer, number = frame.f_locals["self"], frame.f_locals["num_items_in_batch"]
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:  # as `training_step` decides, whatever a `compute_loss` of the user's own does
            is_scaled = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and number is not None
            )
        self.watch.division.by_micro_batches = not is_scaled
        divides = trainer.compute_loss_func is not None  # which is given the number, whatever the model is handed
        self.watch.division.reads = (lambda _: number) if divides and number is not None else self._reads

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-batches of a step had their backward."""
        if self.watch is not None:
            self.watch.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The Trainer logs: what was recorded joins in."""
        record = None if self.watch is None else self.watch.last
        if record is None or not isinstance(logs, dict) or "loss" not in logs or record.step == self._logged:
            return
        self._logged, shown = record.step, record.headlines()
        logs.update(shown)
        if state.log_history:
            state.log_history[-1].update(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over."""
        if self.watch is not None:
            self.watch.close()
            self.watch.flush()


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
