"""`Curvature`: K-FAC, EK-FAC or a diagonal, for every parameter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from unsum.curvature import vectors
from unsum.curvature.blocks import Block, diagonal, kronecker
from unsum.curvature.sums import Bias, ParameterSums, Setting
from unsum.errors import OptionError, UnsupportedError
from unsum.fingerprint import changed
from unsum.gathered import Gradients

KINDS = ("ekfac", "kfac", "diagonal")
Kind = Literal["ekfac", "kfac", "diagonal"]


@dataclass(frozen=True)
class Origin:
    """What a curvature was computed from."""

    kind: Kind
    setting: Setting
    likelihood: str  # "empirical", "categorical", ...
    fingerprints: Mapping[str, str]  # of the parameters
    others: Mapping[str, str] = field(default_factory=dict)  # of those of the model that it is not about (frozen ones)


@dataclass(eq=False)
class Curvature:
    """The result of `unsum.curvature.fit`: a positive matrix over all parameters in blocks, the mean over samples of
    products of gradients.

    Examples:
        >>> import torch, unsum
        >>> model, data = torch.nn.Linear(3, 1), [(torch.randn(3), torch.randn(1)) for _ in range(8)]
        >>> loss = lambda m, batch: (m(batch[0]) - batch[1]).square().sum(1)
        >>> c = unsum.curvature.fit(model, loss, data, kind="kfac")
        >>> c.parameters
        {'weight': 'kronecker', 'bias': 'kronecker'}
        >>> g = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        >>> {name: tuple(value.shape) for name, value in c.solve(g).items()}
        {'weight': (1, 3), 'bias': (1,)}
    """

    origin: Origin
    n: int  # samples
    sums: dict[str, ParameterSums]  # of parameters, in the model's order; of an EK-FAC's matrices nothing is kept
    biases: Mapping[str, Bias]  # of weights: the bias that is in their block
    _blocks: dict[str, Block] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return self.origin.kind

    @property
    def is_decomposed(self) -> bool:
        """Whether eigenvectors were computed; those of an EK-FAC always are."""
        return bool(self._blocks)

    @property
    def blocks(self) -> dict[str, Block]:
        """{first parameter: its block}; eigenvectors are computed when they are first asked for."""
        if not self._blocks:
            of_weights = {bias.name for bias in self.biases.values()}
            self._blocks |= {name: self.made(name) for name in self.sums if name not in of_weights}
        return self._blocks

    def made(self, name: str) -> Block:
        """The block of a parameter, from its sums."""
        sums = self.sums[name]
        if sums.matrix is None:
            return diagonal(name, sums, self.n)
        return kronecker(name, sums, self.n, self.biases.get(name))

    @property
    def parameters(self) -> dict[str, str]:
        """{parameter: "kronecker" or "diagonal"}: the form of its block."""
        of_weights = {bias.name for bias in self.biases.values()}
        return {
            name: "kronecker" if name in of_weights or sums.matrix is not None else "diagonal"
            for name, sums in self.sums.items()
        }

    @property
    def damping(self) -> dict[str, float]:
        """{block: default damping}: 0.1 × the mean of the block's eigenvalues."""
        return {name: block.damping for name, block in self.blocks.items()}

    def solve(self, g: Any, damping: float | Mapping[str, float] | None = None) -> dict[str, Tensor]:
        """(curvature + damping)⁻¹ g, block by block.

        Args:
            g: The `g` of `unsum.gradients`, {parameter: (n, *shape)} or {parameter: tensor}.
            damping: Added to every eigenvalue: a number, {block: number}, or None for `c.damping`.
        """
        given = self._read(g, "solve")
        by_block = self._damping(damping)
        found: dict[str, Tensor] = {}
        for name, block in self.blocks.items():
            found |= block.solve({each: given.parts[each] for each in block.names}, by_block[name])
        return given.back(found)

    def matvec(self, g: Any) -> dict[str, Tensor]:
        """The curvature times g, without damping."""
        given = self._read(g, "matvec")
        found: dict[str, Tensor] = {}
        for block in self.blocks.values():
            found |= block.matvec({each: given.parts[each] for each in block.names})
        return given.back(found)

    def _read(self, g: Any, what: str) -> vectors.Vectors:
        if isinstance(g, Gradients):
            self.refuse_changed(g.parameters, g.names.parameters)
        return vectors.read(g, {name: sums.shape for name, sums in self.sums.items()}, what=what)

    def _damping(self, damping: float | Mapping[str, float] | None) -> Mapping[str, float]:
        if damping is None:
            return self.damping
        given = dict.fromkeys(self.blocks, damping) if not isinstance(damping, Mapping) else {**self.damping, **damping}
        for name, value in given.items():
            if name not in self.blocks:
                raise OptionError(f"damping: no block {name!r}; there are {', '.join(list(self.blocks)[:8])}, ...")
            if not vectors.is_number(value) or not 0 <= value < float("inf"):  # type: ignore[operator]
                raise OptionError(f"damping={value!r}: a number, 0 or more, {{block: number}}, or None")
        return given  # type: ignore[return-value]

    def refuse_changed(self, parameters: Mapping[str, Tensor], of_model: Mapping[str, Tensor] | None = None) -> None:
        """Raise if the parameters are not those of the fit, or if others of the model are not (where all are given)."""
        off = changed(self.origin.fingerprints, parameters)
        off += [] if of_model is None else changed(self.origin.others, of_model)
        if off:
            raise UnsupportedError(
                f"the parameters changed since the curvature was fitted ({off[0]}{', ...' if len(off) > 1 else ''}): "
                "it is that of another model.\n  fit it again, or load the weights that it was fitted on"
            )

    def merge(self, other: Curvature) -> Curvature:
        """Merge with a fit on other samples. The result is that of one fit on the samples of both, for K-FAC and
        diagonals."""
        if not isinstance(other, Curvature):
            raise OptionError(f"merge takes another curvature, got {type(other).__name__}")
        if "ekfac" in (self.kind, other.kind):
            raise UnsupportedError(
                "two EK-FACs cannot be merged: their bases (eigenvectors) differ.\n"
                "  merge K-FACs, or fit on all the data"
            )
        mine, theirs = self.origin, other.origin
        for option in ("kind", "setting", "likelihood"):
            if getattr(mine, option) != getattr(theirs, option):
                raise OptionError(
                    f"merge: {option} is {getattr(mine, option)} here and {getattr(theirs, option)} there"
                )
        if (mine.fingerprints, mine.others) != (theirs.fingerprints, theirs.others):
            raise UnsupportedError(
                "merge: the two curvatures were fitted on different parameters (another model, or other weights).",
                write="unsum.curvature.fit(model, loss_fn, ConcatDataset([first, second]))  # one fit, of one model",
            )
        sums = {name: _merged(name, sums, other.sums[name]) for name, sums in self.sums.items()}
        biases = {w: b for w, b in self.biases.items() if other.biases.get(w) == b or not other.sums[w].pairs}
        biases |= {w: b for w, b in other.biases.items() if not self.sums[w].pairs}
        for side in (self, other):
            _refuse_bias_without_squares(side, biases)
        return Curvature(mine, self.n + other.n, sums, biases)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, with a manifest in its header. `unsum.curvature.load` reads it."""
        from unsum.curvature.files import save

        save(self, path)

    def __repr__(self) -> str:
        how = list(self.parameters.values())
        return (
            f"{self.kind} of {self.n} samples ({self.origin.likelihood}, {self.origin.setting}): {len(how)} "
            f"tensors, {how.count('kronecker')} in Kronecker products, {how.count('diagonal')} by their diagonal"
        )


def _refuse_bias_without_squares(part: Curvature, biases: Mapping[str, Bias]) -> None:
    """A bias that is in its weight's block in one part alone is covered by its diagonal in the whole, for which that
    part must have its squares; and one that is in the block must not have had squares of its own."""
    for weight, bias in {**part.biases, **biases}.items():
        known, is_in = part.sums[bias.name], weight in biases
        if (not is_in and known.squares is None) or (is_in and weight not in part.biases and known.squares is not None):
            raise UnsupportedError(
                f"merge: {bias.name} is in the block of {weight} in one of the two, and by itself in the other one.\n"
                "  fit with kind='diagonal', or leave it out (params=)"
            )


def _merged(name: str, mine: ParameterSums, theirs: ParameterSums) -> ParameterSums:
    if not (theirs.pairs or theirs.squares is not None):
        return mine
    if not (mine.pairs or mine.squares is not None):
        return theirs
    if mine.matrix != theirs.matrix:
        raise UnsupportedError(
            f"merge: {name} is kept as a block in one curvature and as a diagonal in the other.",
            write='unsum.curvature.fit(model, loss_fn, data, kind="diagonal")  # both of them',
        )
    pairs = {side: pair.copy() for side, pair in mine.pairs.items()}
    for side, pair in theirs.pairs.items():
        if side in pairs:
            pairs[side].add(pair)
        else:
            pairs[side] = pair.copy()
    has_both = mine.squares is not None and theirs.squares is not None
    squares = mine.squares + theirs.squares.to(mine.squares) if has_both else mine.squares  # type: ignore[union-attr,operator]
    return ParameterSums(mine.shape, mine.matrix, pairs, theirs.squares if squares is None else squares)
