"""The scale of a GradScaler."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unsum.errors import OptionError


def current_scale(scaler: Any) -> Tensor | float | None:
    """The scale as it is now, without waiting for the device; None for a disabled scaler."""
    if isinstance(scaler, int | float | Tensor):
        return scaler
    if not hasattr(scaler, "get_scale"):
        raise OptionError(f"scaler={scaler!r}: expected a torch.amp.GradScaler, or the scale as a number")
    if not scaler.is_enabled():
        return None
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, Tensor) else scaler.get_scale()
