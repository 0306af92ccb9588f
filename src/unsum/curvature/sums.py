"""The first pass of a fit: sums of a aᵀ and δ δᵀ of every parameter that is met by outer products, and of squares of
all other parameters' gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from unsum.curvature.pieces import Matrix, Piece, Side, gram, pieces, squares
from unsum.curvature.squared import squared, summed_squares
from unsum.errors import UnsupportedError
from unsum.factors.factors import Factors
from unsum.factors.scale import Scale
from unsum.kernels.product import wide
from unsum.seams.tensors import norms_of

Setting = Literal["expand", "reduce"]
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}  # of sums over positions, by dtype of what is added up
SMALL = 1 << 22  # numbers, up to which gradients wait to be squared together


@dataclass(eq=False)
class Pair:
    """Sums over the meetings in which one side of a matrix met the input, and the other one the gradient. A side that
    is too large for a matrix, or that ids chose, is the diagonal alone."""

    a: Tensor  # (stack, i, i) or (stack, i): Σ a aᵀ over positions that got a gradient
    delta: Tensor  # (stack, o, o) or (stack, o): Σ δ δᵀ
    count: Tensor  # (stack,): how many positions
    total: Tensor | None = None  # (stack, i): Σ a, if there may be a bias

    def add(self, other: Pair) -> None:
        """More of them."""
        for name, value in other.tensors().items():
            mine = getattr(self, name)
            mine.add_(value.to(mine))

    def copy(self) -> Pair:
        return Pair(**{name: value.clone() for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        found = {"a": self.a, "delta": self.delta, "count": self.count, "total": self.total}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Bias:
    """A bias that is one more number on the side of its weight that meets the input: there it meets 1."""

    name: str
    shape: tuple[int, ...]
    side: Side

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


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
        self.n = self._now = 0  # samples: of all backwards, of this one
        self.off: dict[
            tuple[str, Side], Tensor | float
        ] = {}  # of weights' sides: how far Σ δ is from the bias's gradient
        self.finite: Tensor | None = None  # not finite if anything is not
        self.without_squares: set[str] = (
            set()
        )  # biases that were in their weight's block in some batch, without a doubt
        self._met: dict[str, dict[Side, list[Piece]]] = {}  # of this backward: weights that wait for their bias
        self._shifts: dict[str, Factors] = {}  # biases that wait for their weight
        self._small: dict[str, Tensor] = {}  # gradients (n, …) that are squared together when the backward is over

    def begin(self, n: int, again: bool) -> None:
        """A backward begins."""
        self.n += n
        self._now = n
        self._met, self._shifts, self._small, self.finite = {}, {}, {}, None

    @property
    def _way_out(self) -> str:
        """Of a single sample, the state in which a recurrent layer begins looks like a constant of the model."""
        other = "fit with kind='diagonal', or leave it out (params=)"
        if self._now > 1:
            return other
        return f"this batch is of one sample: give batches of two or more (another batch_size, drop_last), {other}"

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        known = self.parameters.get(name)
        ((_, terms),) = factors.terms()
        if not terms:  # nothing reached it
            if known is None:
                self.parameters[name] = ParameterSums(factors.shape)
            return
        found = None if self._kind == "diagonal" or name in self._weights else pieces(factors)
        if known is None or (known.matrix is None and known.squares is None):
            known = self.parameters[name] = ParameterSums(factors.shape, found[0].matrix if found else None)
        if known.matrix is None:
            self._take_squares(name, factors)
        elif found is None or found[0].matrix != known.matrix:
            raise UnsupportedError(
                f"{name}: its gradients were outer products in an earlier batch, and are not now.\n  " + self._way_out
            )
        else:
            for piece in found:
                self._add(known, piece, with_total=name in self._biases)
            if name in self._biases:
                by_side = self._met[name] = {}
                for piece in found:
                    by_side.setdefault(piece.input, []).append(piece)
                self._compare(name)

    def end(self, left: Sequence[str]) -> None:
        """The backward is over."""
        for weight in [*self._met, *(self._weights[bias] for bias in self._shifts)]:  # one came without the other
            for side in {*self._met.get(weight, {}), *(side for name, side in self.off if name == weight)}:
                self.off[weight, side] = float("inf")
        for bias, factors in self._shifts.items():
            self._add_squares(bias, factors.per_sample())
        self._add_small()
        self._met, self._shifts = {}, {}
        told = [view for each in self.parameters.values() for view in _samples_of(each)]
        self.finite = norms_of(told).sum() if told else None

    def _add(self, known: ParameterSums, piece: Piece, *, with_total: bool) -> None:
        summed = _reduced if self._setting == "reduce" else _expanded
        pair = summed(piece, self._max_side, with_total=with_total)
        if piece.input in known.pairs:
            known.pairs[piece.input].add(pair)
        else:
            known.pairs[piece.input] = pair

    def _take_squares(self, name: str, factors: Factors) -> None:
        """Of a parameter that is covered by its diagonal, or of a bias that waits for its weight."""
        if name in self._weights and self._kind != "diagonal":
            self._shifts[name] = factors
            self._compare(self._weights[name])
        elif (found := pieces(factors)) is not None:
            self._put_squares(name, squared(found).reshape(factors.shape))
        else:
            self._add_squares(name, factors.per_sample())

    def _add_squares(self, name: str, each: Tensor) -> None:
        if each.is_complex():
            self._put_squares(name, each.abs().square().sum(0))
        elif each.numel() > SMALL:
            self._put_squares(name, summed_squares(each, 0))
        else:
            self._small[name] = each

    def _put_squares(self, name: str, value: Tensor) -> None:
        known = self.parameters[name]
        known.squares = value if known.squares is None else known.squares.add_(value)

    def _add_small(self) -> None:
        """Those of one shape together."""
        alike: dict[tuple[Any, ...], list[str]] = {}
        for name, each in self._small.items():
            alike.setdefault((each.shape, each.dtype, each.device), []).append(name)
        for names in alike.values():
            squares = summed_squares(torch.stack([self._small[name] for name in names]), 1)
            for name, value in zip(names, squares.unbind(), strict=True):
                self._put_squares(name, value)
        self._small = {}

    def _compare(self, weight: str) -> None:
        """Whether a bias got what its weight's δ add up to: then it is one more column of the weight. Where both were
        made of one tensor, there is nothing to add up."""
        bias = self._biases[weight]
        if weight not in self._met or bias not in self._shifts:
            return
        by_side, factors = self._met.pop(weight), self._shifts.pop(bias)
        delta, shift = _shift_of(factors), None
        for side in {*by_side, *(side for name, side in self.off if name == weight)}:
            found = by_side.get(side, [])
            if len(found) == 1 and delta is not None and found[0].is_made_of(delta):
                off: Tensor | float = 0.0
            else:
                shift = factors.per_sample() if shift is None else shift
                off = _distance(found, shift)
            before = self.off.get((weight, side), 0.0)
            if isinstance(off, float) and isinstance(before, float):
                self.off[weight, side] = max(off, before)
            else:
                self.off[weight, side] = torch.maximum(
                    *(torch.as_tensor(x, device=factors.device) for x in (off, before))
                )
        if shift is None:
            self.without_squares.add(bias)
        else:
            self._add_squares(bias, shift)  # perhaps it is not in the block in the end

    def paired(self) -> dict[str, Bias]:
        """Of weights: the bias that got what their δ add up to, in every batch."""
        found = {}
        for (weight, side), off in self.off.items():
            known, bias = self.parameters[weight], self.parameters[self._biases[weight]]
            if known.matrix is not None and float(off) <= 1:
                found[weight] = Bias(self._biases[weight], bias.shape, side)
        for weight, name in self._biases.items():
            if name in self.without_squares and weight not in found:
                raise UnsupportedError(
                    f"{name} got what the gradients at the output of {weight} add up to in some batches, and something "
                    "else in others.\n  fit with kind='diagonal', or leave it out (params=)"
                )
        return found


def _samples_of(each: ParameterSums) -> list[Tensor]:
    """Numbers that are not finite if anything summed is not."""
    if each.matrix is None:
        return [] if each.squares is None else [each.squares]
    sides = [side for pair in each.pairs.values() for side in (pair.a, pair.delta)]
    return [side if side.dim() == 2 else side.diagonal(dim1=1, dim2=2) for side in sides]


def _shift_of(factors: Factors) -> Tensor | None:
    """The δ of which a bias's gradient is the sum, if it is that."""
    ((share, terms),) = factors.terms()
    if len(terms) == 1 and isinstance(terms[0], Scale) and terms[0].x is None and share.scale is None:
        return terms[0].delta
    return None


def _distance(found: Sequence[Piece], shift: Tensor) -> Tensor | float:
    """How far Σ_t δ of these pieces is from a bias's gradients, relative to these and to what rounding explains."""
    if not found:
        return float("inf")
    each = [piece.apart(piece.delta.sum(1, dtype=wide(piece.delta.dtype))).flatten() for piece in found]
    delta = sum(each[1:], each[0])
    if delta.numel() != shift.numel():
        return float("inf")
    rounding = max(_ROUNDING.get(piece.delta.dtype, 2e-2) for piece in found)
    return (delta - shift.flatten()).norm() / (rounding * shift.norm()).clamp_min(1e-30)


def _expanded(piece: Piece, max_side: int, *, with_total: bool) -> Pair:
    """Every position is one of its own."""
    stack, counts = piece.matrix.stack, piece.counts
    total = None
    if piece.is_table:
        seen = torch.zeros(piece.inputs, dtype=wide(piece.delta.dtype), device=piece.delta.device)
        a = seen.index_add_(0, piece.a.flatten(), counts.flatten().to(seen.dtype))[None]
        total = a.clone() if with_total else None
    else:
        met = piece.a * counts.unsqueeze(-1)
        a = _side(met, stack, max_side)
        total = piece.apart(met).sum((0, 2), dtype=wide(met.dtype)) if with_total else None
    return Pair(a, _side(piece.delta, stack, max_side), piece.apart(counts).sum((0, 2)), total)


def _reduced(piece: Piece, max_side: int, *, with_total: bool) -> Pair:
    """A sample's positions are one: its inputs averaged, its gradients added up."""
    counts, dtype = piece.counts, wide(piece.delta.dtype)
    has = counts.sum(1, keepdim=True)
    share = counts.to(dtype) / has.clamp_min(1).to(dtype)  # (n·stack, t)
    if piece.is_table:
        mean = torch.zeros(len(piece.a), piece.inputs, dtype=dtype, device=piece.delta.device)
        mean.scatter_add_(1, piece.a, share)
    else:
        mean = torch.einsum("nt,nti->ni", share, piece.a.to(dtype))
    delta, stack = piece.delta.sum(1, keepdim=True, dtype=dtype), piece.matrix.stack
    total = piece.apart(mean).sum(0) if with_total else None
    count = piece.apart(has[:, 0] > 0).sum(0)
    return Pair(_side(mean[:, None], stack, max_side), _side(delta, stack, max_side), count, total)


def _side(x: Tensor, stack: int, max_side: int) -> Tensor:
    return gram(x, stack) if x.shape[-1] <= max_side else squares(x, stack)
