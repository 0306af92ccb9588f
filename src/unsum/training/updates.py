"""How far the steps of optimizers move parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import OptionError
from unsum.sites import Names
from unsum.training.step_gradient import copies, distances
from unsum.training.weakly import weakly


class Updates:
    """The optimizers of a model, and what their parameters were before a step that is measured."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizers: list[Any] = []
        self._before: dict[int, dict[str, Tensor]] = {}  # by the numbers of optimizers

    def numbers(self) -> set[int]:
        """The optimizers that are followed."""
        return set(range(len(self._optimizers)))

    def follow(self, optimizer: Any, begins: Callable[[int, bool], None], ends: Callable[[int], None]) -> None:
        """Tell when a step of this optimizer begins (its number, and whether it is given a closure), and ends."""
        own, number = innermost(optimizer), len(self._optimizers)
        self._optimizers.append(own)
        begun, ended = weakly(begins), weakly(ends)
        own.register_step_pre_hook(
            lambda _, args, kwargs: begun(number, len(args) > 1 or kwargs.get("closure") is not None)
        )
        own.register_step_post_hook(lambda *_: ended(number))

    def copy(self, number: int) -> None:
        """Keep what the parameters of an optimizer are now, unless something is kept of them."""
        if number not in self._before:
            self._before[number] = copies(self._parameters(number))

    def measure(self, number: int, group: Any, *, again: bool) -> dict[str, Tensor]:
        """{parameter: how far it is from what was kept}. `again`: keep that for another step."""
        before = self._before.get(number, {}) if again else self._before.pop(number, {})
        now = self._parameters(number)
        before = {name: value for name, value in before.items() if name in now}
        return distances(now, before, group) if before else {}

    def forget(self) -> None:
        """Keep nothing."""
        self._before = {}

    def _parameters(self, number: int) -> dict[str, Tensor]:
        """What this process holds of the parameters that an optimizer trains."""
        own = {id(p) for group in self._optimizers[number].param_groups for p in group["params"]}
        names = Names(self._model)
        found = {name: names.parts.get(name, p) for name, p in names.parameters.items() if p.requires_grad}
        return {name: p for name, p in found.items() if id(p) in own}


def read(optimizer: Any) -> list[Any]:
    """The optimizers that were given: None, one, or a list of them."""
    given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for each in given:
        if not hasattr(innermost(each), "register_step_post_hook"):
            raise OptionError(
                f"watch: optimizer={type(each).__name__}: expected a torch.optim.Optimizer, or a list of them"
            )
    return given


def innermost(optimizer: Any) -> Any:
    """The optimizer that steps, inside what others have put around it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
