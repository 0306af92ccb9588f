"""What a reducer is, and what all of unsum's own have in common: the samples that have had a backward, in which order
they came, and what is held.

A reducer is any object with three methods. `begin(n, again)`: a backward with n samples begins; `again` if these
samples had one before. `take(name, factors)`: the gradients of one parameter are complete. `end(left)`: the backward is
over; `left` names the parameters that nothing reached.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from unsum.errors import BackwardOrder, NoBackward
from unsum.factors.factors import Factors
from unsum.factors.stacked import Layers
from unsum.reducers.tap import Tap

Value = TypeVar("Value")
# What `wants` says of squared norms (n,), which come from the cheapest of several ways, and of weighted sums.
SQ_NORMS, WEIGHTED_SUM = "sq_norms", "weighted_sum"


@runtime_checkable
class Reducer(Protocol):
    """What consumes factors as they come."""

    def begin(self, n: int, again: bool) -> None: ...
    def take(self, name: str, factors: Factors) -> None: ...
    def end(self, left: Sequence[str]) -> None: ...


class Reduction:
    """The state that all reducers have: results are read after a backward."""

    wants: Hashable = None  # what is read of every parameter, if that is all; None: only `take` is called
    by_position: bool = True  # whether positions may be read: then small gradients do not wait for others, formed
    sums: bool = False  # whether the sum over samples comes with what is computed: torch is spared it
    reads: tuple[str, ...] = ()  # what users call, for `print`
    _adds = False  # whether a second backward of the same samples may be added to the first
    _parameter_names: tuple[str, ...] = ()  # of the block's parameters, in the model's order

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass that takes factors in its own way is not served as its parent is, unless it says so itself."""
        super().__init_subclass__(**kwargs)

        def said_in(name: str) -> int:
            return next((k for k, each in enumerate(cls.__mro__) if name in vars(each)), len(cls.__mro__))

        takes = min(map(said_in, ("take", "read", "receive")))  # perhaps in a class beside the reducer
        for name, value in (("wants", None), ("sums", False), ("tap", Reduction.tap)):
            if takes < said_in(name):
                setattr(cls, name, value)

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap | None:
        """How the numbers leave a compiled model; None if they do not: then the model runs eagerly in the block."""
        return None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: a block begins."""
        self._calls: list[frozenset[int]] = []  # of each group of samples: the forwards that they came with
        self._sizes: list[int] = []
        self._now = 0  # which group the backward under way belongs to
        self._positions: int | None = None
        self.left_out: list[str] = []

    def order_by(self, parameters: Mapping[str, Tensor]) -> None:
        """The block's parameters, in the model's order, which is that of results as well."""
        self._parameter_names = tuple(parameters)

    def _in_models_order(self, found: Mapping[str, Value]) -> dict[str, Value]:
        """What was found of each parameter, in the model's order instead of that of backward."""
        return {name: found[name] for name in dict.fromkeys((*self._parameter_names, *found)) if name in found}

    def kept(self) -> Any:
        """Another of the same kind that holds what this one holds now, for results that outlive it."""
        other = copy.copy(self)
        vars(other).update(self.save())
        return other

    def save(self) -> dict[str, Any]:
        """What is held now, for `restore` if the backward that begins fails."""
        is_ours = type(self).__module__.startswith("unsum.reducers")  # which change no tensor in place
        return {name: _copied(value, tensors=not is_ours) for name, value in vars(self).items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Forget what came since `save`."""
        vars(self).clear()
        vars(self).update(saved)

    def select(self, calls: frozenset[int], positions: int | None) -> None:
        """The samples of these forwards have a backward; their input has so many positions, if that is known."""
        known = [k for k, group in enumerate(self._calls) if group & calls]
        self._now = known[0] if known else len(self._calls)
        self._positions = positions
        if known:
            self._calls[self._now] |= calls
        else:
            self._calls.append(calls)

    def begin(self, n: int, again: bool) -> None:
        """A backward with n samples begins."""
        if again and not self._adds:
            raise BackwardOrder(
                f"{type(self).__name__}: a second backward through the same samples; its numbers for the two cannot be "
                "added up.",
                write="(first_loss + second_loss).backward()  # once, of the sum",
            )
        if not again:
            self._sizes.append(n)

    def samples(self) -> int:
        """How many have had a backward."""
        return sum(self._sizes)

    def size_now(self) -> int:
        """How many the backward under way has, or the last one had."""
        return self._sizes[self._now]

    def calls_now(self) -> frozenset[int]:
        """The forwards that the backward under way belongs to, or the last one did."""
        return self._calls[self._now]

    def before_now(self) -> int:
        """How many of them come before those of the backward under way."""
        return sum(self._sizes[: self._now])

    def end(self, left: Sequence[str]) -> None:
        """The backward is over."""

    def __repr__(self) -> str:
        have = f"{self.samples()} samples" if self._sizes else "no backward yet"
        return f"{type(self).__name__} of {have}" + (f": {', '.join(self.reads)}" if self.reads else "")

    def _check(self) -> None:
        if not self._sizes:
            raise NoBackward(
                f"{type(self).__name__}: no backward ran inside the block, so there are no samples.",
                write="with unsum.gradients(model, reducer) as g: loss_fn(model(x), y).backward()",
            )

    def _in_order(self, parts: dict[int, Tensor], dim: int = 0) -> Tensor:
        """(n, …), or n at another dimension: what each group has, in the order of the forwards; zeros where there is
        nothing."""
        like = next(iter(parts.values()))
        order = sorted(range(len(self._sizes)), key=lambda k: min(self._calls[k]))

        def zeros(k: int) -> Tensor:
            return like.new_zeros(*like.shape[:dim], self._sizes[k], *like.shape[dim + 1 :])

        found = [parts[k] if k in parts else zeros(k) for k in order]
        return found[0] if len(found) == 1 else torch.cat(found, dim)


def _copied(value: Any, *, tensors: bool) -> Any:
    """Containers are copied; tensors only if they may be changed in place."""
    if isinstance(value, dict):
        return {key: _copied(held, tensors=tensors) for key, held in value.items()}
    if isinstance(value, Tensor):
        return value.clone() if tensors else value
    if type(value) in (list, set, tuple) and tensors:
        return type(value)(_copied(held, tensors=tensors) for held in value)
    return list(value) if isinstance(value, list) else set(value) if isinstance(value, set) else value


class Reading(Reduction, ABC):
    """A reducer that reads one tensor of each parameter's factors, and needs nothing else of them.

    Such a reducer says what it `wants`; unsum then computes that in the cheapest way (many layers in one launch, layers
    of one shape together, a compiled model), and hands over the numbers with `receive`. `read` says what they are.
    """

    power: int  # of what multiplies every gradient, in what is read
    by_name = False  # whether what is read of factors depends on the parameter's name

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        self.receive((name,), self.read(factors))

    def take_layers(self, layers: Layers) -> None:
        """The gradients of several parameters of one shape."""
        if self.wants == SQ_NORMS:
            self.receive(layers.names, layers.sq_norms())
            return
        for name, value in zip(layers.names, self.read_layers(layers), strict=True):
            self.receive((name,), value)

    def read_layers(self, layers: Layers) -> Tensor:
        """(layers, n, …): what is wanted of several parameters of one shape."""
        found = self.read(layers.factors)
        return layers.apart(found) if len(found) == layers.factors.n else found

    @abstractmethod
    def read(self, factors: Factors) -> Tensor:
        """(n, …): what is wanted of each sample's gradient of a parameter."""

    @abstractmethod
    def receive(self, names: Sequence[str], value: Tensor) -> None:
        """What was read of a parameter; of squared norms also of several parameters at once."""
