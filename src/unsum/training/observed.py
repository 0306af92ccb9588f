"""The numbers of one step, on their way from a device to the host, and on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unsum.flow.picking import Spot


@dataclass
class Rows:
    """A tensor that flowed: the norms of its rows (all dimensions but the last)."""

    spot: Spot
    shape: tuple[int, ...]
    norms: Tensor
    microbatch: int  # how many backwards the step had before; then the place in the order of the forwards
    call: int = 0  # the last outermost call of the model when it flowed

    @property
    def site(self) -> str:
        """Where it flowed."""
        return str(self.spot)


@dataclass
class Observed:
    """The numbers of one step, on the host."""

    losses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # samples of each micro-batch
    names: list[str] = field(default_factory=list)  # of parameters
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (names, n): squared norms of each one's part
    grads: dict[str, float] = field(default_factory=dict)  # norms of the step's gradient
    weights: dict[str, float] = field(default_factory=dict)  # norms of parameters
    largest: dict[str, float] = field(default_factory=dict)  # the largest absolute value in each
    total: float = 0.0  # squared norm of the step's gradient, of all ranks: of Σ w g over all samples
    weights_of: tuple[float, float] = (0.0, 0.0)  # Σ w and Σ w²
    all_squares: float = 0.0  # Σ of squared norms over samples of all ranks, and how many these are
    all_samples: int = 0
    rows: list[tuple[Rows, float, int]] = field(default_factory=list)  # with Σ of squares, and the first bad row or -1
    refused: str | None = None

    def broken(self) -> tuple[str, float] | None:
        """The first parameter that holds a value which is not finite. A norm may be infinite without: its square is
        beyond float32."""
        return next(((name, value) for name, value in self.largest.items() if not math.isfinite(value)), None)

    def first_bad(self) -> tuple[str, int] | None:
        """The first parameter with a sample whose gradient is not finite, and that sample."""
        if not self.squares.numel() or math.isfinite(float(self.squares.sum())):
            return None
        name, sample = (~self.squares.isfinite()).nonzero()[0].tolist()
        return self.names[name], sample


class Copy:
    """Parts of one step's numbers, on their way to the host: one copy for each device, which nobody waits for."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        parts = [part.detach().double().reshape(-1) for part in parts]
        self._order = [(len(part), part.device) for part in parts]
        self._there: dict[torch.device, Tensor] = {}
        self._events: list[Any] = []
        for device in {part.device for part in parts}:
            joined = torch.cat([part for part in parts if part.device == device])
            if device.type == "cuda":
                self._there[device] = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
                self._there[device].copy_(joined, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
            else:
                self._there[device] = joined.cpu()

    def is_done(self) -> bool:
        """Whether reading would not wait."""
        return all(event.query() for event in self._events)

    def read(self) -> list[Tensor]:
        """The parts, once they are there."""
        for event in self._events:
            event.synchronize()
        left = dict(self._there)
        found = []
        for size, device in self._order:
            found.append(left[device][:size])
            left[device] = left[device][size:]
        return found


@dataclass(frozen=True)
class Packed:
    """One step's numbers on their way to the host, and what is known there already.

    The numbers are: the losses and the loss scales of all micro-batches, what losses were divided by, squared norms of
    parameters' parts (names, n), sums over samples, squares of gradients and of weights, the largest value in each
    weight, and of rows that flowed, shape by shape, their sums and which are not finite.
    """

    copy: Copy
    rows: list[Rows]
    shapes: list[list[int]]  # which rows have one shape
    names: list[str]  # of parameters, with squared norms, gradients and weights
    grad_names: list[str]
    weight_names: list[str]
    sizes: list[int]  # samples of each micro-batch
    micro_batches: float  # by which each loss was divided, if it was
    ranks: int
    refused: str | None

    def unpack(self) -> Observed:
        """Wait for the numbers, and make sense of them."""
        values, times, backwards = iter(self.copy.read()), self.micro_batches, len(self.sizes)
        found = Observed(refused=self.refused, sizes=self.sizes, names=self.names)
        found.losses = [float(next(values)) for _ in range(backwards)]
        scales = [float(next(values)) for _ in range(backwards)]
        factor = times * float(next(values))
        found.squares = next(values).view(len(self.names), -1 if self.names else 0) * times**2
        squares, samples, *weights_of = next(values).tolist()
        found.all_squares, found.all_samples = squares * times**2, round(samples)
        found.weights_of = weights_of[0], weights_of[1]
        grads, weights, largest = next(values), next(values), next(values)
        found.total = float(grads.sum()) * (self.ranks * factor) ** 2
        found.grads = dict(zip(self.grad_names, grads.sqrt().tolist(), strict=True))
        found.weights = dict(zip(self.weight_names, weights.sqrt().tolist(), strict=True))
        found.largest = dict(zip(self.weight_names, largest.tolist(), strict=True))
        found.rows = [(rows, 0.0, -1) for rows in self.rows]
        for numbers in self.shapes:
            for k, total, bad in zip(numbers, next(values).tolist(), next(values).tolist(), strict=True):
                rows = self.rows[k]
                is_scaled = rows.spot.kind == "grad_output" and rows.microbatch < backwards
                found.rows[k] = rows, total / scales[rows.microbatch] ** 2 if is_scaled else total, round(bad)
        return found
