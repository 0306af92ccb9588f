"""`GradAside`: every `.grad` of a model, out of the way of a backward that is not to change it."""

from __future__ import annotations

from torch import Tensor, nn

from unsum.sites import Names


class GradAside:
    """Every `.grad` of a model, taken away until it is put back: torch would add to it in place."""

    def __init__(self, names: Names) -> None:
        parameters = (*names.parameters.values(), *names.parts.values())
        self._stored: list[tuple[nn.Parameter, Tensor | None]] = [(p, p.grad) for p in parameters]
        for parameter, stored in self._stored:
            if stored is not None:
                parameter.grad = None

    def put_back(self) -> None:
        """Give every parameter its `.grad` back."""
        for parameter, stored in self._stored:
            parameter.grad = stored
