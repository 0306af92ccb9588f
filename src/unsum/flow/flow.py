"""What flows at places: a block follows the modules asked for from `open` to `close`, and hands what flows to a
receiver. `capture` and `edit` are two receivers of the same flow."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from unsum import seams
from unsum.acted import Acted
from unsum.flow.gate import Gate, Leaving
from unsum.flow.picking import Spot
from unsum.flow.requests import Requests
from unsum.flow.waiting import Expected
from unsum.seams.checkpoints import CallCounter, ModuleCall
from unsum.sites import Place, Site


class Receiver(Protocol):
    """What to do with what flows. A result that is not None flows on instead."""

    @property
    def edits(self) -> bool: ...  # changes what flows, so that a site must be a single tensor
    @property
    def refuses(self) -> str | None: ...  # why a backward after the block would be wrong, where gradients are edited
    @property
    def seen(self) -> list[Any] | None: ...  # where tensors are put down by reference; None: `value`, `gradient` decide

    def value(self, spot: Spot, tensor: Tensor, call: ModuleCall) -> Tensor | None: ...
    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> Tensor | None: ...
    def called(self) -> None: ...
    def differentiated(self, roots: Sequence[Any]) -> None: ...  # a backward from these begins


class Flow:
    """The sites that a block asks for, followed from `open` to `close`."""

    def __init__(self, requests: Requests, receiver: Receiver) -> None:
        self.requests, self.receiver = requests, receiver
        self.calls = CallCounter()
        self.begin = self.calls.begin
        self.notes: dict[tuple[Place, Any], str] = {}  # what can explain a place's silence, by kind or by site
        self.repeated: weakref.WeakSet[Any] = weakref.WeakSet()  # checkpoints that were run again
        self.gates: dict[Place, Gate] = {}
        self.blocks: list[seams.Block] | None = None
        self.acted = Acted("edited" if receiver.edits else "captured")
        self.acted.room = 64 + 4 * len(requests.wants)  # no less than one call of each
        self.expected = Expected(receiver, self.acted)
        self.seen = receiver.seen  # of the receiver, read in every call
        self.noted = self.acted.notes.append
        self._handles: list[seams.Handle] = []

    @property
    def is_open(self) -> bool:
        return self.blocks is not None

    def open(self) -> None:
        """Put a hook on every module and parameter asked for."""
        seams.refuse_capturing("unsum.edit" if self.receiver.edits else "unsum.capture")
        self.blocks = seams.open_block(self)
        try:
            for place, wants in self.requests.wants.items():
                if isinstance(place.thing, nn.Module):
                    gate = self.gates[place] = Gate(self, place, wants)
                    self._handles.append(Leaving(gate, place.thing))
                elif isinstance(place.thing, nn.Parameter) and "grad" in wants:
                    self._follow_parameter(place, place.thing, wants["grad"])
        except BaseException:
            self.close()
            raise

    def _follow_parameter(self, place: Place, parameter: nn.Parameter, asked: tuple[int, ...]) -> None:
        if not parameter.requires_grad:
            self.notes[place, "grad"] = "the parameter is frozen (requires_grad=False)"
            return
        spot = Spot(place, "grad", 0, (), (), asked)

        def arrived(grad: Tensor) -> Tensor | None:
            if grad is None or self not in seams.here() or self.expected.is_somebodys():
                return None
            return self.expected.arrived(spot, grad)

        self.acted.leaves[place.name] = str(spot)
        self._handles.append(seams.on_gradient(parameter, arrived))

    def close(self) -> None:
        """Take away every hook of ours. Those on tensors of a graph that was not walked may stay, to refuse."""
        if self.blocks is None:
            return
        seams.close_block(self, self.blocks)
        self.blocks = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.gates.clear()
        self.seen = None
        self.expected.let_go(self.receiver.refuses)

    # ---- asked by gates -------------------------------------------------------------------------------------------

    @property
    def waits_at_parameters(self) -> bool:
        """Whether torch must bring gradients to parameters."""
        return any(site.kind == "grad" for site in self.requests.asked)

    def sees(self, place: Place) -> bool:
        """Whether this block sees what the thread does now. Raises where a hook would be baked into a trace."""
        if self not in seams.here():
            return False
        seams.refuse_tracing(place.name)
        return True

    def is_edited(self, place: Place) -> bool:
        """Whether an open block changes the gradients of this module's inputs: then they go through an alias."""
        return any(
            isinstance(block, Flow)
            and block.receiver.edits
            and block.requests.place_of(place.thing, "grad_input") is not None
            for block in seams.here()
        )

    # ---- asked by others ------------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor, name: str) -> Tensor:
        """What flows on from a tensor that is marked with this name."""
        place = self.requests.mark(name)
        if place is None:
            return tensor
        if place not in self.gates:
            self.gates[place] = Gate(self, place, self.requests.wants[place])
        return self.gates[place].mark(tensor)

    def note(self, place: Place, site: Site) -> str | None:
        """What was seen at a place that can explain its silence."""
        return self.notes.get((place, site), self.notes.get((place, site.kind)))

    def before_backward(self, call: seams.Backward) -> None:
        self.receiver.differentiated(call.roots)
        self.expected.before_backward(call)

    def after_backward(self, *, failed: bool) -> None:
        self.expected.after_backward(failed=failed)
