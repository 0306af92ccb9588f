"""Whether somebody listens to a gradient cannot be asked of a graph: it is counted where hooks are registered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

_local = threading.local()
_lock = threading.Lock()
_counting: list[object] = []  # those who want it, in all threads
_restore: list[Callable[[], None]] = []


def listened() -> int:
    """How often the user has put a hook on a tensor, or asked for its `.grad`, in this thread, a block being open."""
    return getattr(_local, "listened", 0)


def count_listening(ours: type) -> Callable[[], None]:
    """Count from now on, but not hooks of this class. Returns what ends it, in any order with others."""
    wish = object()
    with _lock:
        if not _counting:
            _restore[:] = [_replace(ours)]
        _counting.append(wish)

    def end() -> None:
        with _lock:
            _counting.remove(wish)
            if not _counting:
                _restore.pop()()

    return end


def _replace(ours: type) -> Callable[[], None]:
    register, retain = Tensor.register_hook, Tensor.retain_grad

    def register_hook(self: Tensor, hook: Any) -> Any:
        if not isinstance(hook, ours):
            _local.listened = listened() + 1
        return register(self, hook)

    def retain_grad(self: Tensor) -> None:
        _local.listened = listened() + 1
        retain(self)

    Tensor.register_hook, Tensor.retain_grad = register_hook, retain_grad  # type: ignore[method-assign, assignment]

    def restore() -> None:
        if Tensor.register_hook is register_hook:  # else somebody has put his own over it since
            Tensor.register_hook = register  # type: ignore[method-assign]
        if Tensor.__dict__.get("retain_grad") is retain_grad:
            del Tensor.retain_grad  # what it inherits is seen again
            if Tensor.retain_grad is not retain:
                Tensor.retain_grad = retain  # type: ignore[method-assign]

    return restore
