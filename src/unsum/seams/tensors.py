"""Tensors: hooks on their gradients, and what torch says of them only under private names."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from unsum.seams.hook import Handle, Hook, Ours
from unsum.seams.nodes import current_backward

_is_in_vmap, _is_in_old_vmap = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
_keys = itertools.count(-1, -1)  # of hooks; torch's own are not negative
_hooks, _later_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
_engine_code = torch.autograd.graph._engine_run_backward.__code__  # in which every backward of Python's runs

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # the tensor of which one is a view
version_of: Callable[[Tensor], int] = attrgetter("_version")  # how often its memory was changed in place
is_view: Callable[[Tensor], bool] = Tensor._is_view

add_to: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_  # each to each, in one call
copy_to: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_  # type: ignore[assignment]
_clone: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = getattr(torch, "_foreach_clone", None)  # not in 2.11


class _OnTensor:
    """A hook on a tensor."""

    __slots__ = ("hooks_dict_ref", "key")

    def __init__(self, hooks: OrderedDict[int, Any], key: int) -> None:
        self.hooks_dict_ref, self.key = weakref.ref(hooks), key

    def remove(self) -> None:
        hooks = self.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self.key, None)


class _OnLeaf:
    """A hook on a leaf. Torch keeps the dictionary of a leaf's hooks when the last one is removed, and calls it in
    every later backward (a step of a tiny model took 5 % longer): `remove` takes an empty dictionary away as well."""

    __slots__ = ("_handle", "_leaf", "hooks_dict_ref")

    def __init__(self, leaf: Tensor, handle: Any) -> None:
        self._leaf, self._handle, self.hooks_dict_ref = weakref.ref(leaf), handle, handle.hooks_dict_ref

    def remove(self) -> None:
        self._handle.remove()
        leaf, hooks = self._leaf(), self.hooks_dict_ref()
        if leaf is not None and hooks is not None and not hooks and _hooks(leaf) is hooks and not _may_run_backward():
            leaf._backward_hooks = None


def _may_run_backward() -> bool:
    """Whether a backward runs in some thread, and may be about to ask a leaf for its hooks."""
    if current_backward() != -1:
        return True
    own = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own]
    while frames:
        frame = frames.pop()
        if frame.f_code is _engine_code:
            return True
        if frame.f_back is not None:
            frames.append(frame.f_back)
    return False


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None], *, first: bool = False) -> Handle:
    """Call `hook` with the gradient of `tensor`, whenever a backward has computed it; first of all hooks on it."""
    # Reading grad_fn renews the graph of a view that was changed through an alias; without it torch crashes here.
    node: Any = tensor.grad_fn
    ours = hook if isinstance(hook, Hook) else Ours(hook)
    if node is not None and type(tensor) is Tensor and tensor._backward_hooks is None:
        # What `Tensor.register_hook` does with the first hook of a tensor, in a third of the time.
        hooks: OrderedDict[int, Any] = OrderedDict()
        tensor._backward_hooks = hooks
        node._register_hook_dict(tensor)
        key = next(_keys)
        hooks[key] = ours
        return _OnTensor(hooks, key)
    handle = tensor.register_hook(ours)  # type: ignore[no-untyped-call]
    if first:
        registered: Any = tensor._backward_hooks
        for key in [key for key in registered if key != handle.id]:  # torch goes by the order of insertion
            registered[key] = registered.pop(key)
    return _OnLeaf(tensor, handle) if node is None else handle


def is_dead(handle: Handle) -> bool:
    """Whether the tensor of a handle is gone, and its graph with it."""
    hooks = getattr(handle, "hooks_dict_ref", None)
    return hooks is not None and hooks() is None


def is_batched(tensor: Tensor) -> bool:
    """Whether this is a tensor inside a vmap, which means nothing outside."""
    return _is_in_vmap(tensor) or _is_in_old_vmap(tensor)  # type: ignore[no-any-return]


def hooks_on(tensor: Tensor) -> list[Any]:
    """The hooks that wait for the gradient of this tensor."""
    return list((_hooks(tensor) or {}).values())


def has_late_hooks(tensor: Tensor) -> bool:
    """Whether somebody waits until the gradient of this leaf is accumulated."""
    return bool(_later_hooks(tensor))


def have_hooks(parameters: Collection[nn.Parameter]) -> bool:
    """Whether somebody waits for the gradient of any of these, or for its accumulation."""
    return any(map(_hooks, parameters)) or any(map(_later_hooks, parameters))


def memory_number(tensor: Tensor) -> int:
    """A number of the tensor's memory, which no other memory has as long as this one lives; -1 for a tensor subclass
    without memory of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -1


def copies(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies with memory of their own, in one call; on a GPU in one kernel."""
    if _clone is not None:
        return _clone(values)
    if values[0].is_cuda and values[0].is_floating_point():
        return torch._foreach_mul(list(values), 1)
    return [value.clone() for value in values]
