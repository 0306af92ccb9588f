"""Factors of chosen parameters leave a compiled model.

Their shapes go by the positions of each batch, and are not known before the model runs; so they are no gradients of
taps. An operator in the compiled backward takes them in: when it runs, it copies the tensors that factors are made of.
(Compiled code uses the memory of a and δ again.) What leaves through the tap is a zero, so that the operator is needed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import UnsupportedError
from unsum.factors.dense import Dense
from unsum.factors.factors import Factors
from unsum.factors.lookup import Lookup
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.factors.windows import Windows
from unsum.plan.plan import Meeting
from unsum.reducers.tap import Shape, Tap
from unsum.seams.operators import python_operator

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Outer, Windows, Lookup, Scale, Dense)}
_LEFT = frozenset({"token_squares", "summed", "normalised"})  # other ways to what the rest of the factors tells
_numbers = itertools.count(1)
_open: weakref.WeakValueDictionary[int, KeptTap] = weakref.WeakValueDictionary()


@dataclass
class Brought:
    """What one backward has brought, by the ids of parameters."""

    n: int
    kinds: dict[int, list[Term]]
    versions: dict[int, list[tuple[Tensor, int]]]
    meetings: dict[int, Mapping[Meeting, None]]
    nobodys: dict[int, Tensor] = field(default_factory=dict)


def _take_in(factors: Sequence[Tensor], whose: Tensor, place: int) -> Tensor:
    """Hand copies of the factors of one parameter to the block with this number, if it waits for them."""
    tap = _open.get(int(whose[0]))
    if tap is not None and tap.waits:
        tap.take_in(place, [tensor.clone() for tensor in factors])
    return torch.zeros(1, device=factors[0].device)


_operator = python_operator(
    "unsum::take_in_factors",
    _take_in,
    "(Tensor[] factors, Tensor whose, int place) -> Tensor",
    lambda factors, whose, place: factors[0].new_empty(1, dtype=torch.float32),
)


def taken_apart(name: str, kind: Term) -> tuple[tuple[Any, ...], list[Tensor]]:
    """What a kind of factors is without its tensors, and the tensors."""
    told, tensors = [], []
    for each in fields(kind):
        value = getattr(kind, each.name)
        value = None if each.name in _LEFT else value() if callable(value) else value
        if isinstance(value, Tensor):
            tensors.append(value)
            value = "tensor"
        told.append(value)
    if type(kind).__name__ not in _KINDS or any(isinstance(size, torch.SymInt) for size in _flat(told)):
        raise UnsupportedError(f"{name}: its factors have parts whose sizes change from batch to batch")
    return (type(kind).__name__, *told), tensors


def put_together(told: tuple[Any, ...], tensors: list[Tensor]) -> Term:
    """Factors of these tensors, of which the first ones are used up."""
    kind, *values = told
    found = [tensors.pop(0) if isinstance(value, str) and value == "tensor" else value for value in values]
    if kind == "Scale" and isinstance(found[1], Tensor):
        x = found[1]
        found[1] = lambda: x
    return _KINDS[kind](*found)  # type: ignore[no-any-return]


def _flat(value: Any) -> list[Any]:
    return [each for part in value for each in _flat(part)] if isinstance(value, list | tuple) else [value]


class _Taking:
    """Takes factors while torch writes down."""

    def __init__(self, names: Sequence[str], whose: Tensor) -> None:
        self._places, self._whose = {name: k for k, name in enumerate(names)}, whose
        self.left: list[Tensor] = []
        self.told: dict[int, list[tuple[Any, ...]]] = {}

    def begin(self, n: int, again: bool) -> None: ...

    def take(self, name: str, factors: Factors) -> None:
        place, apart = self._places[name], [taken_apart(name, kind) for kind in factors.kinds()]
        if apart:
            self.told[place] = [told for told, _ in apart]
            tensors = [tensor for _, own in apart for tensor in own]
            self.left.append(_operator(tensors, self._whose, place))

    def end(self, left: Sequence[str]) -> None: ...


class KeptTap(Tap):
    """A zero leaves; factors go by the operator."""

    inputs, calls_python = 2, True  # the number of this tap, and as many numbers as there are samples

    def __init__(self, keeping: Keeping, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # `told`: what the factors of each parameter are without their tensors
        self._to, self._parameters = keeping, parameters
        self._came: dict[int, list[Tensor]] = {}
        self._number = next(_numbers)
        _open[self._number] = self

    @property
    def key(self) -> Hashable:
        return "kept"

    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        return [(1,)]

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        return [torch.tensor([self._number]), torch.zeros(n, device=device)]

    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        return inputs[1].shape[0]

    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Taking:
        return _Taking(list(self._parameters), inputs[0])

    def values(self, reducer: _Taking) -> list[Tensor]:
        if not reducer.left:
            raise UnsupportedError("no chosen parameter has a gradient in the compiled model")
        self.told = [_remembered(reducer.told)]
        return [torch.stack(reducer.left).sum(0)]

    def begin(self, scale: Tensor | float | None) -> None:
        self._came, self.waits = {}, True

    def take_in(self, place: int, tensors: list[Tensor]) -> None:
        """The factors of one parameter, in memory of their own."""
        if place in self._came:
            raise UnsupportedError("the factors of one parameter came twice in one backward of the compiled model")
        self._came[place] = tensors

    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        told, came = _TOLD[self.told[0]], self._came
        if told.keys() != came.keys():
            raise UnsupportedError(
                "some factors did not come out of the compiled model (does the backend replay what it recorded?).",
                write="with unsum.gradients(compiled._orig_mod) as g: ...  # and call compiled._orig_mod in the block",
            )
        names = list(self._parameters)
        self._to.found = {names[k]: [put_together(each, came[k]) for each in told[k]] for k in sorted(came)}
        self._came = {}


_TOLD: dict[str, dict[int, list[tuple[Any, ...]]]] = {}  # by what it reads as: a compiled model remembers strings


def _remembered(told: dict[int, list[tuple[Any, ...]]]) -> str:
    text = repr(sorted(told.items()))
    _TOLD.setdefault(text, told)
    return text


class Keeping:
    """Stands beside the reducers of a block that keeps factors."""

    def __init__(self) -> None:
        self.found: dict[str, list[Term]] = {}  # of the last backward

    def tap(self, parameters: Mapping[str, nn.Parameter]) -> Tap:
        """Factors leave a compiled model."""
        return KeptTap(self, parameters)

    def samples(self) -> int:
        """No weights are given by the order of samples."""
        return 0

    def brought(self, n: int, ids: Mapping[int, str], met: Mapping[str, Mapping[Meeting, None]]) -> Brought:
        """The factors of the last backward, of parameters that have these names, by id."""
        found, self.found = self.found, {}
        kinds = {key: found[name] for key, name in ids.items() if name in found}
        meetings = {key: met[name] for key, name in ids.items() if name in met}
        return Brought(n, kinds, {key: [] for key in kinds}, meetings)
