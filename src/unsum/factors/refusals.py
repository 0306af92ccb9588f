"""The errors for reads of one parameter's gradients. Each says what to read instead."""

from __future__ import annotations

from torch import Tensor

from unsum.errors import NotAvailable, WrongCount, WrongShape


def not_over(name: str) -> NotAvailable:
    """The error for `shared()` while the backward runs."""
    return NotAvailable(
        f"{name}: the part that belongs to no sample is known only when the backward is over.",
        write=f"g[{name!r}].shared()  # after a block with keep=True",
    )


def other_weights(name: str, w: Tensor, n: int) -> WrongCount:
    """The error for weights that are not one for each of n samples."""
    return WrongCount(
        f"{name}: got {len(w) if w.dim() == 1 else tuple(w.shape)} weights for {n} samples.",
        write=f"g[{name!r}].weighted_sum(torch.ones({n}))  # a weight for each sample",
    )


def other_parameter(name: str, shape: tuple[int, ...], other: str, others: tuple[int, ...]) -> WrongShape:
    """The error for inner products with the gradients of a parameter of another shape."""
    return WrongShape(
        f"dot: {name} has shape {shape}, {other} has {others}.",
        write=f"g[{name!r}].dot(h[{name!r}])  # the same parameter in two blocks g and h",
    )


def other_shape(name: str, shape: tuple[int, ...], given: tuple[int, ...]) -> WrongShape:
    """The error for inner products with tensors of another shape."""
    sizes = ", ".join(map(str, shape))
    return WrongShape(
        f"dot: {name} has shape {shape}; got a tensor of shape {given}, neither that nor (m, {sizes}).",
        write=f"g[{name!r}].dot(tensor.reshape(-1, {sizes}))",
    )


def no_positions(name: str, why: str) -> NotAvailable:
    """The error for a read by position."""
    return NotAvailable(
        f"{name} {why}: no gradient by position can be read.",
        write=[f"g[{name!r}].per_sample()  # (n, *shape)", f"g[{name!r}].sq_norms()  # (n,)"],
    )


def no_outer_products(name: str, kind: str) -> NotAvailable:
    """The error for `a` and `delta` of gradients that are kept in another way."""
    return NotAvailable(
        f"{name}: its gradients are not outer products of an input and an output gradient (kept as: {kind}).",
        write=f"g[{name!r}].per_sample()  # (n, *shape)",
    )
