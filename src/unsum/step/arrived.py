"""What torch brings to each parameter, to be compared with what was found: Σ per sample + nobody's part must be it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.errors import NotFinite, UnknownSamples
from unsum.graph.rounded import rounding_of_sums
from unsum.kernels.product import wide


class Arrived:
    """Waits at the parameters while a backward runs. Local: before accumulation, and before processes are averaged."""

    def __init__(self, wanted: Mapping[int, nn.Parameter], names: Mapping[int, str]) -> None:
        self._wanted, self._names = wanted, names
        self.rounding = 1e-9  # how far sums may be off
        self._received: dict[int, Tensor] = {}
        self._handles: list[seams.Handle] = []

    def attach(self, hears: Callable[[], bool]) -> None:
        """Wait, and take in what arrives while `hears()`. First of all hooks, to see what arrives and not what the
        user's own make of it."""
        for key, parameter in self._wanted.items():
            if not parameter.requires_grad:  # frozen since the block began
                continue
            self._handles.append(seams.on_gradient(parameter, self._receiver(key, hears), first=True))

    def detach(self) -> None:
        """Wait no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        """Another backward begins."""
        self._received.clear()

    def _receiver(self, key: int, hears: Callable[[], bool]) -> Any:
        def received(grad: Tensor) -> None:
            if grad is None or not hears():
                return
            dense = (grad.to_dense() if grad.layout != torch.strided else grad).detach().to(wide(grad.dtype))
            self._received[key] = self._received[key] + dense if key in self._received else dense.clone()

        return received

    def check(self, found: Callable[[int], Tensor | None]) -> None:
        """Raise where what was found of a parameter is not what arrived: then something was not seen."""
        finite = [torch.where(g.isfinite(), g, 0) for g in self._received.values() if g.numel()]
        scale = max([float(g.abs().max()) for g in finite], default=0.0)
        for key, received in self._received.items():
            if not received.numel():
                continue
            ours = found(key)
            ours = torch.zeros_like(received) if ours is None else ours
            bad = torch.where(ours.isfinite(), torch.inf, 0.0)
            missing = float(torch.where(received.isfinite(), (received - ours).abs(), bad).max())
            if missing == torch.inf:
                raise NotFinite(
                    "a gradient is not finite, and cannot be traced to a sample.",
                    at=self._names[key],
                    write="with unsum.watch(model) as w: ...  # w.last.nonfinite names the first such value",
                )
            rounding = max(self.rounding, rounding_of_sums(self._wanted[key].dtype))  # narrower than the rest, perhaps
            if not missing <= rounding * scale:
                raise UnknownSamples(
                    f"{self._names[key]}: part of its gradient comes from where no samples are known "
                    f"({missing:.1e} of {scale:.1e}). A hook of yours on a tensor that is computed from the parameter "
                    "has the same effect.",
                    write=[
                        "y = module(x)  # call the module that uses it, inside the block, not torch.nn.functional",
                        f"with unsum.gradients(model, params=[p for p, _ in model.named_parameters() "
                        f"if p != {self._names[key]!r}]) as g: ...",
                    ],
                )
