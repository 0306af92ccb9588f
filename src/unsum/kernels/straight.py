"""Operations that were called, as a straight line of Python: nothing is decided in it. Views are made where they are
read, each as one view of what it is a part of; a kernel is told addresses alone. A tensor is let go where it was read
last: else a function that goes from sample to sample would hold what it has made of all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsum.kernels import constants
from unsum.seams.operators import OpOverload, schema_of
from unsum.seams.tensors import memory_number

Program = Callable[..., tuple[Tensor, ...] | None]  # None where what it is given is not as it was


class NotRecordable(Exception):
    """What ran cannot be had again from its tensors alone."""


@dataclass
class Instruction:
    """One operation: what is called, with what, and which tensors came of it."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Tensor | None]
    listed: bool  # whether they came as a sequence
    writes: bool  # to what it is given: it stays even if nobody reads what comes of it
    launches: bool = False  # whether it is a kernel


@dataclass(frozen=True)
class _View:
    """A tensor as a part of another's memory."""

    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from where the base begins


class Writer:
    """Turns a tape into Python."""

    def __init__(self, given: Sequence[Tensor], steps: Sequence[Instruction], *, quick: bool) -> None:
        self._given, self._steps, self._quick = given, steps, quick
        self._slots: dict[int, int] = {}  # id of a tensor -> its number; the tape holds them all
        self._tensors: list[Tensor] = []
        self._views: dict[int, _View] = {}
        self._names: dict[int, str] = {}  # numbers that have a variable
        self._values: dict[str, Any] = {"_strided": torch.as_strided}
        self._lines: list[str] = []
        self._addresses: set[str] = set()  # variables of which the address has one
        self._inputs = {self._slot(tensor) for tensor in given}

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._slots[id(tensor)]

    def program(self, found: Sequence[Tensor]) -> Program:
        """The function."""
        if len(set(map(id, self._given))) < len(self._given):
            raise NotRecordable("one tensor came twice: which of the two is read where is not known")
        given = [f"g{k}" for k in range(len(self._given))]
        for name, tensor in zip(given, self._given, strict=True):
            self._names[self._slot(tensor)] = name
            self._guard(name, tensor)
        if any(step.launches for step in self._steps):
            for name in given:
                self._addresses.add(name)
                self._lines.append(f"{self._address(name)} = {name}.data_ptr()")
            self._lines.append(f"if ({' | '.join(map(self._address, given))}) & 15: return None")
        for step in self._needed(found):
            self._step(step)
        results = "".join(f"{self._name(self._slot(tensor))}, " for tensor in found)
        self._lines.append(f"return ({results})")
        body = "\n    ".join(_freed(self._lines))
        exec(f"def program({', '.join(given)}):\n    {body}", self._values)
        program: Program = self._values["program"]
        return program

    def _guard(self, name: str, tensor: Tensor) -> None:
        known = self._value((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device))
        self._lines.append(f"if ({name}.shape, {name}.stride(), {name}.dtype, {name}.device) != {known}: return None")
        self._lines.append(f"if {name}.is_neg() or {name}.is_conj(): return None")  # numbers that are not what they say

    def _needed(self, found: Sequence[Tensor]) -> list[Instruction]:
        """Without what nobody reads."""
        wanted, needed = {id(tensor) for tensor in found}, []
        for step in reversed(self._steps):
            if step.writes or any(out is not None and id(out) in wanted for out in step.outs):
                needed.append(step)
                wanted |= {id(t) for t in _tensors((*step.args, *step.kwargs.values()))}
        return needed[::-1]

    def _step(self, step: Instruction) -> None:
        if not step.writes and self._is_view(step):
            return
        if step.writes and not step.launches and any(_is_of(tensor, self._given) for tensor in _tensors(step.args[:1])):
            raise NotRecordable("something is written to what was given")
        if getattr(step.call, "takes_addresses", False):
            self._lines.append(f"{self._value(step.call)}({', '.join(map(self._at, step.args))})")
            return
        args = [self._text(arg) for arg in step.args]
        args += [f"{key}={self._text(value)}" for key, value in step.kwargs.items()]
        call = f"{self._value(_quick(step.call) if self._quick else step.call)}({', '.join(args)})"
        if not step.outs:
            self._lines.append(call)
            return
        names = []
        for out in step.outs:
            if out is None:
                names.append("_")
                continue
            slot = self._slot(out)
            if slot not in self._names:  # else what was written to, given back
                self._names[slot] = f"t{slot}"
            names.append(self._names[slot])
        self._lines.append(f"{', '.join(names)}{',' if step.listed else ''} = {call}")

    def _is_view(self, step: Instruction) -> bool:
        """Whether all that came is memory of the first argument: then it is made where it is read."""
        base = step.args[0] if step.args and isinstance(step.args[0], Tensor) else None
        outs = [out for out in step.outs if out is not None]
        if base is None or not outs or len(outs) < len(step.outs) or not all(_shares(base, out) for out in outs):
            return False
        slot = self._slot(base)
        above = self._views.get(slot) or _View(slot, (), (), 0)
        start = base.storage_offset() - above.offset
        for out in outs:
            if (known := self._slot(out)) != slot and known not in self._names:
                self._views[known] = _View(
                    above.base, tuple(out.shape), out.stride(), int(out.storage_offset() - start)
                )
        return True

    def _name(self, slot: int) -> str:
        """The variable of a tensor, made now if it is a view."""
        if slot in self._names:
            return self._names[slot]
        view = self._views.get(slot)
        if view is None:
            if not constants.is_constant(self._tensors[slot]):
                raise NotRecordable("a tensor from elsewhere")
            self._names[slot] = self._value(self._tensors[slot])
            return self._names[slot]
        base, name = self._name(view.base), f"t{slot}"
        whole = self._tensors[view.base]
        if (view.shape, view.stride, view.offset) == (tuple(whole.shape), whole.stride(), 0):
            self._names[slot] = base
            return base
        at = (
            f"{base}.storage_offset() + {view.offset}"
            if view.base in self._inputs
            else whole.storage_offset() + view.offset
        )
        self._lines.append(f"{name} = _strided({base}, {view.shape}, {view.stride}, {at})")
        self._names[slot] = name
        return name

    def _address(self, name: str) -> str:
        return f"a{name}"

    def _at(self, tensor: Tensor) -> str:
        """Where a tensor begins in memory: that is all that a kernel is told of it."""
        slot = self._slot(tensor)
        view = self._views.get(slot) if slot not in self._names else None
        base = self._name(slot if view is None else view.base)
        if base not in self._addresses:
            self._addresses.add(base)
            self._lines.append(f"{self._address(base)} = {base}.data_ptr()")
        offset = 0 if view is None else view.offset * tensor.element_size()
        return f"{self._address(base)} + {offset}" if offset else self._address(base)

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._name(self._slot(value))
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return f"[{', '.join(self._text(each) for each in value)}]"
        return repr(value) if value is None or type(value) in (int, bool) else self._value(value)

    def _value(self, value: Any) -> str:
        name = f"v{len(self._values)}"
        self._values[name] = value
        return name


_VARIABLE = re.compile(r"\ba?(t\d+)\b")  # a tensor made on the way, or its address


def _freed(lines: Sequence[str]) -> list[str]:
    """The lines, with every tensor made on the way let go after the line that reads it last, as the code that was
    recorded did: the next one takes its memory."""
    left: list[str] = []
    seen: set[str] = set(_VARIABLE.findall(lines[-1]))  # what is returned
    for line in reversed(lines):
        last = dict.fromkeys(name for name in _VARIABLE.findall(line) if name not in seen)
        seen |= last.keys()
        left += [f"del {', '.join(last)}", line] if last else [line]
    return left[::-1]


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _is_of(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether this is memory of one of these."""
    return any(memory_number(tensor) == memory_number(other) for other in given)


def _shares(base: Tensor, out: Tensor) -> bool:
    """Whether this is a view of another's memory, with numbers of the same kind."""
    if out.dtype != base.dtype or out.is_complex() or out.device != base.device:
        return False
    return memory_number(out) == memory_number(base)


def _quick(call: Any) -> Any:
    """Torch's own function for an operator, which takes a third of the operator's time to be called."""
    if not isinstance(call, OpOverload):
        return call
    name = schema_of(call).name.partition("::")[2]
    if name.startswith("linalg_"):
        return getattr(torch.linalg, name.removeprefix("linalg_"), call)
    return getattr(torch, name, None) or getattr(Tensor, name, call)
