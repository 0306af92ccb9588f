"""Privacy accounting, by dp-accounting: epsilon of so many steps of the Poisson-sampled Gaussian mechanism."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

from unsum.errors import OptionError, UnsupportedError


def epsilon(steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """ε for which the steps are (ε, δ)-differentially private, if one example is added or removed.

    An upper bound, by the privacy loss distribution (PLD) of dp-accounting, with its usual discretisation (1e-4).
    """
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise OptionError(f"unsum.private: epsilon(delta={delta!r}): a number between 0 and 1, below 1 / examples")
    if not steps:
        return 0.0
    if not noise_multiplier:
        return math.inf
    if not is_there():
        raise UnsupportedError("unsum.private: epsilon needs dp-accounting: pip install 'unsum[private]'")
    return _epsilon(steps, noise_multiplier, sample_rate, float(delta))


def is_there() -> bool:
    """Whether dp-accounting is installed."""
    return find_spec("dp_accounting") is not None


@lru_cache(64)
def _epsilon(steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    dp_accounting, pld = import_module("dp_accounting"), import_module("dp_accounting.pld")
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian)
    return float(pld.PLDAccountant().compose(event, steps).get_epsilon(delta))
