"""The same operations again, without what decided on them. A function of tensors is run once with everything that it
calls written down: operations of torch and launches of kernels. What is written down becomes a straight line of Python,
views as one view each, which gives the same for other tensors of the same shapes, strides, dtypes and devices.

Nothing is taken on trust: a recording that looks at numbers (`item`), that reads tensors it was not given, or that does
not give the very same numbers when it runs, is no recording. Whoever uses one compares it once more, on other numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unsum.kernels.straight import Instruction, Writer
from unsum.kernels.straight import NotRecordable as NotRecordable
from unsum.kernels.straight import Program as Program
from unsum.seams.modes import without_functions
from unsum.seams.operators import OpOverload, TorchDispatchMode, schema_of, without_modes

_local = threading.local()


class _Looks(TorchFunctionMode):  # type: ignore[misc]
    """Some ways to a tensor's numbers are no operation."""

    _WAYS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self._WAYS:
            raise NotRecordable(f"{func.__name__} looks at numbers")
        return func(*args, **(kwargs or {}))


@dataclass
class Tape(TorchDispatchMode):  # type: ignore[misc]
    """Writes down while it is entered."""

    given: list[Tensor]
    steps: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Any:
        self._before, _local.tape = getattr(_local, "tape", None), self
        self._looks = _Looks()
        self._looks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _local.tape = self._before
        super().__exit__(*error)
        self._looks.__exit__(*error)

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
        self.steps.append(Instruction(func, tuple(args), kwargs, outs, listed, _writes(func)))
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
        self.steps.append(Instruction(start, tuple(tensors), {}, [], False, writes=True, launches=True))


def tape() -> Tape | None:
    """What writes down now, in this thread."""
    return getattr(_local, "tape", None)


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """What runs within is not written down."""
    with without_functions(), without_modes():
        yield


def _looks(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether what comes has a shape, or is a number, that depends on numbers."""
    if func is torch.ops.aten.index.Tensor:  # a mask does, whole numbers do not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _writes(func: OpOverload) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in schema_of(func).arguments)


def record(made: Tape, found: Sequence[Tensor]) -> Program | None:
    """What a tape has written down, as a function of what it was given that gives what was found; None if there is no
    such function."""
    for quick in (True, False):  # by torch's own functions, or by the operators as they were called
        try:
            program = Writer(made.given, made.steps, quick=quick).program(found)
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


class Rehearsed:
    """A function of tensors that is called in every step: as it is at first, then written down, then compared with what
    was written down, and from then on run from that. It gives tensors, and what else there is to know of them, which is
    the same in every step."""

    def __init__(self) -> None:
        self._stage, self._about = 0, None  # 0 never run, 1 run once, 2 written down, 3 compared; -1 not to be had
        self._program: Program | None = None

    def __call__(
        self, function: Callable[[], tuple[Sequence[Tensor], Any]], given: list[Tensor]
    ) -> tuple[Sequence[Tensor], Any]:
        if self._program is not None and self._stage >= 2:
            found = self._program(*given)
            if found is not None and self._stage == 3:
                return found, self._about
            wanted = function()
            if found is not None:
                self._stage = 3 if all(map(is_same, found, wanted[0])) else -1
            return wanted
        if self._stage != 1:
            self._stage = 1 if self._stage == 0 else -1
            return function()
        self._stage = -1
        try:
            with Tape(given) as tape:
                wanted = function()
        except NotRecordable:
            return function()
        self._program, self._about = record(tape, wanted[0]), wanted[1]
        self._stage = -1 if self._program is None else 2
        return wanted
