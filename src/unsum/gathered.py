"""What a `gradients` block has found: the gradients of all parameters, by sample, and how they are read."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unsum.errors import SamplesError
from unsum.factors import Factors
from unsum.plan.run import Meeting, Parts, wide
from unsum.samples import Samples
from unsum.sites import Names


@dataclass
class Group:
    """Samples that came together, and their gradients so far."""

    n: int
    ids: Tensor
    per_sample: dict[int, Tensor] = field(default_factory=dict)
    shared: dict[int, Tensor] = field(default_factory=dict)


class Gradients:
    """The gradients by sample so far: `g[name]` for one parameter, `g.norms()` and the like for all."""

    def __init__(self, names: Names, params: str, samples: Samples, *, mean: bool) -> None:
        self._names = names
        self._samples = samples
        self._mean = mean
        chosen = fnmatch.filter(names.parameters, params)
        self.parameters = {name: p for name in chosen if (p := names.parameters[name]).requires_grad}
        self.by_id: dict[int, str] = {}  # the first name of each
        for name, parameter in self.parameters.items():
            self.by_id.setdefault(id(parameter), name)
        self.forwards = self.backwards = 0
        self._groups: dict[frozenset[int], Group] = {}
        self._meetings: dict[int, dict[Meeting, None]] = {}

    def unique(self) -> dict[int, nn.Parameter]:
        """The parameters by id, tied ones once."""
        return {id(p): p for p in self.parameters.values()}

    def take_in(
        self, parts: Parts, calls: frozenset[int], reached: Iterable[int], scale: Tensor | float | None
    ) -> None:
        """Add what one backward brought to the parameters that it reached, for the samples of these forwards, without
        the loss scale."""
        self.backwards += 1
        ids = self._samples.ids
        for known in [key for key in self._groups if key & calls]:  # the same samples, as they share a forward
            if self._groups[known].n != parts.n:
                raise SamplesError(
                    f"backwards through the same forward have {self._groups[known].n} and {parts.n} samples"
                )
            self._merge(known, known | calls)
            calls = known | calls
        group = self._groups.setdefault(calls, Group(parts.n, torch.arange(parts.n) if ids is None else ids))
        for key in reached:
            for mine, new in ((group.per_sample, parts.per_sample), (group.shared, parts.shared)):
                if key in new:
                    value = new[key] * parts.n if self._mean else new[key]
                    value = value if scale is None else value / scale
                    mine[key] = mine[key] + value if key in mine else value
        for key, met in parts.meetings.items():
            self._meetings.setdefault(key, {}).update(met)

    def _ordered(self) -> list[Group]:
        if not self._groups:
            if self.forwards and not self.backwards:
                raise SamplesError("the block saw a forward and caught no backward: call loss.backward() inside it")
            raise SamplesError("nothing was differentiated inside the block, so there are no samples")
        return [self._groups[key] for key in sorted(self._groups, key=min)]

    def _merge(self, known: frozenset[int], calls: frozenset[int]) -> None:
        group = self._groups.pop(known)
        other = self._groups.setdefault(calls, Group(group.n, group.ids))
        for mine, new in ((other.per_sample, group.per_sample), (other.shared, group.shared)):
            for key, value in new.items():
                mine[key] = mine[key] + value if key in mine else value

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def __getitem__(self, name: str) -> Factors:
        parameter = self.parameters.get(name)
        if parameter is None:
            if name in self._names.parameters:
                raise KeyError(f"{name}: frozen (requires_grad=False), or not chosen by params=")
            raise KeyError(f"{name}: no such parameter; there are: {', '.join(list(self.parameters)[:8])}, ...")
        groups, key = self._ordered(), id(parameter)
        like = parameter.new_zeros((), dtype=wide(parameter.dtype))
        parts = [g.per_sample.get(key, like.new_zeros(g.n, *parameter.shape)) for g in groups]
        shared = [g.shared.get(key, like.new_zeros(parameter.shape)) for g in groups]
        return Factors(torch.cat(parts), torch.stack(shared).sum(0))

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id.values())

    def coverage(self) -> str:
        """A table: each parameter, its share of all elements, the operations at which it met data, and how its
        gradients were obtained."""
        unique = [(name, self.parameters[name]) for name in self.by_id.values()]
        total = sum(p.numel() for _, p in unique) or 1
        rows = [("parameter", "elements", "meets data at", "how")]
        for name, parameter in unique:
            met = self._meetings.get(id(parameter))
            rows.append(
                (
                    name,
                    f"{parameter.numel() / total:.1%}",
                    ", ".join(dict.fromkeys(m.operation for m in met)) if met else "nothing",
                    "replay" if met else "-",
                )
            )
        width = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{a:<{width[0]}}  {b:>{width[1]}}  {c:<{width[2]}}  {d}" for a, b, c, d in rows)

    @property
    def ids(self) -> Tensor:
        """The samples' ids, in the order of all results."""
        groups = self._ordered()
        if self._samples.ids is not None:
            return torch.cat([group.ids for group in groups])
        return torch.arange(sum(group.n for group in groups))

    def sq_norms(self) -> Tensor:
        """(n,): over all parameters."""
        return torch.stack([self[name].sq_norms().double() for name in self]).sum(0)

    def norms(self) -> Tensor:
        """(n,): over all parameters."""
        return self.sq_norms().sqrt()

    def dot(self, other: Gradients) -> Tensor:
        """(n, m): inner products with every sample of `other`, over all parameters."""
        return torch.stack([self[name].dot(other[name]).double() for name in self]).sum(0)

    def sum(self) -> dict[str, Tensor]:
        """{parameter: sum over samples}."""
        return {name: self[name].sum() for name in self}

    def per_sample(self) -> dict[str, Tensor]:
        """{parameter: (n, *shape)}."""
        return {name: self[name].per_sample() for name in self}

    def weighted_sum(self, w: Tensor) -> dict[str, Tensor]:
        """{parameter: Σ w_n G_n}."""
        return {name: self[name].weighted_sum(w) for name in self}
