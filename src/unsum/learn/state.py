"""The state of a model: what a run may change beside its results. Buffers, lists and dicts, iterators, generators of
random numbers and objects that hang on modules, and the random numbers of Python, NumPy and torch."""

from __future__ import annotations

import collections
import contextlib
import copy
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.seams.modules import OWN
from unsum.seams.tensors import put_version_back, version_of

_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, nn.Parameter, str,
          bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)  # fmt: skip


class State:
    """The state of a model as it is now, to be put back later, any number of times. What cannot be put back (a
    generator that is under way) is refused by raising, unless `strict` is false. `given` are arguments of the model
    that a run may change, such as a cache of keys and values."""

    def __init__(self, model: nn.Module, *given: Any, strict: bool = True) -> None:
        self._strict = strict
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no other object gets the number of one that was seen
        self._random()
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._take_dict(vars(module), skip=OWN)
        for value in (*model.buffers(), *given):
            self._take(value)

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()

    def _random(self) -> None:
        self._undo.append(_setter(random.setstate, random.getstate()))
        if (numpy := sys.modules.get("numpy")) is not None:
            self._undo.append(_setter(numpy.random.set_state, numpy.random.get_state()))
        self._undo.append(_setter(torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._undo.append(_setter(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))

    def _take(self, value: Any) -> Any:
        """Remember a value; returns what is to stand in its place when it is put back."""
        if isinstance(value, (*_FIXED, nn.Module)) or id(value) in self._seen:
            return value
        if type(value).__module__.startswith("torch.distributed."):  # FSDP's own: memory that comes and goes
            return value
        self._seen.add(id(value))
        self._held.append(value)
        if isinstance(value, Tensor):
            self._take_tensor(value)
        elif isinstance(value, dict):
            self._take_dict(value)
        elif isinstance(value, list | collections.deque):
            kept = [self._take(each) for each in value]
            self._undo.append(lambda: _refill(value, value.extend, kept))
        elif isinstance(value, set):
            whole = set(value)
            self._undo.append(lambda: _refill(value, value.update, whole))
        elif isinstance(value, tuple | frozenset):
            for each in value:
                self._take(each)
        elif (how := _state_of(value)) is not None:
            self._undo.append(how)
        elif isinstance(value, Iterator):
            return self._copied(value)
        elif type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            whole = value.copy()
            self._undo.append(lambda: value.__setitem__(..., whole))
        elif hasattr(value, "__dict__") and not isinstance(value, types.MappingProxyType):
            self._take_dict(vars(value))
        return value

    def _copied(self, value: Any) -> Any:
        try:
            return copy.copy(value)
        except TypeError as error:
            if not self._strict:
                return value
            raise UnsupportedError(
                f"the model cannot be run again to see whether samples interact: it holds a {type(value).__name__}, "
                "which cannot be copied and put back afterwards.\n  leave verify=True out"
            ) from error

    def _take_dict(self, value: dict[Any, Any], skip: tuple[str, ...] = ()) -> None:
        kept = {key: each if key in skip else self._take(each) for key, each in value.items()}

        def undo() -> None:
            if value.keys() != kept.keys() or any(value[key] is not each for key, each in kept.items()):
                value.clear()
                value.update({key: _again(each) for key, each in kept.items()})

        self._undo.append(undo)

    def _take_tensor(self, value: Tensor) -> None:
        if value.is_meta or value.is_nested or value.layout != torch.strided:
            return
        whole = value.detach().clone()
        version = None if value.is_inference() else version_of(value)

        def undo() -> None:
            with torch.no_grad():
                if not _is_as_it_was(value, whole):
                    value.data.copy_(whole)
            if version is not None and version_of(value) != version:
                put_version_back(value, version)

        self._undo.append(undo)


def _refill(value: Any, put: Callable[[Any], Any], kept: Any) -> None:
    value.clear()
    put(kept)


def _setter(put: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    return lambda: put(state)


def _state_of(value: Any) -> Callable[[], None] | None:
    """How to put back a generator of random numbers."""
    if isinstance(value, torch.Generator):
        return _setter(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return _setter(value.setstate, value.getstate())
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        if bits is not None:
            state = copy.deepcopy(bits.state)
            return lambda: setattr(bits, "state", copy.deepcopy(state))
    return None


def _again(value: Any) -> Any:
    """What is put back: of an iterator a copy, so that it can be put back once more."""
    if not isinstance(value, Iterator) or isinstance(value, types.GeneratorType) or _state_of(value) is not None:
        return value
    return copy.copy(value)


def _is_as_it_was(tensor: Tensor, value: Tensor) -> bool:
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).all())


@contextlib.contextmanager
def set_aside(model: nn.Module, *, strict: bool = True) -> Iterator[None]:
    """Afterwards the state of the model is as it was."""
    state = State(model, strict=strict)
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def buffers_aside(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and torch's random numbers are as they were: for calls of nodes, not of modules."""
    buffers = [(b, b.detach().clone(), version_of(b)) for b in model.buffers() if not b.is_meta]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value, version in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(value)
                elif not _is_as_it_was(buffer, value):  # batch norm does not count what it writes: nor does this
                    buffer.data.copy_(value)
