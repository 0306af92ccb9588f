"""The second pass of an EK-FAC: its eigenvalues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unsum.curvature.blocks import Block
from unsum.curvature.curvature import Curvature
from unsum.curvature.pieces import pieces
from unsum.curvature.squared import squared
from unsum.curvature.sums import ParameterSums
from unsum.errors import UnsupportedError
from unsum.factors.factors import Factors


class Corrected:
    """The second pass: second moments of per-sample gradients in the eigenvectors of the first."""

    by_position = True

    def __init__(self, blocks: Mapping[str, Block]) -> None:
        self.blocks = {name: block for name, block in blocks.items() if block.matrix is not None}
        self.sums: dict[str, Tensor] = {}
        self.n = 0
        self.finite: Tensor | None = None

    def begin(self, n: int, again: bool) -> None:
        """A backward begins."""
        self.n += n
        self.finite = None

    def take(self, name: str, factors: Factors) -> None:
        """The gradients of one parameter."""
        block = self.blocks.get(name)
        if block is None or not factors.terms()[0][1]:
            return
        found = pieces(factors)
        if found is None or found[0].matrix != block.matrix:
            raise UnsupportedError(
                f"{name}: its gradients were outer products in the first pass over the data, not in the second.",
                write='unsum.curvature.fit(model, loss_fn, data, kind="diagonal")',
            )
        assert block.basis is not None
        value = squared(
            found, block.basis.rows, block.basis.columns, bias=None if block.bias is None else block.bias.side
        )
        self.sums[name] = self.sums[name].add_(value) if name in self.sums else value
        total = value.sum()
        self.finite = total if self.finite is None else self.finite + total.to(self.finite)

    def end(self, left: Sequence[str]) -> None:
        """The backward is over."""

    def curvature(self, first: Curvature) -> Curvature:
        """The first pass's blocks with these eigenvalues."""
        blocks = {}
        for name, block in first.blocks.items():
            if name in self.blocks:
                values = self.sums[name] / self.n if name in self.sums else torch.zeros_like(block.eigenvalues)
                block = replace(block, eigenvalues=values)
            blocks[name] = block
        sums = {name: ParameterSums(each.shape, each.matrix, {}, each.squares) for name, each in first.sums.items()}
        return Curvature(first.origin, first.n, sums, first.biases, blocks)
