"""A tensor taken apart by sample: (n, t, features), where t counts the positions of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from unsum.graph.layout import Layout, Mapped, Regular
from unsum.kernels import segments


@dataclass(frozen=True, eq=False)
class Positions:
    """Takes tensors apart whose first dimensions are those of a gradient, and whose last ones are features."""

    layout: Layout
    n: int
    lead: int  # how many dimensions are positions

    def of(self, tensor: Tensor) -> Tensor:
        """(n, t, *features), padded with zeros where samples have unequal numbers of positions."""
        if self._rows and tensor.shape[0] == self._rows and tensor.numel():
            # Samples after each other: one call instead of three, or none at all.
            if self.lead == 2 and self._rows == self.n:
                return tensor
            return tensor.reshape(self.n, -1, *tensor.shape[self.lead :])
        if isinstance(self.layout, Regular):
            dim, block = self.layout.dim, self.layout.block
            outer = 1 if isinstance(block, int) and not block else -1  # of no positions torch cannot tell how many
            apart = tensor.unflatten(dim, (outer, self.n, block)).movedim(dim + 1, 0)
            return apart.flatten(1, self.lead + 1)
        return segments.taken(tensor.flatten(0, self.lead - 1), self.index(tensor.device), is_full=self.is_full)

    @property
    def is_full(self) -> bool:
        """Whether all samples have as many positions, for a reason that is known."""
        return isinstance(self.layout, Regular) or self.layout.held is not None

    def nobodys(self, tensor: Tensor) -> Tensor | None:
        """(1, t, *features): the positions that belong to no sample; None if there are none."""
        if not self.has_nobodys:
            return None
        return tensor.flatten(0, self.lead - 1)[(self.rows < 0).to(tensor.device)][None]

    @cached_property
    def has_nobodys(self) -> bool:
        """Whether some positions belong to no sample."""
        return isinstance(self.layout, Mapped) and not self.layout.is_whole and bool((self.rows < 0).any())

    @property
    def lengths(self) -> Tensor | None:
        """How many positions each sample has; None if all have as many."""
        return None if self.is_full else self._sorted[1].diff()

    @cached_property
    def _rows(self) -> int:
        """The size of the first dimension where samples follow each other along it; 0 if they do not."""
        layout = self.layout
        return self.n * layout.block if isinstance(layout, Regular) and layout.dim == 0 else 0

    @cached_property
    def rows(self) -> Tensor:
        """The sample of each position, all in a row."""
        if isinstance(self.layout, Regular):
            owner = self.layout.owner().flatten(0, self.lead - 1)
            return owner if owner.dim() == 1 else owner.flatten(1)[:, 0]
        map_ = self.layout.map
        if map_.dim() == self.lead:
            return map_.flatten()
        if map_.dim() > self.lead:  # the same along all features
            return map_.flatten(self.lead)[..., 0].flatten() if map_.numel() else map_.new_empty(0)
        lead = self.layout.shape[: self.lead]
        return map_.view((*map_.shape, *(1 for _ in lead[map_.dim() :]))).expand(lead).flatten()

    def index(self, device: torch.device) -> Tensor:
        """(n, t): the positions of each sample, then -1."""
        if device not in self._indices:
            self._indices[device] = self._index.to(device)
        return self._indices[device]

    @cached_property
    def _indices(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def _index(self) -> Tensor:
        if isinstance(self.layout, Regular):
            lead = self.layout.shape[: self.lead]
            return self.of(torch.arange(prod(lead)).view(lead))
        if self.layout.held is None:
            return segments.padded(*self._sorted)
        rows, each = self.layout.held, prod(self.layout.shape[1 : self.lead])  # positions of each row
        return rows if each == 1 else (rows[..., None] * each + torch.arange(each, device=rows.device)).flatten(1)

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        return segments.sort(self.rows, self.n)


def positions(layout: Layout, n: int, features: int) -> Positions | None:
    """How to take apart what has this layout; None where samples lie along features, or are not all known."""
    lead = len(layout.shape) - features
    if lead < 1:
        return None
    if isinstance(layout, Regular):
        return Positions(layout, n, lead) if layout.dim < lead else None
    if layout.has_unseen:
        return None
    rest = layout.map.flatten(lead) if layout.map.dim() > lead else None
    is_one = rest is None or not rest.numel() or bool((rest == rest[..., :1]).all())
    return Positions(layout, n, lead) if is_one else None
