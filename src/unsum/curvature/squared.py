"""Σ_n (Uᵀ G_n V)², number by number: second moments of per-sample gradients in a basis, from their factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from unsum.curvature.pieces import Piece, Side
from unsum.kernels import split
from unsum.kernels.product import TILE, wide

_ALIGNED = 8  # numbers in a row of a matrix that tensor cores read well


def squared(
    found: Sequence[Piece], rows: Tensor | None = None, columns: Tensor | None = None, *, bias: Side | None = None
) -> Tensor:
    """(stack, rows, columns): with bases (stack, k, k) of either side, None for the one that numbers are given in; with
    `bias`, of gradients that have one more number on this side, which is Σ δ. A sample's positions are added up before
    they are squared."""
    turned = [_turned(piece, rows, columns, bias=bias) for piece in found]
    matrix = found[0].matrix
    height, width = matrix.rows + (bias == "rows"), matrix.columns + (bias == "columns")
    if len(turned) == 1:
        ((row, column),) = turned
        if row.dim() == 2:
            return _of_table(row, column, height)[..., :width]
        if row.shape[1] == 1:
            return _of_one_position(row, column, matrix.stack)[:, :height, :width]
    return _of_many(turned, matrix.stack, height)[:, :height, :width]


def _turned(piece: Piece, rows: Tensor | None, columns: Tensor | None, *, bias: Side | None) -> tuple[Tensor, Tensor]:
    """The two sides of a piece, (n·stack, t, ·), in their bases; ids stay ids."""
    of_input, of_delta = (rows, columns) if piece.input == "rows" else (columns, rows)
    # On the side of a bias the input is 1, and what is no input of it brings nothing to it.
    a = _of_ids(piece, of_input, bias) if piece.is_table else _in(piece, piece.a, of_input, 1.0, bias == piece.input)
    delta = _in(piece, piece.delta, of_delta, 0.0, bias not in (None, piece.input))
    return (a, delta) if piece.input == "rows" else (delta, a)


def _in(piece: Piece, x: Tensor, basis: Tensor | None, one_more: float, is_longer: bool) -> Tensor:
    """(n·stack, t, k) times (stack, k, l); with one more number in front of the basis where it is longer. What is
    narrow on a GPU stays so: rounding an eigenvector moves 1e-6 of the mean eigenvalue, of which damping is 0.1."""
    stack, dtype = piece.matrix.stack, x.dtype if x.is_cuda and x.dtype == torch.bfloat16 else wide(x.dtype)
    if basis is None:
        x = x.to(dtype)
        return pad(x, (0, 1), value=one_more) if is_longer else x
    basis = _aligned(basis.to(dtype))
    shift = basis[:, -1] if is_longer and one_more else None
    basis = basis[:, : x.shape[-1]]
    if stack == 1:
        found = _product(x.flatten(0, 1), basis[0], dtype).view(*x.shape[:2], -1)
        return found if shift is None else found.add_(shift[0])
    apart = x.unflatten(0, (-1, stack)).transpose(0, 1)  # (stack, n, t, k)
    found = _product(apart.flatten(1, 2), basis, dtype).unflatten(1, apart.shape[1:3])
    found = found if shift is None else found + shift[:, None, None]
    return found.transpose(0, 1).flatten(0, 1)


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return x @ y if x.dtype == y.dtype == dtype == torch.bfloat16 else split.product(x, y)


def _of_ids(piece: Piece, basis: Tensor | None, bias: Side | None) -> Tensor:
    """Rows that were looked up: their rows of the basis."""
    if basis is None:
        return piece.a
    basis = _aligned(basis)
    found = basis[0][piece.a].to(wide(piece.delta.dtype))
    return found + basis[0, -1] if bias == piece.input else found


def _aligned(basis: Tensor) -> Tensor:
    """With zeros beside it on a GPU, where other widths take slow kernels."""
    short = -basis.shape[-1] % _ALIGNED if basis.is_cuda else 0
    return pad(basis, (0, short)) if short else basis


def _of_one_position(row: Tensor, column: Tensor, stack: int) -> Tensor:
    """One outer product for each sample: Σ r² ⊗ c²."""
    of = lambda x: x[:, 0].to(wide(x.dtype)).square().unflatten(0, (-1, stack)).transpose(0, 1)
    return torch.bmm(of(row).mT, of(column))


def _of_table(ids: Tensor, delta: Tensor, size: int) -> Tensor:
    """Of rows that were looked up: what a sample's positions bring to a row is added up first."""
    delta = delta.to(wide(delta.dtype))
    key = ids + size * torch.arange(len(ids), device=ids.device)[:, None]
    which, place = key.flatten().unique(return_inverse=True)
    each = torch.zeros(len(which), delta.shape[-1], dtype=delta.dtype, device=delta.device)
    each.index_add_(0, place, delta.flatten(0, 1))
    total = torch.zeros(size, delta.shape[-1], dtype=delta.dtype, device=delta.device)
    return total.index_add_(0, which % size, each.square_())[None]


def _of_many(turned: Sequence[tuple[Tensor, Tensor]], stack: int, height: int) -> Tensor:
    """Gradients are formed, as many at a time as bound memory."""
    row, column = turned[0]
    size = (height if row.dim() == 2 else row.shape[-1]) * column.shape[-1]
    some = max(stack, TILE.get(column.device.type, 1 << 25) // max(size, 1) // stack * stack)
    total: Tensor | None = None
    for begin in range(0, len(row), some):
        part = slice(begin, begin + some)
        each = [_formed(left[part], right[part], height) for left, right in turned]
        whole = sum(each[1:], each[0]).unflatten(0, (-1, stack))
        squares = summed_squares(whole, 0)
        total = squares if total is None else total.add_(squares)
    assert total is not None
    return total


def summed_squares(values: Tensor, dim: int) -> Tensor:
    """Σ v² along a dimension, in one pass on a GPU; a processor takes four times as long that way."""
    if values.is_cuda:
        return torch.linalg.vector_norm(values, dim=dim).square_()
    return values.square().sum(dim)


def _formed(row: Tensor, column: Tensor, height: int) -> Tensor:
    """(n, rows, columns)."""
    if row.dim() == 2:
        return _placed(row, column.to(wide(column.dtype)), height)
    return split.product(row.mT, column)


def _placed(ids: Tensor, delta: Tensor, size: int) -> Tensor:
    """(n, size, d): δ added to the rows that ids name."""
    n = len(ids)
    flat = torch.zeros(n * size, delta.shape[-1], dtype=delta.dtype, device=delta.device)
    place = ids + size * torch.arange(n, device=ids.device)[:, None]
    return flat.index_add_(0, place.flatten(), delta.flatten(0, 1)).view(n, size, -1)
