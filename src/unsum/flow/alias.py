"""Aliases: another tensor with the same memory, whose gradient is its own.

Where one tensor is used in several ways, a hook on it sees the sum. An alias that is handed on in its place sees what
comes through it alone. All open blocks share one, so that their hooks fire in the order in which the blocks were
opened.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from unsum.nested import leaves
from unsum.types import Path

# Who made an alias, and for which place.
_made_by: MutableMapping[Tensor, tuple[weakref.ref[Any], Any]] = WeakIdKeyDictionary()


def aliases(value: Any, tensors: Iterable[Tensor], *, who: Any, place: Any) -> dict[Path, Tensor]:
    """Aliases for those of `tensors` that require gradients, at every path of `value` where they stand, so that tensors
    which were one (`query is key`) stay one. None is made for what another block made for the same place."""
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        if not tensor.requires_grad or id(tensor) in made:
            continue
        maker, of = _made_by.get(tensor, (None, None))
        if maker is None or maker() is who or of != place:
            alias = tensor.view_as(tensor) if tensor.layout == torch.strided else torch.ops.aten.alias(tensor)
            made[id(tensor)] = alias
            _made_by[alias] = weakref.ref(who), place
    return {path: made[id(tensor)] for path, tensor in leaves(value) if id(tensor) in made} if made else {}
