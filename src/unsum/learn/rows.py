"""Rows of tensors whose samples are known, found again in what nodes have saved.

A node at which a weight meets data saves that data. Where it is a view of a tensor whose samples are known, its rows
say whose the node's positions are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from unsum.graph.layout import NOBODY, Layout, Regular, complete, mapped, regular, reshaped
from unsum.graph.nodes import Node
from unsum.graph.saved import saved_by
from unsum.nested import leaves
from unsum.seams.tensors import memory_number

_CHOOSING = ("Index", "Gather", "Scatter", "Take", "Masked", "UnsafeIndex")  # by whole numbers
# Functions that move numbers about; and such that change each by itself, or within a sample.
_MOVES = {
    "reshape", "view", "contiguous", "transpose", "permute", "t", "flip", "roll", "index_select", "__getitem__", "cat",
    "concat", "stack", "repeat", "repeat_interleave", "expand", "expand_as", "unsqueeze", "squeeze", "flatten",
    "unflatten", "narrow", "movedim", "swapaxes", "pad", "_pad", "tile", "take_along_dim", "gather", "rot90", "clone",
}  # fmt: skip
_KEEPS = {
    "to", "float", "double", "half", "bfloat16", "long", "int", "type", "clone", "contiguous", "add", "sub", "mul",
    "div", "true_divide", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "neg",
    "clamp", "log", "log1p", "exp", "sqrt", "tanh", "abs", "relu", "sigmoid", "pow", "__pow__", "square", "layer_norm",
    "type_as", "nan_to_num", "dropout", "masked_fill", "sin", "cos", "tan", "erf", "gelu", "silu", "elu", "leaky_relu",
    "softplus", "hardtanh", "sign", "floor", "ceil", "round", "trunc", "reciprocal", "rsqrt", "expm1", "log2", "log10",
    "softmax", "log_softmax", "cumsum", "normalize", "remainder", "fmod", "__mod__", "__neg__", "__abs__",
    "__rtruediv__", "__gt__", "__lt__", "__ge__", "__le__", "gt", "lt", "ge", "le", "eq", "ne", "bool",
}  # fmt: skip
_FILLS = {"zero_", "fill_", "index_fill_", "clamp_min_", "clamp_max_", "sub_", "add_", "mul_", "div_"}
_MULTIPLY = ("Mm", "Addmm", "Bmm", "Baddbmm", "Addbmm", "Linear", "Mv", "Addmv", "MkldnnRnn", "CudnnRnn", "Addr")


def _common(node: Node, dims: int) -> int:
    """How many of the first dimensions of what a node has saved may be those of its output."""
    name = node.name()
    if "Convolution" in name or "Conv2D" in name:
        return min(dims, 1)
    if "Attention" in name:
        return min(dims, 2)
    return dims - 1 if name.startswith(_MULTIPLY) else dims


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a tensor lies in its memory, and its owners."""

    storage: StorageWeakRef  # while this is held, no other memory has its number
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    owners: Layout
    is_given: bool  # to the model, and not made of what was
    call: int  # the outermost call that it was given to
    reading: int  # which of the ways in which that call may be read

    @property
    def n(self) -> int:
        return self.owners.n if isinstance(self.owners, Regular) else int(self.owners.map.max()) + 1

    @property
    def end(self) -> int:
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)) + 1

    @cached_property
    def dims(self) -> list[int] | None:
        """The dimensions by their strides, the largest first; None where positions may share memory (`expand`, sliding
        windows): then parts of the tensor say nothing."""
        order = sorted((d for d, size in enumerate(self.shape) if size > 1), key=lambda d: self.stride[d])
        reach = 0
        for d in order:
            if self.stride[d] <= reach:
                return None
            reach += (self.shape[d] - 1) * self.stride[d]
        return order[::-1]

    def owners_of(self, view: Tensor) -> Tensor | None:
        """The sample of every number of a view of this tensor; None where parts of it say nothing."""
        if (tuple(view.shape), view.stride(), view.storage_offset()) == (self.shape, self.stride, self.offset):
            return self.owners.owner().expand(self.shape)
        if self.dims is None:
            return None
        found = self._cut_out(view)
        return self.owner_at(_addresses(view)) if found is None else found

    def _cut_out(self, view: Tensor) -> Tensor | None:
        """The same for a view that only exchanges dimensions and leaves out their ends, without a look at each number;
        None for any other."""
        left, start = int(view.storage_offset()) - self.offset, dict.fromkeys(range(len(self.shape)), 0)
        for d in self.dims or ():
            start[d], left = divmod(left, self.stride[d])
        by_stride = {self.stride[d]: d for d in self.dims or ()}
        strided = zip(view.shape, view.stride(), strict=True)
        used = [None if size == 1 else by_stride.get(stride, -1) for size, stride in strided]
        own = [d for d in used if d is not None]
        sizes = dict(zip(used, view.shape, strict=True))
        if left or -1 in own or len(set(own)) < len(own) or any(start[d] + sizes[d] > self.shape[d] for d in own):
            return None
        found = self.owners.owner().expand(self.shape)
        for d in range(len(self.shape)):
            found = found.narrow(d, start[d], sizes.get(d, 1))
        rest = [d for d in range(len(self.shape)) if d not in own]
        found = found.permute(*own, *rest)
        for _ in rest:
            found = found.select(-1, 0)
        for k, from_dim in enumerate(used):
            found = found.unsqueeze(k) if from_dim is None else found
        return found

    def owner_at(self, addresses: Tensor) -> Tensor:
        """The sample of each address in this memory; NOBODY where the tensor has no number."""
        left = addresses - self.offset
        inside = left >= 0
        at = [torch.zeros_like(left) for _ in self.shape]
        for d in self.dims or ():
            at[d] = left.div(self.stride[d], rounding_mode="floor")
            inside &= at[d] < self.shape[d]
            left = left - at[d] * self.stride[d]
        inside &= left == 0
        index = tuple(torch.where(inside, coordinate, 0) for coordinate in at)
        return torch.where(inside, self.owners.owner().expand(self.shape)[index], NOBODY)


class Rows:
    """Remembers tensors whose samples are known, without holding them."""

    def __init__(self) -> None:
        self._places: dict[int, list[_Place]] = {}  # by the number of their memory
        self.asked: Collection[int] | None = None  # the calls of which it is asked; None: all

    def remember(self, tensor: Tensor, owners: Layout, call: int, reading: int = 0, *, is_given: bool = True) -> None:
        """The owners of this tensor, in a call, are known: as it is read so, if it may be read in several ways."""
        if tensor.layout != torch.strided or not tensor.numel() or self._holds(tensor, call, reading):
            return
        try:
            storage = StorageWeakRef(tensor.untyped_storage())
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            return
        if len(self._places) > 1000:
            self._places = {key: there for key, there in self._places.items() if not there[0].storage.expired()}
        there = self._places.setdefault(storage.cdata, [])
        offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
        size = tensor.element_size()
        there.append(_Place(storage, shape, tensor.stride(), offset, size, owners, is_given, call, reading))
        del there[:-64]

    def _holds(self, tensor: Tensor, call: int, reading: int) -> bool:
        there = self._places.get(memory_number(tensor), ())
        return any((place.call, place.reading) == (call, reading) and _covers(place, tensor) for place in there)

    def choose(self, call: int, reading: int) -> None:
        """A call that could be read in several ways is to be read in this one."""
        for there in self._places.values():
            there[:] = [place for place in there if place.call != call or place.reading == reading]
        self._places = {key: there for key, there in self._places.items() if there}

    def follow(self, function: Any, name: str, args: Any, kwargs: Any, made: Tensor) -> None:
        """A tensor was made of others, without a node. Where these are remembered, and the function moves numbers about
        or changes each by itself, so is what was made: its owners are found by calling the function on theirs."""
        if (name not in _MOVES and name not in _KEEPS) or made.layout != torch.strided or not made.numel():
            return
        if kwargs.get("out") is not None:  # called again, it would write to the user's own
            return
        if memory_number(made) in self._places:  # a view: known by where it lies
            return
        readings: dict[tuple[int, int], _Known] = {}
        given = [tensor for _, tensor in leaves((args, kwargs))]
        for tensor in given:
            for place in reversed(self._places.get(memory_number(tensor), ())):
                known = readings.setdefault((place.call, place.reading), {})
                if id(tensor) not in known and _covers(place, tensor):
                    known[id(tensor)] = place, tensor
        for (call, reading), known in readings.items():
            layout = _made_of(function, name, args, kwargs, known, made) if known else None
            if layout is not None:
                self.remember(made, layout, call, reading, is_given=False)

    def written(self, name: str, target: Tensor, others: Sequence[Tensor]) -> None:
        """A tensor is written to. What is changed number by number, without another remembered tensor, keeps its
        owners; of all else nothing is known any more."""
        is_kept = name.rstrip("_") in _KEEPS or name in _FILLS
        if not is_kept or any(memory_number(other) in self._places for other in others):
            self._places.pop(memory_number(target), None)

    def find_copies(self, given: Sequence[Tensor], nodes: Callable[[], Iterable[Node]]) -> None:
        """A function was given these tensors and has made these nodes. Where a node has saved a copy of what is
        remembered (a kernel wants it dense, or time first), the copy is remembered as well."""
        known = [
            (place, tensor)
            for tensor in given
            if tensor.grad_fn is None and tensor.is_floating_point() and tensor.dim() > 1
            for place in self._places.get(memory_number(tensor), ())
            if _covers(place, tensor)
        ]
        if not known:
            return
        for node in nodes():
            for saved in saved_by(node):
                if saved.requires_grad or not saved.is_contiguous() or memory_number(saved) in self._places:
                    continue
                for place, tensor in known:
                    layout = _of_copy(place, tensor, saved)
                    if layout is not None:
                        self.remember(saved, layout, place.call, place.reading, is_given=False)

    def _place(self, tensor: Tensor) -> _Place | None:
        """Where a tensor that is remembered, and of which this is a view, lies: of the calls that are asked about, the
        last that was given it."""
        there = self._places.get(memory_number(tensor), ())
        if not there or not tensor.numel():
            return None
        asked = [place for place in there if self.asked is None or place.call in self.asked]
        return next((place for place in reversed(asked) if _covers(place, tensor)), None)

    def forget(self) -> None:
        """Let go of everything."""
        self._places.clear()

    def __bool__(self) -> bool:
        return bool(self._places)

    def of(self, tensor: Tensor) -> Layout | None:
        """The owners of a tensor that is remembered, or of a view of all of it."""
        place = self._place(tensor)
        return None if place is None else _as_a_whole(place, tensor)

    def are_saved_by(self, node: Node) -> bool:
        """Whether a node has saved rows of a tensor whose samples are known."""
        return any(self._place(tensor) is not None for tensor in saved_by(node))

    def are_given_to(self, node: Node) -> bool:
        """Whether a node has saved rows of a tensor that the model was given."""
        return any((place := self._place(tensor)) is not None and place.is_given for tensor in saved_by(node))

    def owners(self, node: Node, shape: tuple[int, ...]) -> Layout | None:
        """The sample of every position of a node's output of this shape, from the rows of what the node has saved."""
        for tensor in saved_by(node):
            place = self._place(tensor)
            # Fewer dimensions stand for the first ones only if they are ids, as of an embedding.
            if place is None or 0 in shape or not shape or not tensor.dim():
                continue
            if not tensor.is_floating_point() and node.name().startswith(_CHOOSING):
                continue  # which rows to take, not rows
            if tensor.dim() != len(shape) and (tensor.is_floating_point() or tensor.dim() > len(shape)):
                continue
            if (whole := _as_a_whole(place, tensor)) is not None and whole.dim < tensor.dim():
                same = tuple(tensor.shape[: whole.dim + 1]) == tuple(shape[: whole.dim + 1])
                if same and whole.dim < _common(node, tensor.dim()):
                    return Regular(shape, whole.n, whole.dim, whole.block)
                continue
            if place.dims is None:
                continue
            own = place.owner_at(_addresses(tensor))
            for common in range(_common(node, own.dim()), 0, -1):
                if tuple(own.shape[:common]) != tuple(shape[:common]):
                    continue
                rest = own.flatten(common) if own.dim() > common else own[..., None]
                if bool((rest == rest[..., :1]).all()):
                    return _regular(rest[..., 0], place.owners, shape)
        return None


def _addresses(view: Tensor) -> Tensor:
    """Where each number of a tensor lies in its memory, counted in numbers."""
    found = torch.full((), int(view.storage_offset()))
    for d, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        found = found + (torch.arange(size) * stride).view(-1, *[1] * (view.dim() - 1 - d))
    return found.expand(view.shape)


def _covers(place: _Place, view: Tensor) -> bool:
    """Whether all numbers of a tensor are numbers of the remembered one."""
    if place.itemsize != view.element_size():
        return False
    offset, end = int(view.storage_offset()), 1
    end += offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    if offset < place.offset or end > place.end:
        return False
    if (tuple(view.shape), view.stride(), offset) == (place.shape, place.stride, place.offset):
        return True
    if place.dims is None:
        return False
    if prod(place.shape) == place.end - place.offset:  # without gaps
        return True
    return bool((place.owner_at(_addresses(view)) != NOBODY).all())


def _regular(rows: Tensor, owners: Layout, shape: tuple[int, ...]) -> Layout:
    found = complete(rows, owners.n) if isinstance(owners, Regular) else None
    if isinstance(found, Regular):
        return Regular(shape, found.n, found.dim, found.block)
    return mapped(rows).widened(shape)


def _as_a_whole(place: _Place, view: Tensor) -> Regular | None:
    """Whose a view is, if it is all of a tensor whose samples lie along a dimension, in the same order."""
    if not isinstance(place.owners, Regular) or view.storage_offset() != place.offset:
        return None
    if tuple(view.shape) == place.shape and view.stride() == place.stride:
        return place.owners
    if view.numel() != prod(place.shape) or not view.is_contiguous() or place.stride != _dense(place.shape):
        return None
    found = reshaped(place.owners, tuple(view.shape), place.owners.n)
    return found if isinstance(found, Regular) else None


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[k + 1 :]) for k in range(len(shape)))


_Known = dict[int, tuple[_Place, Tensor]]  # arguments of a function that are remembered, by id: where, and themselves


def _made_of(function: Any, name: str, args: Any, kwargs: Any, known: _Known, made: Tensor) -> Layout | None:
    """The layout of what a function has made of remembered tensors; None if it is unclear."""
    n = max(place.n for place, _ in known.values())
    if name in _KEEPS and not (args and id(args[0]) in known):
        return None
    if name in _KEEPS:
        layouts = [_as_a_whole(place, tensor) for place, tensor in known.values()]
        whole = layouts[0]
        if whole is not None and whole.shape == tuple(made.shape) and layouts.count(whole) == len(layouts):
            return whole
    owners = {key: place.owners_of(tensor) for key, (place, tensor) in known.items()}
    if any(own is None for own in owners.values()):
        return None
    if name in _KEEPS and name not in _MOVES:  # number by number, or along dimensions within a sample
        first, *others = owners.values()
        assert first is not None
        is_clear = first.shape == made.shape and all(own is not None and torch.equal(first, own) for own in others)
        return _layout(first, n) if is_clear else None
    found = _called_on(function, name, args, kwargs, owners, made)
    if found is None:
        return None
    return _completed(found, n) if bool((found < 0).any()) else _layout(found, n)


def _called_on(
    function: Any, name: str, args: Any, kwargs: Any, owners: Mapping[int, Tensor | None], made: Tensor
) -> Tensor | None:
    """What a function that moves the numbers of its first argument about makes of their owners."""

    def own(value: Any) -> Tensor:
        known = owners.get(id(value))
        # One more than each owner, so that what is filled up with zeros, or comes from elsewhere, is unknown.
        return torch.zeros(value.shape, dtype=torch.int32) if known is None else known.int() + 1

    def here(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        return type(value)(map(here, value)) if type(value) in (tuple, list) else value

    first, *others = args or (None,)
    moved = [first] if isinstance(first, Tensor) else list(first) if isinstance(first, tuple | list) else []
    if not any(id(value) in owners for value in moved) or not all(isinstance(value, Tensor) for value in moved):
        return None
    numbers = {key: here(value) for key, value in kwargs.items() if key not in ("memory_format", "value")}
    if name.endswith("pad"):
        others = others[:2]  # not what it is filled with
    try:
        found = function(
            own(first) if isinstance(first, Tensor) else list(map(own, moved)), *map(here, others), **numbers
        )
    except Exception:  # an argument that whole numbers cannot have
        return None
    fits = isinstance(found, Tensor) and found.shape == made.shape and found.dtype == torch.int32
    return found - 1 if fits else None


def _of_copy(place: _Place, tensor: Tensor, saved: Tensor) -> Layout | None:
    """The layout of a tensor that a node has saved, if it is a copy of a remembered one, in the order of its numbers or
    with the first two dimensions exchanged; None if it is not, or if both orders fit and differ in the owners."""
    if saved.numel() != tensor.numel() or saved.dtype != tensor.dtype or saved.device != tensor.device:
        return None
    owners = place.owners_of(tensor)
    if owners is None:
        return None
    found: list[Tensor] = []
    for order in (lambda t: t, lambda t: t.transpose(0, 1)):
        if torch.equal(order(tensor.detach()).reshape(saved.shape), saved):
            found.append(order(owners).reshape(saved.shape))
    if not found or not all(torch.equal(found[0], other) for other in found[1:]):
        return None
    return _layout(found[0], place.n)


def _completed(owners: Tensor, n: int) -> Layout | None:
    """The layout of a tensor of which some positions are unknown (padding, a first token, another tensor beside): they
    are of the sample whose row they are in, if some position of every row is known and samples lie along rows."""
    known = owners >= 0
    for layout in regular(tuple(owners.shape), n):
        if layout.block not in (1, layout.shape[layout.dim] // n):
            continue
        rows = known.movedim(layout.dim, 0).flatten(1).any(1)
        if bool(rows.all()) and bool((~known | (owners == layout.owner().expand(owners.shape))).all()):
            return layout
    return None


def _layout(owners: Tensor, n: int) -> Layout:
    """The layout of a tensor whose numbers have these owners, of n samples."""
    for layout in regular(tuple(owners.shape), n):
        if layout.block in (1, layout.shape[layout.dim] // n):
            wanted = layout.owner()
            if torch.equal(wanted.expand(owners.shape), owners.to(wanted.dtype)):
                return layout
    return mapped(owners).narrowed()
