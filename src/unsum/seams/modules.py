"""Modules: hooks on one of them, and the watching of all calls.

A block that wants to know of every call, but changes none, changes what `nn.Module` does when it is called while it is
open: hooks on every module would take longer to register, and make every call slower."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

_lock = threading.Lock()
_keys = itertools.count(-1, -1)  # of hooks; torch's own are not negative
_buffers, _values = attrgetter("_buffers"), methodcaller("values")


def _backwards(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")  # of hooks
_on_all = [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]  # hooks that torch calls for every module
OWN = (
    "_parameters",
    "_modules",
    *_HOOKS,
    *_FLAGS,
)  # attributes of a module that are torch's, and no state of the user's


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` gives, or a module after `module.compile()`."""
    return module._compiled_call_impl is not None or "dynamo_ctx" in module.__dict__


def has_hooks_around(module: nn.Module) -> bool:
    """Whether hooks are on what `torch.compile(module)` gives, or on all modules: torch calls them, and compiles what
    they are around."""
    return any(_on_all) or ("dynamo_ctx" in module.__dict__ and any(map(vars(module).get, _HOOKS)))


def hear_of_backwards(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks of the user's run when a backward has come to any of these modules, or to all modules."""
    return any(map(_backwards, modules)) or any(_on_all[2:])


class _Seam:
    """The function behind `nn.Module.__call__`. While somebody watches, its code is another: the function, and the
    class, are the same ones all the time. (To put another function into the class makes Python forget what it knows of
    all its subclasses, twice in a step; and after some hundred times Python 3.13 no longer remembers it.)"""

    def __init__(self, function: Any) -> None:
        self._function, self._code = function, function.__code__
        self._watching: list[Watcher] = []  # in all threads
        self._local = local = threading.local()
        usual = FunctionType(self._code, function.__globals__, function.__name__)

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watchers = getattr(local, "watchers", None)
            if not watchers:
                return usual(module, *args, **kwargs)
            if len(watchers) == 1:
                watcher = watchers[0]
                if watcher.passes:
                    return usual(module, *args, **kwargs)
                if is_compiled(module):
                    output = watcher.instead_of_call(module, args, kwargs)
                    if output is not NOTHING:
                        return output
            begun = [watcher for watcher in watchers if watcher.before_call(module, args, kwargs)]
            if not begun:
                return usual(module, *args, **kwargs)
            output, rests = None, len(watchers) == 1 and begun[0].passes
            if rests:
                self._rest()
            try:
                output = usual(module, *args, **kwargs)
            finally:
                if rests:
                    self._resume()
                for watcher in reversed(begun):
                    watcher.after_call(output)
            return output

        self._watched = _calling(watched)

    def open(self, watcher: Watcher) -> Callable[[], None]:
        """Tell the watcher of calls in this thread. Returns what ends it, from any thread and in any order."""
        watchers: list[Watcher] = self._local.__dict__.setdefault("watchers", [])
        watchers.append(watcher)
        with _lock:
            self._watching.append(watcher)
            self._function.__code__ = self._watched
        return functools.partial(self._close, watcher, watchers)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As if nobody watched, for the only one who does."""
        watchers, present = self._local.__dict__.get("watchers", []), self._function.__code__
        self._local.watchers, self._function.__code__ = [], self._code
        try:
            yield
        finally:
            self._local.watchers, self._function.__code__ = watchers, present

    def _rest(self) -> None:
        """The only one who watches need not be told of the calls inside this one: they are called as if nobody did."""
        with _lock:
            if len(self._watching) == 1:
                self._function.__code__ = self._code

    def _resume(self) -> None:
        with _lock:
            if self._watching:
                self._function.__code__ = self._watched

    def _close(self, watcher: Watcher, watchers: list[Watcher]) -> None:
        watchers.remove(watcher)
        with _lock:
            self._watching.remove(watcher)
            if not self._watching:
                self._function.__code__ = self._code


def _calling(function: Callable[..., Any]) -> CodeType:
    """Code that calls a function, without a name for it: it runs among the names of another file."""
    space: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a number that is called, in whose place the function is put
        exec(f"def call(self, *args, **kwargs):\n    return {_NUMBER}(self, *args, **kwargs)", space)
    code: CodeType = space["call"].__code__
    return code.replace(co_consts=tuple(function if each == _NUMBER else each for each in code.co_consts))


_NUMBER = 7919
_seam = _Seam(nn.Module._wrapped_call_impl)


def on_calls(watcher: Watcher) -> Callable[[], None]:
    """Tell the watcher of all calls of modules in this thread. Returns what undoes it."""
    return _seam.open(watcher)


def unwatched() -> contextlib.AbstractContextManager[None]:
    """As if nobody watched, for the only one who does."""
    return _seam.aside()


def on_call(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> int:
    """Call `before(module, args, kwargs)` and `after(module, args, output)`, both a `Hook`, as torch calls hooks;
    `after` also where the module raises (with None). Returns a key for `off_call`.

    Torch's own registering takes several times as long, for every linear in every step."""
    key = next(_keys)
    module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key] = before, True
    module._forward_hooks[key], module._forward_hooks_always_called[key] = after, True
    return key


def off_call(module: nn.Module, key: int) -> None:
    """Undo `on_call`."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)
    module._forward_hooks.pop(key, None)
    module._forward_hooks_always_called.pop(key, None)


def called_after(module: nn.Module, key: int) -> Callable[..., Any]:
    """The hook that `on_call` has put behind the calls of a module."""
    return module._forward_hooks[key]


@contextlib.contextmanager
def other_hooks(hooks: Iterable[tuple[nn.Module, int, Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    """Others in the place of hooks that `on_call` has put on modules: (module, key, before, after). They are hooks that
    torch's compiler reads. They have the same key every time, since torch may compare it; and it does not read hooks
    that are called where a module raises."""
    undo: list[tuple[nn.Module, int, Any, Any]] = []
    try:
        for module, key, before, after in hooks:
            undo.append((module, key, module._forward_pre_hooks[key], module._forward_hooks[key]))
            _exchange(module._forward_pre_hooks, key, _READ, before)
            _exchange(module._forward_hooks, key, _READ, after)
            _exchange(module._forward_pre_hooks_with_kwargs, key, _READ, True)
            del module._forward_hooks_always_called[key]
        yield
    finally:
        for module, key, before, after in undo:
            _exchange(module._forward_pre_hooks, _READ, key, before)
            _exchange(module._forward_hooks, _READ, key, after)
            _exchange(module._forward_pre_hooks_with_kwargs, _READ, key, True)
            module._forward_hooks_always_called[key] = True


_READ = -(1 << 40)  # the key of hooks that torch reads


def _exchange(among: dict[int, Any], key: int, new: int, value: Any) -> None:
    """Another key and value in the place of one, in the same order: that in which hooks are called."""
    if len(among) == 1:
        among.pop(key, None)
        among[new] = value
        return
    items = [(new, value) if each == key else (each, own) for each, own in among.items()]
    among.clear()
    among.update(items)


def buffers_of(modules: Iterable[nn.Module]) -> Iterable[Any]:
    """The buffers that these modules have themselves; None for one that is not there."""
    return itertools.chain.from_iterable(map(_values, map(_buffers, modules)))


def without_hooks(module: nn.Module) -> nn.Module:
    """A module like this one, with the same parameters, buffers and attributes, on which no hook of the user's is
    called: other threads go on to use the one that has them."""
    other: nn.Module = object.__new__(type(module))  # FSDP has another way of making one
    other.__dict__ = dict(vars(module))
    for name in _HOOKS:
        other.__dict__[name] = collections.OrderedDict()
    other.__dict__["_modules"] = {
        name: None if child is None else child if isinstance(child, torch.jit.ScriptModule) else without_hooks(child)
        for name, child in module._modules.items()
    }
    other.__dict__["_buffers"] = dict(module._buffers)
    return other
