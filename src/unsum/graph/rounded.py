"""How far sums may be off: by dtype, and by functions that round gradients to few bits inside their backward. Of these
unsum knows what they compute, the linear layers of float8 training (torchao): it is linear but for that rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from unsum.graph.nodes import Node

COARSE = 0.25
"""How far results may be off, relative to their norm. Float8 has two or three bits behind the first: rounding both
factors moves a product by 3 to 7 % of its norm, and a single number of it by at most 20 %. A rule that is wrong is off
by 100 % or more."""

_SUMS = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}


def rounding_of_sums(dtype: torch.dtype) -> float:
    """How far sums of numbers of this dtype may be off, relative to the largest gradient."""
    return _SUMS.get(dtype, 5e-2)


_NAMES = frozenset({"matmul_with_hp_or_float8_argsBackward", "mx_mmBackward"})


def rounding_of(node: Node) -> float:
    """`COARSE` for a node that is known to round; 0 for all others."""
    return COARSE if isinstance(node, BackwardCFunction) and type(node).__name__ in _NAMES else 0.0


def scales_by_batch(node: Node) -> bool:
    """Whether a node that rounds has one scale for the whole batch ("tensorwise"), of its input or of its gradient:
    then the largest number of one sample decides how those of another are rounded."""
    if not rounding_of(node) or (config := getattr(node, "config", None)) is None:  # of mx_mm: blocks of one row
        return False
    return any(_is_by_batch(getattr(config, f"cast_config_{of}", None)) for of in ("input", "grad_output"))


def _is_by_batch(cast: Any) -> bool:
    scaling = getattr(getattr(cast, "scaling_type", None), "value", "")
    granularity = getattr(getattr(cast, "scaling_granularity", None), "value", "tensorwise")
    return scaling != "disabled" and granularity != "axiswise"
