"""Some coordinates of gradients in the eigenbasis of a curvature's block, from factors where that can be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unsum.curvature.blocks import Block
from unsum.factors.factors import Factors


class Coordinates:
    """Of a block with eigenvectors U and V, the places of UᵀGV that are kept. They lie in few of its rows and columns:
    only these eigenvectors meet the factors, and no gradient is formed. A bias, which is one more column (or row) of
    G, brings a term of its own."""

    def __init__(self, block: Block, places: Tensor) -> None:
        self._block, self._places = block, places
        self.name, self.names = block.name, block.names
        self.adds_up = block.basis is not None and block.matrix is not None and block.matrix.stack == 1
        if self.adds_up:
            self._cut()

    def _cut(self) -> None:
        """The eigenvectors that are needed, and where the kept places are among their products."""
        block = self._block
        assert block.basis is not None and block.matrix is not None
        rows, columns = block.eigenvalues.shape[-2:]
        row, own_row = (self._places // columns).unique(return_inverse=True)
        column, own_column = (self._places % columns).unique(return_inverse=True)
        self._left = _chosen(block.basis.rows, row, rows, block.eigenvalues)  # (rows, r)
        self._right = _chosen(block.basis.columns, column, columns, block.eigenvalues)  # (columns, c)
        self._at = own_row * len(column) + own_column
        side = None if block.bias is None else block.bias.side
        left, right = self._left, self._right
        self._of_bias = left[-1] if side == "rows" else right[-1]  # the bias is the last row, or the last column
        self._weight_left = (left[:-1] if side == "rows" else left).T.contiguous()
        self._weight_right = (right[:-1] if side == "columns" else right).contiguous()

    def share(self, name: str, factors: Factors) -> Tensor:
        """(n, kept): what one parameter of the block brings."""
        block, device = self._block, factors.device
        if name == self.name:
            found = factors.two_sided(self._weight_left.to(device), self._weight_right.to(device))
        else:
            assert block.bias is not None
            bias, last = factors.per_sample().flatten(1), self._of_bias.to(device, factors.dtype)
            if block.bias.side == "rows":
                found = last[:, None] * (bias @ self._right.to(bias))[:, None]
            else:
                found = (bias @ self._left.to(bias))[:, :, None] * last
        return found.flatten(1)[:, self._at.to(device)]

    def whole(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """(n, kept), of a block without a basis, or of several matrices, from gradients that are formed."""
        found = self._block.into(gradients).flatten(1)
        return found[:, self._places.to(found.device)]


def _chosen(vectors: Tensor | None, some: Tensor, size: int, like: Tensor) -> Tensor:
    """(size, some): eigenvectors; of a side that is diagonal as it is, the unit vectors."""
    if vectors is not None:
        return vectors[0][:, some.to(vectors.device)]
    return torch.zeros(size, len(some), dtype=like.dtype).scatter_(0, some[None], 1.0)
