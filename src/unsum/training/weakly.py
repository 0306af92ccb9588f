"""`weakly`: a method that others may hold without keeping its object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls the method as long as its object lives; then nothing. For hooks and `atexit`."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (own := known()) is not None:
            own(*args)

    return call
