"""For the tests of other projects: keep your own models honest."""

from __future__ import annotations

from typing import Any

from torch import nn

from unsum.check import Checked, LossFunction, check

__all__ = ["assert_exact"]


def assert_exact(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Checked:
    """Assert that `unsum.check` finds nothing; with pytest, the fixture of the same name needs no import.

    Examples:
        >>> import torch
        >>> found = assert_exact(nn.Linear(2, 1), lambda m, x: m(x)[:, 0].square(), torch.randn(3, 2))
        >>> found.ok
        True
    """
    found = check(model, loss_fn, batch)
    if not found.ok:
        raise AssertionError(f"gradients per sample are not those of plain autograd: {found}")
    return found
