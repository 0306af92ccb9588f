"""Tensors that are the same in every step, such as the matrices of a projection."""

from __future__ import annotations

import weakref

from torch import Tensor

_known: dict[int, weakref.ref[Tensor]] = {}


def constant(tensor: Tensor) -> Tensor:
    """This tensor is never changed: what reads it may be recorded."""
    key = id(tensor)
    _known[key] = weakref.ref(tensor, lambda _: _known.pop(key, None))
    return tensor


def is_constant(tensor: Tensor) -> bool:
    """Whether it was said so."""
    known = _known.get(id(tensor))
    return known is not None and known() is tensor
