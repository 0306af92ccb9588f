"""Watching calls of modules. A block that wants to know of every call, but changes none, replaces a method of
`nn.Module` while it is open: hooks on every module would take longer to register, and make every call slower."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Protocol

from torch import nn

_lock = threading.Lock()


class Watcher(Protocol):
    """Something open that wants to know of calls of modules."""

    passes: bool  # whether it need not be told of any call that begins now

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether the end of this call is wanted as well."""
        ...

    def after_call(self, output: Any) -> None:
        """A call is over; None if it raised."""
        ...

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a compiled module in another way, if nobody else watches; NOTHING for the usual one."""
        ...


NOTHING = object()


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` gives, or a module after `module.compile()`."""
    return module._compiled_call_impl is not None or "dynamo_ctx" in module.__dict__


class _Seam:
    """A method of `nn.Module` through which calls pass, replaced while somebody watches."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._watching: list[Watcher] = []  # in all threads
        self._before: list[Callable[..., Any]] = []  # what was there, if ours is there
        self._local = threading.local()

        local, before = self._local, self._before

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watchers = getattr(local, "watchers", None)
            if not watchers:
                return before[0](module, *args, **kwargs)
            if len(watchers) == 1:
                watcher = watchers[0]
                if watcher.passes:
                    return before[0](module, *args, **kwargs)
                if is_compiled(module):
                    output = watcher.instead_of_call(module, args, kwargs)
                    if output is not NOTHING:
                        return output
            call = before[0]
            begun = [watcher for watcher in watchers if watcher.before_call(module, args, kwargs)]
            if not begun:
                return call(module, *args, **kwargs)
            output = None
            try:
                output = call(module, *args, **kwargs)
            finally:
                for watcher in reversed(begun):
                    watcher.after_call(output)
            return output

        self._watched = watched

    def open(self, watcher: Watcher) -> Callable[[], None]:
        """Tell the watcher of calls in this thread. Returns what ends it, from any thread and in any order."""
        watchers: list[Watcher] = self._local.__dict__.setdefault("watchers", [])
        watchers.append(watcher)
        with _lock:
            self._watching.append(watcher)
            present = getattr(nn.Module, self._method)
            if not self._before or present is self._before[0]:  # else ours is there, or below somebody's own
                self._before[:] = [present]
                setattr(nn.Module, self._method, self._watched)
        return functools.partial(self._close, watcher, watchers)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As if nobody watched, for the only one who does."""
        watchers, present = self._local.__dict__.get("watchers", []), getattr(nn.Module, self._method)
        if present is not self._watched:
            yield
            return
        self._local.watchers = []
        setattr(nn.Module, self._method, self._before[0])
        try:
            yield
        finally:
            self._local.watchers = watchers
            setattr(nn.Module, self._method, present)

    def _close(self, watcher: Watcher, watchers: list[Watcher]) -> None:
        watchers.remove(watcher)
        with _lock:
            self._watching.remove(watcher)
            if (
                not self._watching and getattr(nn.Module, self._method) is self._watched
            ):  # else somebody's own is over it
                setattr(nn.Module, self._method, self._before.pop())


_seams = {method: _Seam(method) for method in ("_call_impl", "__call__")}


def on_calls(watcher: Watcher, modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Tell the watcher of all calls of modules in this thread. Returns what undoes it."""
    # To replace a slot of a class makes Python go through all its subclasses, of which there are hundreds, twice in a
    # step; but modules that were compiled in place have a `_call_impl` of their own.
    compiled = set(map(id, map(attrgetter("_compiled_call_impl"), modules))) - {id(None)}
    return _seams["__call__" if compiled else "_call_impl"].open(watcher)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """As if nobody watched, for the only one who does."""
    with _seams["__call__"].aside(), _seams["_call_impl"].aside():
        yield
