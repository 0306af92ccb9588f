"""From the tensor that meets data back to the parameter: transposes, casts, views and slices of a weight are followed
without multiplying out. What cannot be followed is formed and replayed, sample by sample."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from unsum.factors.dense import Dense
from unsum.factors.lookup import Lookup
from unsum.factors.outer import Outer
from unsum.factors.routed import Routed
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.graph.nodes import Node, signed
from unsum.seams.nodes import saved_of

_CASTS = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewAsBackward0", "ContiguousBackward0")
_SHAPES = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2",
)  # fmt: skip


def follow(kind: Term, node: Node, output: int, shape: tuple[int, ...]) -> Term | None:
    """The factors of the tensor (of this shape) of which a node on the weight side made another; None if they cannot
    be followed."""
    name = node.name()
    if name in _CASTS:
        return kind
    if name in _SHAPES:
        return _viewed(kind, shape)
    if turns(node, shape):
        return _turned(kind, shape)
    if name == "EmbeddingBackward0" and isinstance(kind, Dense | Scale):
        return _looked_up(kind, node, shape)
    if name == "SliceBackward0":
        return _sliced(kind, shape, *_slice_of(node, shape))
    if name in ("SelectBackward0", "UnbindBackward0"):
        return _selected(kind, node, output, shape)
    if name in ("SplitBackward0", "SplitWithSizesBackward0"):
        return _sliced(kind, shape, *_piece_of(node, name, output, shape))
    return None


def turns(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether a node transposes a matrix of this shape, or matrices side by side."""
    name = node.name()
    return name == "TBackward0" or _transposes(node, name, shape) or _swaps(node, name, shape)


def _transposes(node: Node, name: str, shape: tuple[int, ...]) -> bool:
    """The last two dimensions of a matrix, or of matrices side by side."""
    if name != "TransposeBackward0" or len(shape) not in (2, 3):
        return False
    return {signed(saved_of(node, "dim0")) % len(shape), signed(saved_of(node, "dim1")) % len(shape)} == {
        len(shape) - 2,
        len(shape) - 1,
    }


def _swaps(node: Node, name: str, shape: tuple[int, ...]) -> bool:
    return name == "PermuteBackward0" and [d % 2 for d in saved_of(node, "dims")] == [1, 0] and len(shape) == 2


def _viewed(kind: Term, shape: tuple[int, ...]) -> Term | None:
    if isinstance(kind, Dense):
        return Dense(kind.values.reshape(kind.n, *shape))
    if isinstance(kind, Scale):
        if kind.over is not None or [s for s in shape if s > 1] != [s for s in kind.shape if s > 1]:
            return Dense(kind.per_sample().reshape(kind.n, *shape))
        return replace(kind, shape=shape, over=kind.shape)
    if isinstance(kind, Outer | Routed):
        return replace(kind, shape=shape)
    return None


def _turned(kind: Term, shape: tuple[int, ...]) -> Term | None:
    if isinstance(kind, Outer | Routed) and _is_own(kind):
        return replace(kind, turned=not kind.turned, shape=shape)
    if isinstance(kind, Dense | Scale | Outer | Routed):
        return Dense(kind.per_sample().mT.reshape(kind.n, *shape))
    return None


def _is_own(kind: Outer | Routed) -> bool:
    """Whether the shape is that of the factors' matrix, or matrices side by side, and not of a view of it."""
    count = kind.groups if isinstance(kind, Outer) else kind.matrices
    o, i = kind.delta.shape[-1], kind.a.shape[-1]
    matrix = (i, o) if kind.turned else (o, i)
    return tuple(kind.shape) == (count, *matrix) or (count == 1 and tuple(kind.shape) == matrix)


def _looked_up(kind: Dense | Scale, node: Node, shape: tuple[int, ...]) -> Term | None:
    """Rows of a table that belong to nobody, such as positions: what they get goes back to the table."""
    padding, ids = saved_of(node, "padding_idx"), saved_of(node, "indices")
    if saved_of(node, "scale_grad_by_freq") or 0 <= padding < shape[0]:
        return None
    values = kind.per_sample().reshape(kind.n, -1, shape[1])
    return Lookup(ids.flatten().expand(kind.n, -1), values, shape)


def _slice_of(node: Node, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    dim = saved_of(node, "dim") % len(shape)
    size = shape[dim]
    first, last, step = slice(
        signed(saved_of(node, "start")), signed(saved_of(node, "end")), saved_of(node, "step")
    ).indices(size)
    return dim, first, last, step


def _piece_of(node: Node, name: str, output: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    dim = signed(saved_of(node, "dim")) % len(shape)
    if name == "SplitBackward0":
        size = saved_of(node, "split_size")
        return dim, output * size, min((output + 1) * size, shape[dim]), 1
    sizes = saved_of(node, "split_sizes")
    first = sum(sizes[:output])
    return dim, first, first + sizes[output], 1


def _sliced(kind: Term, shape: tuple[int, ...], dim: int, first: int, last: int, step: int) -> Term | None:
    if step != 1:
        return None
    if isinstance(kind, Dense | Scale):
        values = kind.per_sample()
        whole = values.new_zeros(kind.n, *shape)
        whole.narrow(dim + 1, first, last - first).copy_(values)
        return Dense(whole)
    if not isinstance(kind, Outer) or len(shape) != 2 or len(kind.shape) != 2 or not _is_own(kind):
        return None
    padding = (first, shape[dim] - last)
    if (dim == 0) != kind.turned:
        return replace(kind, delta=_padded(kind.delta, padding), shape=shape)
    return replace(kind, a=_padded(kind.a, padding), shape=shape)


def _selected(kind: Term, node: Node, output: int, shape: tuple[int, ...]) -> Term | None:
    """One of several matrices side by side: an expert."""
    member = member_of(node, output, shape)
    if member is None or not isinstance(kind, Outer | Routed) or not _is_one(kind):
        return None
    return _among(kind, member, shape, turned=kind.turned, dtype=kind.dtype)


def member_of(node: Node, output: int, shape: tuple[int, ...]) -> int | None:
    """Which of several matrices side by side (of this shape) an output of a node is; None if it is none of them."""
    name = node.name()
    if name not in ("SelectBackward0", "UnbindBackward0") or len(shape) != 3 or signed(saved_of(node, "dim")) % 3:
        return None
    return output if name == "UnbindBackward0" else signed(saved_of(node, "index")) % shape[0]


def chosen(kind: Term, member: int, parameter: Tensor, *, turned: bool) -> Term:
    """The factors of a parameter that is several matrices side by side, of which one was met as it is, cast, or
    transposed."""
    shape = tuple(parameter.shape)
    if isinstance(kind, Outer | Routed) and _is_one(kind):
        return _among(kind, member, shape, turned=kind.turned != turned, dtype=parameter.dtype)
    values = kind.per_sample()
    whole = values.new_zeros(len(values), *shape)
    whole[:, member] = values.mT if turned else values
    return cast(Dense(whole), parameter.dtype)


def _is_one(kind: Outer | Routed) -> bool:
    """Whether these are the factors of one matrix, in its own shape."""
    return (kind.groups if isinstance(kind, Outer) else kind.matrices) == 1 and _is_own(kind)


def _among(
    kind: Outer | Routed, member: int, shape: tuple[int, ...], *, turned: bool, dtype: torch.dtype | None
) -> Routed:
    if isinstance(kind, Routed):
        rows, held = (kind.a, kind.delta, kind.sample), kind.held
    else:
        n, t = kind.a.shape[:2]
        row = torch.arange(n * t, device=kind.a.device)
        rows, held = (kind.a.flatten(0, 1), kind.delta.flatten(0, 1), row // max(t, 1)), row.view(n, t)
    return Routed(*rows, member, kind.n, shape[0], shape, turned=turned, held=held, dtype=dtype)


def _padded(tensor: Tensor, padding: tuple[int, int]) -> Tensor:
    return tensor if padding == (0, 0) else F.pad(tensor, padding)


def cast(kind: Term, dtype: torch.dtype) -> Term:
    """Reads are given in the parameter's dtype, float32 at least."""
    if isinstance(kind, Dense):
        wanted = torch.promote_types(dtype, torch.float32)
        return kind if kind.values.dtype == wanted else Dense(kind.values.to(wanted))
    return replace(kind, dtype=dtype)


def finished(kind: Term, parameter: Tensor, *, turned: bool) -> Term:
    """The factors of a parameter, of which a tensor was met as it is, cast, or transposed."""
    if isinstance(kind, Outer) and (turned or kind.shape == parameter.shape):
        return kind.of(tuple(parameter.shape), parameter.dtype, turned=turned)
    if isinstance(kind, Scale) and kind.delta.dtype == parameter.dtype and not turned:
        return kind  # which goes by its own dtype
    whole = _turned(kind, tuple(parameter.shape)) if turned else kind
    assert whole is not None
    return cast(whole, parameter.dtype)
