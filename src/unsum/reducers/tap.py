"""How a reducer takes its numbers out of a compiled model: the tensors that it is given there, those that leave
through taps, and what becomes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.reducers.holding import Sizes

Shape = tuple[int, ...]


class Tap(ABC):
    """A reducer, as a compiled model sees it."""

    taps = 1  # how many tensors leave
    inputs = 0  # how many it is given
    in_order = False  # whether what it is given goes by the order of the samples
    by_sample = False  # whether it has a row for each sample, in whatever order; so it has if `in_order`
    calls_python = False  # whether a function runs in the middle of the backward, where no CUDA graph may be
    together = False  # whether what leaves for one parameter depends on the others: all of them are to be asked for
    by_parts = False  # whether each part of a model with graph breaks may have one: what they receive then adds up

    def __init__(self) -> None:
        self.told: list[str] = []  # what there is to know of what leaves, found out while torch writes down
        self.waits = False  # whether a backward of the block is under way, if it makes a difference

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """What is asked for: another key, another compilation."""

    def prepare(self, sizes: Sizes, learnt: int, n: int) -> Hashable:
        """A call with n samples comes. `sizes`: what holding the gradients of each parameter takes, for as many samples
        as there were when it was learnt. Returns what is chosen: another choice, another compilation."""
        return None

    @abstractmethod
    def shapes(self, n: int, positions: int | None) -> list[Shape]:
        """The shapes of what leaves."""

    def given(self, first: int, n: int, device: torch.device) -> list[Tensor]:
        """What it is given for n samples, of which so many came before."""
        return []

    @abstractmethod
    def size(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> int:
        """The number of samples, while torch writes down."""

    @abstractmethod
    def reducer(self, taps: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """A reducer that takes factors while torch writes down."""

    @abstractmethod
    def values(self, reducer: Any) -> list[Tensor]:
        """What leaves, when all factors have come to that reducer."""

    def begin(self, scale: Tensor | float | None) -> None:  # noqa: B027
        """A backward begins whose gradients are to be multiplied by this."""

    @abstractmethod
    def receive(self, values: Sequence[Tensor], scale: Tensor | float | None) -> None:
        """What has left, after a backward."""
