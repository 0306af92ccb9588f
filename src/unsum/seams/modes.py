"""Modes: what sees every torch call of a thread, and what switches a user's `torch.autocast` off."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

without_functions = torch._C.DisableTorchFunction  # within it no torch function mode and no subclass is asked


class WatchingMode(TorchFunctionMode):
    """A mode for `watch`, or for a `with`. While it `is_over` it has to pass every call on."""

    is_over = False

    def __enter__(self) -> Any:
        self.is_over = False
        return super().__enter__()


def watch(mode: WatchingMode) -> None:
    """Let a mode see every torch call of this thread. It goes below the user's own modes, so that these may be left
    while it is on."""
    mode.is_over = False
    _stack(mode, *(each for each in _popped() if each is not mode))


def unwatch(mode: WatchingMode) -> None:
    """Undo `watch`. Inside a call that the mode itself handles, torch has taken it off the stack, and puts it back
    afterwards: there it passes calls on until the next mode comes or goes."""
    mode.is_over = True
    _stack(*_popped())


def _popped() -> list[TorchFunctionMode]:
    """All modes of this thread, the lowest first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def _stack(*modes: TorchFunctionMode) -> None:
    for each in modes:
        if not (isinstance(each, WatchingMode) and each.is_over):
            _push_mode(each)


_local = threading.local()


def autocasts() -> tuple[str, ...]:
    """The kinds of device on which a backward inside `torch.autocast` would round what we compute."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """What is computed within is not rounded by a `torch.autocast` of the user's."""
    kinds = autocasts()
    if not kinds:
        yield
        return
    before, _local.is_set_aside = getattr(_local, "is_set_aside", False), True
    try:
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        _local.is_set_aside = before


def are_hooks_rounded() -> bool:
    """Whether what a hook computes in the backward that runs, or is about to begin, would be rounded."""
    return getattr(_local, "is_set_aside", False) or bool(autocasts())


def exact(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs within `exactly`, from one that may not."""

    def call(*args: Any) -> Any:
        with exactly():
            return hook(*args)

    return call
