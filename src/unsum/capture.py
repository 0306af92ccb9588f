"""`capture`: read what flows at sites."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.errors import OptionError, SiteError
from unsum.flow.captured import Captured, Entry, Seen, entry
from unsum.flow.compiled_calls import CompiledCalls
from unsum.flow.flow import Flow
from unsum.flow.keeping import Keep, Keeping, Reduce
from unsum.flow.picking import Spot
from unsum.flow.requests import Requests
from unsum.flow.silence import complain
from unsum.opened import Opened
from unsum.seams.checkpoints import ModuleCall
from unsum.sites import Asked, Place, parse

Missing = Literal["error", "ignore"]


class _Stop(BaseException):
    """Leaves the block of the capture that raised it. No Exception, so that a model's own handlers let it pass."""

    def __init__(self, capture: Capture) -> None:
        super().__init__("stop=True: every site has fired")
        self.capture = capture


def _name(error: Exception, spot: Spot) -> None:
    """Let an error from a reduction, a slice or a cast say at which site."""
    if isinstance(error, OptionError):
        raise OptionError(f"{spot}: {error}") from None
    error.add_note(f"unsum: while capturing {spot}")


class Capture:
    """The block that `unsum.capture` makes."""

    edits = False
    refuses = None

    def __init__(
        self, model: nn.Module | None, asked: tuple[Asked, ...], keeping: Keeping, missing: Missing, stop: bool
    ) -> None:
        if not asked:
            raise SiteError("name at least one site: unsum.capture(model, 'fc1:output'); unsum.sites(model) lists them")
        if missing not in ("error", "ignore"):
            raise OptionError(f"missing={missing!r}: choose 'error' or 'ignore'")
        self._model = model
        self._asked = [parse(a, model) for a in asked]
        self._keeping = keeping
        self._missing = missing
        self._stop = stop
        self._flow: Flow | None = None
        self._got: Captured | None = None
        self._compiled: CompiledCalls | None = None
        self.seen: list[Entry | Seen] | None = None  # where tensors are put down as they are, by reference

    def __enter__(self) -> Captured:
        if self._flow is not None:
            raise SiteError("this capture is open already; make another one with unsum.capture(...)")
        seen: list[Entry | Seen] = []
        self.seen = seen if self._keeping.is_plain and not self._stop else None
        flow = Flow(Requests(self._model, self._asked), self)
        got = self._got = Captured(flow, seen)
        self._parts: dict[tuple[Place, int], Entry] = {}
        self._fired: set[tuple[int, Place]] = set()
        flow.open()
        self._flow = flow
        if self._may_run_compiled():
            self._compiled = CompiledCalls(flow, seen, copies=self._keeping.keep == "clone")
        return got

    def _may_run_compiled(self) -> bool:
        """Whether calls of a compiled model may run compiled: nothing is asked for that needs Python within them."""
        if self._model is None or self._keeping.keep == "graph" or self._stop or not seams.is_compiled(self._model):
            return False
        assert self._flow is not None
        return all(self._flow.requests.mark_in(site) is None for site in self._asked)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        flow, got = self._flow, self._got
        assert flow is not None
        assert got is not None
        if self._compiled is not None:
            self._compiled.close()
        flow.close()
        # Let go of what was captured: it must be freed as soon as the user drops it, without the garbage collector.
        self._flow = self._got = self.seen = self._compiled = None
        self._parts.clear()
        if error is None and self._missing == "error":
            complain(flow, got.answered(len(self._asked)), "captured")
        return isinstance(error, _Stop) and error.capture is self

    # ---- receiving ------------------------------------------------------------------------------------------------

    def value(self, spot: Spot, tensor: Tensor, call: ModuleCall) -> None:
        if call.again:
            return
        if self._keeping.keep == "graph" and call.regions and not torch.is_grad_enabled():
            raise SiteError(
                f"{spot}: inside a reentrant checkpoint there is no graph that keep='graph' could stay attached to.\n"
                "  use checkpoint(..., use_reentrant=False)"
            )
        try:
            kept = self._keeping.value(tensor)
        except Exception as error:
            _name(error, spot)
            raise
        self._add(spot, kept, tensor, None)

    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> None:
        if spot.kind == "grad" and (spot.place, backward) in self._parts:
            return self._add_part(self._parts[spot.place, backward], spot, grad)
        try:
            kept = self._keeping.gradient(grad, is_parameter=spot.kind == "grad")
        except Exception as error:
            _name(error, spot)
            raise
        added = self._add(spot, kept, grad, backward)
        if spot.kind == "grad":
            self._parts[spot.place, backward] = added
        if self._stop:
            self._stop_if_complete()
        return None

    def called(self) -> None:
        if self._stop:
            self._stop_if_complete()

    def differentiated(self, roots: Sequence[Any]) -> None:
        pass

    def _add(self, spot: Spot, kept: Any, tensor: Tensor, backward: int | None) -> Entry:
        assert self._got is not None
        added = entry(spot, kept, tensor, backward)
        self._got.seen.append(added)
        if self._stop:
            self._fired.update((number, spot.place) for number in spot.asked)
        return added

    def _add_part(self, entry: Entry, spot: Spot, grad: Tensor) -> None:
        """A reentrant checkpoint brings a parameter's gradient in several parts, and their sum is this backward's."""
        if self._keeping.reduce is not None:
            raise SiteError(
                f"{spot}: its gradient comes in several parts (a reentrant checkpoint), which cannot be reduced one by "
                "one.\n  use checkpoint(..., use_reentrant=False)"
            )
        part = self._keeping.gradient(grad, is_parameter=True)
        entry.kept = type(part)(entry.kept.read(str(spot)) + part.read(str(spot)))

    def _stop_if_complete(self) -> None:
        assert self._flow is not None
        for number in range(len(self._asked)):
            places = self._flow.requests.places[number].values()
            if not places or any((number, place) not in self._fired for place in places):
                return
        raise _Stop(self)


def capture(
    model: nn.Module | None,
    *sites: Asked | list[Asked],
    keep: Keep = "reference",
    to: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    slice: Any = None,
    reduce: Reduce | None = None,
    missing: Missing = "error",
    stop: bool = False,
    scaler: Any = None,
) -> Opened[Captured]:
    """Read what flows at sites of `model` while the block is open.

    A capture does not change what the model computes: outputs and gradients are bit for bit those of a run without it.

    Args:
        model: Any module, also wrapped or compiled; None where all sites are tensors named with `unsum.mark`.
        sites: Where: `"fc1:input"`, `"blocks.*.mlp:grad_output"`, `(nn.Linear, "output")`, `"fc1.weight:grad"`;
            `"mark:y:output"` for a tensor that `unsum.mark` names "y", without a model also `"y:output"`. A list of
            sites is also accepted.
        keep: "reference" keeps the tensor itself, detached; reading it raises `SiteError` if it was changed in place
            since. "clone" copies it. "graph" keeps it attached to the graph, so that a loss can be put on it.
        to: The device to keep the tensor on. From CUDA to the CPU the copy is asynchronous.
        dtype: The dtype to keep it in.
        slice: Keep `tensor[slice]` only.
        reduce: Keep only what this function of the tensor returns; or "norm", "mean" (both are NaN if an element is),
            or "finite" (how many elements are NaN or infinite).
        missing: "error" raises `SiteError` at the end of the block for sites that never fired, with the reason;
            "ignore" accepts them.
        stop: Leave the block as soon as every site has fired.
        scaler: A GradScaler; gradients are divided by its scale.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> with capture(model, "0:input", "2:grad_output") as got:
        ...     model(torch.ones(5, 2)).sum().backward()
        >>> got["0:input"].shape, got["2:grad_output"].shape
        (torch.Size([5, 2]), torch.Size([5, 1]))
    """
    asked = [one for each in sites for one in (each if isinstance(each, list) else [each])]
    block = Capture(model, tuple(asked), Keeping(keep, to, dtype, slice, reduce, scaler), missing, stop)
    return Opened(block, "unsum.capture", only_with="stop=True leaves a `with`; open it by one" if stop else None)
