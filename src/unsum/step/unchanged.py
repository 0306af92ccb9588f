"""What is held during a backward must stay as it came: a hook of the user's may change a gradient in place."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from torch import Tensor

from unsum.errors import UnsupportedError
from unsum.factors.total import Term
from unsum.seams.tensors import is_changed, version_of

Held = list[tuple[Tensor, int]]  # tensors, and which version of them


def versions(kind: Term) -> Held:
    """Of the tensors that factors refer to."""
    cls: Any = type(kind)
    return versions_of(*[getattr(kind, name) for name in _tensors(cls)])


@cache
def _tensors(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name in ("a", "x", "ids", "delta"))


def versions_of(*tensors: object) -> Held:
    """Of these, as far as they are tensors whose changes are counted."""
    return [(t, version_of(t)) for t in tensors if isinstance(t, Tensor) and not t.is_inference()]


def are_changed(held: Held) -> bool:
    """Whether any of these was changed in place since, or freed."""
    return any([is_changed(tensor, version) for tensor, version in held])  # noqa: C419


def refuse_changed(name: str) -> None:
    """Raise for a parameter of which something that is held was changed in place."""
    raise UnsupportedError(
        f"{name}: a gradient was changed in place (by a hook, perhaps), or a saved activation was changed or freed, "
        "while unsum still needed it.",
        write="tensor.register_hook(lambda grad: grad * 2)  # a hook that returns a new tensor",
    )
