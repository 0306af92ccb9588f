"""`Factors`: the gradients of one parameter by sample, and everything that can be read of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from unsum.errors import OptionError
from unsum.factors import total
from unsum.factors.dense import Dense
from unsum.factors.outer import Outer
from unsum.factors.refusals import (
    no_outer_products,
    no_positions,
    not_over,
    other_parameter,
    other_shape,
    other_weights,
)
from unsum.factors.routed import Routed
from unsum.factors.total import Term
from unsum.factors.windows import Windows
from unsum.kernels.constants import constant
from unsum.kernels.product import rows, wide
from unsum.seams.tensors import is_changed


@dataclass
class GroupFactors:
    """What samples that came together have of a parameter's gradient: a sum of factors, all multiplied by `scale`."""

    n: int
    kinds: list[Term] = field(default_factory=list)
    scale: Tensor | float | None = None
    held: list[tuple[Tensor, int]] = field(default_factory=list)  # tensors among the factors, and their versions

    def is_changed(self) -> bool:
        """Whether a tensor among the factors was changed in place since, or freed."""
        return any(is_changed(tensor, version) for tensor, version in self.held)

    def times(self, value: Tensor, power: int = 1) -> Tensor:
        """A result with the scale put in."""
        return value if self.scale is None else value * self.scale**power


class Factors:
    """The per-sample gradients of one parameter, as factors. Gradients are formed only where a read needs them.

    Examples:
        >>> import torch, unsum
        >>> model = torch.nn.Linear(3, 2)
        >>> with unsum.gradients(model) as g:
        ...     model(torch.ones(4, 5, 3)).sum().backward()
        >>> f = g["weight"]
        >>> f.per_sample().shape, f.per_token().shape
        (torch.Size([4, 2, 3]), torch.Size([4, 5, 2, 3]))
        >>> f.a.shape, f.delta.shape  # the two factors, before the sum
        (torch.Size([4, 5, 3]), torch.Size([4, 5, 2]))
        >>> torch.equal(f.sum() + f.shared(), model.weight.grad)
        True
    """

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        shares: Sequence[GroupFactors],
        shared: Tensor | None = None,
        *,
        is_over: bool = True,
    ) -> None:
        self.name = name
        self.is_complex = parameter.is_complex()
        self._is_over = is_over  # whether the backward is: until then nobody's part may still come
        self.shape = tuple(parameter.shape)
        self.dtype, self.device = wide(parameter.dtype), parameter.device  # what reads are given in
        self._shares, self._shared = shares, shared
        self._sq_norms: Tensor | None = None  # once they are known, and the sum that came with them
        self._sum: Tensor | None = None

    @property
    def n(self) -> int:
        """How many samples."""
        return sum(share.n for share in self._shares)

    def __reduce__(self) -> str:
        raise TypeError(
            f"the factors of {self.name} belong to their model and its graph, and cannot be copied or pickled.\n  save "
            "what you read of them: f.per_sample(), f.sq_norms()"
        )

    def __repr__(self) -> str:
        kinds = {type(kind).__name__.lower() for share in self._shares for kind in share.kinds}
        how = f", kept as: {', '.join(sorted(kinds))}" if kinds else ", all zero: nothing reached it"
        return f"per-sample gradients of {self.name} {self.shape}: {self.n} samples{how}"

    def per_sample(self) -> Tensor:
        """(n, *shape): one gradient for each sample."""
        parts = [s.times(total.dense(s.kinds)) if s.kinds else self._zeros(s.n, *self.shape) for s in self._shares]
        if not parts:
            return self._zeros(0, *self.shape)
        found = _joined([part.to(self.dtype) for part in parts])
        return self._readers(found) if self._is_over and self._is_held(found) else found

    def shared(self) -> Tensor:
        """The part of the gradient that belongs to no sample (a weight penalty in the loss); zeros if there is none."""
        if not self._is_over:
            raise not_over(self.name)
        return self._zeros(*self.shape) if self._shared is None else self._readers(self._shared)

    def sum(self) -> Tensor:
        """The sum over samples. `sum() + shared()` is what the backward adds to `.grad`."""
        parts = [share.times(kind.sum()) for share in self._shares for kind in share.kinds]
        return sum(parts[1:], parts[0]) if parts else self._zeros(*self.shape)

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n."""
        if not isinstance(w, Tensor):
            raise OptionError(f"weighted_sum takes a tensor of shape ({self.n},), got {type(w).__name__}")
        if tuple(w.shape) != (self.n,):
            raise other_weights(self.name, w, self.n)
        parts, first = [], 0
        for share in self._shares:
            own = w[first : first + share.n].to(self.device, self.dtype)
            parts += [share.times(kind.weighted_sum(own)) for kind in share.kinds]
            first += share.n
        return sum(parts[1:], parts[0]).to(self.dtype) if parts else self._zeros(*self.shape)

    def sq_norms(self) -> Tensor:
        """(n,): the squared norm of each sample's gradient."""
        if self._sq_norms is None:
            parts = [s.times(total.sq_norms(s.kinds), 2) if s.kinds else self._zeros(s.n) for s in self._shares]
            self._sq_norms = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._zeros(0)
        return self._readers(self._sq_norms)

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """(n,) and the sum over samples, from one product where that is cheaper."""
        if self._sq_norms is not None:
            return self._sq_norms, self.sum() if self._sum is None else self._sum
        if len(self._shares) == 1 and len(kinds := total.total(self._shares[0].kinds)) == 1:
            sq, summed = kinds[0].norms_and_sum()
            self._sq_norms, self._sum = self._shares[0].times(sq, 2), self._shares[0].times(summed)
            return self._sq_norms, self._sum
        return self.sq_norms(), self.sum()

    def formed(self, *, want_sum: bool = False) -> Factors:
        """The same multiplied out, with norms (and the sum, if it is wanted) from the same product; itself where norms
        need no gradient formed."""
        if len(self._shares) != 1 or len(kinds := total.total(self._shares[0].kinds)) != 1:
            return self
        if isinstance(kinds[0], Dense) and self._sq_norms is not None:
            return self
        made = kinds[0].norms_and_each(want_sum=want_sum)
        if made is None:
            return self
        (share,), (sq, summed, each) = self._shares, made
        formed = object.__new__(type(self))
        vars(formed).update(vars(self))
        formed._shares = [replace(share, kinds=[each], held=[])]
        formed._sq_norms = self._sq_norms = share.times(sq, 2)
        formed._sum = self._sum = None if summed is None else share.times(summed)
        return formed

    def is_changed(self) -> bool:
        """Whether a tensor among the factors was changed in place since they came."""
        return any(share.is_changed() for share in self._shares)

    def dot(self, other: Factors | Tensor) -> Tensor:
        """(n, m): inner products with every one in `other`: the factors of another block, or m tensors of
        the parameter's shape, (m, *shape); (n,) with one such tensor. Gradients are formed only where that is less
        work."""
        if isinstance(other, Tensor):
            return self._dot_tensor(other)
        if not isinstance(other, Factors):
            raise OptionError(f"dot takes the factors of another capture or a tensor, got {type(other).__name__}")
        if other.shape != self.shape:
            raise other_parameter(self.name, self.shape, other.name, other.shape)
        rows = []
        for mine in self._shares:
            row = [
                mine.times(theirs.times(total.dot(mine.kinds, theirs.kinds)))
                if mine.kinds and theirs.kinds
                else self._zeros(mine.n, theirs.n)
                for theirs in other._shares
            ]
            rows.append(torch.cat(row, 1))
        return torch.cat(rows)

    def _dot_tensor(self, other: Tensor) -> Tensor:
        if tuple(other.shape) == self.shape:
            return self._dot_tensor(other[None])[:, 0]
        if tuple(other.shape[1:]) != self.shape or other.dim() != len(self.shape) + 1:
            raise other_shape(self.name, self.shape, tuple(other.shape))
        other = other.detach().to(self.device, self.dtype)
        parts = [
            s.times(total.dot_dense(s.kinds, other)) if s.kinds else self._zeros(s.n, len(other)) for s in self._shares
        ]
        return _joined(parts) if parts else self._zeros(0, len(other))

    def token_dots(self, other: Tensor) -> Tensor:
        """(n, t, m): inner products of each position's part with m tensors of the parameter's shape."""
        other = other.detach().to(self.device, self.dtype)
        parts = [share.times(self._known(total.token_dots(kind, other))) for share, kind in self._alone()]
        return _joined(_padded(parts))

    def kinds(self) -> list[Term]:
        """What the gradients are sums of, as it came."""
        return [kind for share in self._shares for kind in share.kinds]

    def terms(self) -> list[tuple[GroupFactors, list[Term]]]:
        """What the gradients are sums of, for each group of samples; those of one kind as one, with more positions."""
        return [(share, total.total(share.kinds)) for share in self._shares]

    def project(self, k: int, seed: int = 0) -> Tensor:
        """(n, k·k): random projections, whose inner products are on average those of the gradients; a parameter of at
        most k² elements is not projected. The result depends on the name and the seed only."""
        if not isinstance(k, int) or k < 1:
            raise OptionError(f"project(k={k!r}): k is a whole number, 1 or more")
        wanted = sides(self.shape, k)
        return self.projected(k, None if wanted is None else projection(self.name, seed, *wanted, self.device))

    def projected(self, k: int, matrices: tuple[Tensor, Tensor] | None) -> Tensor:
        """(n, k·k) by these matrices, of which `sides` tells the sizes; of several parameters after each other
        (`Layers`) by (layers, …) of them."""
        if matrices is None:
            return rows(self.per_sample())
        left, right = matrices
        if len(self.shape) < 2:
            flat = rows(self.per_sample())
            if left.dim() == 3:
                return (flat.unflatten(0, (len(left), -1)) @ left.to(self.dtype).mT).flatten(0, 1)
            return flat @ left.to(self.dtype).T
        return self.two_sided(left, right).flatten(1)

    def two_sided(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, r, c): L G R of each sample, for a parameter seen as a matrix (rows, rest); L is (r, rows), R (rest, c).
        No gradient is formed where factors are outer products."""
        parts = []
        for share in self._shares:
            each = [kind.project(left, right).to(self.dtype) for kind in share.kinds]
            sizes = share.n, left.shape[-2], right.shape[-1]
            parts.append(share.times(sum(each[1:], each[0])) if each else self._zeros(*sizes))
        return _joined(parts).to(self.dtype)

    def token_projected(self, matrices: tuple[Tensor, Tensor] | None) -> Tensor:
        """(n, t, k·k): the projection of each position's part by these matrices (None: as it is), which add up to
        `projected`. Of a parameter that met data several times (tied weights), the parts of one position are added
        up."""
        found = []
        for share in self._shares:
            each = [self._known(total.token_projected(kind, matrices)) for kind in share.kinds]
            if len({part.shape[1] for part in each}) != 1:
                raise no_positions(self.name, "met data at places with different numbers of positions")
            found.append(share.times(sum(each[1:], each[0])).to(self.dtype))
        return _joined(_padded(found))

    def per_token(self) -> Tensor:
        """(n, t, *shape): the part of each position; padded with zeros where samples have unequal numbers."""
        return torch.cat(_padded([share.times(self._known(kind.tokens())) for share, kind in self._alone()]))

    def token_sq_norms(self) -> Tensor:
        """(n, t): the squared norm of each position's part."""
        squares = [share.times(self._known(kind.token_sq_norms()), 2) for share, kind in self._alone()]
        return _joined(_padded(squares))

    @property
    def a(self) -> Tensor:
        """(n, t, i): the tensor that the parameter was multiplied with; (n, i) where every sample has one position."""
        found = [outer.a for _, outer in self.outers()]
        return _short(torch.cat(_padded(found)))

    @property
    def delta(self) -> Tensor:
        """(n, t, o): the gradient at the layer's output; (n, o) where every sample has one position."""
        found = [share.times(outer.delta) for share, outer in self.outers()]
        return _short(torch.cat(_padded(found)))

    @property
    def lengths(self) -> Tensor:
        """(n,): how many positions each sample has."""
        found = []
        for share, kind in self._alone():
            lengths, t = getattr(kind, "lengths", None), self._known(kind.token_sq_norms()).shape[1]
            found.append(torch.full((share.n,), t) if lengths is None else lengths.cpu())
        return torch.cat(found)

    @property
    def is_ragged(self) -> bool:
        """Whether samples have unequal numbers of positions: rows that were chosen, or documents."""
        found = [n for kind in self.kinds() if (n := getattr(kind, "lengths", None)) is not None and len(n)]
        return any(bool((n != n[0]).any()) for n in found)

    def _known(self, positions: Tensor | None) -> Tensor:
        if positions is None:
            raise no_positions(self.name, "has gradients that were formed as a whole, without positions")
        return positions

    def _alone(self) -> list[tuple[GroupFactors, Term]]:
        """The one kind of each share."""
        found: list[tuple[GroupFactors, Term]] = []
        for share in self._shares:
            kinds = share.kinds
            if len(kinds) != 1:
                raise no_positions(self.name, f"met data {len(kinds)} times in one backward")
            found.append((share, kinds[0]))
        return found

    def outers(self) -> list[tuple[GroupFactors, Outer]]:
        """The outer products of each share, for those who want both factors; raises where the gradients are none."""
        found = []
        for share, kind in self._alone():
            outer = kind.outer() if isinstance(kind, Windows | Routed) else kind
            if not isinstance(outer, Outer):
                raise no_outer_products(self.name, type(kind).__name__.lower())
            found.append((share, outer))
        return found

    def _is_held(self, found: Tensor) -> bool:
        """Whether this lies in the memory of a factor: gradients that came formed, or of one position."""
        held = [t for kind in self.kinds() for t in vars(kind).values() if isinstance(t, Tensor)]
        memory = found.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == memory for each in held)

    def _readers(self, held: Tensor) -> Tensor:
        """A copy of a tensor that is held, which the reader may change in place. While the backward runs, only unsum
        reads, and gets the tensor itself."""
        return held.clone() if self._is_over else held

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def kept_numbers(shape: Sequence[int], k: int) -> int:
    """How many numbers a projection leaves of a parameter of this shape."""
    return min(prod(shape), k * k)


def sides(shape: Sequence[int], k: int) -> tuple[int, int, int] | None:
    """How many numbers on each side, rows and columns, the matrices have that project a parameter of this shape; None
    if it is kept as it is."""
    if prod(shape) <= k * k:
        return None
    return (k * k, prod(shape), 1) if len(shape) < 2 else (k, shape[0], prod(shape[1:]))


@lru_cache(maxsize=512)
def projection(
    name: str,
    seed: int,
    k: int,
    rows: int,
    columns: int,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Two random matrices (k, rows) and (columns, k), scaled so that E⟨LGR, LHR⟩ = ⟨G, H⟩; the same on every device."""
    generator = torch.Generator().manual_seed((zlib.crc32(name.encode()) << 16) + seed)
    left = torch.randn(k, rows, generator=generator, dtype=torch.float32) / k**0.5
    right = torch.randn(columns, k, generator=generator, dtype=torch.float32) / k**0.5
    return constant(left.to(device)), constant(right.to(device))


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """Made equally long along dimension 1."""
    longest = max((t.shape[1] for t in tensors), default=0)
    return [
        t if t.shape[1] == longest else torch.cat([t, t.new_zeros(len(t), longest - t.shape[1], *t.shape[2:])], 1)
        for t in tensors
    ]


def _joined(parts: list[Tensor]) -> Tensor:
    """Samples after each other."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _short(tensor: Tensor) -> Tensor:
    return tensor[:, 0] if tensor.shape[1] == 1 else tensor
