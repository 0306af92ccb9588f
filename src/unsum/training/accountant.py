"""Privacy accounting, by dp-accounting: epsilon of so many steps of the Poisson-sampled Gaussian mechanism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unsum.errors import OptionError, UnsupportedError


@dataclass(frozen=True)
class Settings:
    """What the guarantee is made of."""

    noise_multiplier: float
    expected_batch: float
    sample_rate: float

    def __post_init__(self) -> None:
        for name, low, high, range_in_words in (
            ("noise_multiplier", 0.0, math.inf, "a number, 0 (no noise) or more"),
            ("expected_batch", 1e-300, math.inf, "a positive number, known to everybody: sample_rate times the number "
             "of examples, say"),
            ("sample_rate", 1e-300, 1.0, "a probability, above 0 and at most 1"),
        ):  # fmt: skip
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high or math.isinf(value):
                raise OptionError(f"unsum.private: {name}={value!r}: {range_in_words}")
            object.__setattr__(self, name, float(value))


class Account:
    """The steps of private training: how many were taken with each noise multiplier and sampling rate."""

    def __init__(self) -> None:
        self._taken: dict[tuple[float, float], int] = {}  # (noise multiplier, sampling rate): steps
        self.undrawn = 0  # steps without a batch of dp.loader

    @property
    def steps(self) -> int:
        """All of them."""
        return sum(self._taken.values())

    def add(self, settings: Settings, *, is_drawn: bool) -> None:
        """A step was taken."""
        key = settings.noise_multiplier, settings.sample_rate
        self._taken[key] = self._taken.get(key, 0) + 1
        self.undrawn += not is_drawn

    def epsilon(self, delta: float) -> float:
        """ε for which the steps are (ε, δ)-differentially private, if one example is added or removed.

        An upper bound, by the privacy loss distribution (PLD) of dp-accounting, with its usual discretisation (1e-4).
        """
        if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
            raise OptionError(f"unsum.private: epsilon(delta={delta!r}): a number between 0 and 1, below 1 / examples")
        if not self._taken:
            return 0.0
        if not self.has_noise():
            return math.inf
        if not is_there():
            raise UnsupportedError("unsum.private: epsilon needs dp-accounting: pip install dp-accounting")
        return _epsilon(tuple((*key, steps) for key, steps in sorted(self._taken.items())), float(delta))

    def has_noise(self) -> bool:
        """Whether all steps had noise."""
        return all(noise_multiplier for noise_multiplier, _ in self._taken)

    def others(self, settings: Settings) -> list[str]:
        """Steps with other settings, in words."""
        return [
            f"{steps} steps with multiplier {key[0]:g} at rate {key[1]:g}"
            for key, steps in self._taken.items()
            if key != (settings.noise_multiplier, settings.sample_rate)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        taken = [[*key, steps] for key, steps in self._taken.items()]
        return {"steps": self.steps, "undrawn": self.undrawn, "taken": taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self._taken = {(multiplier, rate): steps for multiplier, rate, steps in state["taken"]}
        self.undrawn = state["undrawn"]


def is_there() -> bool:
    """Whether dp-accounting is installed."""
    return find_spec("dp_accounting") is not None


@lru_cache(64)
def _epsilon(taken: tuple[tuple[float, float, int], ...], delta: float) -> float:
    dp_accounting, pld = import_module("dp_accounting"), import_module("dp_accounting.pld")
    accountant = pld.PLDAccountant()
    for noise_multiplier, sample_rate, steps in taken:
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian), steps)
    return float(accountant.get_epsilon(delta))
