"""The gradients of one parameter, by sample."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.errors import SamplesError


class Factors:
    """The gradients of one parameter, by sample."""

    def __init__(self, per_sample: Tensor, shared: Tensor) -> None:
        self._per_sample, self._shared = per_sample, shared

    def per_sample(self) -> Tensor:
        """(n, *shape): one gradient for each sample."""
        return self._per_sample

    def shared(self) -> Tensor:
        """What belongs to no sample (a penalty on the weights): zeros, most often."""
        return self._shared

    def sum(self) -> Tensor:
        """The sum over samples; with `shared()`, what the backward brought to the parameter."""
        return self._per_sample.sum(0)

    def sq_norms(self) -> Tensor:
        """(n,): the squared norm of each sample's gradient."""
        return self._flat().abs().square().sum(1)

    def dot(self, other: Factors) -> Tensor:
        """(n, m): inner products with every one in `other`."""
        return self._flat() @ other._flat().conj().T

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n."""
        if w.shape != self._per_sample.shape[:1]:
            raise SamplesError(f"got {tuple(w.shape)} weights for {len(self._per_sample)} samples")
        return torch.tensordot(w.to(self._per_sample), self._per_sample, 1)

    def _flat(self) -> Tensor:
        return self._per_sample.reshape(len(self._per_sample), self._shared.numel())
