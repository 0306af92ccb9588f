"""Which samples' gradients are far larger than the others': a robust rule that follows the level of the run.

The *level* is the median norm of the step's samples, or of the last 32 samples if the step has fewer. A sample is an
outlier if its norm is above `level · max(3, exp(threshold · 1.4826 · MAD))`, where MAD is the median distance of the
logarithms of the last `window` samples' norms from the level of their own step. 1.4826 · MAD is the standard deviation
where logarithms of norms are normally distributed; neither it nor the level is moved by the outliers themselves, nor by
norms that rise or fall during training. Below five samples nothing is an outlier, except a norm that is not finite,
which always is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from torch import Tensor

LEAST, RECENT, FACTOR = 5, 32, 3.0
_TINY = 1e-300  # in the place of a norm that is 0


class Outliers:
    """The norms of the last samples, and the rule.

    Examples:
        >>> import torch
        >>> Outliers()(torch.tensor([1.0, 1.1, 0.9, 1.05, 1.0, 40.0]))
        [5]
    """

    def __init__(self, threshold: float = 5.0, window: int = 512) -> None:
        self._threshold = threshold
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._apart: deque[float] = deque(maxlen=window)  # distances from the level

    def __call__(self, norms: Tensor) -> list[int]:
        """The rows of this step that are outliers."""
        values = norms.tolist()
        logs = {row: math.log(max(value, _TINY)) for row, value in enumerate(values) if math.isfinite(value)}
        found = [row for row in range(len(values)) if row not in logs]
        self._recent.extend(logs.values())
        known = list(logs.values()) if len(logs) >= RECENT else list(self._recent)
        if len(known) < LEAST:
            return found
        level = statistics.median(known)
        self._apart.extend(abs(log - level) for log in logs.values())
        bound = level + max(math.log(FACTOR), self._threshold * 1.4826 * statistics.median(self._apart))
        return sorted(found + [row for row, log in logs.items() if log > bound])
