"""Reducers: numbers from factors while backward runs, parameter by parameter, so that nothing is kept. What all of them
have in common is in `reducing`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from unsum.errors import OptionError, SamplesError
from unsum.factors.factors import Factors
from unsum.reducing import Reading, Reduction
from unsum.reducing import Reducer as Reducer


class Norms(Reading):
    """The norm of each sample's gradient.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> with unsum.gradients(model, unsum.Norms()) as g:
        ...     model(2 * torch.eye(3)).sum().backward()
        >>> g[unsum.Norms].norms()
        tensor([2., 2., 2.])
    """

    power = 2

    def reset(self) -> None:
        super().reset()
        self._squares: dict[int, list[tuple[Sequence[str], Tensor]]] = {}  # of each group, as they came

    def reads(self) -> Hashable:
        """What is read of factors."""
        return "norms"

    def read(self, factors: Factors) -> Tensor:
        """(n,)."""
        return factors.sq_norms()

    def receive(self, name: str, value: Tensor) -> None:
        """A parameter's squared norms."""
        self.put((name,), value)

    def put(self, names: Sequence[str], squares: Tensor) -> None:
        """Squared norms that were had with something else: (parameters, n), or (parameters, parts, n) of which the
        parts are still to be added up; of one, also (n,) and (parts, n). Nothing is computed until they are read."""
        self._squares.setdefault(self._now, []).append((names, squares))

    def groups(self) -> list[tuple[Sequence[str], Tensor]]:
        """Names and squared norms (names, n) that the last backward brought, as they came."""
        return [(names, _whole(names, squares)) for names, squares in self._squares.get(self._now, [])]

    def by_parameter(self) -> dict[str, Tensor]:
        """{name: (n,)}: squared norms of each parameter's part."""
        self._check()
        found: dict[str, dict[int, Tensor]] = {}
        for group, came in self._squares.items():
            for name, own in _apart(came):
                found.setdefault(name, {})[group] = own
        return {name: self._in_order(parts) for name, parts in found.items()}

    def sq_norms(self) -> Tensor:
        """(n,): squared norms over all parameters."""
        self._check()
        if not self._squares:
            return torch.zeros(sum(self._sizes))
        device = next(iter(self._squares.values()))[0][1].device
        return self._in_order(
            {
                group: torch.cat([in_rows(each.to(device)) for _, each in came]).sum(0)
                for group, came in self._squares.items()
            }
        )

    def norms(self) -> Tensor:
        """(n,): over all parameters."""
        return self.sq_norms().sqrt()


def in_rows(squares: Tensor) -> Tensor:
    """(…, n) as (rows, n), also where there is no sample."""
    return squares.view(squares.shape[:-1].numel(), squares.shape[-1])


def _apart(came: Sequence[tuple[Sequence[str], Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Squared norms by parameter, their parts added up."""
    for names, squares in came:
        yield from zip(names, _whole(names, squares).unbind(), strict=True)


def _whole(names: Sequence[str], squares: Tensor) -> Tensor:
    """(names, n): the parts of each added up."""
    whole = squares.view(len(names), squares.shape[:-1].numel() // len(names), squares.shape[-1])
    return whole[:, 0] if whole.shape[1] == 1 else whole.sum(1)


class TokenNorms(Reading):
    """The norm of each token's part of the gradient, over the parameters whose positions are the input's.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.TokenNorms()) as g:
        ...     model(torch.ones(4, 5, 3)).sum().backward()
        >>> g[unsum.TokenNorms].norms().shape
        torch.Size([4, 5])
    """

    power = 2

    def __init__(self, positions: int | None = None) -> None:
        self._given = positions
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._squares: dict[int, Tensor] = {}
        self._new: dict[int, dict[str, Tensor]] = {}  # of this backward, by the number of positions

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        try:
            squares = self.read(factors)
        except SamplesError:
            self.left_out.append(name)
            return
        self.receive(name, squares)

    def reads(self) -> Hashable:
        """What is read of factors."""
        return "tokens"

    def read(self, factors: Factors) -> Tensor:
        """(n, t)."""
        return factors.token_sq_norms()

    def receive(self, name: str, value: Tensor) -> None:
        """A parameter's squared norms by token."""
        self._new.setdefault(value.shape[1], {})[name] = value

    def end(self, left: Sequence[str]) -> None:
        """The backward is over. Where the input does not tell its positions, those that most parameters have are it."""
        counts = {t: len(found) for t, found in self._new.items()}
        wanted = self._given or self._positions or max(counts, key=lambda t: (counts[t], t), default=0)
        self.left_out += [name for t, found in self._new.items() if t != wanted for name in found]
        if wanted in self._new:
            self._squares[self._now] = torch.stack(list(self._new[wanted].values())).sum(0)
        self._new = {}

    def positions_of(self, given: int | None) -> int | None:
        """How many positions are wanted of samples whose input has so many; None if that is not known beforehand."""
        return self._given or given

    def put(self, squares: Tensor, left_out: Sequence[str]) -> None:
        """(n, t) that were had elsewhere, and the parameters that are not in them."""
        self._squares[self._now] = squares
        self.left_out += left_out

    def sq_norms(self) -> Tensor:
        """(n, t)."""
        self._check()
        if not self._squares:
            raise SamplesError("TokenNorms: no parameter has the input's positions")
        longest = max(part.shape[1] for part in self._squares.values())
        pad = torch.nn.functional.pad
        return self._in_order({k: pad(part, (0, longest - part.shape[1])) for k, part in self._squares.items()})

    def norms(self) -> Tensor:
        """(n, t)."""
        return self.sq_norms().sqrt()


class SecondMoment(Reduction):
    """Σ_n |g_n|², number by number: with the sum, the variance of gradients and the noise scale.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.SecondMoment()) as g:
        ...     model(2 * torch.ones(3, 3)).sum().backward()
        >>> g[unsum.SecondMoment].sum_squares()["weight"]
        tensor([[12., 12., 12.],
                [12., 12., 12.]])
    """

    def reset(self) -> None:
        super().reset()
        self._sums: dict[str, Tensor] = {}

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        each = factors.per_sample()
        each = torch.view_as_real(each) if each.is_complex() else each
        value = torch.einsum("n...,n...->...", each, each)
        value = value.sum(-1) if factors.is_complex else value
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def sum_squares(self) -> dict[str, Tensor]:
        """{parameter: Σ_n |g_n|²}."""
        self._check()
        return self._sums


class Project(Reading):
    """Random projections: k·k numbers for each parameter. Their inner products are, on average, those of gradients.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.Project(k=2, seed=0)) as g:
        ...     model(torch.ones(5, 3)).sum().backward()
        >>> g[unsum.Project].matrix().shape
        torch.Size([5, 4])
    """

    _adds = True
    power = 1

    def __init__(self, k: int = 16, seed: int = 0) -> None:
        if not isinstance(k, int) or k < 1:
            raise OptionError(f"Project(k={k!r}): k is a whole number, 1 or more")
        self._k, self._seed = k, seed
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._parts: dict[str, dict[int, Tensor]] = {}

    def reads(self) -> Hashable:
        """What is read of factors."""
        return "projected", self._k, self._seed

    def read(self, factors: Factors) -> Tensor:
        """(n, k·k)."""
        return factors.project(self._k, self._seed)

    def options(self) -> tuple[int, int]:
        """k and the seed."""
        return self._k, self._seed

    def receive(self, name: str, value: Tensor) -> None:
        """Add to a parameter's (n, k·k)."""
        parts = self._parts.setdefault(name, {})
        parts[self._now] = parts[self._now] + value if self._now in parts else value

    def by_parameter(self) -> dict[str, Tensor]:
        """{parameter: (n, k·k)}."""
        self._check()
        return {name: self._in_order(parts) for name, parts in self._parts.items()}

    def matrix(self) -> Tensor:
        """(n, K): the parameters side by side, by name."""
        parts = self.by_parameter()
        return torch.cat([parts[name] for name in sorted(parts)], 1)


class Kronecker(Reduction):
    """A = Σ a aᵀ and G = Σ δ δᵀ of every parameter that is met by outer products. Positions without a gradient
    (padding) are no positions.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.Kronecker()) as g:
        ...     model(torch.ones(4, 3)).sum().backward()
        >>> g[unsum.Kronecker].factors()["weight"][1]
        tensor([[4., 4.],
                [4., 4.]])
    """

    _adds = False

    def reset(self) -> None:
        super().reset()
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        try:
            outers = factors.outers()
        except SamplesError:
            self.left_out.append(name)
            return
        for share, outer in outers:
            if outer.groups > 1:
                self.left_out.append(name)
                return
            a, delta = (part.flatten(0, 1).to(factors.dtype) for part in (outer.a, outer.delta))
            a = a * (delta != 0).any(1, keepdim=True)
            new = a.T @ a, share.times(delta.T @ delta, 2)
            known = self._factors.get(name)
            self._factors[name] = new if known is None else (known[0] + new[0], known[1] + new[1])

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{parameter: (A (i, i), G (o, o))}."""
        self._check()
        return self._factors
