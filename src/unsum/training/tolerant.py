"""A `gradients` block for a run that is to go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from unsum import seams
from unsum.block import GradientsBlock
from unsum.errors import UnsumError
from unsum.step.backward import Options
from unsum.training.proposals import reworded


class Tolerant(GradientsBlock):
    """A `gradients` block that tells of each backward, and that may let a backward go on which it refuses. What
    `torch.autograd.grad` returns is no part of `.grad`, and is passed over. `fails` is called after a backward that
    failed in a trainer, whose callbacks are not told of it; None: this is no trainer."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        refuses: bool,
        fails: Callable[[], None] | None,
        begins: Callable[[], None],
        heard: Callable[[seams.Backward], None],
    ) -> None:
        super().__init__(model, options)
        self._refuses, self._fails, self._begins, self._heard = refuses, fails, begins, heard
        self._call: seams.Backward | None = None
        self.refused: UnsumError | None = None

    def _let_go(self, error: UnsumError) -> None:
        error.args = (_as_watch(str(error), in_trainer=self._fails is not None),)
        if self._refuses:
            if self._fails is not None and not self._under_way:  # else after the backward
                self._fails()
            raise error
        self.refused = error

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        try:
            is_outermost = not self._forward.is_inside
            is_ours = self.refused is None and super().before_call(module, args, kwargs)
            if is_ours and is_outermost:
                self._options.scaler.called(kwargs)
            return is_ours
        except UnsumError as error:
            self._let_go(error)
            return False

    def after_call(self, output: Any) -> None:
        try:
            super().after_call(output)
        except UnsumError as error:
            self._let_go(error)

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.refused is not None:
            return seams.NOTHING
        try:
            self._options.scaler.called(kwargs)
            return super().instead_of_call(module, args, kwargs)
        except UnsumError as error:
            self._let_go(error)
            return seams.NOTHING

    def before_backward(self, call: seams.Backward) -> Sequence[Tensor | GradientEdge] | None:
        if not self._under_way:
            self._call = call
            if call.accumulates:
                self._begins()
        is_returned = not self._under_way and not call.accumulates  # torch.autograd.grad: no part of the step's .grad
        if self.refused is not None or is_returned:
            self._under_way.append((call.accumulates, None))
            return None
        try:
            return super().before_backward(call)
        except UnsumError as error:
            self._step = None
            self._let_go(error)
            return None

    def after_backward(self, *, failed: bool) -> None:
        is_ours = self._step is not None or self.refused is not None
        super().after_backward(failed=failed)
        if not self._under_way and is_ours and not failed and self._call is not None and self._call.accumulates:
            self._heard(self._call)
        if failed and not self._under_way and self._fails is not None:
            self._fails()


def _as_watch(message: str, *, in_trainer: bool) -> str:
    message = reworded(message, options=r"Watch(\1)" if in_trainer else r"unsum.watch(model, \1)", plain="with watch:")
    if in_trainer:  # which calls model.train() in every step
        message = "\n".join(line for line in message.splitlines() if "model.eval()" not in line)
    return message
