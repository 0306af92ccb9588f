"""How often optimizers step while a block is open: once, as a block is for one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from unsum.sites import Names


def twice(name: str, block: str, *write: str) -> str:
    """The warning that a block of this name has seen an optimizer step twice."""
    what = f"{name}: an optimizer stepped twice inside one block, which is for one step: norms mix different weights"
    code = (
        f"for batch in loader:\n             with {block}: loss_fn(model, batch).backward()  # one block for each step"
    )
    return "\n     or: ".join([f"{what}.\n  write: {code}", *write])


class OptimizerSteps:
    """Counts the steps of optimizers that train a model, from `open` to `close`, and tells when one steps again."""

    def __init__(self, model: nn.Module, again: Callable[[], None]) -> None:
        self._model, self._again = model, again
        self._handle: Any = None

    def open(self) -> None:
        """Count from now on."""
        counts, own = Counter[int](), _parameters(self._model)

        def stepped(optimizer: Any, *_: Any) -> None:
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                counts[id(optimizer)] += 1
                if counts[id(optimizer)] == 2:
                    self._again()

        self._handle = register_optimizer_step_post_hook(stepped)

    def close(self) -> None:
        """Count no more. Safe to call twice."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _parameters(model: nn.Module) -> set[int]:
    names = Names(model)
    return {id(p) for p in (*names.parameters.values(), *names.parts.values())}
