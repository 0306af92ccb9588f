"""A factor for every sample, by which its part of a gradient is known again.

Powers of two are exact in floating point: 48 samples in one copy, 48² in two. Where exponents are few (float16) signs
do it: one copy for each bit of the sample's number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.graph.layout import NOBODY, UNSEEN, Layout, Regular, complete, mapped, regular

STEP = 48  # samples that one copy of powers tells apart: exponents from -24 to 24, without 0

# How far a ratio may be from its power, and how small a gradient is beside the largest to be rounding alone.
TOLERANCE = {torch.float64: (1e-9, 1e-13), torch.complex128: (1e-9, 1e-13),
              torch.float32: (2e-5, 1e-6), torch.complex64: (2e-5, 1e-6)}  # fmt: skip


class Codes:
    """The factors of n samples, and how to read them again."""

    def __init__(self, n: int, *, signs: bool) -> None:
        self.n = n
        self._signs = signs
        sample = torch.arange(n + 1)  # the last one is nobody
        self._digits: list[Tensor] = []
        if signs:
            copies = max(n.bit_length(), 1)
            self._digits = [(sample >> bit) & 1 for bit in range(copies)]
            self.tables = [1.0 - 2.0 * digit for digit in self._digits]
            return
        left, self.tables = n, []
        while True:
            size = min(left, STEP)
            digit = sample // STEP ** len(self.tables) % STEP
            exponent = digit - size // 2
            exponent = torch.where(exponent >= 0, exponent + 1, exponent)
            exponent[n] = 0
            self._digits.append(exponent)
            self.tables.append(torch.pow(2.0, exponent.double()))  # on the CPU: CUDA's pow is not exact
            left = -(-left // STEP)
            if left <= 1:
                return

    def factor(self, copy: int, layout: Layout, like: Tensor) -> Tensor:
        """What this copy multiplies each position with, in the dtype of `like`."""
        table = self.tables[copy].to(like.dtype if not like.is_complex() else like.real.dtype)
        if isinstance(layout, Regular):
            view = [-1 if d == layout.dim else 1 for d in range(like.dim())]
            return table[layout.along()].to(like.device).view(view)
        return layout.beside(table.to(like.device)[layout.map.to(like.device).long()])

    def read(
        self, plain: Tensor, scaled: list[Tensor], *, only_regular: bool = False, fills: bool = True
    ) -> Layout | None:
        """Whose each position is, from a gradient and its copies; None where positions mix samples, or where the layout
        is not regular though that alone is asked for. Positions without a gradient follow the others if these fit just
        one regular layout; not so unless `fills`."""
        if not plain.numel():
            return None if only_regular else complete(torch.zeros(plain.shape), self.n)
        size = torch.where(plain.isfinite(), plain.abs(), 0).max()
        some = _some(plain.numel(), plain.device)
        few = plain.reshape(-1)[some].cpu(), [value.reshape(-1)[some].cpu() for value in scaled]
        owner = self._owner(*few, size.cpu())
        if owner is None and plain.dtype in TOLERANCE:
            return None  # a few positions have shown it
        fitting = self._fitting(plain, scaled, some, self._guess(*few) if owner is None else owner)
        if fitting is not None and (fills or self.is_full(fitting, plain)):
            return fitting
        if only_regular:
            return fitting
        owner = self._owner(plain, scaled, size)
        if owner is not None and plain.dtype not in TOLERANCE:
            owner = _by_rows(owner)
        return None if owner is None else complete(owner, self.n) if fills else mapped(owner)

    def is_full(self, layout: Layout, plain: Tensor) -> bool:
        """Whether every sample has a gradient somewhere."""
        assert isinstance(layout, Regular)
        axes = [d for d in range(plain.dim() + 2) if d != layout.dim + 1]
        return bool((plain != 0).unflatten(layout.dim, (-1, layout.n, layout.block)).sum(axes).all())

    def _guess(self, plain: Tensor, scaled: list[Tensor]) -> Tensor:
        """The likeliest owner of each position, where noise (bfloat16, atomics) blurs the ratios."""
        owner = torch.zeros(plain.shape, dtype=torch.long, device=plain.device)
        clear = nobody = plain != 0
        for copy, value in enumerate(scaled):
            ratio = (value.double() / plain.double()).nan_to_num(1.0)
            digit, _ = self._digit(ratio, torch.inf)
            owner, nobody, clear = self._put(owner, nobody, clear, digit, copy)
        return torch.where(clear, owner, UNSEEN)

    def _fitting(self, plain: Tensor, scaled: list[Tensor], some: Tensor, owner: Tensor) -> Regular | None:
        """The one regular layout that explains the copies, if there is one: those that do not explain a few positions
        need not be tried on all."""
        shape = tuple(plain.shape)
        places = torch.stack(torch.unravel_index(some.cpu(), shape)) if shape else some.cpu()[None]
        possible = [layout for layout in regular(shape, self.n) if self._agrees(layout, places, owner, plain.dtype)]
        fitting = [layout for layout in possible if self._explains(layout, plain, scaled)]
        return fitting[0] if len(fitting) == 1 else None

    def _agrees(self, layout: Regular, places: Tensor, owner: Tensor, dtype: torch.dtype) -> bool:
        """Whether a layout says of a few positions what their ratios say; of most of them, where there is noise."""
        right = places[layout.dim] // layout.block % self.n == owner
        if dtype in TOLERANCE:
            return bool((right | (owner == UNSEEN)).all())
        return bool(right.sum() >= 0.6 * (owner != UNSEEN).sum())

    def _explains(self, layout: Regular, plain: Tensor, scaled: list[Tensor]) -> bool:
        for copy, value in enumerate(scaled):
            wanted = plain * self.factor(copy, layout, plain)
            if torch.equal(wanted, value):
                continue
            # Not bit for bit (atomics, other kernels): then for every sample to rounding.
            split = (-1, layout.n, layout.block)
            axes = [d for d in range(plain.dim() + 2) if d != layout.dim + 1]
            off = torch.linalg.vector_norm((wanted - value).unflatten(layout.dim, split), dim=axes)
            size = torch.linalg.vector_norm(wanted.unflatten(layout.dim, split), dim=axes)
            if not bool((off <= TOLERANCE.get(plain.dtype, (5e-2, 0))[0] * size).all()):
                return False
        return True

    def _owner(self, plain: Tensor, scaled: list[Tensor], size: Tensor) -> Tensor | None:
        """The owner of each position, or None where they mix; `size` is that of the largest gradient."""
        tolerance, small = TOLERANCE.get(plain.dtype, (2e-2, 1e-3))
        finite = plain.isfinite()
        for value in scaled:
            finite = finite & value.isfinite()
        seen = (plain != 0) & finite
        tiny = torch.where(finite, plain.abs(), 0) <= small * size
        clear = seen  # where the ratio spells an owner; elsewhere it must be too small to matter
        owner = torch.zeros(plain.shape, dtype=torch.long, device=plain.device)
        nobody = seen
        for copy, value in enumerate(scaled):
            # Not seen though it is there, unless it is an underflow.
            there = torch.where(finite & ~seen, value.abs(), 0)
            if bool((there > small * size * self.tables[copy].max()).any()):
                return None
            ratio = torch.where(seen, value / torch.where(seen, plain, 1), 1)
            real = (ratio.real if ratio.is_complex() else ratio).double()
            digit, right = self._digit(real, tolerance)
            clear = clear & right
            if bool((seen & ~tiny & ~clear).any()):
                return None
            owner, nobody, clear = self._put(owner, nobody, clear, digit, copy)
        owner = torch.where(nobody, NOBODY, owner)
        clear = clear & (owner < self.n)
        if bool((seen & ~tiny & ~clear).any()):
            return None
        return torch.where(clear, owner, UNSEEN)

    def _digit(self, ratio: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
        if self._signs:
            return (ratio < 0).long(), (ratio.abs() - 1).abs() <= tolerance
        logarithm = ratio.clamp_min(1e-300).log2()
        exponent = logarithm.round()
        return exponent.long(), ((logarithm - exponent).abs() <= tolerance) & (ratio > 0)

    def _put(
        self, owner: Tensor, nobody: Tensor, clear: Tensor, digit: Tensor, copy: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add one copy's digit to the owners so far."""
        of_nobody = int(self._digits[copy][self.n])
        nobody = nobody & (digit == of_nobody)
        if self._signs:
            return owner + (digit << copy), nobody, clear
        size = min(-(-self.n // STEP**copy), STEP)
        index = torch.where(digit > 0, digit - 1, digit) + size // 2
        inside = (index >= 0) & (index < size) & (digit != 0)
        # A digit of 0 is nobody's, in all copies or in none.
        return owner + torch.where(inside, index * STEP**copy, self.n), nobody, clear & (inside | (digit == 0))


def _by_rows(owner: Tensor) -> Tensor:
    """Where noise (bfloat16) hides whose the smallest numbers of a row are, and most others are of one sample, so
    are they."""
    if owner.dim() < 2:
        return owner
    seen = owner != UNSEEN
    most = owner.amax(-1, keepdim=True)
    is_one = ((owner == most) | ~seen).all(-1, keepdim=True) & (seen.double().mean(-1, keepdim=True) > 0.5)
    return torch.where(is_one & (most >= 0), most, owner)


def _some(count: int, device: torch.device) -> Tensor:
    """A few positions, spread over all."""
    if count <= 512:
        return torch.arange(count, device=device)
    return torch.randint(count, (256,), generator=torch.Generator().manual_seed(count)).to(device)
