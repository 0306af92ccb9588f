"""The same operations again, without what decided on them. A function of tensors is run once with everything that it
calls written down: operations of torch and launches of kernels. What is written down becomes a straight line of Python,
views as one view each, which gives the same for other tensors of the same shapes, strides, dtypes and devices.

Nothing is taken on trust: a recording that looks at numbers (`item`), that reads tensors it was not given, or that does
not give the very same numbers when it runs, is no recording. Whoever uses one compares it once more, on other numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from unsum.kernels import constants

Program = Callable[..., tuple[Tensor, ...] | None]  # None where what it is given is not as it was

_local = threading.local()


class NotRecordable(Exception):
    """What ran cannot be had again from its tensors alone."""


@dataclass
class _Step:
    """One operation: what is called, with what, and which tensors came of it."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Tensor | None]
    listed: bool  # whether they came as a sequence
    writes: bool  # to what it is given: it stays even if nobody reads what comes of it


@dataclass
class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Writes down while it is entered."""

    given: list[Tensor]
    steps: list[_Step] = field(default_factory=list)
    launches: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Any:
        self._before, _local.tape = getattr(_local, "tape", None), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _local.tape = self._before
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        listed = isinstance(found, tuple | list)
        outs = list(found) if listed else [found]
        if (
            not all(out is None or isinstance(out, Tensor) for out in outs)
            or torch.Tag.nondeterministic_seeded in func.tags
        ):
            raise NotRecordable(f"{func} looks at numbers, or draws them")
        if _looks(func, args):
            raise NotRecordable(f"{func} looks at numbers")
        self.steps.append(_Step(func, tuple(args), kwargs, outs, listed, _writes(func)))
        return found

    def summed_from(self, found: Tensor) -> Tensor | None:
        """The (parts, n) tensor of which this one is the sum over parts; None if it came otherwise."""
        for step in reversed(self.steps):
            if any(out is found for out in step.outs):
                source = step.args[0] if step.args else None
                is_sum = step.call is torch.ops.aten.sum.dim_IntList and list(step.args[1:]) == [[0]]
                return source if is_sum and isinstance(source, Tensor) and source.dim() == 2 else None
        return None

    def launched(self, start: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """A kernel was launched with these tensors, some of which it has written to."""
        self.launches = True
        self.steps.append(_Step(start, tuple(tensors), {}, [], False, True))


def tape() -> Tape | None:
    """What writes down now, in this thread."""
    return getattr(_local, "tape", None)


def unwritten() -> Any:
    """What runs within is not written down."""
    return _disable_current_modes()


def _looks(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether what comes has a shape, or is a number, that depends on numbers."""
    if func is torch.ops.aten.index.Tensor:  # a mask does, whole numbers do not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _writes(func: OpOverload) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def record(made: Tape, found: Sequence[Tensor]) -> Program | None:
    """What a tape has written down, as a function of what it was given that gives what was found; None if there is no
    such function."""
    for quick in (True, False):  # by torch's own functions, or by the operators as they were called
        try:
            program = _Writer(made, quick=quick).program(found)
            again = program(*made.given)
            if again is not None and all(map(is_same, again, found)):
                return program
        except Exception:  # another signature, a tensor from elsewhere
            pass
    return None


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, number by number, and lie in memory alike."""
    if (one.shape, one.dtype, one.stride(), one.device) != (other.shape, other.dtype, other.stride(), other.device):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@dataclass(frozen=True)
class _View:
    """A tensor as a part of another's memory."""

    base: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from where the base begins


class _Writer:
    """Turns a tape into Python."""

    def __init__(self, made: Tape, *, quick: bool) -> None:
        self._made, self._quick = made, quick
        self._slots: dict[int, int] = {}  # id of a tensor -> its number; the tape holds them all
        self._tensors: list[Tensor] = []
        self._views: dict[int, _View] = {}
        self._names: dict[int, str] = {}  # numbers that have a variable
        self._values: dict[str, Any] = {"_strided": torch.as_strided}
        self._lines: list[str] = []
        self._addresses: set[str] = set()  # variables of which the address has one
        self._inputs = {self._slot(tensor) for tensor in made.given}

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._slots[id(tensor)]

    def program(self, found: Sequence[Tensor]) -> Program:
        """The function."""
        given = [f"g{k}" for k in range(len(self._made.given))]
        for name, tensor in zip(given, self._made.given, strict=True):
            self._names[self._slot(tensor)] = name
            self._guard(name, tensor)
        if self._made.launches:
            for name in given:
                self._addresses.add(name)
                self._lines.append(f"{self._address(name)} = {name}.data_ptr()")
            self._lines.append(f"if ({' | '.join(map(self._address, given))}) & 15: return None")
        for step in self._needed(found):
            self._step(step)
        results = "".join(f"{self._name(self._slot(tensor))}, " for tensor in found)
        self._lines.append(f"return ({results})")
        body = "\n    ".join(self._lines)
        exec(f"def program({', '.join(given)}):\n    {body}", self._values)
        program: Program = self._values["program"]
        return program

    def _guard(self, name: str, tensor: Tensor) -> None:
        known = self._value((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device))
        self._lines.append(f"if ({name}.shape, {name}.stride(), {name}.dtype, {name}.device) != {known}: return None")

    def _needed(self, found: Sequence[Tensor]) -> list[_Step]:
        """Without what nobody reads."""
        wanted, needed = {id(tensor) for tensor in found}, []
        for step in reversed(self._made.steps):
            if step.writes or any(out is not None and id(out) in wanted for out in step.outs):
                needed.append(step)
                wanted |= {id(t) for t in _tensors((*step.args, *step.kwargs.values()))}
        return needed[::-1]

    def _step(self, step: _Step) -> None:
        if not step.writes and self._is_view(step):
            return
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

    def _is_view(self, step: _Step) -> bool:
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


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _shares(base: Tensor, out: Tensor) -> bool:
    """Whether this is a view of another's memory, with numbers of the same kind."""
    if out.dtype != base.dtype or out.is_complex() or out.device != base.device:
        return False
    return out.untyped_storage()._cdata == base.untyped_storage()._cdata


def _quick(call: Any) -> Any:
    """Torch's own function for an operator, which takes a third of the operator's time to be called."""
    if not isinstance(call, OpOverload):
        return call
    name = call._schema.name.partition("::")[2]
    if name.startswith("linalg_"):
        return getattr(torch.linalg, name.removeprefix("linalg_"), call)
    return getattr(torch, name, None) or getattr(Tensor, name, call)
