"""Whether a model draws random numbers, as dropout in train mode does."""

from __future__ import annotations

import torch
from torch import Tensor


class Chance:
    """The state of torch's generators when this was made.

    Examples:
        >>> chance = Chance()
        >>> chance.was_drawn()
        False
        >>> _ = torch.rand(1)
        >>> chance.was_drawn()
        True
    """

    def __init__(self) -> None:
        self._before = _states()

    def was_drawn(self) -> bool:
        """Whether random numbers were drawn since."""
        return any(not torch.equal(one, other) for one, other in zip(self._before, _states(), strict=False))


def _states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, *torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else states
