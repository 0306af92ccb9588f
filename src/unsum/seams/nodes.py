"""Nodes of the autograd graph: hooks on them, and what torch says of them only under private names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from unsum.seams.hook import Handle
from unsum.seams.modes import are_hooks_rounded, exact

SAVED = "_saved_"  # how the names of what nodes have saved begin

outputs_of: Callable[[Any], Any] = attrgetter("_input_metadata")  # shape, dtype and device of each output of a node
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")  # a node's number; each thread counts its own
next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of the node that is made next
current_node: Callable[[], Any] = torch._C._current_autograd_node  # that runs now, in a backward
current_backward: Callable[[], int] = torch._C._current_graph_task_id  # a number; -1 outside
Function: type = torch._C._FunctionBase  # the context of an autograd.Function

VIEW: type = torch._C._functions.ViewBackward0  # type: ignore[attr-defined]
_CONVOLUTION: Any = torch._C._functions.ConvolutionBackward0  # type: ignore[attr-defined]

_tensor_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def saved_of(node: Any, name: str) -> Any:
    """What a node has saved under this name, such as "dim" or "self"."""
    return getattr(node, SAVED + name)


def saved_or(node: Any, name: str, default: Any) -> Any:
    """What a node has saved under this name; the default where nodes of its kind save nothing so named."""
    return getattr(node, SAVED + name, default)


def is_convolution(node: Any) -> bool:
    """Whether a node is torch's own convolution."""
    return type(node) is _CONVOLUTION


def saved_tensors(kind: type) -> tuple[str, ...]:
    """The attributes under which nodes of this kind have tensors saved."""
    if kind not in _tensor_names:
        names = (name for name in dir(kind) if name.startswith(SAVED) and hasattr(kind, f"_raw{name}"))
        _tensor_names[kind] = tuple(names)
    return _tensor_names[kind]


def saved_others(node: Any) -> list[str]:
    """The attributes under which a node of torch's has saved what is no tensor. (What a custom Function puts on its
    context has any name, and may be a tensor.)"""
    kind = type(node)
    return [name for name in dir(kind) if name.startswith(SAVED) and not hasattr(kind, f"_raw{name}")]


def packed(node: Any) -> Iterator[tuple[str, Any]]:
    """What a node has saved, not unpacked, by the attribute that would unpack it. Raises nothing: what was freed is
    None."""
    for name in dir(node):
        if name.startswith(f"_raw{SAVED}"):
            try:
                yield name.removeprefix("_raw"), getattr(node, name)
            except RuntimeError:  # of a custom function, freed
                yield name.removeprefix("_raw"), None


class Token:
    """Belongs to one node and lives as long as it does."""

    __slots__ = ("__weakref__",)


def token(node: Any) -> Token:
    """The token of a node, kept in the node: recognises it without holding it."""
    notes = node.metadata
    found: Token | None = notes.get("unsum")
    if found is None:
        found = notes.setdefault("unsum", Token())  # in one go: another thread may do the same
    return found


def will_run(node: Any) -> bool:
    """Whether the backward that runs in this thread comes to this node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True


def on_node(node: Any, hook: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]) -> Handle:
    """Call `hook` with the gradients that arrive at a node of the graph, before it runs."""
    handle: Handle = node.register_prehook(exact(hook) if are_hooks_rounded() else hook)
    return handle


def on_nodes(nodes: Iterable[Any], hooks: Iterable[Callable[..., Any]]) -> list[Handle]:
    """`on_node` for many nodes, each with its own hook."""
    if are_hooks_rounded():
        hooks = map(exact, hooks)
    return [node.register_prehook(hook) for node, hook in zip(nodes, hooks, strict=True)]


def after_node(node: Any, hook: Callable[[tuple[Tensor | None, ...], Any], tuple[Tensor | None, ...] | None]) -> Handle:
    """Call `hook` with the gradients that a node of the graph hands on (and those it got), after it has run. It may
    return others, which are handed on instead."""
    handle: Handle = node.register_hook(hook)
    return handle
