"""Σ_n (Uᵀ G_n V)², number by number: second moments of per-sample gradients in a basis, from their factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unsum.curvature.pieces import Piece, Side
from unsum.kernels.product import TILE, wide


def squared(
    found: Sequence[Piece], rows: Tensor | None = None, columns: Tensor | None = None, *, bias: Side | None = None
) -> Tensor:
    """(stack, rows, columns): with bases (stack, k, k) of either side, None for the one that numbers are given in; with
    `bias`, of gradients that have one more number on this side, which is Σ δ. A sample's positions are added up before
    they are squared."""
    turned = [_turned(piece, rows, columns, bias=bias) for piece in found]
    if len(turned) == 1:
        ((row, column),) = turned
        if row.dim() == 2:
            return _of_table(row, column, found[0].matrix.rows)
        if row.shape[1] == 1:
            return _of_one_position(row, column, found[0].matrix.stack)
    return _of_many(turned, found[0])


def _turned(piece: Piece, rows: Tensor | None, columns: Tensor | None, *, bias: Side | None) -> tuple[Tensor, Tensor]:
    """The two sides of a piece, (n·stack, t, ·), in their bases; ids stay ids."""
    of_input, of_delta = (rows, columns) if piece.input == "rows" else (columns, rows)
    # On the side of a bias the input is 1, and what is no input of it brings nothing to it.
    a = _of_ids(piece, of_input, bias) if piece.is_table else _in(piece, piece.a, of_input, 1.0, bias == piece.input)
    delta = _in(piece, piece.delta, of_delta, 0.0, bias not in (None, piece.input))
    return (a, delta) if piece.input == "rows" else (delta, a)


def _in(piece: Piece, x: Tensor, basis: Tensor | None, one_more: float, is_longer: bool) -> Tensor:
    """(n·stack, t, k) times (stack, k, l); with one more number in front of the basis where it is longer."""
    stack, x = piece.matrix.stack, x.to(wide(x.dtype))
    if basis is None:
        return torch.nn.functional.pad(x, (0, 1), value=one_more) if is_longer else x
    basis = basis.to(x)
    shift = basis[:, -1] * one_more if is_longer and one_more else None
    basis = basis[:, :-1] if is_longer else basis
    if stack == 1:
        found = x @ basis[0]
        return found if shift is None else found.add_(shift[0])
    found = x.unflatten(0, (-1, stack)) @ basis
    return (found if shift is None else found + shift[:, None]).flatten(0, 1)


def _of_ids(piece: Piece, basis: Tensor | None, bias: Side | None) -> Tensor:
    """Rows that were looked up: their rows of the basis."""
    if basis is None:
        return piece.a
    found = basis[0][piece.a].to(wide(piece.delta.dtype))
    return found + basis[0, -1] if bias == piece.input else found


def _of_one_position(row: Tensor, column: Tensor, stack: int) -> Tensor:
    """One outer product for each sample: Σ r² ⊗ c²."""
    row, column = (x[:, 0].square().unflatten(0, (-1, stack)).transpose(0, 1) for x in (row, column))
    return torch.bmm(row.mT, column)


def _of_table(ids: Tensor, delta: Tensor, size: int) -> Tensor:
    """Of rows that were looked up: what a sample's positions bring to a row is added up first."""
    n = len(ids)
    key = ids + size * torch.arange(n, device=ids.device)[:, None]
    which, place = key.flatten().unique(return_inverse=True)
    each = torch.zeros(len(which), delta.shape[-1], dtype=delta.dtype, device=delta.device)
    each.index_add_(0, place, delta.flatten(0, 1))
    total = torch.zeros(size, delta.shape[-1], dtype=delta.dtype, device=delta.device)
    return total.index_add_(0, which % size, each.square_())[None]


def _of_many(turned: Sequence[tuple[Tensor, Tensor]], first: Piece) -> Tensor:
    """Gradients are formed, as many at a time as bound memory."""
    stack = first.matrix.stack
    (row, column) = turned[0]
    height = first.matrix.rows if row.dim() == 2 else row.shape[-1]
    width = column.shape[-1]
    n = len(row)
    some = max(stack, TILE.get(column.device.type, 1 << 25) // max(height * width, 1) // stack * stack)
    total = torch.zeros(stack, height, width, dtype=column.dtype, device=column.device)
    for begin in range(0, n, some):
        part = slice(begin, begin + some)
        each = None
        for left, right in turned:
            formed = (
                _placed(left[part], right[part], height) if left.dim() == 2 else torch.bmm(left[part].mT, right[part])
            )
            each = formed if each is None else each + formed
        assert each is not None
        total += each.square_().unflatten(0, (-1, stack)).sum(0)
    return total


def _placed(ids: Tensor, delta: Tensor, size: int) -> Tensor:
    """(n, size, d): δ added to the rows that ids name."""
    n = len(ids)
    flat = torch.zeros(n * size, delta.shape[-1], dtype=delta.dtype, device=delta.device)
    place = ids + size * torch.arange(n, device=ids.device)[:, None]
    return flat.index_add_(0, place.flatten(), delta.flatten(0, 1)).view(n, size, -1)
