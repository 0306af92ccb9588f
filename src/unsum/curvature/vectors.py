"""Gradients and the like as {parameter: tensor}: one, or m of them as rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from unsum.errors import OptionError, WrongShape
from unsum.gathered import Gradients


@dataclass(frozen=True, eq=False)
class Vectors:
    """m vectors, each with a part for every parameter."""

    parts: dict[str, Tensor]  # (m, *shape)
    is_one: bool  # whether one was given, without the dimension of rows

    def back(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Results in the form in which they were asked for, in the order of what was given."""
        return {name: parts[name][0] if self.is_one else parts[name] for name in self.parts}


def read(given: Any, shapes: Mapping[str, tuple[int, ...]], *, what: str) -> Vectors:
    """What a user gives: Gradients, {parameter: (m, *shape)} or {parameter: tensor}, for all of these parameters."""
    if isinstance(given, Gradients):
        given = given.per_sample()
    if not isinstance(given, Mapping):
        raise OptionError(
            f"{what} takes what unsum.gradients gives, {{parameter: (n, *shape)}} or {{parameter: tensor}}, got "
            f"{type(given).__name__}"
        )
    unknown, missing = [name for name in given if name not in shapes], [name for name in shapes if name not in given]
    if unknown or missing:
        wrong = f"no such parameter here: {unknown[0]}" if unknown else f"{missing[0]} is missing"
        raise OptionError(f"{what}: {wrong}; give every parameter that was fitted ({len(shapes)} of them)")
    sizes: dict[int | None, str] = {}
    parts = {}
    for name, shape in shapes.items():
        value = given[name]
        if not isinstance(value, Tensor):
            raise OptionError(f"{what}: {name} is a {type(value).__name__}, not a tensor")
        if not (value.is_floating_point() or value.is_complex()):
            raise OptionError(f"{what}: {name} is of {value.dtype}: give floating point numbers")
        is_one = tuple(value.shape) == shape
        if not is_one and (value.dim() != len(shape) + 1 or tuple(value.shape[1:]) != shape):
            raise WrongShape(
                f"{what}: {name} has shape {shape}; got {tuple(value.shape)}, neither that nor "
                f"({', '.join(map(str, ('n', *shape)))}).",
                write=f"value.reshape({', '.join(map(str, (-1, *shape)))})",
            )
        sizes[None if is_one else len(value)] = name
        parts[name] = value.detach()[None] if is_one else value.detach()
    if len(sizes) > 1:
        (one, mine), (other, theirs), *_ = sizes.items()
        told = lambda size: "a single tensor" if size is None else f"{size} rows"
        raise WrongShape(
            f"{what}: {mine} is {told(one)}, {theirs} is {told(other)}; all must be alike.",
            write="{name: p.grad for name, p in model.named_parameters()}  # one tensor for each parameter",
        )
    return Vectors(parts, None in sizes)


def dots(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """(m,): inner products, row by row, in float64."""
    parts = [(real_rows(value) * real_rows(other[name])).sum(1) for name, value in one.items()]
    return torch.stack(parts).sum(0)


def real_rows(value: Tensor) -> Tensor:
    """(m, numbers) in float64; of a complex number, its two parts."""
    return (torch.view_as_real(value) if value.is_complex() else value).flatten(1).double()


def is_number(value: Any) -> bool:
    """Whether this is a real number (also numpy's), and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def schedule_damping(learning_rates: Iterable[float], weight_decay: float = 0.0) -> float:
    """The damping that corresponds to a training run: 1 / Σ learning rates + weight decay. SGD with these steps hardly
    moves directions with less curvature than that.

    Examples:
        >>> round(schedule_damping([0.1] * 50, weight_decay=0.01), 6)
        0.21
    """
    try:
        rates = [float(rate) for rate in learning_rates]
    except (TypeError, ValueError):
        rates = []
    if not rates or any(not 0 <= rate < float("inf") for rate in rates) or not sum(rates):
        raise OptionError("schedule_damping takes the learning rate of every step: numbers, 0 or more, and not all 0")
    if not is_number(weight_decay) or not 0 <= weight_decay < float("inf"):
        raise OptionError(f"weight_decay={weight_decay!r}: a number, 0 or more")
    return 1 / math.fsum(rates) + weight_decay
