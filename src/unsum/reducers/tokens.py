"""`TokenNorms`: the norm of each token's part of the gradient."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unsum.errors import NotAvailable
from unsum.factors.factors import Factors
from unsum.reducers.reducer import Reading
from unsum.reducers.tap import Shape, Tap


class TokenNorms(Reading):
    """The norm of each token's part of the gradient, over the parameters that meet data once per position of the input.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> with unsum.gradients(model, unsum.TokenNorms()) as g:
        ...     model(torch.ones(4, 5, 3)).sum().backward()
        >>> g[unsum.TokenNorms].norms().shape
        torch.Size([4, 5])
    """

    wants, power = "token_sq_norms", 2

    def __init__(self, positions: int | None = None) -> None:
        self._given = positions
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._squares: dict[int, Tensor] = {}
        self._new: dict[int, dict[str, Tensor]] = {}  # of this backward, by the number of positions

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        if self._positions is not None and factors.is_ragged:  # an expert's rows are not the input's positions
            self.left_out.append(name)
            return
        try:
            squares = self.read(factors)
        except NotAvailable:
            self.left_out.append(name)
            return
        self.receive((name,), squares)

    def read(self, factors: Factors) -> Tensor:
        """(n, t)."""
        return factors.token_sq_norms()

    def receive(self, names: Sequence[str], value: Tensor) -> None:
        """A parameter's squared norms by token."""
        self._new.setdefault(value.shape[1], {})[names[0]] = value

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap:
        """(n, t) leave a compiled model."""
        return _TokensTap(self, parameters)

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

    def receive_sum(self, squares: Tensor, left_out: Sequence[str]) -> None:
        """(n, t): the sum over all parameters but those left out."""
        before = self._squares.get(self._now)  # of another part of the model, in the same backward
        self._squares[self._now] = squares if before is None else before + squares
        self.left_out += left_out

    def sq_norms(self) -> Tensor:
        """(n, t)."""
        self._check()
        if not self._squares:
            raise _no_positions()
        longest = max(part.shape[1] for part in self._squares.values())
        pad = torch.nn.functional.pad
        return self._in_order({k: pad(part, (0, longest - part.shape[1])) for k, part in self._squares.items()})

    def norms(self) -> Tensor:
        """(n, t)."""
        return self.sq_norms().sqrt()


def _no_positions() -> NotAvailable:
    return NotAvailable(
        "TokenNorms: no parameter has a gradient for each position of the input.",
        write="with unsum.gradients(model, unsum.Norms()) as g: ...  # a norm for each sample",
    )


class _Tokens:
    """Adds up what has the input's positions."""

    def __init__(self, tap: Tensor) -> None:
        self.total: Tensor | None = None
        self.left_out: list[str] = []
        self.tap, self._t = tap, tap.shape[1]

    def begin(self, n: int, again: bool) -> None: ...

    def take(self, name: str, factors: Factors) -> None:
        try:
            squares = factors.token_sq_norms()
        except NotAvailable:
            self.left_out.append(name)
            return
        if squares.shape[1] != self._t:
            self.left_out.append(name)
        else:
            self.total = squares if self.total is None else self.total + squares

    def end(self, left: Sequence[str]) -> None: ...


class _TokensTap(Tap):
    """(n, t): squared norms of every token's part."""

    by_parts = True

    def __init__(self, reducer: TokenNorms, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # `told`: what is left out
        self._to, self._names = reducer, frozenset(parameters)

    @property
    def key(self) -> Hashable:
        return "tokens"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        t = self._to.positions_of(positions)
        if t is None:
            raise NotAvailable(
                "TokenNorms: the model's input does not show how many positions a sample has.",
                write="unsum.TokenNorms(positions=128)",
            )
        return [(n, t)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return taps[0].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Tokens:
        return _Tokens(taps[0])

    def values(self, reducer: _Tokens) -> list[Tensor]:
        self.told = reducer.left_out
        return [torch.zeros_like(reducer.tap) if reducer.total is None else reducer.total]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        if self._names.issubset(self.told):  # what has left are zeros, which are nobody's norms
            self._to.left_out += self.told
            return
        self._to.receive_sum(values[0] if scale is None else values[0] * scale**2, self.told)
