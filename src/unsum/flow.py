"""What flows at places: follows every call of the modules asked for, and hands tensors and gradients to a receiver.

`capture` and `edit` are two receivers of the same flow. Here is everything that makes a hook tell the truth:

- gradients come from hooks on the tensors that flow, not from module backward hooks (those fail on in-place changes,
  keyword arguments and nested outputs), each hook knowing its own call;
- an input is handed on as an alias, so that its gradient is this module's share and not that of all its users; so is an
  output that the module did not make (`Identity`, a parameter);
- a view that is changed in place later is found again in the graph (`inplace`);
- a checkpoint's second forward is no new call (`recompute`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unsum import hooks, inplace
from unsum.errors import SiteError, UnsupportedError
from unsum.nested import find, format_path, leaves, put
from unsum.recompute import Call, Calls
from unsum.sites import Names, Place, Site, site_name, why_not_called
from unsum.types import Kind, Path, Step

# Aliases that blocks have made, each with its block and what it was made for: a module, or the name of a mark.
_made_by: MutableMapping[Tensor, tuple[weakref.ref[Flow], Any]] = WeakIdKeyDictionary()


class Spot(NamedTuple):
    """One tensor in one call of one place."""

    place: Place
    kind: Kind
    call: int
    path: Path  # where the tensor is in the arguments or the output
    shown: Path  # how it was asked for: `m:input` is the first tensor, wherever that is
    asked: tuple[int, ...]  # which of the requests it answers

    def __str__(self) -> str:
        return site_name(self.place.name, self.kind, None, self.shown)


class Receiver(Protocol):
    """What to do with what flows. A result that is not None flows on instead."""

    @property
    def one(self) -> bool: ...  # a site without a path must be a single tensor
    @property
    def refuses(self) -> str | None: ...  # why a backward after the block would be wrong, where gradients are edited

    def value(self, spot: Spot, tensor: Tensor, call: Call) -> Tensor | None: ...
    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> Tensor | None: ...
    def called(self) -> None: ...


class _Watch:
    """The hook on one tensor that waits for its gradient."""

    __slots__ = ("anchor", "fired", "flow", "handle", "moved", "refusal", "spot")

    def __init__(self, flow: Flow, spot: Spot, anchor: inplace.Anchor | None) -> None:
        self.flow: Flow | None = flow
        self.spot = spot
        self.anchor = anchor
        self.moved = self.fired = False
        self.handle: hooks.Handle | None = None
        self.refusal: str | None = None

    def at_tensor(self, grad: Tensor) -> Tensor | None:
        return None if self.moved else self.arrived(grad)

    def at_base(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """The same, where the view was changed in place and its base stands for it."""
        anchor = self.anchor
        assert anchor is not None
        grad = grads[anchor.output]
        new = None if grad is None else self.arrived(anchor.to_view(grad))
        if new is None:
            return None
        return (*grads[: anchor.output], anchor.to_base(new), *grads[anchor.output + 1 :])

    def arrived(self, grad: Tensor | None) -> Tensor | None:
        if self.flow is None:
            if self.refusal is not None:
                raise SiteError(f"{self.spot}: {self.refusal}")
            return None
        if grad is None:  # a custom autograd.Function may return None
            return None
        self.fired = True
        return self.flow.arrived(self.spot, grad)

    def let_go(self, refusal: str | None = None) -> None:
        """Stop. With a refusal the hook stays in the graph, to raise if that is walked after all."""
        self.flow, self.refusal = None, refusal
        if refusal is None and self.handle is not None:
            self.handle.remove()


class _Pick(NamedTuple):
    path: Path
    shown: Path
    tensor: Tensor
    asked: tuple[int, ...]


class Flow:
    """Follows the sites asked for from `open` to `close`."""

    def __init__(self, model: nn.Module | None, asked: Sequence[Site], receiver: Receiver) -> None:
        self.names = None if model is None else Names(model)
        self.asked = asked
        self.receiver = receiver
        self.calls = Calls()
        self.backwards = 0
        self.repeated: weakref.WeakSet[Any] = weakref.WeakSet()  # checkpoints that were run again
        self.places: dict[int, dict[str, Place]] = {}  # request -> the places that it names
        self._wants: dict[Place, dict[Kind, list[int]]] = {}
        self._marks: dict[str, Place] = {}
        self._notes: dict[tuple[Place, Kind], str] = {}
        self._running: dict[Place, list[Call | None]] = {}
        self._handles: list[hooks.Handle] = []
        self._watches: list[_Watch] = []
        self._many = 1024
        self._depth = 0
        self._retained = False
        self._blocks: list[hooks.Block] | None = None
        for number, site in enumerate(asked):
            self._resolve(number, site)

    # ---- names ----------------------------------------------------------------------------------------------------

    def _resolve(self, number: int, site: Site) -> None:
        places = self.places[number] = {}
        if self.names is None:
            if not isinstance(site.where, str) or site.kind not in ("output", "grad_output"):
                raise SiteError(
                    f"{site}: without a model only marked tensors can be named, as 'name:output' or 'name:grad_output'"
                )
            return
        for name, thing in self.names.find(site).items():
            known = next((place for place in self._wants if place.thing is thing), None)
            place = known or Place(name, thing)
            places[name] = place
            self._wants.setdefault(place, {}).setdefault(site.kind, []).append(number)

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
                    self._wants.setdefault(place, {}).setdefault(site.kind, []).append(number)
        return place if place in self._wants else None

    # ---- open and close -------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._blocks = hooks.open_block(self)
        try:
            for place, kinds in self._wants.items():
                if isinstance(place.thing, nn.Module):
                    self._follow(place)
                elif isinstance(place.thing, nn.Parameter) and "grad" in kinds:
                    self._follow_parameter(place, tuple(kinds["grad"]))
        except BaseException:
            self.close()
            raise

    def _follow(self, place: Place) -> None:
        assert isinstance(place.thing, nn.Module)
        self._running[place] = []
        self._handles += hooks.on_call(
            place.thing,
            lambda args, kwargs: self._before(place, args, kwargs),
            lambda output: self._after(place, output),
        )

    def _follow_parameter(self, place: Place, asked: tuple[int, ...]) -> None:
        parameter = place.thing
        assert isinstance(parameter, nn.Parameter)
        if not parameter.requires_grad:
            self._notes[place, "grad"] = "the parameter is frozen (requires_grad=False)"
            return
        spot = Spot(place, "grad", 0, (), (), asked)

        def arrived(grad: Tensor) -> Tensor | None:
            if grad is None or self not in hooks.here():
                return None
            return self.arrived(spot, grad)

        self._handles.append(hooks.on_gradient(parameter, arrived))

    def close(self) -> None:
        """Take away every hook of ours. Those on tensors of a graph that was not walked may stay, to refuse."""
        if self._blocks is None:
            return
        hooks.close_block(self, self._blocks)
        self._blocks = None
        for handle in self._handles:
            handle.remove()
        for watch in self._watches:
            watch.let_go(self.receiver.refuses)
        self._handles.clear()
        self._watches.clear()
        self._running.clear()

    @property
    def marked(self) -> list[str]:
        """The names of the tensors that were marked so far."""
        return list(self._marks)

    @property
    def is_open(self) -> bool:
        return self._blocks is not None

    # ---- forward --------------------------------------------------------------------------------------------------

    def _before(self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self not in hooks.here():
            return None
        hooks.refuse_tracing(place.name)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                _ = value.grad_fn  # renews that of a stale view, so that its age is known to be before this call
        call = self.calls.begin(place)
        self._running[place].append(call)
        if call is None:
            return None
        if call.repeats is not None:
            self.repeated.add(call.repeats)
        kinds = self._wants[place]
        if "input" not in kinds and "grad_input" not in kinds:
            return None
        inputs: dict[Step, Any] = dict(enumerate(args))
        inputs.update(kwargs)
        new = self._pass(place, call, inputs, "input", "grad_input")
        if new is None:
            return None
        return tuple(new[i] for i in range(len(args))), {key: new[key] for key in kwargs}

    def _after(self, place: Place, output: Any) -> Any:
        running = self._running.get(place)
        if not running or self not in hooks.here():
            return None
        call = running.pop()
        if call is None:
            return None
        new = self._pass(place, call, output, "output", "grad_output")
        self.receiver.called()
        return new

    def mark_value(self, place: Place, tensor: Tensor) -> Tensor:
        """Pass a marked tensor through: it acts as the output of a module that returns its input."""
        hooks.refuse_tracing(place.name)
        _ = tensor.grad_fn
        call = self.calls.begin(place)
        if call is None:
            return tensor
        if call.repeats is not None:
            self.repeated.add(call.repeats)
        new = self._pass(place, call, tensor, "output", "grad_output")
        self.receiver.called()
        return tensor if new is None else new  # type: ignore[no-any-return]

    def _pass(self, place: Place, call: Call, value: Any, kind: Kind, grad_kind: Kind) -> Any:
        """Hand the tensors in `value` to the receiver, and wait for their gradients. What flows on, or None."""
        values = self._select(place, kind, call, value)
        grads = self._select(place, grad_kind, call, value) if call.real else []
        now: dict[Path, Tensor] = {}  # the tensors that flow on, where they differ
        if grads:
            now = self._aliases(place, call, value, grads, always=kind == "input")
        for path, shown, tensor, asked in values:
            tensor = now.get(path, tensor)
            new = self.receiver.value(Spot(place, kind, call.number, path, shown, asked), tensor, call)
            if new is not None and new is not tensor:
                now[path] = new
        for path, shown, tensor, asked in grads:
            self._watch(Spot(place, grad_kind, call.number, path, shown, asked), now.get(path, tensor))
        return put(value, now) if now else None

    def _aliases(
        self, place: Place, call: Call, value: Any, grads: Sequence[_Pick], *, always: bool
    ) -> dict[Path, Tensor]:
        """Aliases for tensors that others use as well, the same one wherever the same tensor stands.

        Blocks share one: then their hooks fire in the order in which the blocks were opened.
        """
        made: dict[int, Tensor] = {}
        key = place.name if place.thing is None else place.thing
        for pick in grads:
            tensor = pick.tensor
            if not tensor.requires_grad or id(tensor) in made or not (always or _is_older(tensor, call)):
                continue
            who, what = _made_by.get(tensor, (None, None))
            if who is None or who() is self or what != key:
                alias = tensor.view_as(tensor) if tensor.layout == torch.strided else torch.ops.aten.alias(tensor)
                made[id(tensor)] = alias
                _made_by[alias] = (weakref.ref(self), key)
        return {path: made[id(tensor)] for path, tensor in leaves(value) if id(tensor) in made} if made else {}

    def _select(self, place: Place, kind: Kind, call: Call, value: Any) -> list[_Pick]:
        """The tensors in `value` that are asked for."""
        wanted = self._wants[place].get(kind)
        if wanted is None:
            return []
        chosen: dict[Path, _Pick] = {}
        for number in wanted:
            site = self.asked[number]
            if site.call is not None and site.call != call.number:
                continue
            for path, shown, tensor in self._tensors(place, site, value):
                known = chosen.get(path)
                if known is None:
                    chosen[path] = _Pick(path, shown, tensor, (number,))
                else:
                    shown = shown if len(shown) < len(known.shown) else known.shown
                    chosen[path] = _Pick(path, shown, tensor, (*known.asked, number))
        return list(chosen.values())

    def _tensors(self, place: Place, site: Site, value: Any) -> list[tuple[Path, Path, Tensor]]:
        if isinstance(value, Tensor) and not site.path:
            return [((), (), value)]
        is_input = site.kind in ("input", "grad_input")
        path, part = self._part(place, site, value, is_input)
        found = [(inner, inner, tensor) for inner, tensor in leaves(part, path)]
        if is_input and not site.path:
            return [(inner, (), tensor) for inner, _, tensor in found[:1]]
        if self.receiver.one and len(found) > 1:
            names = ", ".join(repr(site_name(place.name, site.kind, site.call, inner)) for inner, _, _ in found[:6])
            raise SiteError(f"{site}: holds {len(found)} tensors; name one of them: {names}")
        if not found:
            self._notes[place, site.kind] = f"there is no tensor there; there are: {_paths(value) or 'none at all'}"
        return found

    def _part(self, place: Place, site: Site, value: Any, is_input: bool) -> tuple[Path, Any]:
        try:
            return find(value, site.path)
        except LookupError:
            pass
        if is_input:
            try:
                return find(value, other_name(place, site.path))
            except LookupError:
                pass
        self._notes[place, site.kind] = f"it has no {format_path(site.path)}; it has: {_paths(value) or 'no tensor'}"
        return (), None

    # ---- backward -------------------------------------------------------------------------------------------------

    def _watch(self, spot: Spot, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            self._notes[spot.place, spot.kind] = (
                "it ran with gradients switched off (no_grad or inference_mode)"
                if not torch.is_grad_enabled()
                else "it needs no gradient: nothing before it requires one (frozen, or data)"
            )
            return
        if len(self._watches) > self._many:
            self._watches = [w for w in self._watches if w.handle is not None and not hooks.is_dead(w.handle)]
            self._many = 1024 + 2 * len(self._watches)
        watch = _Watch(self, spot, inplace.anchor(tensor))
        watch.handle = hooks.on_gradient(tensor, watch.at_tensor)
        self._watches.append(watch)

    def arrived(self, spot: Spot, grad: Tensor) -> Tensor | None:
        if hooks.is_batched(grad):
            raise UnsupportedError(
                f"{spot}: torch.autograd.grad(..., is_grads_batched=True) runs the backward under vmap, where what "
                "flows cannot be captured or edited.\n  call it once for each row"
            )
        return self.receiver.gradient(spot, grad, self.backwards)

    def before_backward(self, roots: Sequence[Any], *, retain_graph: bool) -> None:
        self._depth += 1
        if self._depth == 1:
            self.backwards += 1
            self._retained = retain_graph
        for watch in self._watches:
            if watch.anchor is not None and not watch.moved and watch.anchor.changed():
                self._move(watch, roots)

    def _move(self, watch: _Watch, roots: Sequence[Any]) -> None:
        assert watch.anchor is not None and watch.handle is not None
        try:
            node = watch.anchor.find(roots)
        except inplace.LostError as why:
            raise SiteError(
                f"{watch.spot}: the tensor was changed in place afterwards, and the gradient of its old value cannot "
                f"be told from others: {why}.\n  change it out of place (y = y + 1; inplace=False), or take the "
                "gradient at another site"
            ) from None
        if node is not None:
            watch.handle.remove()
            watch.handle, watch.moved = hooks.on_node(node, watch.at_base), True

    def after_backward(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        for running in self._running.values():
            # A checkpoint stops its second forward early, by an exception: those calls never ended.
            while running and (running[-1] is None or running[-1].again):
                running.pop()
        if not self._retained:
            for watch in self._watches:
                if watch.fired:
                    watch.let_go()
            self._watches = [watch for watch in self._watches if not watch.fired]

    # ---- why nothing came -----------------------------------------------------------------------------------------

    def why_silent(self, place: Place, site: Site) -> str:
        """Why a place that was asked for never fired."""
        if isinstance(place.thing, nn.Module) and not self.calls.count(place):
            assert self.names is not None
            return why_not_called(self.names, place)
        if site.call is not None and site.call >= self.calls.count(place):
            return f"it was called {self.calls.count(place)} times"
        note = self._notes.get((place, site.kind))
        if note is not None:
            return note
        if not self.backwards:
            return "no backward ran in this block"
        return "no gradient reached it: it is not used in what was differentiated, or only detached"


def other_name(place: Place, path: Path) -> Path:
    """An argument's other name: its place for its keyword, its keyword for its place."""
    if not path or not isinstance(place.thing, nn.Module):
        return path
    names = list(inspect.signature(place.thing.forward).parameters)
    first = path[0]
    if isinstance(first, str) and first in names:
        return (names.index(first), *path[1:])
    if isinstance(first, int) and 0 <= first < len(names):
        return (names[first], *path[1:])
    return path


def _paths(value: Any) -> str:
    return ", ".join(format_path(path) or "a single tensor" for path, _ in list(leaves(value))[:8])


def _is_older(tensor: Tensor, call: Call) -> bool:
    """Whether the tensor comes from outside the call: the module returned what it was given, or a parameter."""
    node = tensor.grad_fn
    return node is None or node._sequence_nr() < call.start
