"""What losses were divided by before they were differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unsum.seams.scaler import current_scale


class Division:
    """What losses were multiplied or divided by before they were differentiated, which is taken out of the samples'
    gradients: the scale of a GradScaler, and what a trainer divides by: a number that it hands to the model (`reads`
    finds it among the arguments of a call), or the number of micro-batches of the step."""

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self.reads: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None
        self.times = 1.0  # that number is this times what was found
        self.by_micro_batches: bool | int = False  # where no number is found: True, by how many there were
        self.factor: Tensor | float | None = None  # found in the last call
        if scaler is not None:
            current_scale(scaler)  # what is no scaler shows here

    def called(self, kwargs: Mapping[str, Any]) -> None:
        """The model is called with these arguments."""
        if self.reads is not None:
            found = self.reads(kwargs)
            self.factor = None if found is None else found * self.times

    def is_enabled(self) -> bool:
        return self.scaler is not None or self.factor is not None

    def get_scale(self) -> Any:
        scale = self.loss_scale()
        return (1.0 if scale is None else scale) / (1.0 if self.factor is None else self.factor)

    def loss_scale(self) -> Tensor | float | None:
        """The scale of the GradScaler, if there is one."""
        return None if self.scaler is None else current_scale(self.scaler)

    def factor_now(self) -> Tensor:
        """(1,): the number that was found in the last call, or 1."""
        return torch.as_tensor(1.0 if self.factor is None else self.factor).reshape(1)

    def micro_batches(self, count: int) -> float:
        """By how many micro-batches each loss of a step was divided, if not by the number that was found."""
        if self.factor is not None or not self.by_micro_batches:
            return 1.0
        return float(count if self.by_micro_batches is True else self.by_micro_batches)
