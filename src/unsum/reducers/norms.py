"""`Norms`: the norm of each sample's gradient."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from unsum.factors.factors import Factors
from unsum.reducers.reducer import SQ_NORMS, Reading
from unsum.reducers.tap import Shape, Tap


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

    wants, sums, power, by_position = SQ_NORMS, True, 2, False
    reads = ("norms()", "sq_norms()", "by_parameter()")

    def reset(self) -> None:
        super().reset()
        self._squares: dict[int, list[tuple[Sequence[str], Tensor]]] = {}  # of each group, as they came

    def read(self, factors: Factors) -> Tensor:
        """(n,)."""
        return factors.sq_norms()

    def receive(self, names: Sequence[str], value: Tensor) -> None:
        """Squared norms: (parameters, n), or (parameters, parts, n) of which the parts are still to be added up; of one
        parameter also (n,) and (parts, n). Nothing is computed until they are read."""
        self._squares.setdefault(self._now, []).append((names, value))

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap:
        """(parameters, n) leave a compiled model."""
        return _NormsTap(self, parameters)

    def groups(self) -> list[tuple[Sequence[str], Tensor]]:
        """Names and squared norms (names, n) that the last backward brought, as they came."""
        return [(names, by_name(names, squares)) for names, squares in self._squares.get(self._now, [])]

    def table(self) -> tuple[list[str], Tensor]:
        """Names, and the squared norms (names, n) of each one's part, all samples in order: in few operations."""
        self._check()
        found: dict[int, tuple[list[str], Tensor]] = {}
        for group, came in self._squares.items():
            device = came[0][1].device
            own = torch.cat([by_name(names, squares.to(device)) for names, squares in came])
            found[group] = [name for names, _ in came for name in names], own
        if not found:
            return [], torch.zeros(0, self.samples())
        order = list(dict.fromkeys(name for names, _ in found.values() for name in names))
        return order, self._in_order({group: _rows(order, *own) for group, own in found.items()}, dim=1)

    def by_parameter(self) -> dict[str, Tensor]:
        """{name: (n,)}: squared norms of each parameter's part."""
        self._check()
        found: dict[str, dict[int, Tensor]] = {}
        for group, came in self._squares.items():
            for name, own in _apart(came):
                found.setdefault(name, {})[group] = own
        return {name: self._in_order(parts).clone() for name, parts in self._in_models_order(found).items()}

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
        """(n,): norms over all parameters."""
        return self.sq_norms().sqrt()


def in_rows(squares: Tensor) -> Tensor:
    """(…, n) as (rows, n), also where there is no sample."""
    return squares.view(squares.shape[:-1].numel(), squares.shape[-1])


def _rows(order: list[str], names: list[str], squares: Tensor) -> Tensor:
    """The rows of these names, in another order; zeros where a name is missing."""
    if names == order:
        return squares
    rows = dict(zip(names, squares.unbind(), strict=True))
    none = squares.new_zeros(squares.shape[1])
    return torch.stack([rows.get(name, none) for name in order])


def _apart(came: Sequence[tuple[Sequence[str], Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Squared norms by parameter, their parts added up."""
    for names, squares in came:
        yield from zip(names, by_name(names, squares).unbind(), strict=True)


def by_name(names: Sequence[str], squares: Tensor) -> Tensor:
    """(names, n): squared norms of each parameter, their parts added up."""
    whole = squares.view(len(names), squares.shape[:-1].numel() // len(names), squares.shape[-1])
    return whole[:, 0] if whole.shape[1] == 1 else whole.sum(1)


class _NormsTap(Tap):
    """(parameters, n): squared norms."""

    by_parts = True

    def __init__(self, reducer: Norms, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # `told`: in which order norms leave
        self._to, self._names = reducer, list(parameters)

    @property
    def key(self) -> Hashable:
        return "norms"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [(len(self._names), n)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return taps[0].shape[1]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> Norms:
        return Norms()

    def values(self, reducer: Norms) -> list[Tensor]:
        groups = sorted(reducer.groups(), key=lambda group: group[0][0])
        self.told = [name for names, _ in groups for name in names]
        return [torch.cat([squares for _, squares in groups])]

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        self._to.receive(self.told, values[0] if scale is None else values[0] * scale**2)
