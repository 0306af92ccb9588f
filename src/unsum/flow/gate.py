"""The gate at a place: every call of a module that a block asks about passes through it, on the way in and out.

A `Gate` is prepared for each place when the block opens. Every call takes the same steps, and each step looks first for
the ordinary case: one tensor in, one out, made by the module, with gradients on. The steps make a hook tell the truth:

- gradients come from hooks on the tensors that flow, not from module backward hooks (those fail on in-place changes,
  keyword arguments and nested outputs), each hook knowing its own call;
- the gradient of an input is this module's share, not that of all its users (`share`); where it is to be edited, and
  for an output that the module did not make (`Identity`, a parameter), an alias stands in for the tensor (`alias`);
- a checkpoint's second forward is no new call (`seams/checkpoints`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import exception
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.flow.alias import aliases
from unsum.flow.picking import Spot, pick
from unsum.flow.requests import Port, Wants
from unsum.flow.share import Share
from unsum.nested import leaves, put
from unsum.seams.checkpoints import ModuleCall
from unsum.seams.nodes import number_of
from unsum.seams.tensors import version_of
from unsum.sites import Place
from unsum.types import Kind, Path

if TYPE_CHECKING:
    from unsum.flow.flow import Flow

_Found = Sequence[tuple[Spot, Tensor]]
_Shares = list[tuple[Share, Tensor]]
_Nodes = tuple[Any, ...]
_Begun = tuple[ModuleCall | None, BaseException | None, _Nodes, _Shares]
"""A call that has begun: the error that was being handled, the nodes of its arguments, the shares that are wanted."""

_tuple: Any = tuple.__new__  # a named tuple by way of its own class takes twice as long
_grad_enabled, _is_traced, _are_here = torch.is_grad_enabled, seams.is_traced, seams.are_here


class Gate(seams.Hook):
    """The gate at one place. As a hook, it is called before each call of the module."""

    __slots__ = ("begun", "entering", "flow", "key", "leaving", "place")

    def __init__(self, flow: Flow, place: Place, wants: Wants) -> None:
        self.flow, self.place = flow, place
        self.begun: list[_Begun] = []
        self.key = 0  # of the hooks on the module
        self.entering, self.leaving = flow.requests.ports(wants)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is about to be called. What it is to get instead of its arguments, or None."""
        flow, port = self.flow, self.entering
        # Whether the call is traced comes first: torch may be reading these lines.
        if (_is_traced() or not _are_here(flow.blocks)) and not flow.sees(self.place):
            return None
        first = args[0] if args else None
        if isinstance(first, Tensor) and len(args) == 1 and not kwargs:
            given: _Nodes = (first.grad_fn,)
        else:
            given = tuple([tensor.grad_fn for _, tensor in leaves([args, kwargs])])
        call = flow.begin(self.place)
        shares: _Shares = []
        self.begun.append((call, exception(), given, shares))
        if call is None:
            return None
        if call.repeats is not None:
            flow.repeated.add(call.repeats)
        if port is None or self.put_down(port, call, first, given):
            return None
        new = self.take(port, call, first, (args, kwargs), given, shares)
        if new is None:
            return None
        return tuple(new[i] for i in range(len(args))), {key: new[key] for key in kwargs}

    def put_down(self, port: Port, call: ModuleCall, tensor: Any, given: _Nodes) -> bool:
        """The ordinary case of `take`, in a few instructions: a tensor that the receiver holds by reference, and for
        its gradient one that the module has made. False where it is another case."""
        flow = self.flow
        seen = flow.seen
        number, again, is_real, start, _, _ = call
        if seen is None or not port.is_put_down or again or not isinstance(tensor, Tensor):
            return False
        node = tensor.grad_fn
        if node is None:
            if port.grads or tensor.is_inference():
                return False
            spot = _tuple(Spot, (self.place, port.kind, number, port.first, (), port.values))
            seen.append((spot, tensor.detach(), version_of(tensor), None))
            flow.acted.at(tensor, spot)
            return True
        made = number_of(node)
        where = made, type(node), tensor.output_nr, tensor.shape
        if waited := port.grads:
            if made < start or not is_real or node in given or not _grad_enabled():
                return False
            spot = _tuple(Spot, (self.place, port.grad_kind, number, port.first, (), waited))
            flow.noted((spot, *where))
            flow.expected.add(spot, tensor)
        if asked := port.values:
            spot = _tuple(Spot, (self.place, port.kind, number, port.first, (), asked))
            seen.append((spot, tensor.detach(), version_of(tensor), None))
            flow.noted((spot, *where))
        return True

    def mark(self, tensor: Tensor) -> Tensor:
        """Pass a marked tensor through: it acts as the output of a module that returns its input."""
        assert self.leaving is not None
        seams.refuse_tracing(self.place.name)
        given = (tensor.grad_fn,)
        call = self.flow.begin(self.place)
        if call is None:
            return tensor
        if call.repeats is not None:
            self.flow.repeated.add(call.repeats)
        new = self.take(self.leaving, call, tensor, tensor, given)
        self.flow.receiver.called()
        return tensor if new is None else new  # type: ignore[no-any-return]

    def take(
        self, port: Port, call: ModuleCall, first: Any, whole: Any, given: _Nodes, shares: _Shares | None = None
    ) -> Any:
        """Hand the tensors of one port of a call to the receiver, and wait for their gradients. What flows on, or None.

        `whole` is the output, or the arguments and the keywords; `first` is what a plain site means in it; `given` are
        the nodes of what the module got. The shares of arguments that are to be waited for are added to `shares`.
        """
        flow, place = self.flow, self.place
        number, _, is_real, start, _, _ = call
        acted, asked, waited = flow.acted, port.values, port.grads if is_real else ()
        values: _Found = ()
        grads: _Found = ()
        if port.is_plain and isinstance(first, Tensor):
            if asked:
                values = ((_tuple(Spot, (place, port.kind, number, port.first, (), asked)), first),)
            if waited:
                grads = ((_tuple(Spot, (place, port.grad_kind, number, port.first, (), waited)), first),)
        else:
            values = self._pick(port.kind, asked, number, port.read(whole))
            grads = self._pick(port.grad_kind, waited, number, port.read(whole))
        now: dict[Path, Tensor] = {}  # the tensors that flow on, where they differ
        if grads:
            if not _grad_enabled():  # nothing done now will be differentiated
                why = "it ran with gradients switched off (no_grad or inference_mode)"
                flow.notes[place, port.grad_kind] = why
                grads = ()
            foreign = []  # tensors that the module has not made: it returned what it was given, or a parameter
            for spot, tensor in grads:
                node = acted.at(tensor, spot)
                if node is None or number_of(node) < start or node in given:
                    foreign.append(tensor)
            if foreign:
                if shares is not None and not flow.is_edited(place):
                    grads = self._share(call, grads, shares)
                else:
                    now = self._aliases(port.read(whole), foreign)
        seen = None if call.again else flow.receiver.seen
        for spot, tensor in values:
            if now:
                tensor = now.get(spot.path, tensor)
            if seen is not None and not tensor.is_inference():
                seen.append((spot, tensor.detach(), version_of(tensor), None))
                new = None
            else:
                new = flow.receiver.value(spot, tensor, call)
            if new is not None and new is not tensor:
                now[spot.path] = tensor = new
            acted.at(tensor, spot)
        for spot, tensor in grads:
            if now:
                tensor = now.get(spot.path, tensor)
            if tensor.requires_grad:
                flow.expected.add(spot, tensor)
            else:
                why = "it needs no gradient: nothing before it requires one (frozen, or data)"
                flow.notes[place, spot.kind] = why
        return put(port.read(whole), now) if now else None

    def _pick(self, kind: Kind, wanted: Iterable[int], call: int, value: Any) -> _Found:
        flow = self.flow
        asked = ((number, flow.requests.asked[number]) for number in wanted)
        sites = [(number, site) for number, site in asked if site.call is None or site.call == call]
        return pick(self.place, kind, call, value, sites, one=flow.receiver.edits, absent=flow.notes)

    def _share(self, call: ModuleCall, grads: _Found, shares: _Shares) -> _Found:
        """Wait for the module's share of its inputs' gradients; what is left is to be watched itself."""
        shares += [(Share(spot, tensor, call.start), tensor) for spot, tensor in grads if tensor.requires_grad]
        self.flow.expected.shares += [share for share, _ in shares]
        return [(spot, tensor) for spot, tensor in grads if not tensor.requires_grad]

    def end_shares(self, shares: _Shares, output: Any) -> dict[Path, Tensor]:
        """The module is left. Where it returns an input itself, its share comes through the output: by an alias."""
        outputs = [tensor for _, tensor in leaves(output)]
        alive: Any = next((seams.on_gradient(t, seams.inert) for t in outputs if t.grad_fn is not None), None)
        for share, tensor in shares:
            share.close(tensor, outputs, alive)
        returned = [(share, tensor) for tensor in outputs for share, _ in shares if share.is_of(tensor)]
        if not returned:
            return {}
        made = self._aliases(output, [tensor for _, tensor in returned])
        of = {id(tensor): made[path] for path, tensor in leaves(output) if path in made}
        for share, tensor in returned:
            if not share.returned and id(tensor) in of:
                share.returned = True
                self.flow.expected.add_returned(share, of[id(tensor)])
        return made

    def _aliases(self, value: Any, tensors: Sequence[Tensor]) -> dict[Path, Tensor]:
        place = self.place
        return aliases(value, tensors, who=self.flow, place=place.name if place.thing is None else place.thing)


class Leaving(seams.Hook):
    """The hook that is called after each call of a gate's module."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate, module: nn.Module) -> None:
        self._gate = gate
        gate.key = seams.on_call(module, gate, self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A module was called. What is to flow on instead of its output, or None."""
        gate = self._gate
        flow, port, begun = gate.flow, gate.leaving, gate.begun
        if not begun or not (_are_here(flow.blocks) or flow in seams.here()):
            return None
        call, error, given, shares = begun.pop()
        if call is None or (output is None and exception() is not error):  # the module raised
            return None
        returned = gate.end_shares(shares, output) if shares else None
        if returned:
            output = put(output, returned)
        elif port is not None and gate.put_down(port, call, output, given):
            return None
        new = None if port is None else gate.take(port, call, output, output, given)
        flow.receiver.called()
        return output if new is None and returned else new

    def remove(self) -> None:
        """No longer follow the module."""
        module = self._gate.place.thing
        assert isinstance(module, nn.Module)
        seams.off_call(module, self._gate.key)
