"""A hook of ours, and what takes one away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Handle(Protocol):
    """What takes a hook away again."""

    def remove(self) -> None: ...


class Hook:
    """A hook of ours. A copy of the module, or a pickle, gets one that does nothing: it is not the user's module."""

    __slots__ = ()
    __torch_unserializable__ = True  # torch warns of other tensor hooks when a tensor is pickled

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_inert, ()


def inert(*args: Any) -> None:
    """What is left of a hook of ours in a copy of the module."""


def _get_inert() -> Callable[..., None]:
    return inert
