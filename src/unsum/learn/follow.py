"""Following: whose the numbers are that a function makes of raw inputs, before any parameter and without a node.

A function that moves numbers about is called on their owners as well. One that changes each number by itself, or within
a sample, leaves the owners as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unsum.graph.layout import Layout, Regular, mapped, regular, same
from unsum.learn.extents import Extent, as_a_whole
from unsum.learn.within import RULES, TOGETHER, within
from unsum.nested import leaves, put

# Functions that move numbers about; and such that change each by itself, or within a sample.
MOVES = {
    "reshape", "view", "contiguous", "transpose", "permute", "t", "flip", "roll", "index_select", "__getitem__", "cat",
    "concat", "stack", "repeat", "repeat_interleave", "expand", "expand_as", "unsqueeze", "squeeze", "flatten",
    "unflatten", "narrow", "movedim", "swapaxes", "pad", "_pad", "tile", "take_along_dim", "gather", "rot90", "clone",
    "_pack_padded_sequence",
}  # fmt: skip
KEEPS = {
    "to", "float", "double", "half", "bfloat16", "long", "int", "type", "clone", "contiguous", "add", "sub", "mul",
    "div", "true_divide", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "neg",
    "clamp", "log", "log1p", "exp", "sqrt", "tanh", "abs", "relu", "sigmoid", "pow", "__pow__", "square",
    "type_as", "nan_to_num", "dropout", "masked_fill", "sin", "cos", "tan", "erf", "gelu", "silu", "elu", "leaky_relu",
    "softplus", "hardtanh", "sign", "floor", "ceil", "round", "trunc", "reciprocal", "rsqrt", "expm1", "log2", "log10",
    "softmax", "log_softmax", "cumsum", "normalize", "remainder", "fmod", "__mod__", "__neg__", "__abs__",
    "__rtruediv__", "__gt__", "__lt__", "__ge__", "__le__", "gt", "lt", "ge", "le", "eq", "ne", "bool",
}  # fmt: skip
FILLS = {"zero_", "fill_", "index_fill_", "clamp_min_", "clamp_max_"}  # write numbers that are nobody's rows

# What other whole numbers there might have been.
_CHANGES = (
    lambda t: t.flip(0),
    lambda t: t.roll(1, 0),
    lambda t: t if t.dtype == torch.bool else torch.zeros_like(t),
)

Known = dict[int, tuple[Extent, Tensor]]  # arguments of a function that are remembered, by id: where, and themselves


def made_of(function: Any, name: str, args: Any, kwargs: Any, known: Known, made: Tensor) -> Layout | None:
    """The layout of what a function has made of remembered tensors; None if it is unclear."""
    n = max(extent.n for extent, _ in known.values())
    if name in RULES or name in TOGETHER:
        layouts = [_regular(extent, tensor) for extent, tensor in known.values()]
        first = args[0] if args and id(args[0]) in known else None
        if first is not None and None not in layouts:
            return within(name, [each for each in layouts if each is not None], first, args, kwargs, made)
        if name not in KEEPS and name not in MOVES:
            return None
    if name in KEEPS:
        layouts = [as_a_whole(extent, tensor) for extent, tensor in known.values()]
        whole = layouts[0]
        if whole is not None and whole.shape == tuple(made.shape) and layouts.count(whole) == len(layouts):
            return whole
    owners = {key: extent.owners_of(tensor) for key, (extent, tensor) in known.items()}
    if any(own is None for own in owners.values()):
        return None
    if name in KEEPS and name not in MOVES:  # number by number, or along dimensions within a sample
        spread = [_spread(own, made) for own in owners.values()]
        if spread[0] is None or not all(own is not None and torch.equal(own, spread[0]) for own in spread):
            return None
        return _layout(spread[0], n)
    found = _called_on(function, name, args, kwargs, owners, made)
    if found is None:
        return None
    return _completed(found, n) if bool((found < 0).any()) else _layout(found, n)


def goes_by_values(
    function: Any, name: str, args: Any, kwargs: Any, known: Known, made: Tensor, layout: Layout
) -> bool:
    """Whether other whole numbers among the arguments (an index, a mask) would have given the result another layout."""
    if name not in MOVES or name == "_pack_padded_sequence":  # whose lengths are in the graph later on
        return False
    moved, others = args[:1], (tuple([_index(each) for each in args[1:]]), kwargs)
    indices = {path: t for path, t in leaves(others) if not t.is_floating_point() and t.dim() and t.numel() > 1}
    for change in _CHANGES if indices else ():
        behind, named = put(others, {path: change(tensor) for path, tensor in indices.items()})
        found = made_of(function, name, (*moved, *behind), named, known, made)
        if found is None or not same(found, layout):
            return True
    return False


def _index(value: Any) -> Any:
    """A list of whole numbers as a tensor."""
    is_list = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    return torch.tensor(value) if is_list else value


def _regular(extent: Extent, tensor: Tensor) -> Regular | None:
    """The owners of a view of a remembered tensor, if its samples lie along a dimension."""
    whole = as_a_whole(extent, tensor)
    if whole is not None:
        return whole
    own = extent.owners_of(tensor)
    found = None if own is None or bool((own < 0).any()) else _layout(own, extent.n)
    return found if isinstance(found, Regular) else None


def _spread(own: Tensor | None, made: Tensor) -> Tensor | None:
    """The owners of a result that numbers with these owners were spread over; None if it has another shape."""
    try:
        return None if own is None else own.expand(made.shape)
    except RuntimeError:
        return None


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
    found = found[0] if name == "_pack_padded_sequence" else found
    fits = isinstance(found, Tensor) and found.shape == made.shape and found.dtype == torch.int32
    return found - 1 if fits else None


def of_copy(extent: Extent, tensor: Tensor, saved: Tensor) -> Layout | None:
    """The layout of a tensor that a node has saved, if it is a copy of a remembered one (in another dtype, as autocast
    makes them), in the order of its numbers or with the first two dimensions exchanged; None if it is not, or if both
    orders fit and differ in the owners."""
    if saved.numel() != tensor.numel() or not saved.is_floating_point() or saved.device != tensor.device:
        return None
    copied = tensor.detach().to(saved.dtype)
    owners = extent.owners_of(tensor)
    if owners is None:
        return None
    found: list[Tensor] = []
    for order in (lambda t: t, lambda t: t.transpose(0, 1)):
        if torch.equal(order(copied).reshape(saved.shape), saved):
            found.append(order(owners).reshape(saved.shape))
    if not found or not all(torch.equal(found[0], other) for other in found[1:]):
        return None
    return _layout(found[0], extent.n)


def _completed(owners: Tensor, n: int) -> Layout | None:
    """The layout of a tensor of which some positions are unknown (padding, a first token, another tensor beside): they
    are of the sample whose row they are in, if some position of every row is known and samples lie along rows."""
    known = owners >= 0
    for layout in regular(tuple(owners.shape), n):
        if layout.block not in (1, layout.shape[layout.dim] // n):
            continue
        rows = known.movedim(layout.dim, 0)[..., None].flatten(1).any(1)
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
