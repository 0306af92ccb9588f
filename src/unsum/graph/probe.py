"""Whose is each position of an output? Asked of the model itself, by running it again with other inputs.

`confirm`: ten classes and ten samples, so that both dimensions of the output have the size of the batch. The model is
run once as it was and once with the first sample's input replaced by the second's. What changes belongs to the first.

`mixing`: for every bit of the samples' numbers, the inputs of those that have it are replaced, and of those that do
not. A position that changes both times mixes samples, also where the graph shows no trace of it.

No gradients, no hooks; random numbers, buffers and whatever modules keep on themselves are set aside meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import InteractionError, SamplesError
from unsum.graph.layout import Layout, Regular
from unsum.nested import children, format_path, leaves, put
from unsum.types import Path

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def confirm(model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, *, n: int, k: int) -> None:
    """Raise where the samples lie along another dimension of an output than `k`, though that has their number too."""
    if n < 2 or not _is_plain((args, kwargs)):
        return  # a cache, say, would be written to
    given = (args, kwargs)
    changes = {path: _first_replaced(t, k) for path, t in leaves(given) if t.dim() > k and t.shape[k] == n}
    if not changes:
        return
    try:
        before, after = _outputs(model, call, given, {}), _outputs(model, call, given, changes)
    except Exception:  # it cannot be run again like this: some models need their own hooks
        return
    for path, tensor in before.items():
        if path in after and after[path].shape == tensor.shape:
            _compare(tensor, after[path], n, k)


def refuse_mixing(
    model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, owners_of: OwnersOf, n: int
) -> None:
    """Raise where a call mixes samples."""
    found = mixing(model, call, args, kwargs, owners_of, n)
    if found is not None:
        raise InteractionError(
            f"samples interact: {found}, though the graph shows no trace of it (detached statistics, mixup).\n"
            '  without verify=True, interacting="exact" gives the derivative of each sample\'s part of the loss'
        )


OwnersOf = Callable[[tuple[int, ...], int], Layout | None]


def mixing(
    model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, owners_of: OwnersOf, n: int
) -> str | None:
    """Which output of a call depends on other samples than its own, in words; None if none does, or if it cannot be
    tried."""
    given = (args, kwargs)
    inputs = {path: (t, layout) for path, t in leaves(given) if (layout := owners_of(tuple(t.shape), n)) is not None}
    if n < 2 or not inputs or not _is_plain(given):
        return None
    try:
        before = _outputs(model, call, given, {})
    except Exception:  # it cannot be run again like this: some models need their own hooks
        return None
    for bit in range((n - 1).bit_length()):
        changed: list[dict[Path, Tensor]] = []
        for value in (0, 1):
            chosen = ((torch.arange(n) >> bit) & 1) == value
            changes = {path: _replaced(t, layout, chosen) for path, (t, layout) in inputs.items()}
            after = _outputs(model, call, given, changes)
            changed.append({path: _differs(t, after[path]) for path, t in before.items() if path in after})
        for path, tensor in before.items():
            layout = owners_of(tuple(tensor.shape), n)
            if layout is None or path not in changed[0] or path not in changed[1]:
                continue
            own = layout.owner(tensor.device)
            for value in (0, 1):
                # What changes when other samples are replaced is not this sample's alone.
                wrong = changed[value][path] & (own >= 0) & (((own >> bit) & 1) != value)
                if bool(wrong.any()):
                    sample = int(own[wrong][0])
                    return f"sample {sample} of output{format_path(path)} changes with other samples"
    return None


def _outputs(model: nn.Module, call: Callable[..., Any], given: Any, changes: Mapping[Path, Tensor]) -> Any:
    args, kwargs = put(given, changes) if changes else given
    with state_set_aside(model, quiet=True), torch.no_grad(), torch._C.DisableTorchFunction():
        return dict(leaves(call(*args, **kwargs)))


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
    return ~torch.isclose(one, other, rtol=0, atol=float(rounding.get(one.dtype, 2e-2) * scale), equal_nan=True)


def _compare(before: Tensor, after: Tensor, n: int, k: int) -> None:
    if before.dim() <= k or before.shape[k] != n or list(before.shape).count(n) < 2:
        return
    changed = ~torch.isclose(before, after, rtol=0, atol=0, equal_nan=True)
    along = [d for d, size in enumerate(before.shape) if size == n and not bool(changed.narrow(d, 1, n - 1).any())]
    if bool(changed.any()) and along and k not in along:
        raise SamplesError(
            f"the samples lie along dimension {along[0]} of an output of shape {tuple(before.shape)}; dimension {k} "
            f"only happens to have the same size.\n  samples=unsum.dim({along[0]}), or unsum.mark_samples(losses)"
        )


def _first_replaced(tensor: Tensor, k: int) -> Tensor:
    new = tensor.detach().clone()
    new.select(k, 0).copy_(tensor.detach().select(k, 1))
    return new


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return True
    parts = list(children(value))
    return bool(parts or isinstance(value, tuple | list | Mapping)) and all(_is_plain(part) for _, part in parts)


@contextlib.contextmanager
def state_set_aside(model: nn.Module, *, quiet: bool = False) -> Iterator[None]:
    """Random numbers, buffers and what modules keep on themselves are afterwards as they were. If `quiet`, no hook on
    a module is called meanwhile."""
    attributes = {module: dict(vars(module)) for module in model.modules()}
    if quiet:
        for module in attributes:
            vars(module).update((name, OrderedDict()) for name in _HOOKS)
    tables = {module: dict(module._buffers) for module in model.modules()}
    buffers = {buffer: (buffer.detach().clone(), buffer._version) for buffer in model.buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, kept in attributes.items():
            vars(module).clear()
            vars(module).update(kept)
            module._buffers.clear()
            module._buffers.update(tables[module])
        with torch.no_grad():
            for buffer, (value, version) in buffers.items():
                if buffer._version != version:
                    buffer.copy_(value)
                elif not _is_as_it_was(buffer, value):  # batch norm does not count what it writes: nor does this
                    buffer.data.copy_(value)


def _is_as_it_was(buffer: Tensor, value: Tensor) -> bool:
    return bool(((buffer == value) | ((buffer != buffer) & (value != value))).all())
