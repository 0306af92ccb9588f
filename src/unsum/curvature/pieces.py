"""What a parameter met, as two sides of its matrix: the input's and the gradient's, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from unsum.factors.factors import Factors, GroupFactors
from unsum.factors.lookup import Lookup
from unsum.factors.outer import Outer
from unsum.factors.routed import Routed
from unsum.factors.total import Term
from unsum.factors.windows import Windows
from unsum.kernels import split
from unsum.kernels.product import wide

Side = Literal["rows", "columns"]


@dataclass(frozen=True)
class Matrix:
    """How a parameter is read as matrices: `stack` of them side by side (experts, the groups of a convolution), each
    rows × columns."""

    stack: int
    rows: int
    columns: int

    def of(self, value: Tensor) -> Tensor:
        """(…, *shape) as (…, stack, rows, columns), for a value with so many dimensions in front."""
        return value.reshape(-1, self.stack, self.rows, self.columns)


@dataclass(frozen=True, eq=False)
class Piece:
    """G_n = Σ_t δ_nt ⊗ a_nt of every matrix of a stack; sample n's g-th matrix is at n·stack + g."""

    a: Tensor  # (n·stack, t, i), or ids (n·stack, t) of rows that were looked up
    delta: Tensor  # (n·stack, t, o)
    matrix: Matrix
    input: Side  # which side of the matrix met the input; the other one met the gradient
    source: tuple[int, int, torch.dtype] | None = None  # where the tensor lies of which δ was made, and its size

    @property
    def is_table(self) -> bool:
        """Whether the input is ids: one-hot rows that nobody formed."""
        return self.a.dim() == 2

    @property
    def inputs(self) -> int:
        """How many numbers the input's side has."""
        return self.matrix.rows if self.input == "rows" else self.matrix.columns

    @cached_property
    def counts(self) -> Tensor:
        """(n·stack, t): whether a position got a gradient: padding did not."""
        return torch.linalg.vector_norm(self.delta, torch.inf, dim=-1) != 0  # in one pass

    def is_made_of(self, delta: Tensor) -> bool:
        """Whether all of δ is this tensor, as it lies in memory."""
        return self.source == (delta.data_ptr(), delta.numel(), delta.dtype)

    def apart(self, value: Tensor) -> Tensor:
        """(n, stack, …)."""
        return value.unflatten(0, (-1, self.matrix.stack))

    def part(self, samples: slice) -> Piece:
        """Some of the samples."""
        stack = self.matrix.stack
        rows = slice(samples.start * stack, samples.stop * stack)
        return replace(self, a=self.a[rows], delta=self.delta[rows])

    @property
    def n(self) -> int:
        return len(self.a) // self.matrix.stack


def pieces(factors: Factors) -> list[Piece] | None:
    """The outer products of a parameter's gradients, of samples that came together; None if they are none."""
    if factors.is_complex or len(factors.terms()) != 1:
        return None
    ((share, terms),) = factors.terms()
    found = [_piece(share, term, factors.shape) for term in terms]
    if not found or any(piece is None for piece in found) or len({piece.matrix for piece in found if piece}) > 1:
        return None
    return [piece for piece in found if piece is not None]


def _piece(share: GroupFactors, term: Term, shape: Sequence[int]) -> Piece | None:
    if isinstance(term, Lookup):
        rows, columns = shape
        return Piece(term.ids, share.times(term.delta), Matrix(1, rows, columns), "rows")
    outer = term.outer() if isinstance(term, Windows | Routed) else term
    if not isinstance(outer, Outer):
        return None
    a, delta = outer.a, outer.delta
    o, i = delta.shape[-1], a.shape[-1]
    matrix = Matrix(outer.groups, *((i, o) if outer.turned else (o, i)))
    # Of a transposed convolution the input is at the places, and the gradient is what windows are taken of.
    is_swapped = isinstance(term, Windows) and term.turned
    if is_swapped:
        a, delta = delta, a
    if delta.dtype == wide(delta.dtype) or share.scale is None:
        delta = share.times(delta)
    else:
        delta = share.times(delta.to(wide(delta.dtype)))
    source = None
    if share.scale is None and isinstance(term, Outer | Windows) and not is_swapped and not term.delta.is_complex():
        source = term.delta.data_ptr(), term.delta.numel(), term.delta.dtype
    return Piece(a, delta, matrix, "rows" if outer.turned != is_swapped else "columns", source)


def gram(x: Tensor, stack: int) -> Tensor:
    """(stack, k, k): Σ x xᵀ over samples and positions of (n·stack, t, k), in float32 at least."""
    if stack == 1:
        return split.gram(x.flatten(0, 1))[None]
    return split.gram(x.unflatten(0, (-1, stack)).transpose(0, 1).flatten(1, 2))


def squares(x: Tensor, stack: int) -> Tensor:
    """(stack, k): the diagonal of `gram` alone."""
    each = torch.linalg.vector_norm(x, dim=1, dtype=wide(x.dtype)).square()
    return each.unflatten(0, (-1, stack)).sum(0)
