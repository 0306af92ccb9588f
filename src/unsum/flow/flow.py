"""What flows at places: follows every call of the modules asked for, and hands what flows to a receiver.

`capture` and `edit` are two receivers of the same flow. Here is everything that makes a hook tell the truth:

- gradients come from hooks on the tensors that flow, not from module backward hooks (those fail on in-place changes,
  keyword arguments and nested outputs), each hook knowing its own call;
- the gradient of an input is this module's share, not that of all its users (`share`); where it is to be edited, and
  for an output that the module did not make (`Identity`, a parameter), an alias stands in for the tensor;
- a view that is changed in place later is found again in the graph (`inplace`);
- a checkpoint's second forward is no new call (`recompute`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.acted import Acted
from unsum.errors import SiteError, UnsupportedError
from unsum.flow import shortcut
from unsum.flow.alias import aliases
from unsum.flow.picking import Spot, pick
from unsum.flow.share import Collection, Share
from unsum.flow.shortcut import Begun
from unsum.flow.waiting import Watch
from unsum.nested import leaves, put
from unsum.seams.checkpoints import Call, Calls
from unsum.seams.nodes import next_number, number_of
from unsum.sites import Names, Place, Site
from unsum.types import Kind, Path, Step


class Receiver(Protocol):
    """What to do with what flows. A result that is not None flows on instead."""

    @property
    def edits(self) -> bool: ...  # changes what flows, so that a site must be a single tensor
    @property
    def refuses(self) -> str | None: ...  # why a backward after the block would be wrong, where gradients are edited

    @property
    def seen(self) -> list[Any] | None: ...  # where what is kept by reference may be put down as it is, without asking

    def value(self, spot: Spot, tensor: Tensor, call: Call) -> Tensor | None: ...
    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> Tensor | None: ...
    def called(self) -> None: ...


_Shares = list[tuple[Share, Tensor]]  # inputs of a call whose share of the gradient is wanted


class _Running(NamedTuple):
    """A call that has begun."""

    call: Call | None
    shares: _Shares
    error: BaseException | None  # what was being handled when it began
    given: Mapping[int, Any]  # the nodes of its tensor arguments, by their ids


class Flow:
    """Follows the sites asked for from `open` to `close`."""

    def __init__(self, model: nn.Module | None, asked: Sequence[Site], receiver: Receiver) -> None:
        self.names = None if model is None else Names(model)
        self.asked = asked
        self.receiver = receiver
        self.calls = Calls()
        self.acted = Acted("edited" if receiver.edits else "captured")
        self.backwards = 0
        self.repeated: weakref.WeakSet[Any] = weakref.WeakSet()  # checkpoints that were run again
        self.places: dict[int, dict[str, Place]] = {}  # request -> the places that it names
        self._wants: dict[Place, dict[Kind, tuple[int, ...]]] = {}  # the requests for what, where
        self._marks: dict[str, Place] = {}
        self._notes: dict[tuple[Place, Any], str] = {}  # by kind, or by site
        self._places: dict[int, Place] = {}  # by the id of the module or parameter
        self._running: dict[Place, list[_Running | Begun]] = {}
        self._handles: list[seams.Handle] = []
        self._watches: list[Watch] = []
        self._shares: list[Share] = []
        self._collections: list[Collection] = []  # one for each backward that is under way
        self._second_order: list[range] = []  # the nodes that a backward with create_graph has made
        self._many = 1024
        self._accumulates: list[bool] = []  # for each backward under way, whether it adds to .grad
        self._first_node: int | None = None
        self.blocks: list[seams.Block] | None = None
        self._short = [shortcut.serves(site) for site in asked]
        self._all_short = all(self._short)
        for number, site in enumerate(asked):
            self._resolve(number, site)
        self.acted.room = 64 + 4 * len(self._places)  # no less than one call of each

    # ---- names ----------------------------------------------------------------------------------------------------

    def _resolve(self, number: int, site: Site) -> None:
        places = self.places[number] = {}
        if self.names is None:
            if not isinstance(site.where, str) or site.kind not in ("output", "grad_output"):
                raise SiteError(
                    f"{site}: without a model only marked tensors can be named, as 'name:output' or 'name:grad_output'"
                )
            return
        known, wants, kind, alone = self._places, self._wants, site.kind, (number,)
        for name, thing in self.names.find(site).items():
            place = known.get(id(thing))
            if place is None:
                place = known[id(thing)] = Place(name, thing)
                wants[place] = {}
            places[name] = place
            kinds = wants[place]
            kinds[kind] = (*kinds[kind], number) if kind in kinds else alone

    def mark(self, name: str) -> Place | None:
        """The place of a mark of this name, if it is asked for."""
        if self.names is not None:
            return None
        place = self._marks.get(name)
        if place is None:
            place = self._marks[name] = Place(name)
            for number, site in enumerate(self.asked):
                assert isinstance(site.where, str)
                if site.where == name or fnmatchcase(name, site.where):
                    self.places[number][name] = place
                    kinds = self._wants.setdefault(place, {})
                    kinds[site.kind] = (*kinds.get(site.kind, ()), number)
        return place if place in self._wants else None

    # ---- open and close -------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.blocks, seen = seams.open_block(self), self.receiver.seen
        try:
            for place, kinds in self._wants.items():
                if isinstance(place.thing, nn.Module):
                    self._follow(place, kinds, seen)
                elif isinstance(place.thing, nn.Parameter) and "grad" in kinds:
                    self._follow_parameter(place, kinds["grad"])
        except BaseException:
            self.close()
            raise

    def _follow(self, place: Place, kinds: Mapping[Kind, tuple[int, ...]], seen: list[Any] | None) -> None:
        assert isinstance(place.thing, nn.Module)
        running: list[_Running | Begun] = []
        self._running[place] = running
        if seen is not None and (
            self._all_short or all(self._short[number] for numbers in kinds.values() for number in numbers)
        ):
            self._handles.append(shortcut.follow(self, place, kinds, running, seen))
            return
        self._handles += seams.on_call(
            place.thing,
            lambda args, kwargs: self.enter(place, args, kwargs),
            lambda output: self.leave(place, output),
        )

    def _follow_parameter(self, place: Place, asked: tuple[int, ...]) -> None:
        parameter = place.thing
        assert isinstance(parameter, nn.Parameter)
        if not parameter.requires_grad:
            self._notes[place, "grad"] = "the parameter is frozen (requires_grad=False)"
            return
        spot = Spot(place, "grad", 0, (), (), asked)

        def arrived(grad: Tensor) -> Tensor | None:
            if grad is None or self not in seams.here():
                return None
            if len(self._accumulates) > 1 and not self._accumulates[-1]:
                return None  # somebody's torch.autograd.grad inside the backward, whose result he handles himself
            return self.arrived(spot, grad)

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
        for watch in self._watches:
            watch.let_go(self.receiver.refuses)
        self._handles.clear()
        self._watches.clear()
        self._shares.clear()
        self._running.clear()

    def note(self, place: Place, site: Site) -> str | None:
        """What was seen at a place that can explain its silence."""
        return self._notes.get((place, site), self._notes.get((place, site.kind)))

    def place_of(self, thing: nn.Module | nn.Parameter, kind: Kind) -> Place | None:
        """The place of a module or parameter, if this kind is asked for there."""
        place = self._places.get(id(thing))
        return place if place is not None and kind in self._wants[place] else None

    @property
    def marked(self) -> list[str]:
        """The names of the tensors that were marked so far."""
        return list(self._marks)

    @property
    def waits_at_parameters(self) -> bool:
        """Whether torch must bring gradients to parameters."""
        return any(site.kind == "grad" for site in self.asked)

    @property
    def is_open(self) -> bool:
        return self.blocks is not None

    # ---- forward --------------------------------------------------------------------------------------------------

    def enter(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is about to be called. What it is to get instead, or None."""
        if self not in seams.here():
            return None
        seams.refuse_tracing(place.name)
        kinds = self._wants[place]
        given: dict[int, Any] = {}
        if "grad_output" in kinds:
            for value in (*args, *kwargs.values()):
                for tensor in (value,) if isinstance(value, Tensor) else [t for _, t in leaves(value)]:
                    given[id(tensor)] = tensor.grad_fn
        call = self.calls.begin(place)
        running = _Running(call, [], sys.exc_info()[1], given)
        self._running[place].append(running)
        if call is None:
            return None
        if call.repeats is not None:
            self.repeated.add(call.repeats)
        if "input" not in kinds and "grad_input" not in kinds:
            return None
        inputs: dict[Step, Any] = dict(enumerate(args))
        inputs.update(kwargs)
        new = self._pass(place, call, inputs, "input", "grad_input", running.shares)
        if new is None:
            return None
        return tuple(new[i] for i in range(len(args))), {key: new[key] for key in kwargs}

    def leave(self, place: Place, output: Any) -> Any:
        """A module was called. What is to flow on instead of the output, or None."""
        running = self._running.get(place)
        if not running or self not in seams.here():
            return None
        begun = running.pop()
        assert isinstance(begun, _Running)
        return self._end(place, begun, output)

    def resume(self, place: Place, begun: Begun, output: Any) -> Any:
        """The same, where the call has begun on the short way."""
        number, start, error, argument, node = begun
        call = Call(number, again=False, real=True, start=start, regions=(), repeats=None)
        return self._end(place, _Running(call, [], error, {argument: node}), output)

    def _end(self, place: Place, begun: _Running, output: Any) -> Any:
        call, shares, error, given = begun
        if call is None or (output is None and sys.exc_info()[1] is not error):  # the module raised
            return None
        returned = self._end_shares(place, shares, output) if shares else {}
        if returned:
            output = put(output, returned)
        new = self._pass(place, call, output, "output", "grad_output", given=given)
        self.receiver.called()
        return output if new is None and returned else new

    def _end_shares(self, place: Place, shares: _Shares, output: Any) -> dict[Path, Tensor]:
        """The module is left. Where it returns an input itself, its share comes through the output: by an alias."""
        outputs = [tensor for _, tensor in leaves(output)]
        alive = next((seams.on_gradient(t, seams.inert) for t in outputs if t.grad_fn is not None), None)
        for share, tensor in shares:
            share.close(tensor, outputs, alive)
        returned = [(share, tensor) for tensor in outputs for share, _ in shares if share.is_of(tensor)]
        if not returned:
            return {}
        made = self._aliases(place, output, [tensor for _, tensor in returned], lambda _: True)
        of = {id(tensor): made[path] for path, tensor in leaves(output) if path in made}
        for share, tensor in returned:
            if not share.returned and id(tensor) in of:
                share.returned = True
                self._watches.append(Watch(share.spot, of[id(tensor)], partial(self._returned, share)))
        return made

    def _returned(self, share: Share, spot: Spot, grad: Tensor) -> None:
        self._collections[-1].add(share, grad)

    def mark_value(self, place: Place, tensor: Tensor) -> Tensor:
        """Pass a marked tensor through: it acts as the output of a module that returns its input."""
        seams.refuse_tracing(place.name)
        _ = tensor.grad_fn
        call = self.calls.begin(place)
        if call is None:
            return tensor
        if call.repeats is not None:
            self.repeated.add(call.repeats)
        new = self._pass(place, call, tensor, "output", "grad_output")
        self.receiver.called()
        return tensor if new is None else new  # type: ignore[no-any-return]

    def _pass(
        self,
        place: Place,
        call: Call,
        value: Any,
        kind: Kind,
        grad_kind: Kind,
        shares: _Shares | None = None,
        given: Mapping[int, Any] | None = None,
    ) -> Any:
        """Hand the tensors in `value` to the receiver, and wait for their gradients. What flows on, or None."""
        kinds = self._wants[place]
        values = self._pick(place, kind, call, value) if kind in kinds else ()
        grads = self._pick(place, grad_kind, call, value) if grad_kind in kinds and call.real else []
        if grads and not torch.is_grad_enabled():  # nothing done now will be differentiated
            self._notes[place, grad_kind] = "it ran with gradients switched off (no_grad or inference_mode)"
            grads = []
        for spot, tensor in grads:
            self.acted.at(tensor, spot)
        now: dict[Path, Tensor] = {}  # the tensors that flow on, where they differ
        if grads and shares is not None and not self._is_edited(place):
            grads = self._share(call, grads, shares)
        elif grads:

            def needed(tensor: Tensor) -> bool:
                return shares is not None or _is_older(tensor, call, given or {})

            now = self._aliases(place, value, [tensor for _, tensor in grads], needed)
        for spot, tensor in values:
            tensor = now.get(spot.path, tensor)
            new = self.receiver.value(spot, tensor, call)
            if new is not None and new is not tensor:
                now[spot.path] = new
            self.acted.at(now.get(spot.path, tensor), spot)
        for spot, tensor in grads:
            self._watch(spot, now.get(spot.path, tensor))
        return put(value, now) if now else None

    def _pick(self, place: Place, kind: Kind, call: Call, value: Any) -> list[tuple[Spot, Tensor]]:
        wanted = self._wants[place][kind]
        sites = [(n, site) for n in wanted if (site := self.asked[n]).call is None or site.call == call.number]
        return pick(place, kind, call.number, value, sites, one=self.receiver.edits, absent=self._notes)

    def _is_edited(self, place: Place) -> bool:
        """Whether an open block changes the gradients of this module's inputs: then they go through an alias."""
        return any(
            isinstance(block, Flow) and block.receiver.edits and block._wants_gradients_of(place.thing)
            for block in seams.here()
        )

    def _wants_gradients_of(self, thing: Any) -> bool:
        return any(place.thing is thing and "grad_input" in kinds for place, kinds in self._wants.items())

    def _share(self, call: Call, grads: list[tuple[Spot, Tensor]], shares: _Shares) -> list[tuple[Spot, Tensor]]:
        """Wait for the module's share of its inputs' gradients; what is left is to be watched itself."""
        left = []
        for spot, tensor in grads:
            if tensor.requires_grad:
                shares.append((Share(spot, tensor, call.start), tensor))
            else:
                left.append((spot, tensor))
        self._shares += [share for share, _ in shares]
        return left

    def _aliases(
        self, place: Place, value: Any, tensors: Sequence[Tensor], needed: Callable[[Tensor], bool]
    ) -> dict[Path, Tensor]:
        key = place.name if place.thing is None else place.thing
        return aliases(value, tensors, who=self, place=key, needed=needed)

    # ---- backward -------------------------------------------------------------------------------------------------

    def _watch(self, spot: Spot, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            why = "it needs no gradient: nothing before it requires one (frozen, or data)"
            self._notes[spot.place, spot.kind] = why
            return
        self.add(Watch(spot, tensor, self.arrived))

    def add(self, watch: Watch) -> None:
        """Keep a watch until its graph is gone, or the block is left."""
        if len(self._watches) > self._many:
            self._watches = [watch for watch in self._watches if not watch.is_dead()]
            self._many = 1024 + 2 * len(self._watches)
        self._watches.append(watch)

    def arrived(self, spot: Spot, grad: Tensor) -> Tensor | None:
        if seams.is_batched(grad):
            raise UnsupportedError(
                f"{spot}: torch.autograd.grad(..., is_grads_batched=True) runs the backward under vmap, where what "
                "flows cannot be captured or edited.\n  call it once for each row"
            )
        return self.receiver.gradient(spot, grad, self.backwards)

    def before_backward(self, call: seams.Backward) -> None:
        self._accumulates.append(call.accumulates)
        self._collections.append(Collection(self.arrived))
        if len(self._accumulates) == 1:
            self.backwards += 1
            self._first_node = next_number() if call.create_graph else None
        for watch in self._watches:
            if watch.anchor is not None and watch.anchor.has_changed():
                watch.follow_changes(watch.anchor, call.roots)
        self._collections[-1].wait(self._shares, call.roots, self._second_order)

    def after_backward(self, *, failed: bool) -> None:
        self._accumulates.pop()
        self._collections.pop().end(failed=failed)
        if self._accumulates:
            return
        if self._first_node is not None:
            self._second_order.append(range(self._first_node, next_number()))
        # What was walked may be walked again, even without retain_graph where nothing was saved: only what is gone is
        # let go.
        self._watches = [watch for watch in self._watches if not watch.is_dead()]
        self._shares = [share for share in self._shares if not share.is_dead()]


def _is_older(tensor: Tensor, call: Call, given: Mapping[int, Any]) -> bool:
    """Whether the tensor comes from outside the call: the module returned what it was given, or a parameter."""
    node = tensor.grad_fn
    if node is None or (id(tensor) in given and given[id(tensor)] == node):
        return True
    return number_of(node) < call.start
