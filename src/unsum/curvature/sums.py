"""The first pass of a fit: sums of a aᵀ and δ δᵀ of every parameter that is met by outer products, and of squares of
all other parameters' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from unsum.curvature.pieces import Matrix, Piece, Side, gram, pieces, squares
from unsum.curvature.squared import squared
from unsum.errors import UnsupportedError
from unsum.factors.factors import Factors
from unsum.kernels.product import wide

Setting = Literal["expand", "reduce"]


@dataclass(eq=False)
class Pair:
    """Sums over the meetings in which one side of a matrix met the input, and the other one the gradient. A side that
    is too large for a matrix, or that ids chose, is the diagonal alone."""

    a: Tensor  # (stack, i, i) or (stack, i): Σ a aᵀ over positions that got a gradient
    delta: Tensor  # (stack, o, o) or (stack, o): Σ δ δᵀ
    total: Tensor  # (stack, i): Σ a, which a bias needs
    count: Tensor  # (stack,): how many positions

    def add(self, other: Pair) -> None:
        """More of them."""
        for name in ("a", "delta", "total", "count"):
            getattr(self, name).add_(getattr(other, name).to(getattr(self, name)))

    def copy(self) -> Pair:
        return Pair(*(tensor.clone() for tensor in self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        return {"a": self.a, "delta": self.delta, "total": self.total, "count": self.count}


@dataclass(frozen=True)
class Bias:
    """A bias that is one more number on the side of its weight that meets the input: there it meets 1."""

    name: str
    shape: tuple[int, ...]
    side: Side


@dataclass(eq=False)
class ParameterSums:
    """What is summed of one parameter: pairs by the side that met the input, or squares."""

    shape: tuple[int, ...]
    matrix: Matrix | None = None
    pairs: dict[Side, Pair] = field(default_factory=dict)
    squares: Tensor | None = None  # of those that have no pairs, and of biases


class Sums:
    """A reducer that goes from batch to batch: it keeps what it has summed."""

    by_position = True

    def __init__(self, biases: Mapping[str, str], *, kind: str, setting: Setting, max_side: int) -> None:
        self._biases = biases  # of weights: the parameter that may be their bias
        self._weights = {bias: weight for weight, bias in biases.items()}
        self._kind, self._setting, self._max_side = kind, setting, max_side
        self.parameters: dict[str, ParameterSums] = {}
        self.n = 0
        self.off: dict[tuple[str, Side], Tensor] = {}  # of weights' sides: how far Σ δ is from their bias's gradient
        self.finite: Tensor | None = None  # not finite if anything of the last batch was not
        self._deltas: dict[str, dict[Side, Tensor]] = {}  # of this backward, by weight: (n, …), Σ_t δ
        self._shifts: dict[str, Tensor] = {}  # the same of biases: their gradients

    def begin(self, n: int, again: bool) -> None:
        """A backward begins."""
        self.n += n
        self._deltas, self._shifts, self.finite = {}, {}, None

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        known = self.parameters.get(name)
        if not factors.terms()[0][1]:  # nothing reached it
            if known is None:
                self.parameters[name] = ParameterSums(factors.shape)
            return
        found = None if self._kind == "diagonal" or name in self._weights else pieces(factors)
        if known is None or (known.matrix is None and known.squares is None):
            known = self.parameters[name] = ParameterSums(factors.shape, found[0].matrix if found else None)
        if known.matrix is None:
            self._add_squares(name, known, factors)
        elif found is None or found[0].matrix != known.matrix:
            raise UnsupportedError(
                f"{name}: its gradients were outer products in an earlier batch and are none now.\n"
                "  fit with kind='diagonal', or leave it out (params=)"
            )
        else:
            for piece in found:
                self._add(known, piece)
            if name in self._biases:
                self._deltas[name] = _summed(found)

    def end(self, left: Sequence[str]) -> None:
        """The backward is over: a bias that got what its weight's δ add up to is one more column of the weight."""
        for weight, bias in self._biases.items():
            deltas, shift = self._deltas.get(weight, {}), self._shifts.get(bias)
            for side in sorted({*deltas, *(side for name, side in self.off if name == weight)}):
                delta = deltas.get(side)
                if delta is None and shift is None:
                    continue
                if delta is None or shift is None or delta.numel() != shift.numel():
                    off = torch.tensor(torch.inf)
                else:
                    off = (delta.flatten() - shift.flatten()).norm() / shift.norm().clamp_min(1e-30)
                before = self.off.get((weight, side))
                self.off[weight, side] = off if before is None else torch.maximum(before, off.to(before))
        self._deltas, self._shifts = {}, {}

    def _add(self, known: ParameterSums, piece: Piece) -> None:
        pair = _reduced(piece, self._max_side) if self._setting == "reduce" else _expanded(piece, self._max_side)
        self._note(pair.delta.sum() + pair.total.sum())
        if piece.input in known.pairs:
            known.pairs[piece.input].add(pair)
        else:
            known.pairs[piece.input] = pair

    def _add_squares(self, name: str, known: ParameterSums, factors: Factors) -> None:
        found = pieces(factors)
        if found is not None:
            value = squared(found).reshape(factors.shape)
        else:
            each = factors.per_sample()
            value = each.abs().square().sum(0) if factors.is_complex else torch.einsum("n...,n...->...", each, each)
            if name in self._weights:
                self._shifts[name] = each
        known.squares = value if known.squares is None else known.squares + value
        self._note(value.sum())

    def _note(self, value: Tensor) -> None:
        self.finite = value if self.finite is None else self.finite + value.to(self.finite)

    def paired(self) -> dict[str, Bias]:
        """Of weights: the bias that got what their δ add up to, in every batch."""
        found = {}
        for (weight, side), off in self.off.items():
            known, bias = self.parameters[weight], self.parameters[self._biases[weight]]
            loose = 1e-8 if bias.squares is not None and bias.squares.dtype == torch.float64 else 2e-2
            if known.matrix is not None and float(off) <= loose:
                found[weight] = Bias(self._biases[weight], bias.shape, side)
        return found


def _expanded(piece: Piece, max_side: int) -> Pair:
    """Every position is one of its own."""
    stack, counts = piece.matrix.stack, piece.counts
    count = piece.apart(counts).sum((0, 2))
    if piece.is_table:
        seen = torch.zeros(piece.inputs, dtype=wide(piece.delta.dtype), device=piece.delta.device)
        seen.index_add_(0, piece.a.flatten(), counts.flatten().to(seen.dtype))
        a = total = seen[None]
        total = total.clone()
    else:
        met = piece.a * counts.unsqueeze(-1)
        a = _side(met, stack, max_side)
        total = piece.apart(met).sum((0, 2), dtype=wide(met.dtype))
    return Pair(a, _side(piece.delta, stack, max_side), total, count.to(torch.float64))


def _reduced(piece: Piece, max_side: int) -> Pair:
    """A sample's positions are one: its inputs averaged, its gradients added up."""
    counts, dtype = piece.counts, wide(piece.delta.dtype)
    has = counts.sum(1, keepdim=True)
    share = counts.to(dtype) / has.clamp_min(1).to(dtype)  # (n·stack, t)
    if piece.is_table:
        mean = torch.zeros(len(piece.a), piece.inputs, dtype=dtype, device=piece.delta.device)
        mean.scatter_add_(1, piece.a, share)
    else:
        mean = torch.einsum("nt,nti->ni", share, piece.a.to(dtype))
    one = Piece(mean[:, None], piece.delta.sum(1, keepdim=True, dtype=dtype), piece.matrix, piece.input)
    return Pair(
        _side(one.a, one.matrix.stack, max_side),
        _side(one.delta, one.matrix.stack, max_side),
        one.apart(one.a[:, 0]).sum(0),
        one.apart(has[:, 0] > 0).sum(0).to(torch.float64),
    )


def _side(x: Tensor, stack: int, max_side: int) -> Tensor:
    return gram(x, stack) if x.shape[-1] <= max_side else squares(x, stack)


def _summed(found: Sequence[Piece]) -> dict[Side, Tensor]:
    """(n, stack·o): Σ_t δ of all positions, by the side that met the input."""
    sums: dict[Side, Tensor] = {}
    for piece in found:
        each = piece.apart(piece.delta.sum(1, dtype=wide(piece.delta.dtype))).flatten(1)
        sums[piece.input] = sums[piece.input] + each if piece.input in sums else each
    return sums
