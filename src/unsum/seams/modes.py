"""Modes: what sees every torch call of a thread, and what switches a user's `torch.autocast` off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

without_functions = torch._C.DisableTorchFunction  # within it no torch function mode and no subclass is asked


def watch(mode: TorchFunctionMode) -> None:
    """Let a mode see every torch call of this thread. It goes below the user's own modes, so that these may be left
    while it is on."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in (mode, *reversed(above)):
        _push_mode(each)


def unwatch(mode: TorchFunctionMode) -> None:
    """Undo `watch`."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in reversed(above):
        if each is not mode:
            _push_mode(each)


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
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def exact(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that runs within `exactly`, from one that may not."""

    def call(*args: Any) -> Any:
        with exactly():
            return hook(*args)

    return call
