"""What a `gradients` block has found: the gradients of all parameters, by sample, and how they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unsum.acted import Acted
from unsum.choice import Chosen
from unsum.coverage import rows, table
from unsum.errors import NoBackward, NotAvailable, OptionError, WrongCount, WrongShape
from unsum.factors.factors import Factors, GroupFactors
from unsum.factors.total import Term
from unsum.notebook import Table
from unsum.plan.plan import Meeting
from unsum.reducers import SQ_NORMS, Reducer
from unsum.samples import Samples
from unsum.sites import Names

_SHOWN = 12  # parameters that are listed
_WITH_BACKWARD = "with unsum.gradients(model) as g: loss_fn(model(x), y).backward()"


class Brought(Protocol):
    """What one backward has brought, by the ids of parameters."""

    n: int
    kinds: dict[int, list[Term]]
    versions: dict[int, list[tuple[Tensor, int]]]  # of the tensors that are held, as they came
    nobodys: dict[int, Tensor]
    meetings: dict[int, Mapping[Meeting, None]]


@dataclass
class Group:
    """Samples that came together, and their gradients so far."""

    n: int
    ids: Tensor | None = None  # None if samples have no ids of their own
    shares: dict[int, GroupFactors] = field(default_factory=dict)  # by the id of the parameter
    nobodys: dict[int, Tensor] = field(default_factory=dict)


class Gradients:
    """Per-sample gradients of a block: `g[name]` for one parameter, `g.norms()` and others over all parameters,
    `g[reducer]` for the result of a reducer. Sums over parameters (`norms`, `sq_norms`, `dot`) are float64.

    Examples:
        >>> import torch, unsum
        >>> model = torch.nn.Linear(3, 2)
        >>> with unsum.gradients(model) as g:
        ...     model(torch.ones(4, 3)).sum().backward()
        >>> g["bias"].per_sample().shape, g.norms().shape, g.dot(g).shape
        (torch.Size([4, 2]), torch.Size([4]), torch.Size([4, 4]))
        >>> g.ids.tolist(), "bias" in g
        ([0, 1, 2, 3], True)
    """

    # More than twelve attributes: what the block is about, what it has found, and how often it was asked.
    def __init__(
        self, names: Names, chosen: Chosen, samples: Samples, reducers: Sequence[Reducer] = (), *, keep: bool = True
    ) -> None:
        self.names, self._samples = names, samples
        self.acted = Acted("split")
        self._reducers, self._keep = reducers, keep
        self._kept: dict[int, Reducer] = {}  # by the id of a reducer: what it held before another block used it
        self.parameters, self._unique = chosen.parameters, chosen.unique
        self.by_id = chosen.by_id  # the first name of each
        self.forwards = self.backwards = 0
        self._groups: dict[frozenset[int], Group] = {}
        self._meetings: dict[int, dict[Meeting, None]] = {}  # by the id of the parameter, of all backwards but the last
        self._last: Mapping[int, Mapping[Meeting, None]] = {}

    def unique(self) -> dict[int, nn.Parameter]:
        """The parameters by id, tied ones once."""
        return self._unique

    # ---- what comes in --------------------------------------------------------------------------------------------

    def group(self, calls: frozenset[int], n: int) -> tuple[frozenset[int], bool]:
        """The samples of these forwards, and whether they had a backward before: those that share a forward are the
        same."""
        again = False
        for known in [key for key in self._groups if key & calls]:
            if self._groups[known].n != n:
                raise WrongCount(
                    f"two backwards through the same forward have {self._groups[known].n} and {n} samples.",
                    write="(first_losses.sum() + second_losses.sum()).backward()  # as many losses in both",
                )
            merged = self._groups.pop(known)
            calls = known | calls
            if calls in self._groups:
                _add(self._groups[calls], merged)
            else:
                self._groups[calls] = merged
            again = True
        if not again:
            self._groups[calls] = Group(n, self._samples.ids)
        return calls, again

    def drop(self, calls: frozenset[int]) -> None:
        """A backward has failed: its new samples are none."""
        self._groups.pop(calls, None)

    def take_in(
        self,
        brought: Brought,
        calls: frozenset[int],
        scale: Tensor | float | None,
        unscale: Tensor | float | None,
    ) -> None:
        """Add what one backward brought, for the samples of these forwards; `scale` multiplies the samples' gradients,
        `unscale` what is nobody's."""
        self.backwards += 1
        shares = {
            key: GroupFactors(brought.n, kinds, scale, brought.versions[key]) for key, kinds in brought.kinds.items()
        }
        nobodys = {key: value if unscale is None else value * unscale for key, value in brought.nobodys.items()}
        _add(self._groups[calls], Group(brought.n, None, shares, nobodys))
        if brought.meetings != self._last:
            self._add_meetings()
            self._last = brought.meetings

    def _add_meetings(self) -> None:
        for key, met in self._last.items():
            self._meetings.setdefault(key, {}).update(met)
        self._last = {}

    def tapped(self, meetings: dict[str, dict[Meeting, None]]) -> None:
        """A backward of a compiled model has gone to the reducers."""
        self.backwards += 1
        self._add_meetings()
        for key, name in self.by_id.items():
            self._meetings.setdefault(key, {}).update(meetings.get(name, {}))

    # ---- reads ----------------------------------------------------------------------------------------------------

    def _ordered(self) -> list[Group]:
        if not self._groups:
            if self.forwards and not self.backwards:
                raise NoBackward(
                    "the block saw a forward and no backward, so there are no samples: loss.backward() belongs inside "
                    "it.",
                    write=_WITH_BACKWARD,
                )
            raise NoBackward("no backward ran inside the block, so there are no samples.", write=_WITH_BACKWARD)
        return [self._groups[key] for key in sorted(self._groups, key=min)]

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def __getitem__(self, name: Any) -> Any:
        """The factors of the parameter with this name; or a reducer, given the object or its class."""
        if not isinstance(name, str):
            return self._reducer(name)
        parameter = self.parameters.get(name)
        if parameter is None:
            if name in self.names.parameters:
                raise KeyError(f"{name}: frozen (requires_grad=False), or not chosen by params=")
            more = ", ..." if len(self.parameters) > 8 else ""
            raise KeyError(f"{name}: no such parameter; there are: {', '.join(list(self.parameters)[:8])}{more}")
        return self._factors(name, parameter)

    def keep_reducer(self, reducer: Any) -> None:
        """A reducer is used again, in another block: what it has shown here is kept."""
        self._kept[id(reducer)] = reducer.kept()

    def _reducer(self, wanted: Any) -> Reducer:
        found = [
            self._kept.get(id(r), r)
            for r in self._reducers
            if r is wanted or (isinstance(wanted, type) and isinstance(r, wanted))
        ]
        if len(found) != 1:
            kinds = ", ".join(type(r).__name__ for r in self._reducers) or "none"
            raise KeyError(
                f"{wanted!r}: {'no' if not found else 'more than one'} such reducer; this block has: {kinds}"
            )
        return found[0]

    def nobodys(self) -> dict[str, Tensor]:
        """{parameter: what belongs to no sample}, of those that have such a part."""
        found: dict[str, Tensor] = {}
        for key, value in (item for group in self._groups.values() for item in group.nobodys.items()):
            name = self.by_id[key]
            found[name] = found[name] + value if name in found else value
        return found

    def _factors(self, name: str, parameter: nn.Parameter) -> Factors:
        groups, key = self._ordered(), id(parameter)
        if not self._keep:
            own = type(self._reducers[0])
            public = f"unsum.{own.__name__}" if own.__module__.startswith("unsum.") else own.__name__
            raise NotAvailable(
                f"{name}: a block with reducers does not keep the factors.",
                write=[f"g[{public}]", "with unsum.gradients(model, reducer, keep=True) as g: ...  # keeps them too"],
            )
        shares = [group.shares.get(key, GroupFactors(group.n)) for group in groups]
        if any(share.is_changed() for share in shares):
            raise NotAvailable(
                f"{name}: a tensor among its factors was changed in place since the backward.",
                write=["model(x.clone())", f"g[{name!r}].per_sample()  # before the tensor is changed"],
            )
        nobodys = [group.nobodys[key] for group in groups if key in group.nobodys]
        shared = sum(nobodys[1:], nobodys[0]) if nobodys else None
        return Factors(self.by_id[key], parameter, shares, shared)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id.values())

    def keys(self) -> list[str]:
        """The names of the parameters, tied ones once."""
        return list(self)

    def __len__(self) -> int:
        """How many tensors of parameters there are, tied ones once."""
        return len(self.by_id)

    def __repr__(self) -> str:
        n, numbers = sum(group.n for group in self._groups.values()), sum(p.numel() for p in self._unique.values())
        have = f"{n} samples" if self._groups else "no backward yet"
        first = f"per-sample gradients: {have}, {numbers:,} parameters in {len(self)} tensors"
        lines = [f"  g[{type(reducer).__name__}]: {reducer!r}" for reducer in self._reducers]
        if self._keep:
            names = list(self)
            lines += [f"  g[{name!r}]: {tuple(self.parameters[name].shape)}" for name in names[:_SHOWN]]
            lines += [f"  ... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        return "\n".join([first, *lines])

    def __reduce__(self) -> str:
        raise TypeError(
            "the results of a block belong to its model and its graph, and cannot be copied or pickled.\n"
            "  save what you read from it: g.norms(), g.per_sample(), g[reducer].matrix(), ..."
        )

    def coverage(self) -> Table:
        """A table: each parameter, its share of all elements, the operations at which it met data (with module and
        node number), the rule that gave its gradients or "replay", and how many numbers are held for one sample."""
        return table(*self.coverage_rows())

    def coverage_rows(self) -> tuple[list[tuple[str, ...]], str]:
        """The same as rows, headings first, and the share that rules cover, in words."""
        kept = {key: group.shares[key] for group in self._groups.values() for key in self.by_id if key in group.shares}
        self._add_meetings()
        return rows(self.by_id, self.unique(), self._meetings, kept)

    @property
    def ids(self) -> Tensor:
        """The ids of the samples, in the order of all results."""
        groups = self._ordered()
        if self._samples.ids is not None:
            return torch.cat([group.ids for group in groups if group.ids is not None])
        return torch.arange(sum(group.n for group in groups))

    def sq_norms(self) -> Tensor:
        """(n,): squared norms of the per-sample gradients over all parameters. With reducers, one of them must have
        squared norms (`unsum.Norms`)."""
        if not self._keep:
            known = [reducer for reducer in self._reducers if getattr(reducer, "wants", None) == SQ_NORMS]
            if known and self._groups:
                return self._reducer(known[0]).sq_norms().double()  # type: ignore[attr-defined,no-any-return]
        parts = [self[name].sq_norms().double() for name in self]
        return torch.stack(parts).sum(0) if parts else torch.zeros(len(self.ids), dtype=torch.float64)

    def norms(self) -> Tensor:
        """(n,): norms of the per-sample gradients over all parameters."""
        return self.sq_norms().sqrt()

    def dot(self, other: Gradients | Mapping[str, Tensor]) -> Tensor:
        """(n, m): inner products with every sample of `other`, over all parameters. `other` may also be
        {parameter: (m, *shape)}, or {parameter: tensor}, which gives (n,); parameters that it lacks count as zero."""
        if isinstance(other, Gradients):
            return torch.stack([self[name].dot(other[name]).real.double() for name in self]).sum(0)
        if not isinstance(other, Mapping):
            raise OptionError(
                f"dot takes the gradients of another block, or {{parameter: tensor}}, got {type(other).__name__}"
            )
        if not other:
            raise OptionError("dot got an empty dictionary: give {parameter: tensor} or {parameter: (m, *shape)}")
        parts: list[Tensor] = []
        given: dict[str, str] = {}  # by the name under which tied ones are listed
        for name, value in other.items():
            factors = self[name]
            if factors.name in given:
                raise OptionError(
                    f"dot: {given[factors.name]} and {name} are one parameter (tied), which would count twice; give it "
                    "once"
                )
            given[factors.name] = name
            found = factors.dot(value).real.double()
            if parts and found.shape != parts[0].shape:
                raise WrongShape(
                    f"dot: {name} has shape {tuple(value.shape)}, which is not as many tensors as the others have.",
                    write=[
                        "g.dot({name: p.grad for name, p in model.named_parameters()})  # one tensor for each",
                        "g.dot({name: torch.stack(rows[name]) for name in rows})  # (m, *shape), the same m for each",
                    ],
                )
            parts.append(found)
        return torch.stack(parts).sum(0)

    def sum(self) -> dict[str, Tensor]:
        """{parameter: the sum over samples}."""
        return {name: self[name].sum() for name in self}

    def per_sample(self) -> dict[str, Tensor]:
        """{parameter: per-sample gradients (n, *shape)}."""
        return {name: self[name].per_sample() for name in self}

    def weighted_sum(self, w: Tensor) -> dict[str, Tensor]:
        """{parameter: Σ w_n G_n}, for weights `w` of shape (n,)."""
        return {name: self[name].weighted_sum(w) for name in self}


def _add(group: Group, new: Group) -> None:
    """Another backward of the same samples."""
    for key, share in new.shares.items():
        known = group.shares.get(key)
        if known is None:
            group.shares[key] = share
        elif known.scale is share.scale:
            group.shares[key] = GroupFactors(share.n, known.kinds + share.kinds, share.scale, known.held + share.held)
        else:  # another loss scale
            kinds = [kind if s.scale is None else kind.times(s.scale) for s in (known, share) for kind in s.kinds]
            group.shares[key] = GroupFactors(share.n, kinds, None, known.held + share.held)
    for key, value in new.nobodys.items():
        group.nobodys[key] = group.nobodys[key] + value if key in group.nobodys else value
