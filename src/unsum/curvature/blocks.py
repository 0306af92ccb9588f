"""The blocks of a curvature: a matrix that acts on one parameter (and its bias), given by a basis and eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unsum.curvature.pieces import Matrix, Side
from unsum.curvature.sums import Bias, Pair, ParameterSums
from unsum.errors import OptionError
from unsum.kernels.product import wide

DAMPING = 0.1  # of a block's mean eigenvalue


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of the two sides, (stack, k, k); None where a side is diagonal as it is."""

    rows: Tensor | None
    columns: Tensor | None
    row_values: Tensor  # (stack, rows): eigenvalues of the sides, whose products are K-FAC's
    column_values: Tensor

    def values(self) -> Tensor:
        """(stack, rows, columns)."""
        return self.row_values[:, :, None] * self.column_values[:, None, :]


@dataclass(eq=False)
class Block:
    """What acts on one parameter, or on a weight with its bias as one more column (row, if the weight is (i, o))."""

    name: str
    bias: Bias | None
    shape: tuple[int, ...]
    matrix: Matrix | None  # None: a diagonal, number by number
    basis: Basis | None
    eigenvalues: Tensor  # (stack, rows, columns), or the parameter's shape; 0 or more
    precision: float  # of what the eigenvalues were computed from, relative to the largest

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.bias is None else (self.name, self.bias.name)

    @cached_property
    def mean_eigenvalue(self) -> float:
        return float(self.eigenvalues.double().mean()) if self.eigenvalues.numel() else 0.0

    @property
    def damping(self) -> float:
        """The default."""
        return DAMPING * self.mean_eigenvalue

    def matvec(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The block times gradients, {parameter: (m, *shape)}."""
        return self._back(self.into(values), self.eigenvalues, values)

    def solve(self, values: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
        """The inverse of the damped block times gradients."""
        turned = self.into(values)
        damped = (self.eigenvalues + damping).to(turned.device)
        largest = float(damped.max()) if damped.numel() else 0.0
        rounding = torch.finfo(damped.dtype).eps if damping and self.basis is not None else self.precision
        is_zero = damped <= largest * rounding
        factor = 1 / damped
        if bool(is_zero.any()):
            sizes = turned.abs()
            is_noise = sizes <= rounding * sizes.flatten(1).amax(1).view(-1, *[1] * (sizes.dim() - 1))
            if not damping and bool((is_zero & ~is_noise).any()):
                raise self._singular(damping, is_reached=largest > damping)
            factor = torch.where(is_zero & is_noise, 0, factor)  # rounding is not blown up; any damping wins otherwise
        return self._back(turned, factor, values)

    def _singular(self, damping: float, *, is_reached: bool) -> OptionError:
        what = f"{self.name}: its block is singular with damping {damping:g}"
        if not is_reached:
            return OptionError(
                f"{what} (all zero: nothing reached it in the data of the fit), and a gradient that is not zero is to "
                f"be solved for.\n  give it a damping: c.solve(g, damping={{{self.name!r}: 1e-3}}), or leave it out of "
                "the fit (params=)"
            )
        return OptionError(
            f"{what} (smallest eigenvalue {float(self.eigenvalues.min()):.3g}, largest "
            f"{float(self.eigenvalues.max()):.3g}).\n"
            "  give a damping: c.solve(g, damping=1e-3), or None for 0.1 of each block's mean eigenvalue"
        )

    def _back(self, turned: Tensor, factor: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Multiplied in the basis, in float32 at least; rounded once, at the end, to the dtypes of `values`."""
        found = self.out_of(turned * factor.to(turned.device, turned.real.dtype))
        return {name: value.to(values[name].dtype) for name, value in found.items()}

    def into(self, values: Mapping[str, Tensor]) -> Tensor:
        """(m, stack, rows, columns): gradients as matrices, with the bias, in the basis."""
        value = values[self.name]
        value = value.to(wide(value.dtype))
        if self.matrix is None:
            return value
        found = self.matrix.of(value)
        if self.bias is not None:
            shift = values[self.bias.name].reshape(len(value), self.matrix.stack, self.bias.size // self.matrix.stack)
            dim = 2 if self.bias.side == "rows" else 3
            found = torch.cat([found, shift.unsqueeze(dim)], dim)
        return self.turned(found)

    def turned(self, found: Tensor, *, back: bool = False) -> Tensor:
        """Into the basis, or back."""
        if self.basis is None:
            return found
        rows, columns = self.basis.rows, self.basis.columns
        if rows is not None:
            found = (rows if back else rows.mT).to(found) @ found
        if columns is not None:
            found = found @ (columns.mT if back else columns).to(found)
        return found

    def out_of(self, found: Tensor) -> dict[str, Tensor]:
        """Back from the basis, as {parameter: (m, *shape)}."""
        if self.matrix is None:
            return {self.name: found}
        m, found = len(found), self.turned(found, back=True)
        if self.bias is None:
            return {self.name: found.reshape(m, *self.shape)}
        dim = 2 if self.bias.side == "rows" else 3
        weight, shift = found.narrow(dim, 0, found.shape[dim] - 1), found.select(dim, -1)
        return {self.name: weight.reshape(m, *self.shape), self.bias.name: shift.reshape(m, *self.bias.shape)}


def diagonal(name: str, sums: ParameterSums, n: int) -> Block:
    """The second moment of every number's gradient."""
    values = torch.zeros(sums.shape) if sums.squares is None else sums.squares / max(n, 1)
    return Block(name, None, sums.shape, None, None, values, 0.0)


def kronecker(name: str, sums: ParameterSums, n: int, bias: Bias | None) -> Block:
    """K-FAC's block: the Kronecker product of two means."""
    assert sums.matrix is not None
    sides = [_sides(side, pair, n, None if bias is None else bias.side) for side, pair in sums.pairs.items()]
    rows, columns = sides[0] if len(sides) == 1 else _pooled(sides)
    (row_basis, row_values), (column_basis, column_values) = _eigen(rows), _eigen(columns)
    basis = Basis(row_basis, column_basis, row_values, column_values)
    precision = torch.finfo(rows.dtype).eps * max(row_values.shape[-1], column_values.shape[-1])
    return Block(name, bias, sums.shape, sums.matrix, basis, basis.values(), precision)


def _sides(side: Side, pair: Pair, n: int, bias: Side | None) -> tuple[Tensor, Tensor]:
    """The means of the rows' side and of the columns': of inputs over the positions that got a gradient, of gradients
    summed over positions and averaged over samples."""
    a = _with_ones(pair) if bias == side else pair.a
    a = _times(a, 1 / pair.count.clamp_min(1).to(a))
    delta = pair.delta / max(n, 1)
    if bias not in (None, side):  # what comes from this side brings nothing to the bias
        delta = torch.nn.functional.pad(delta, (0, 1) if delta.dim() == 2 else (0, 1, 0, 1))
    return (a, delta) if side == "rows" else (delta, a)


def _with_ones(pair: Pair) -> Tensor:
    """Σ [a; 1] [a; 1]ᵀ."""
    assert pair.total is not None
    count = pair.count.to(pair.a)[:, None]
    if pair.a.dim() == 2:
        return torch.cat([pair.a, count], 1)
    total = pair.total.to(pair.a)[..., None]
    return torch.cat([torch.cat([pair.a, total], 2), torch.cat([total.mT, count[:, None]], 2)], 1)


def _pooled(sides: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One pair for a weight that met data from both sides (an embedding that is also the head): of every meeting both
    sides are given the same mean eigenvalue, then they are added up, so that the block has the trace of the sum."""
    means = [[_mean(side) for side in pair] for pair in sides]
    whole = sum((r * c for r, c in means), torch.zeros_like(means[0][0]))
    rows, columns = [], []
    for (row, column), (of_row, of_column) in zip(sides, means, strict=True):
        factor = (of_column / of_row.clamp_min(torch.finfo(row.dtype).tiny)).sqrt()
        rows.append(_times(row, factor))
        columns.append(_over(column, factor))
    row, column = _added(rows), _added(columns)
    norm = (whole / (_mean(row) * _mean(column)).clamp_min(torch.finfo(row.dtype).tiny)).sqrt()
    return _times(row, norm), _times(column, norm)


def _times(side: Tensor, factor: Tensor) -> Tensor:
    return side * factor.view(-1, *[1] * (side.dim() - 1))


def _over(side: Tensor, factor: Tensor) -> Tensor:
    return _times(side, torch.where(factor > 0, 1 / factor, 0))


def _mean(side: Tensor) -> Tensor:
    """(stack,): the mean eigenvalue."""
    return side.mean(1) if side.dim() == 2 else side.diagonal(dim1=1, dim2=2).mean(1)


def _added(sides: list[Tensor]) -> Tensor:
    """The sum of sides of which some are diagonals."""
    if all(side.dim() == 2 for side in sides):
        return sum(sides[1:], sides[0])
    whole = [side if side.dim() == 3 else torch.diag_embed(side) for side in sides]
    return sum(whole[1:], whole[0])


def _eigen(side: Tensor) -> tuple[Tensor | None, Tensor]:
    """Eigenvectors (in float64, kept in the dtype of the sums) and eigenvalues, 0 or more."""
    if side.dim() == 2:
        return None, side.clamp_min(0)
    symmetric = side.double()
    values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    return vectors.to(side.dtype), values.clamp_min(0).to(side.dtype)
