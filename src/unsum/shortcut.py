"""The short way of an ordinary call.

Most calls are alike: a module gets one plain tensor and returns one, gradients are on, no checkpoint and no transform
is around, and a capture keeps what flows by reference. Then all that `flow` would do comes down to the few steps here,
in a third of the time. Each call is looked at anew; whatever is not ordinary about it goes the long way, from its
beginning or from its end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum import hooks
from unsum.acted import Acted
from unsum.picking import Spot
from unsum.recompute import Calls, may_be_in_region
from unsum.sites import Place, Site
from unsum.types import Kind
from unsum.watch import Watch

Seen = tuple[Spot, Tensor, int, int | None, torch.Size, torch.dtype]
"""A value as it is put down: where, what, its version, in which backward, its shape and dtype."""

Begun = tuple[int, int, BaseException | None, int, Any]
"""A call: its number, that of the next node, the error being handled, the id of the argument and its node."""

_SERVED = {"input", "output", "grad_output"}  # a module's share of its input's gradient is found by other means
_grad_enabled, _next_node = torch.is_grad_enabled, torch._C._autograd._get_sequence_nr


class Long(Protocol):
    """The long way."""

    blocks: list[hooks.Block] | None
    calls: Calls
    acted: Acted
    backwards: int

    def enter(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def leave(self, place: Place, output: Any) -> Any: ...
    def resume(self, place: Place, begun: Begun, output: Any) -> Any: ...
    def add(self, watch: Watch) -> None: ...
    def arrived(self, spot: Spot, grad: Tensor) -> Tensor | None: ...


def serves(kinds: Mapping[Kind, Sequence[int]], sites: Sequence[Site]) -> bool:
    """Whether what is asked for at a place can go the short way: whole values, of every call."""
    if not _SERVED.issuperset(kinds):
        return False
    return all(not sites[n].path and sites[n].call is None for numbers in kinds.values() for n in numbers)


def follow(
    flow: Long, place: Place, kinds: Mapping[Kind, Sequence[int]], running: list[Any], seen: list[Any]
) -> hooks.Handle:
    """Follow the calls of a module; what was seen is put down in `seen`."""
    assert isinstance(place.thing, nn.Module)
    lane = _Lane(flow, place, kinds, running, seen)
    return hooks.on_plain_call(place.thing, _Entering(lane), _Leaving(lane))


class _Lane:
    """One module that is followed."""

    __slots__ = ("flow", "grad_output", "input", "output", "place", "running", "seen")

    def __init__(
        self, flow: Long, place: Place, kinds: Mapping[Kind, Sequence[int]], running: list[Any], seen: list[Any]
    ) -> None:
        self.flow, self.place, self.running, self.seen = flow, place, running, seen
        self.input = tuple(kinds.get("input", ()))  # the requests for it
        self.output = tuple(kinds.get("output", ()))
        self.grad_output = tuple(kinds.get("grad_output", ()))


class _Entering(hooks.Hook):
    """Before a call."""

    __slots__ = ("_lane",)

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lane = self._lane
        flow, place = lane.flow, lane.place
        if (
            len(args) != 1
            or kwargs
            or not _is_plain(tensor := args[0])
            or not hooks.are_here(flow.blocks)
            or may_be_in_region()
            or hooks.is_traced()
        ):
            return flow.enter(place, args, kwargs)
        node: Any = tensor.grad_fn
        counts = flow.calls.counts
        number = counts[place] = counts.get(place, -1) + 1
        lane.running.append((number, _next_node(), sys.exc_info()[1], id(tensor), node))
        if lane.input:
            spot, shape = Spot(place, "input", number, (0,), (), lane.input), tensor.shape
            lane.seen.append((spot, tensor.detach(), tensor._version, None, shape, tensor.dtype))
            flow.acted.note(spot, tensor, node, shape)
        return None


class _Leaving(hooks.Hook):
    """After a call."""

    __slots__ = ("_lane",)

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        lane = self._lane
        flow, place, running = lane.flow, lane.place, lane.running
        if not running or type(running[-1]) is not tuple:
            return flow.leave(place, output)
        if not hooks.are_here(flow.blocks):
            return None
        begun: Begun = running.pop()
        if not _is_plain(output) or not _grad_enabled():
            return flow.resume(place, begun, output)
        number, start, _, given, given_node = begun
        node: Any = output.grad_fn
        if lane.grad_output and (  # nothing to wait for, or not made by the module: see `flow`
            node is None or node._sequence_nr() < start or (id(output) == given and node == given_node)
        ):
            return flow.resume(place, begun, output)
        shape = output.shape
        if lane.output:
            spot = Spot(place, "output", number, (), (), lane.output)
            lane.seen.append((spot, output.detach(), output._version, None, shape, output.dtype))
            flow.acted.note(spot, output, node, shape)
        if lane.grad_output:
            spot = Spot(place, "grad_output", number, (), (), lane.grad_output)
            flow.acted.note(spot, output, node, shape)
            flow.add(_Waiting(spot, output, flow, lane.seen))
        return None


class _Waiting(Watch):
    """Puts down the gradient of an output."""

    __slots__ = ("_flow", "_seen")

    def __init__(self, spot: Spot, tensor: Tensor, flow: Long, seen: list[Any]) -> None:
        self._flow, self._seen = flow, seen
        super().__init__(spot, tensor, flow.arrived)

    def __call__(self, grad: Tensor) -> Tensor | None:
        if self._is_closed() or not _is_plain(grad) or grad.requires_grad or hooks.is_batched(grad):
            return super().__call__(grad)
        self._seen.append((self.spot, grad, grad._version, self._flow.backwards, grad.shape, grad.dtype))
        return None


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and not value.is_inference() and not value.is_nested
