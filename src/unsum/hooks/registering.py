"""Hooks on modules, tensors and nodes of the graph, and modes: everything here is undone by what it returns."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

_is_in_vmap, _is_in_old_vmap = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
_keys = itertools.count(-1, -1)  # of hooks; torch's own are not negative


class Handle(Protocol):
    """What takes a hook away again."""

    def remove(self) -> None: ...


class Hook:
    """A hook of ours. A copy of the module, or a pickle, gets one that does nothing: it is not the user's module."""

    __slots__ = ()
    __torch_unserializable__ = True  # torch warns of other tensor hooks when a tensor is pickled

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_inert, ()


class Ours(Hook):
    """One that calls a function."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def inert(*args: Any) -> None:
    """What is left of a hook of ours in a copy of the module."""


def _get_inert() -> Callable[..., None]:
    return inert


def on_call(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> list[Handle]:
    """Call `before(args, kwargs)` and `after(output)` around every call of the module, also one that raises (with
    None); a result that is not None takes the place of the arguments or the output."""
    return [
        module.register_forward_pre_hook(Ours(lambda _, args, kwargs: before(args, kwargs)), with_kwargs=True),
        module.register_forward_hook(Ours(lambda _, args, output: after(output)), always_call=True),
    ]


def on_plain_call(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> int:
    """Call `before(module, args, kwargs)` and `after(module, args, output)`, both a `Hook`, as torch calls hooks;
    `after` also where the module raises (with None). Returns a key for `off_plain_call`.

    Torch's own registering takes several times as long, for every linear in every step."""
    key = next(_keys)
    module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key] = before, True
    module._forward_hooks[key], module._forward_hooks_always_called[key] = after, True
    return key


def off_plain_call(module: nn.Module, key: int) -> None:
    """Undo `on_plain_call`."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)
    module._forward_hooks.pop(key, None)
    module._forward_hooks_always_called.pop(key, None)


class _OnTensor:
    """A hook on a tensor."""

    __slots__ = ("hooks_dict_ref", "key")

    def __init__(self, hooks: OrderedDict[int, Any], key: int) -> None:
        self.hooks_dict_ref, self.key = weakref.ref(hooks), key

    def remove(self) -> None:
        hooks = self.hooks_dict_ref()
        if hooks is not None:
            hooks.pop(self.key, None)


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
    return handle


def on_node(node: Any, hook: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]) -> Handle:
    """Call `hook` with the gradients that arrive at a node of the graph, before it runs."""
    handle: Handle = node.register_prehook(_exactly(hook) if _autocasts() else hook)
    return handle


def on_nodes(nodes: Iterable[Any], hooks: Iterable[Callable[..., Any]]) -> list[Handle]:
    """`on_node` for many nodes, each with its own hook."""
    if _autocasts():
        hooks = map(_exactly, hooks)
    return [node.register_prehook(hook) for node, hook in zip(nodes, hooks, strict=True)]


def _autocasts() -> tuple[str, ...]:
    """The kinds of device on which a backward inside `torch.autocast` would round what we compute."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return ()
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """What is computed within is not rounded by a `torch.autocast` of the user's."""
    kinds = _autocasts()
    if not kinds:
        yield
        return
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _exactly(hook: Callable[..., Any]) -> Callable[..., Any]:
    def exact(*args: Any) -> Any:
        with exactly():
            return hook(*args)

    return exact


def after_node(node: Any, hook: Callable[[tuple[Tensor | None, ...], Any], None]) -> Handle:
    """Call `hook` with the gradients that a node of the graph hands on (and those it got), after it has run."""
    handle: Handle = node.register_hook(hook)
    return handle


def is_dead(handle: Handle) -> bool:
    """Whether the tensor of a handle is gone, and its graph with it."""
    hooks = getattr(handle, "hooks_dict_ref", None)
    return hooks is not None and hooks() is None


def is_batched(tensor: Tensor) -> bool:
    """Whether this is a tensor inside a vmap, which means nothing outside."""
    return _is_in_vmap(tensor) or _is_in_old_vmap(tensor)  # type: ignore[no-any-return]


def watch(mode: TorchFunctionMode) -> None:
    """Let a mode see every torch call of this thread. It goes below the user's own modes, so that these may be left
    while it is on."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in (mode, *reversed(above)):
        _push_mode(each)


def unwatch(mode: TorchFunctionMode) -> None:
    """Undo `watch`."""
    above = [_pop_mode() for _ in range(_len_torch_function_stack())]
    for each in reversed(above):
        if each is not mode:
            _push_mode(each)
