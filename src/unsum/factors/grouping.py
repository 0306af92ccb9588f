"""Which kernel for many layers at once (`kernels/grouped`) gives the norms of these factors, and from which tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.kernels import grouped
from unsum.kernels.product import wide
from unsum.seams.operators import hint

Way = Literal["gram", "shift", "norm"]


def grouping(kind: Term, dtype: torch.dtype) -> tuple[Way, tuple[Tensor, ...]] | None:
    """The way to the norms of a parameter of this dtype, and what its kernel is given; None if there is none."""
    if not isinstance(kind, Outer | Scale) or kind.lengths is not None or wide(dtype) != torch.float32:
        return None
    if isinstance(kind, Scale):
        if not kind.is_whole or (kind.x is not None and kind.normalised is None):
            return None
        return ("shift", (kind.delta,)) if kind.normalised is None else ("norm", (kind.delta, *kind.normalised))
    (n, t, i), o = kind.a.shape, kind.delta.shape[2]
    if kind.groups > 1 or not grouped.suits(hint(n), hint(t), i, o, kind.delta.device.type):
        return None
    return "gram", (kind.a, kind.delta)
