"""Which samples' gradients are far larger than the others': a robust rule over the last samples.

A sample is an outlier if its norm is above `median · max(3, exp(threshold · 1.4826 · MAD))`, where the median is that
of the norms of the last `window` samples, this step's among them, and MAD is the median distance of the logarithms of
these norms from their median. 1.4826 · MAD is the standard deviation where logarithms of norms are normally
distributed; neither it nor the median is moved by the outliers themselves. Below five samples nothing is an outlier,
except a norm that is not finite, which always is.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

LEAST, FACTOR = 5, 3.0


class Outliers:
    """The norms of the last samples, and the rule.

    Examples:
        >>> Outliers()(torch.tensor([1.0, 1.1, 0.9, 1.05, 1.0, 40.0]))
        [5]
    """

    def __init__(self, threshold: float = 5.0, window: int = 512) -> None:
        self._threshold = threshold
        self._last: deque[float] = deque(maxlen=window)

    def __call__(self, norms: Tensor) -> list[int]:
        """The rows of this step that are outliers."""
        values = norms.double().tolist()
        self._last.extend(value for value in values if math.isfinite(value))
        found = [row for row, value in enumerate(values) if not math.isfinite(value)]
        if len(self._last) < LEAST:
            return found
        logs = torch.tensor(self._last, dtype=torch.float64).clamp(min=1e-300).log()
        middle = logs.quantile(0.5)
        spread = 1.4826 * (logs - middle).abs().quantile(0.5)
        bound = float(middle) + max(math.log(FACTOR), self._threshold * float(spread))
        return sorted(
            found + [row for row, value in enumerate(values) if 0 < value < math.inf and math.log(value) > bound]
        )
