"""Does an output depend on other samples than its own? Asked of the model, by running it again with other inputs.

For every bit of the samples' numbers, the inputs of those that have it are replaced, and of those that do not. A
position that changes both times mixes samples, also where the graph shows no trace of it. No gradients, no hooks; the
model's state is put back. What cannot be asked is not answered: then an error says why.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unsum.errors import UnsupportedError
from unsum.graph.layout import Layout, Regular
from unsum.nested import children, format_path, leaves, put
from unsum.seams.modes import without_functions
from unsum.types import Path

OwnersOf = Callable[[tuple[int, ...], int], Layout | None]
Run = Callable[[Any, Any], Any]  # of arguments; leaves nothing behind

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum,
          slice, range)  # fmt: skip


class CannotBeAsked(UnsupportedError):
    """The model cannot be run again, so whether samples interact is not known."""


def mixing(run: Run, args: Any, kwargs: Any, output: Any, owners_of: OwnersOf, n: int) -> tuple[dict[Path, str], bool]:
    """Which outputs of a call depend on other samples than their own, in words; and whether any output of samples has
    changed at all: if none has (samples that are all the same, a last layer of zeros), the answer says nothing about
    another call. Raises if it cannot be asked."""
    given = (args, kwargs)
    _refuse_what_cannot_be_given_again(given)
    inputs = {path: (t, layout) for path, t in leaves(given) if (layout := owners_of(tuple(t.shape), n)) is not None}
    if n < 2:
        return {}, False
    if not inputs:
        raise _cannot("none of its arguments has the samples")
    before = _outputs(run, given, {})
    first = {path: tensor.detach() for path, tensor in leaves(output)}
    if before.keys() != first.keys() or any(bool(_differs(first[path], t).any()) for path, t in before.items()):
        raise _cannot("a second run gives something else: it draws random numbers, or keeps a state")
    found: dict[Path, str] = {}
    has_changed = False
    for bit in range((n - 1).bit_length()):
        changed: list[dict[Path, Tensor]] = []
        for value in (0, 1):
            chosen = ((torch.arange(n) >> bit) & 1) == value
            changes = {path: _replaced(t, layout, chosen) for path, (t, layout) in inputs.items()}
            after = _outputs(run, given, changes)
            changed.append({path: _differs(t, after[path]) for path, t in before.items() if path in after})
        for path, tensor in before.items():
            layout = owners_of(tuple(tensor.shape), n)
            if layout is None or path in found or path not in changed[0] or path not in changed[1]:
                continue
            has_changed = has_changed or any(bool(each[path].any()) for each in changed)
            own = layout.owner(tensor.device)
            for value in (0, 1):
                # What changes when other samples are replaced is not this sample's alone.
                wrong = changed[value][path] & (own >= 0) & (((own >> bit) & 1) != value)
                if bool(wrong.any()):
                    found[path] = f"sample {int(own[wrong][0])} of output{format_path(path)} changes with other samples"
                    break
    return found, has_changed


def _cannot(why: str) -> CannotBeAsked:
    return CannotBeAsked(
        f"verify=True: the model cannot be run again, so whether samples interact is not known: {why}.\n"
        "  leave verify=True out, or unsum.check(model, loss_fn, batch) with a model that can"
    )


def _outputs(run: Run, given: Any, changes: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    args, kwargs = put(given, changes) if changes else given
    try:
        with torch.no_grad(), without_functions():
            return {path: tensor.detach().clone() for path, tensor in leaves(run(args, kwargs))}
    except UnsupportedError:
        raise
    except Exception as error:
        raise _cannot(f"{type(error).__name__}: {error}") from error


def _replaced(tensor: Tensor, layout: Layout, chosen: Tensor) -> Tensor:
    """The chosen samples' positions hold what other samples have."""
    own = layout.owner(tensor.device).long()
    if isinstance(layout, Regular):
        other = tensor.detach().roll(-layout.block, layout.dim)
    else:
        other = tensor.detach().flatten().flip(0).view(tensor.shape)
    return torch.where(chosen.to(tensor.device)[own] & (own >= 0), other, tensor.detach())


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Where two results differ by more than rounding."""
    if one.shape != other.shape:
        return torch.ones(one.shape, dtype=torch.bool, device=one.device)
    if not one.is_floating_point() and not one.is_complex():
        return one != other
    rounding = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
    scale = torch.where(one.isfinite(), one.abs(), 0).max() if one.numel() else 0
    atol = float(rounding.get(one.dtype, 2e-2) * scale)
    return ~torch.isclose(one.detach(), other.detach(), rtol=0, atol=atol, equal_nan=True)


def _refuse_what_cannot_be_given_again(value: Any) -> None:
    if isinstance(value, _PLAIN):
        return
    parts = list(children(value))
    if not parts and not isinstance(value, tuple | list | Mapping):
        raise _cannot(f"an argument of type {type(value).__name__} cannot be given to it again as it was")
    for _, part in parts:
        _refuse_what_cannot_be_given_again(part)
