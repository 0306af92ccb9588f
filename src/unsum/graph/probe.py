"""Along which dimension of an output do the samples lie, where sizes coincide?

Ten classes and ten samples: both dimensions of the output have the size of the batch. Then the model is run again
without gradients, once as it was and once with the first sample's input replaced by the second's. What changes belongs
to the first sample. Random numbers, buffers and whatever modules keep on themselves are set aside meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import SamplesError
from unsum.nested import children, leaves, put


def confirm(model: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, *, n: int, k: int) -> None:
    """Raise where the samples lie along another dimension of an output than `k`, though that has their number too."""
    if n < 2 or not _is_plain((args, kwargs)):
        return  # a cache, say, would be written to
    given = (args, kwargs)
    changes = {path: _first_replaced(t, k) for path, t in leaves(given) if t.dim() > k and t.shape[k] == n}
    if not changes:
        return
    with state_set_aside(model), torch.no_grad(), torch._C.DisableTorchFunction():
        state = torch.get_rng_state()
        before = dict(leaves(call(*args, **kwargs)))
        torch.set_rng_state(state)
        other_args, other_kwargs = put(given, changes)
        after = dict(leaves(call(*other_args, **other_kwargs)))
    for path, tensor in before.items():
        if path in after and after[path].shape == tensor.shape:
            _compare(tensor, after[path], n, k)


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
def state_set_aside(model: nn.Module) -> Iterator[None]:
    """Random numbers, buffers and what modules keep on themselves are afterwards as they were."""
    attributes = {module: dict(vars(module)) for module in model.modules()}
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
