"""Tensors: hooks on their gradients, and what torch says of them only under private names."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from unsum.seams.hook import Handle, Hook
from unsum.seams.nodes import current_backward, on_node
from unsum.seams.operators import is_stand_in

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


def is_changed(tensor: Tensor, version: int) -> bool:
    """Whether the memory of a tensor was changed in place since it had this version, or was given back."""
    if tensor._version != version:
        return True
    if is_stand_in(tensor) or tensor.numel() == 0 or tensor.data_ptr():
        return False
    return not tensor._is_zerotensor()  # which has no memory from the beginning


def put_version_back(tensor: Tensor, version: int) -> None:
    """The memory of a tensor is as it was at this version: a graph that has saved it then may be walked."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors,): their norms, in few launches; in float32 at least."""
    dtypes = {tensor.dtype for tensor in tensors}
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(dtypes) > 1 or wide.is_complex:
        return torch.stack([torch.linalg.vector_norm(t).to(tensors[0].device, torch.float64) for t in tensors])
    found = torch.stack(torch._foreach_norm(list(tensors), 2, wide))
    if found.device.type == "cpu" and bool(found.isinf().any()):  # the square of a large number is beyond float32
        return torch.stack(torch._foreach_norm([tensor.double() for tensor in tensors], 2))
    return found


def largest_of(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors,): the largest absolute value in each, 0 in an empty one; NaN if there is one."""
    found = [torch.zeros((), dtype=torch.float64, device=tensors[0].device) for _ in tensors]
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for k, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(k)
    for numbers in kinds.values():
        for k, value in zip(numbers, torch._foreach_norm([tensors[k] for k in numbers], math.inf), strict=True):
            found[k] = value.to(found[k])
    return torch.stack(found)


class TensorHook(Hook):
    """A hook that is on one tensor at a time, and can take itself away again."""

    __slots__ = ("hooks_dict_ref", "key")

    def put_on(self, tensor: Tensor) -> None:
        """Wait for the gradient of `tensor`."""
        # Reading grad_fn renews the graph of a view that was changed through an alias; without it torch crashes here.
        node: Any = tensor.grad_fn
        hooks: Any = tensor._backward_hooks
        if node is not None and hooks is None and type(tensor) is Tensor:
            # What `Tensor.register_hook` does with the first hook of a tensor, in a third of the time.
            hooks = tensor._backward_hooks = OrderedDict()
            node._register_hook_dict(tensor)
            self.key = next(_keys)
            hooks[self.key] = self
            self.hooks_dict_ref = weakref.ref(hooks)
        else:
            handle = tensor.register_hook(self)  # type: ignore[no-untyped-call]
            self.key, self.hooks_dict_ref = handle.id, handle.hooks_dict_ref

    def move_to(self, node: Any, hook: Callable[..., Any]) -> None:
        """Wait at a node of the graph instead: `hook` is called as `on_node` calls it."""
        self.remove()
        handle: Any = on_node(node, hook)
        self.key, self.hooks_dict_ref = handle.id, handle.hooks_dict_ref

    def is_dead(self) -> bool:
        """Whether the tensor is gone, and its graph with it."""
        return self.hooks_dict_ref() is None

    def remove(self) -> None:
        """Wait no longer."""
        hooks = self.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self.key, None)


class _Calling(TensorHook):
    """One that calls a function."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Tensor], Tensor | None]) -> None:
        self.function = function

    def __call__(self, grad: Tensor) -> Tensor | None:
        return self.function(grad)


class _OnLeaf:
    """A hook on a leaf. Torch keeps the dictionary of a leaf's hooks when the last one is removed, and calls it in
    every later backward (a step of a tiny model took 5 % longer): `remove` takes an empty dictionary away as well."""

    __slots__ = ("_hook", "_leaf", "hooks_dict_ref")

    def __init__(self, leaf: Tensor, hook: TensorHook) -> None:
        self._leaf, self._hook, self.hooks_dict_ref = weakref.ref(leaf), hook, hook.hooks_dict_ref

    def remove(self) -> None:
        self._hook.remove()
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
    ours = _Calling(hook)
    ours.put_on(tensor)
    if first:
        registered: Any = tensor._backward_hooks
        for key in [key for key in registered if key != ours.key]:  # torch goes by the order of insertion
            registered[key] = registered.pop(key)
    return _OnLeaf(tensor, ours) if tensor.grad_fn is None else ours


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


def have_foreign_hooks(parameters: Collection[nn.Parameter]) -> bool:
    """Whether somebody else than an open block waits for the gradient of any of these, or for its accumulation."""
    if not have_hooks(parameters):
        return False
    held = [hook for p in parameters for known in (_hooks(p), _later_hooks(p)) for hook in (known or {}).values()]
    return not all(isinstance(hook, Hook) for hook in held)


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
