"""The short way of an ordinary call.

Most calls are alike: a module gets one plain tensor and returns one, gradients are on, no checkpoint and no transform
is around, and a capture keeps what flows by reference. Then all that `flow` would do comes down to the few steps here,
in about a third of the time. Each call is looked at anew; whatever is not ordinary about it goes the long way, from its
beginning or from its end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.acted import Acted
from unsum.flow.picking import Spot
from unsum.flow.waiting import Watch
from unsum.seams.checkpoints import Calls, may_be_in_region
from unsum.seams.nodes import next_number, number_of
from unsum.seams.tensors import version_of
from unsum.sites import Place, Site
from unsum.types import Kind

Seen = tuple[Spot, Tensor, int, int | None, torch.Size]
"""A value as it is put down: where, what, its version, in which backward, its shape."""

Begun = tuple[int, int, BaseException | None, int, Any]
"""A call: its number, that of the next node, the error being handled, the id of the argument and its node."""

_SERVED = {"input", "output", "grad_output"}  # a module's share of its input's gradient is found by other means
_tuple: Any = tuple.__new__  # a named tuple by way of its own class takes twice as long
_grad_enabled = torch.is_grad_enabled


class Long(Protocol):
    """The long way."""

    blocks: list[seams.Block] | None
    calls: Calls
    acted: Acted
    backwards: int

    def enter(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def leave(self, place: Place, output: Any) -> Any: ...
    def resume(self, place: Place, begun: Begun, output: Any) -> Any: ...
    def add(self, watch: Watch) -> None: ...
    def arrived(self, spot: Spot, grad: Tensor) -> Tensor | None: ...


def serves(site: Site) -> bool:
    """Whether what a site asks for can go the short way: whole values, of every call."""
    return site.kind in _SERVED and not site.path and site.call is None


def follow(
    flow: Long, place: Place, kinds: Mapping[Kind, tuple[int, ...]], running: list[Any], seen: list[Any]
) -> seams.Handle:
    """Follow the calls of a module; what was seen is put down in `seen`."""
    assert isinstance(place.thing, nn.Module)
    lane = _Lane(flow, place, kinds, running, seen)
    leaving = _Leaving(lane)
    leaving.key = seams.on_plain_call(place.thing, lane, leaving)
    return leaving


class _Lane(seams.Hook):
    """One module that is followed; called before each of its calls."""

    __slots__ = ("arrived", "flow", "grad_output", "input", "notes", "output", "place", "running", "seen")

    def __init__(
        self, flow: Long, place: Place, kinds: Mapping[Kind, tuple[int, ...]], running: list[Any], seen: list[Any]
    ) -> None:
        self.flow, self.place, self.running, self.seen, self.arrived = flow, place, running, seen, flow.arrived
        self.notes = flow.acted.notes
        self.input = kinds.get("input", ())  # the requests for it
        self.output = kinds.get("output", ())
        self.grad_output = kinds.get("grad_output", ())

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flow, place = self.flow, self.place
        if (
            seams.is_traced()  # first: torch may be reading these lines
            or kwargs
            or len(args) != 1
            or type(tensor := args[0]) is not Tensor
            or not seams.are_here(flow.blocks)
            or may_be_in_region()
            or tensor.is_nested
            or ((node := tensor.grad_fn) is None and tensor.is_inference())
        ):
            return flow.enter(place, args, kwargs)
        counts = flow.calls.counts
        number = counts[place] = counts.get(place, -1) + 1
        self.running.append((number, next_number(), sys.exc_info()[1], id(tensor), node))
        if self.input:
            spot, shape = _tuple(Spot, (place, "input", number, (0,), (), self.input)), tensor.shape
            self.seen.append((spot, tensor.detach(), version_of(tensor), None, shape))
            if node is None:
                flow.acted.at(tensor, spot)
            else:
                self.notes.append((spot, number_of(node), type(node), tensor.output_nr, shape))
        return None


class _Leaving(seams.Hook):
    """Called after each call of the module."""

    __slots__ = ("_lane", "key")

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane
        self.key = 0

    def remove(self) -> None:
        """No longer follow the module."""
        module = self._lane.place.thing
        assert isinstance(module, nn.Module)
        seams.off_plain_call(module, self.key)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        lane = self._lane
        flow, place, running = lane.flow, lane.place, lane.running
        if not running or type(running[-1]) is not tuple:
            return flow.leave(place, output)
        if not seams.are_here(flow.blocks):
            return None
        begun: Begun = running.pop()
        if type(output) is not Tensor or not _grad_enabled() or output.is_nested:
            return flow.resume(place, begun, output)
        number, start, _, given, given_node = begun
        node: Any = output.grad_fn
        if node is None or (made := number_of(node)) < start or (id(output) == given and node == given_node):
            return flow.resume(place, begun, output)  # there is nothing to wait for, or the module has not made it
        shape, output_nr, notes = output.shape, output.output_nr, lane.notes
        if lane.output:
            spot = _tuple(Spot, (place, "output", number, (), (), lane.output))
            lane.seen.append((spot, output.detach(), version_of(output), None, shape))
            notes.append((spot, made, type(node), output_nr, shape))
        if len(notes) > flow.acted.room:
            flow.acted.sort()
        if lane.grad_output:
            spot = _tuple(Spot, (place, "grad_output", number, (), (), lane.grad_output))
            notes.append((spot, made, type(node), output_nr, shape))
            watch = _Waiting(spot, output, lane.arrived)
            watch.lane = lane
            flow.add(watch)
        return None


class _Waiting(Watch):
    """Puts down the gradient of an output."""

    __slots__ = ("lane",)

    lane: _Lane

    def __call__(self, grad: Tensor) -> Tensor | None:
        if (
            type(grad) is not Tensor
            or self._moved
            or self._of_leaf
            or self._arrived is None
            or grad.requires_grad
            or grad.is_nested
            or seams.is_batched(grad)
        ):
            return super().__call__(grad)
        lane = self.lane
        lane.seen.append((self.spot, grad, version_of(grad), lane.flow.backwards, grad.shape))
        return None
