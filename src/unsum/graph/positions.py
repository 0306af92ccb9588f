"""A tensor taken apart by sample: (n, t, features), where t counts the positions of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unsum.graph.layout import UNSEEN, Layout, Regular


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
            apart = tensor.unflatten(dim, (-1, self.n, block)).movedim(dim + 1, 0)
            return apart.flatten(1, self.lead + 1)
        flat = tensor.flatten(0, self.lead - 1)
        index = self._index.to(tensor.device)
        taken = flat[index.clamp_min(0)]
        return taken.masked_fill_((index < 0).view(*index.shape, *(1 for _ in taken.shape[2:])), 0)

    def nobodys(self, tensor: Tensor) -> Tensor | None:
        """(1, t, *features): the positions that belong to no sample; None if there are none."""
        if isinstance(self.layout, Regular) or not bool((self.rows < 0).any()):
            return None
        return tensor.flatten(0, self.lead - 1)[(self.rows < 0).to(tensor.device)][None]

    @property
    def lengths(self) -> Tensor | None:
        """How many positions each sample has, if not all the same."""
        if isinstance(self.layout, Regular):
            return None
        counts = self._counts
        return None if bool((counts == counts[:1]).all()) else counts

    @cached_property
    def _rows(self) -> int:
        """The size of the first dimension where samples follow each other along it; 0 if they do not."""
        layout = self.layout
        return self.n * layout.block if isinstance(layout, Regular) and layout.dim == 0 else 0

    @cached_property
    def rows(self) -> Tensor:
        """The sample of each position, all in a row."""
        owner = self.layout.owner()
        flat = owner.flatten(0, self.lead - 1)
        return flat if flat.dim() == 1 else flat.flatten(1)[:, 0]

    @cached_property
    def _counts(self) -> Tensor:
        rows = self.rows
        return torch.bincount(rows[rows >= 0].long(), minlength=self.n)

    @cached_property
    def _index(self) -> Tensor:
        """(n, t): the rows of each sample, then -1."""
        rows, counts = self.rows.cpu(), self._counts.cpu()
        order = torch.argsort(rows, stable=True)[int((rows < 0).sum()) :]
        longest = int(counts.max()) if len(counts) else 0
        index = torch.full((self.n, longest), -1)
        place = torch.arange(longest) < counts[:, None]
        index[place] = order
        return index


def positions(layout: Layout, n: int, features: int) -> Positions | None:
    """How to take apart what has this layout; None where samples lie along features, or are not all known."""
    lead = len(layout.shape) - features
    if lead < 1:
        return None
    if isinstance(layout, Regular):
        return Positions(layout, n, lead) if layout.dim < lead else None
    owner = layout.map
    if owner.numel() and bool((owner == UNSEEN).any()):
        return None
    rest = owner.flatten(lead) if features else owner[..., None]
    return Positions(layout, n, lead) if not owner.numel() or bool((rest == rest[..., :1]).all()) else None
