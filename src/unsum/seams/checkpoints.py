"""Which call of a place is this one? A checkpoint runs a forward again inside the backward; that is not a new call.

Regions are run again in the reverse of their order, and one module may be called in several of them, so counting alone
cannot tell which call is repeated. What identifies a region is torch's own object for it, found on the Python stack:
the `_CheckpointFrame` of a non-reentrant checkpoint, the context of the autograd Function of a reentrant one (torch's,
or anybody's: reversible layers do the same). Within a region calls come in the same order both times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint

from unsum.errors import UnsupportedError
from unsum.seams.nodes import Function, current_backward, next_number, number_of

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__
_FUNCTION_FILE = torch.autograd.function.__file__
_grad_enabled = torch.is_grad_enabled
_tuple: Any = tuple.__new__  # a named tuple by way of its own class takes twice as long

saved_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""`saved_hooks(True)`: what packs and unpacks the tensors that are saved now; None for nothing. A checkpoint does."""


class ModuleCall(NamedTuple):
    """One call of a place, or one repetition of it."""

    number: int
    again: bool  # run a second time, inside a backward, by a checkpoint
    real: bool  # the graph built now is the one that will be walked
    start: int  # autograd's counter when the call began: older nodes come from elsewhere
    regions: tuple[Any, ...]  # the checkpoints around it, innermost first
    repeats: Any | None  # the checkpoint that runs it again


class _Region(NamedTuple):
    thing: Any
    again: object | None  # which repetition, if it is one
    reentrant: bool


_UNSEEN = object()  # the forward of a Function whose context cannot be seen


class CallCounter:
    """Counts the calls of each place."""

    def __init__(self) -> None:
        self.counts: dict[Any, int] = {}  # of each place the number of its last call, from 0
        self._opened = next_number()
        self._unknown: set[Any] = set()  # places called in a Function whose context cannot be seen
        # region -> place -> the calls made in it; and the same for the repetition that is under way
        self._made: WeakKeyDictionary[Any, dict[Any, list[int]]] = WeakKeyDictionary()
        self._again: WeakKeyDictionary[Any, tuple[object, dict[Any, int]]] = WeakKeyDictionary()

    def count(self, place: Any) -> int:
        """How often the place was called, repetitions not counted."""
        return self.counts.get(place, -1) + 1

    def begin(self, place: Any) -> ModuleCall | None:
        """The call that begins now; None if it repeats one that was made before this block was open."""
        start = next_number()
        if _grad_enabled() and current_backward() == -1 and saved_hooks(True) is None:  # in no checkpoint, surely
            index = self.counts[place] = self.counts.get(place, -1) + 1
            return _tuple(ModuleCall, (index, False, True, start, (), None))  # type: ignore[no-any-return]
        regions = _regions()
        repeated = next((i for i, region in enumerate(regions) if region.again is not None), None)
        if repeated is not None and self._is_new(place, regions[repeated]):
            repeated = None
        if repeated is None:
            index = self.counts[place] = self.counts.get(place, -1) + 1
            inner, repeats, real = [region for region in regions if region.again is None], None, True
        else:
            known = self._repeated(place, regions[repeated])
            if known is None:
                return None
            index, inner, repeats = known, regions[:repeated], regions[repeated].thing
            real = regions[repeated].reentrant
        if any(region.thing is _UNSEEN for region in inner):
            self._unknown.add(place)
            inner = [region for region in inner if region.thing is not _UNSEEN]
        for region in inner:
            self._made.setdefault(region.thing, {}).setdefault(place, []).append(index)
        return ModuleCall(index, repeats is not None, real, start, tuple(region.thing for region in inner), repeats)

    def _is_new(self, place: Any, region: _Region) -> bool:
        """Whether a call inside the backward of a Function is a new one: its forward ran in this block without it."""
        if not region.reentrant or place in self._made.get(region.thing, {}):
            return False
        if number_of(region.thing) < self._opened:
            return False  # its forward was run before this block
        if place in self._unknown:
            raise UnsupportedError(
                f"{getattr(place, 'name', place)}: called in the forward and in the backward of a custom "
                f"{type(region.thing).__name__.removesuffix('Backward')} whose forward has no context, so that the two "
                "cannot be told to be one call.\n  write it as forward(ctx, ...), without setup_context"
            )
        return True

    def _repeated(self, place: Any, region: _Region) -> int | None:
        made = self._made.get(region.thing)
        if made is None or place not in made:
            return None
        which, counts = self._again.get(region.thing, (None, {}))
        if which != region.again:
            counts = {}
            self._again[region.thing] = region.again, counts
        nth = counts.get(place, 0)
        counts[place] = nth + 1
        return made[place][nth] if nth < len(made[place]) else None


def _regions() -> list[_Region]:
    """The checkpoints that we are in, innermost first."""
    found: list[_Region] = []
    inner = frame = sys._getframe(2)
    while frame is not None:
        region = _region(frame)
        if _is_apply(frame) and inner.f_code.co_name == "forward" and _region(inner) is None:
            region = _Region(_UNSEEN, again=None, reentrant=True)
        if region is not None:
            found.append(region)
        inner, frame = frame, frame.f_back  # type: ignore[assignment]
    return found


def _is_apply(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _FUNCTION_FILE and frame.f_code.co_name == "apply"


def _region(frame: FrameType) -> _Region | None:
    code = frame.f_code
    if code.co_filename == _CHECKPOINT_FILE:
        if code.co_name == "unpack_hook" and "frame" in code.co_freevars:
            return _Region(frame.f_locals["frame"], again=frame.f_locals.get("gid"), reentrant=False)
        if code.co_name == "checkpoint":
            inside = frame.f_locals.get("gen")
            thing = inside.gi_frame.f_locals.get("new_frame") if inside is not None and inside.gi_frame else None
            return None if thing is None else _Region(thing, again=None, reentrant=False)
    if code.co_name in ("forward", "backward") and code.co_argcount and code.co_varnames[0] != "self":
        context = frame.f_locals.get(code.co_varnames[0])
        if isinstance(context, Function):
            again = ("backward", current_backward()) if code.co_name == "backward" else None
            return _Region(context, again=again, reentrant=True)
    return None
