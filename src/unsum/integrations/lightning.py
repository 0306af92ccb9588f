"""Lightning: `Watch`, a callback that records the steps of a Trainer with `unsum.watch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unsum import training
from unsum.errors import OptionError

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment,no-redef]
    except ImportError as error:
        raise ImportError("unsum.integrations.lightning needs lightning: pip install lightning") from error


class Watch(Callback):
    """A callback for Lightning's Trainer: per-sample gradient norms, outliers, noise scale and layers of its steps.

    Takes the options of `unsum.watch`, except the model; `optimizer=True` also records the sizes of updates. The watch
    itself is `callback.watch`, with `.last` and `.history`. Ids and texts are taken from the batches.

    Lightning divides each loss by the number of micro-batches (`accumulate_grad_batches`), and a GradScaler multiplies
    it; unsum takes both out. Norms are those of each example's part of the loss that `training_step` returned. Pass
    `loss_reduction="mean"` if that loss is a mean over samples: norms are then those of each example's own loss.

    The median and the largest norm, the noise scale and the number of outliers go to the Trainer's loggers.

    Examples:
        >>> callback = Watch(every=10)  # for Trainer(callbacks=[callback])
        >>> callback
        Watch: no training step yet
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        if given:
            raise OptionError(
                f"Watch({type(given[0]).__name__}): options alone are given; the Trainer hands its module to the "
                "callback.",
                write="lightning.Trainer(callbacks=[unsum.integrations.lightning.Watch()])",
            )
        if options.get("accumulation") is not None:
            raise OptionError(
                "Watch: leave accumulation= out: the Trainer's own number (accumulate_grad_batches) is used"
            )
        self._updates = bool(options.pop("optimizer", False))
        self._options = options
        self._watch: training.Watch | None = None
        self._is_open = False
        training.watch(nn.Linear(1, 1), **options)  # a wrong option shows here

    @property
    def watch(self) -> training.Watch:
        """The watch, with `.last` and `.history`, from the begin of training on."""
        if self._watch is None:
            raise OptionError(
                "this callback has not seen a training step: it is in no Trainer, or fit() was not called.",
                write="lightning.Trainer(callbacks=[callback]).fit(module, loader)",
            )
        return self._watch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins."""
        self._watch, self._is_open = training.watch(pl_module, **self._options), False
        self._watch.is_trainers = True
        if self._updates:
            for optimizer in trainer.optimizers:
                self.watch.follow(optimizer)
        self.watch.division.scaler = getattr(trainer.precision_plugin, "scaler", self.watch.division.scaler)
        if trainer.world_size > 1:
            self.watch.group = torch.distributed.group.WORLD

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch begins, and with the first one a step."""
        if self._watch is None:
            return
        if not self._is_open:
            self._is_open = True
            self.watch.division.by_micro_batches = trainer.accumulate_grad_batches
            self.watch.open(trainer.global_step)
        self.watch.note(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """All micro-batches of a step had their backward."""
        if self._watch is None:
            return
        self.watch.close()
        self._is_open = False
        record = self.watch.last if self._logs_now(trainer) else None
        if record is not None and record.step == trainer.global_step:
            shown = record.headlines()
            for logger in trainer.loggers:
                logger.log_metrics(shown, step=record.step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self._finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training was broken off."""
        self._finish()

    def _finish(self) -> None:
        if self._watch is not None:
            self.watch.close()
            self.watch.flush()

    def __repr__(self) -> str:
        return f"Watch: {'no training step yet' if self._watch is None else self._watch}"

    def _logs_now(self, trainer: Any) -> bool:
        return bool(trainer.loggers) and trainer.global_step % max(trainer.log_every_n_steps, 1) == 0
