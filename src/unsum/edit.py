"""`edit`: change what flows at sites."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.capture import Missing
from unsum.errors import OptionError, SiteError, VerbError
from unsum.flow.flow import Flow
from unsum.flow.keeping import unscaled
from unsum.flow.picking import Spot
from unsum.flow.requests import Requests
from unsum.flow.silence import complain
from unsum.flow.unread import Returned, Unread
from unsum.graph.nodes import place
from unsum.opened import Opened
from unsum.seams.checkpoints import ModuleCall
from unsum.seams.nodes import Function
from unsum.seams.scaler import current_scale
from unsum.sites import Asked, Site, parse, site_name
from unsum.verbs import Verb

Change = Verb | Callable[[Tensor], Tensor]

_INSIDE = "  write: with unsum.edit(model, edits): loss_fn(model(x), y).backward()  # backward inside the block"
_TOO_LATE = (
    f"the block of a gradient edit was closed before this backward, which would run without the edit.\n{_INSIDE}"
)
_UNEDITED = (
    "the block of an edit inside a checkpoint was closed before this backward, in which the checkpoint would run again "
    f"without the edit.\n{_INSIDE}"
)


class _Tripwire:
    """Stays in the graph after the block, to refuse a backward that would run without the edit."""

    def __init__(self, site: str, walked: Callable[[], None]) -> None:
        self.site, self.walked, self.armed = site, walked, False

    def __call__(self, grads: Any) -> None:
        if self.armed:
            raise SiteError(f"{self.site}: {_UNEDITED}")
        self.walked()

    def arm(self) -> None:
        self.armed, self.walked = True, lambda: None


class _Unfinished:
    """The checkpoints that have an edit inside, and the tripwires in their graphs."""

    def __init__(self) -> None:
        self._checkpoints: WeakSet[Any] = WeakSet()
        self._tripwires: WeakSet[_Tripwire] = WeakSet()  # graphs hold them: a step's go with its graph

    def add(self, site: str, edited: Tensor, call: ModuleCall, done: WeakSet[Any]) -> None:
        """A call inside checkpoints was edited. The checkpoints that were run again are `done`."""
        self._checkpoints.update(call.regions)
        regions = [weakref.ref(region) for region in call.regions]
        tripwire = _Tripwire(site, lambda: done.update(r for ref in regions if (r := ref()) is not None))
        if edited.requires_grad:
            seams.on_gradient(edited, tripwire)
        elif isinstance(call.regions[0], Function):
            seams.on_node(call.regions[0], tripwire)
        self._tripwires.add(tripwire)

    def arm(self) -> None:
        """The block is left: a backward through a checkpoint is refused from now on."""
        for tripwire in self._tripwires:
            tripwire.arm()
        self._tripwires.clear()

    def refuse(self, sites: Sequence[Site], done: WeakSet[Any]) -> None:
        """Raise if a checkpoint is still to be run again."""
        if all(checkpoint in done for checkpoint in self._checkpoints):
            return
        gc.collect()  # a graph that nobody holds any more will not be walked
        if any(checkpoint not in done for checkpoint in self._checkpoints):
            raise SiteError(f"{', '.join(map(str, sites))}: {_UNEDITED}")


class Edit:
    """The block that `unsum.edit` makes."""

    edits, seen = True, None

    def __init__(
        self, model: nn.Module | None, edits: Mapping[Asked, Change | Sequence[Change]], missing: Missing, scaler: Any
    ) -> None:
        if missing not in ("error", "ignore"):
            raise OptionError(f"missing={missing!r}: choose 'error' or 'ignore'")
        if not isinstance(edits, Mapping):
            raise OptionError(f"edits are a mapping {{site: verb or list of verbs}}, got {type(edits).__name__}")
        self._model = model
        self._asked = [parse(site, model) for site in edits]
        self._changes = [_listed(str(site), change) for site, change in zip(self._asked, edits.values(), strict=True)]
        for site, changes in zip(self._asked, self._changes, strict=True):
            if not site.kind.startswith("grad") and any(isinstance(c, Verb) and c.on_gradients_only for c in changes):
                raise SiteError(f"{site}: reverse() is for gradients; did you mean 'grad_{site.kind}'?")
        self.refuses = _TOO_LATE if any(site.kind.startswith("grad_") for site in self._asked) else None
        self._missing = missing
        self._scaler = scaler
        self._flow: Flow | None = None

    def __enter__(self) -> Edit:
        if self._flow is not None:
            raise SiteError("this edit is open already; make another one with unsum.edit(...)")
        flow = Flow(Requests(self._model, self._asked), self)
        self._fired: set[int] = set()
        self._parts: set[tuple[str, int]] = set()
        self._unfinished = _Unfinished()
        self._states: WeakKeyDictionary[Any, dict[Any, Tensor]] = WeakKeyDictionary()
        self._unread = Unread()
        flow.open()
        names = flow.requests.names
        edits_values = any(not site.kind.startswith("grad") for site in self._asked)
        self._returned = Returned(names.model, flow, self._unread) if names is not None and edits_values else None
        self._flow, self.acted = flow, flow.acted
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        flow = self._flow
        assert flow is not None
        flow.close()
        if self._returned is not None:
            self._returned.remove()
        self._flow = self._returned = None
        self._unfinished.arm()
        if error is None:
            self._unfinished.refuse(self._asked, flow.repeated)
            if self._missing == "error":
                complain(flow, self._fired, "reached")
            self._unread.warn()

    # ---- receiving ------------------------------------------------------------------------------------------------

    def value(self, spot: Spot, tensor: Tensor, call: ModuleCall) -> Tensor:
        new = self._changed(spot, tensor, call)
        if call.regions and not call.again:
            assert self._flow is not None
            self._unfinished.add(str(spot), new, call, self._flow.repeated)
        elif not call.again and torch.is_grad_enabled():
            self._unread.add(str(spot), new)
        return new

    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> Tensor:
        if spot.kind == "grad":
            if (spot.place.name, backward) in self._parts:
                raise SiteError(
                    f"{spot}: its gradient comes in several parts (a reentrant checkpoint), which cannot be edited one "
                    "by one.\n  use checkpoint(..., use_reentrant=False)"
                )
            self._parts.add((spot.place.name, backward))
        scale = None if self._scaler is None else current_scale(self._scaler)
        if scale is None:
            return self._changed(spot, grad, None)
        new = self._changed(spot, unscaled(grad, scale), None)
        return (new * scale).to(grad.dtype)

    def called(self) -> None:
        pass

    def differentiated(self, roots: Sequence[Any]) -> None:
        self._unread.look(place(root)[0] for root in roots)

    def _changed(self, spot: Spot, tensor: Tensor, call: ModuleCall | None) -> Tensor:
        for number in spot.asked:
            for nth, change in enumerate(self._changes[number]):
                with _repeatable(change, self._states, (spot, number, nth), call, tensor.device):
                    tensor = _apply(change, tensor, spot)
            self._fired.add(number)
        return tensor


def _listed(site: str, change: Change | Sequence[Change]) -> list[Change]:
    changes = list(change) if isinstance(change, list | tuple) else [change]
    for one in changes:
        if getattr(one, "__module__", None) == Verb.__module__ and not isinstance(one, Verb):
            raise OptionError(f"{site}: call the verb: unsum.{getattr(one, '__name__', one)}(...)")
        if not callable(one):
            is_value = isinstance(one, Tensor | float | int)
            raise OptionError(
                f"{site}: an edit is a verb or a function of a tensor, got {type(one).__name__}.",
                write=f'unsum.edit(model, {{"{site}": unsum.replace(v)}})' if is_value else (),
            )
    return changes  # type: ignore[return-value]


def _apply(change: Change, tensor: Tensor, spot: Spot) -> Tensor:
    site = str(spot)
    try:
        # A function of the user's may write into what it gets: that must not be the tensor that others use.
        new = change(tensor) if isinstance(change, Verb) else change(tensor.clone())
    except VerbError as error:
        first, *rest = str(error).splitlines()
        told = f"{site}: {change!r}: {first}; the tensor there is {_described(tensor)}"
        if spot.call:  # in a loop such as generate, later calls have other lengths than the first
            told += f"; this is call {spot.call} of the module in this block, the first is 0"
            rest = [f"  write: '{site_name(spot.place.name, spot.kind, 0, spot.shown)}'  # the first call alone"]
        raise SiteError("\n".join([told, *rest])) from error
    except Exception as error:
        if isinstance(change, Verb):
            raise SiteError(f"{site}: {change!r} does not work on {_described(tensor)}: {error}") from error
        error.add_note(f"unsum: while editing {site}, which is {_described(tensor)}")
        raise
    if not isinstance(new, Tensor):
        hint = "; end the function with return" if new is None else ""
        raise SiteError(f"{site}: the edit returned {type(new).__name__}, needs a tensor, {_described(tensor)}{hint}")
    if new.shape != tensor.shape or new.dtype != tensor.dtype or new.device != tensor.device:
        raise SiteError(f"{site}: the edit returned {_described(new)}, needs {_described(tensor)}")
    return new


def _described(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{layout} on {tensor.device}"


class _repeatable:
    """Inside a checkpoint: draw the random numbers that were drawn the first time."""

    def __init__(
        self,
        change: Change,
        states: WeakKeyDictionary[Any, Any],
        key: Any,
        call: ModuleCall | None,
        device: torch.device,
    ) -> None:
        self.generator = None
        if isinstance(change, Verb) and change.draws and call is not None and (call.regions or call.again):
            self.generator = change.generator or _default_generator(device)
        self.states, self.key, self.call = states, key, call
        self.now: Tensor | None = None

    def __enter__(self) -> None:
        if self.generator is None or self.call is None:
            return
        spot, number, nth = self.key
        key = (spot.place, spot.kind, spot.call, spot.path, number, nth)
        for region in self.call.regions:
            self.states.setdefault(region, {})[key] = self.generator.get_state()
        if self.call.again and key in self.states.get(self.call.repeats, {}):
            first, now = self.states[self.call.repeats][key], self.generator.get_state()
            if not torch.equal(first, now):  # else the checkpoint has taken care of it, and goes on from here
                self.now = now
                self.generator.set_state(first)

    def __exit__(self, *_: object) -> None:
        if self.now is not None and self.generator is not None:
            self.generator.set_state(self.now)


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return None


def edit(
    model: nn.Module | None,
    edits: Mapping[Asked, Change | Sequence[Change]],
    *,
    missing: Missing = "error",
    scaler: Any = None,
) -> Opened[Edit]:
    """Change what flows at sites of `model` while the block is open.

    Gradients follow the edited values. Call `backward` inside the block if you edit gradients, or edit inside a
    checkpoint; after an edit of an output elsewhere, `backward` may also run after the block.

    An edited value that neither what the model returns nor a loss depends on (attention weights that the model drops)
    gives the warning `unsum.errors.UnreadEdit`. unsum finds it in the graph, so there is no warning where gradients
    are off.

    Args:
        model: Any module, also wrapped or compiled; None where all sites are tensors named with `unsum.mark`.
        edits: For each site (written as in `capture`) a verb (`unsum.scale(2.0)`), a function from a tensor to a tensor
            of the same shape, dtype and device, or a list of them, applied in order.
        missing: "error" raises `SiteError` at the end of the block for sites that were never reached, with the reason;
            "ignore" accepts them.
        scaler: A GradScaler; gradients are edited without its scale.

    Examples:
        >>> from unsum.verbs import add, zero
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> with edit(model, {"0:output": [zero(), add(5.0)]}):
        ...     print(model(torch.ones(1, 2)))
        tensor([[5., 5., 5.]], grad_fn=<ReluBackward0>)
    """
    return Opened(Edit(model, edits, missing, scaler), "unsum.edit", warns_unopened=bool(edits))
