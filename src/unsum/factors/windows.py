"""A convolution: its weight meets a window of the input at every place of the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unsum.factors.dense import Dense
from unsum.factors.outer import Outer
from unsum.kernels import costs, fused, product, window_rows
from unsum.kernels.product import Way, wide
from unsum.seams.operators import hint, is_stand_in

ALIGNED_PLACES = 8  # other numbers of places take slow kernels where (places, places) is formed
AT_ONCE = 1 << 20  # numbers in the windows that a processor unfolds at once


@dataclass(frozen=True)
class Geometry:
    """How windows lie in the input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, eq=False)
class Windows:
    """G_n = Σ over places of δ ⊗ window. The windows are unfolded only when they are read."""

    x: Tensor  # (n, t, channels, *space): t images per sample, nearly always one
    delta: Tensor  # (n, t, channels, *places)
    geometry: Geometry
    shape: tuple[int, ...]
    turned: bool = False  # a transposed convolution: `x` is the gradient and `delta` the input
    dtype: torch.dtype | None = None

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def lengths(self) -> None:
        return None

    def numel(self) -> int:
        """How many numbers are held for one sample."""
        return (self.x.numel() + self.delta.numel()) // max(self.n, 1)

    def outer(self) -> Outer:
        """The same as outer products, windows unfolded."""
        (n, t), g = self.x.shape[:2], self.geometry.groups
        unfolded = unfold(self.x.flatten(0, 1), self.geometry, tuple(self.delta.shape[3:]))  # (n·t, C·k, places)
        a = unfolded.view(n, t, g, -1, unfolded.shape[-1])
        delta = self.delta.reshape(n, t, g, -1, unfolded.shape[-1])
        a, delta = (x.permute(0, 2, 1, 4, 3).reshape(n * g, -1, x.shape[3]) for x in (a, delta))
        return Outer(a, delta, self.shape, groups=g, dtype=self.dtype)

    def way(self, *, want_sum: bool) -> Way:
        """The cheapest way to the norms."""
        (o, *rest), places = self.shape, prod(self.delta.shape[3:]) * self.delta.shape[1]
        return costs.cheaper(hint(places), prod(rest), o // self.geometry.groups, self.x.device.type, want_sum=want_sum)

    def _one_by_one(self) -> Iterator[Tensor]:
        """Each sample's gradient, by torch's own convolution; as fast as that of the whole batch on a CPU."""
        geometry, like = self.geometry, self.x.new_empty(()).expand(self.shape)
        for x, delta in zip(self.x, self.delta, strict=True):
            yield torch.ops.aten.convolution_backward(
                delta, x, like, None, geometry.stride, geometry.padding, geometry.dilation, False,
                [0] * len(geometry.kernel), geometry.groups, [False, True, False],
            )[1]  # fmt: skip

    def _parts(self) -> Iterator[Windows]:
        """Some samples at a time, of which the unfolded windows stay in the processor's cache."""
        windows = self.geometry.groups * prod(self.shape[1:]) * self.positions
        some = max(1, AT_ONCE // max(windows, 1))
        for x, delta in zip(self.x.split(some), self.delta.split(some), strict=True):
            yield replace(self, x=x, delta=delta)

    def _is_for_the_gpu(self) -> bool:
        return fused.is_on_a_gpu(self.x) and not self.turned and self.geometry.groups == 1 and self.n > 0

    def _is_for_the_processor(self) -> bool:
        usual = not self.turned and self.x.dtype != torch.float16 and not is_stand_in(self.x)
        return self.x.device.type == "cpu" and usual and self.n > 0

    def per_sample(self) -> Tensor:
        """(n, *shape)."""
        if self._is_for_the_processor():
            each = self._each()
            return each.to(wide(self.dtype or each.dtype))
        return self.outer().per_sample()

    def _each(self) -> Tensor:
        """(n, *shape): written one after the other to where they stay."""
        each = self.x.new_empty(self.n, *self.shape)
        for k, own in enumerate(self._one_by_one()):
            each[k] = own
        return each

    def tokens(self) -> Tensor:
        """(n, places, *shape)."""
        return self.outer().tokens()

    def token_sq_norms(self) -> Tensor:
        """(n, places)."""
        return self.outer().token_sq_norms()

    def sum(self) -> Tensor:
        """The sum over samples."""
        if self._is_for_the_gpu() or self._is_for_the_processor():
            whole = replace(self, x=self.x.flatten(0, 1)[None], delta=self.delta.flatten(0, 1)[None])
            total = next(whole._one_by_one())  # as torch does it: nothing is unfolded
            return total.to(wide(self.dtype or total.dtype))
        return self.outer().sum()

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n. The smaller of the two factors takes the weights."""
        name = "x" if self.x.numel() < self.delta.numel() else "delta"
        return replace(self, **{name: fused.scaled(getattr(self, name), w)}).sum()  # type: ignore[arg-type]

    def sq_norms(self) -> Tensor:
        """(n,)."""
        return self._reduced(want_sum=False)[0]

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """Both, from the same product."""
        sq, total = self._reduced(want_sum=True)
        return sq, self.sum() if total is None else total

    def rows(self) -> tuple[Tensor, Tensor]:
        """(n, places, kernel·channels) and (n, places, o): windows, channels last, as a GPU reads them best."""
        n, t = self.x.shape[:2]
        x, delta = (tensor.flatten(0, 1).movedim(1, -1) for tensor in (self.x, self.delta))
        a, delta = window_rows.rows(x, delta, *self._geometry())
        return a.reshape(n, t * a.shape[1], a.shape[2]), delta.reshape(n, t * delta.shape[1], delta.shape[2])

    def _geometry(self) -> list[Sequence[int]]:
        geometry = self.geometry
        return [geometry.kernel, geometry.stride, geometry.padding, geometry.dilation]

    def _images(self) -> tuple[Tensor, Tensor, list[Sequence[int]]] | None:
        """(n, h, w, channels), (n, down, right, o) where they lie, the geometry; None if they are no single images."""
        if self.x.shape[1] != 1 or self.x.dim() not in (4, 5):
            return None
        x, delta = (tensor[:, 0].movedim(1, -1) for tensor in (self.x, self.delta))
        if x.dim() == 4:
            return x, delta, self._geometry()
        line: list[Sequence[int]] = [[first, *rest] for first, rest in zip((1, 1, 0, 1), self._geometry(), strict=True)]
        return x[:, None], delta[:, None], line  # one line of an image

    def _is_unfolded(self) -> bool:
        """Whether rows of windows are copies."""
        geometry = self.geometry
        return any(size > 1 for size in (*geometry.kernel, *geometry.stride)) or any(geometry.padding)

    def _on_a_gpu(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None]:
        """By a kernel that unfolds nothing where that is the cheaper way, else by rows."""
        way = self.way(want_sum=want_sum)
        (o, *rest), places = self.shape, prod(self.delta.shape[3:])
        if way == "gram" or self._is_unfolded() or places % ALIGNED_PLACES:
            self = replace(self, x=_with_channels_last(self.x), delta=_with_channels_last(self.delta))
        images = self._images()
        if way == "gram":
            if images is not None and (self._is_unfolded() or places % ALIGNED_PLACES):
                x, delta, geometry = images
                if fused.serves("gram_sq_norms", x, delta):
                    return fused.gram_sq_norms(x, delta, *geometry), None
            return product.sq_norms(*self.rows(), way), None
        if images is not None and self._is_unfolded() and costs.spares_unfolding(places, prod(rest), o, "cuda"):
            x, delta, geometry = images
            if x.dtype in (torch.bfloat16, torch.float16) and fused.serves("products", x, delta):
                sq, total, _ = fused.products(x, delta, *geometry, False)
                return sq, self._from_rows(total)
        sq, summed = product.norms_and_sum(*self.rows(), want_sum=want_sum)
        return sq, None if summed is None else self._from_rows(summed)

    @property
    def positions(self) -> int:
        """Of one sample."""
        return self.delta.shape[1] * prod(self.delta.shape[3:])

    def forms(self) -> bool:
        """Whether the cheapest way to norms and a sum forms every gradient."""
        return self.way(want_sum=True) == "product" and (self._is_for_the_gpu() or self._is_for_the_processor())

    def norms_and_each(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None, Dense] | None:
        """Norms, the sum if it is wanted, and the gradients that are formed for them; None where none are."""
        if is_stand_in(self.x) and self.x.device.type == "cpu":
            return self.outer().norms_and_each(want_sum=want_sum)
        if not self.forms():
            return None
        if self._is_for_the_processor():
            return Dense(self._each()).norms_and_each(want_sum=want_sum)
        sq, total, each = product.norms_and_each(*self.rows(), want_sum=want_sum)
        return sq, None if total is None else self._from_rows(total), Dense(self._from_rows(each))

    def _from_rows(self, matrix: Tensor) -> Tensor:
        """(…, o, kernel·channels) in the parameter's own shape, without moving a number."""
        return matrix.unflatten(-1, (*self.geometry.kernel, self.shape[1])).movedim(-1, -1 - len(self.geometry.kernel))

    def _reduced(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None]:
        if self._is_for_the_gpu():
            return self._on_a_gpu(want_sum=want_sum)
        if not self._is_for_the_processor():
            return self.outer().norms_and_sum() if want_sum else (self.outer().sq_norms(), None)
        if self.way(want_sum=want_sum) == "gram":
            return torch.cat([part.outer().sq_norms() for part in self._parts()]), None
        norms, total = [], None
        for each in self._one_by_one():
            each = each.to(wide(each.dtype))
            norms.append(torch.linalg.vector_norm(each))
            if want_sum:
                total = each if total is None else total.add_(each)
        return torch.stack(norms).square(), total if total is None else total.to(wide(self.dtype or total.dtype))

    def times(self, factor: Tensor | float) -> Windows:
        """Every gradient multiplied by the same number."""
        return replace(self, delta=self.delta * factor)

    @property
    def joint(self) -> tuple[Any, ...]:
        """What others must have in common with it to be joined."""
        return self.turned, self.shape, self.geometry.groups, self.n, self.x.dtype, self.delta.dtype

    def plus(self, *others: Windows) -> Outer:
        """The sum with others."""
        return self.outer().plus(*(other.outer() for other in others))

    def dot(self, other: Windows) -> Tensor:
        """(n, m)."""
        return self.outer().dot(other.outer())

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R for a parameter seen as a matrix (rows, rest)."""
        return self.outer().project(left, right)


def _with_channels_last(tensor: Tensor) -> Tensor:
    """(n, t, channels, *space) with the channels of a place beside each other: a batch norm's gradient has them apart,
    and reading them so takes longer than this copy."""
    return tensor if tensor.stride(2) == 1 else tensor.movedim(2, -1).contiguous().movedim(-1, 2)


def unfold(x: Tensor, geometry: Geometry, places: tuple[int, ...]) -> Tensor:
    """(m, channels·kernel, places): the window at every place, channels of one group side by side."""
    kernel, dilation = geometry.kernel, geometry.dilation
    if len(kernel) == 2 and all(size == 1 for size in kernel) and not any(geometry.padding):
        return x[..., :: geometry.stride[0], :: geometry.stride[1]].flatten(2)
    padding = [p for pad in reversed(geometry.padding) for p in (pad, pad)]
    x = F.pad(x, padding) if any(padding) else x
    for d, (size, step, apart) in enumerate(zip(kernel, geometry.stride, dilation, strict=True)):
        x = x.unfold(2 + d, apart * (size - 1) + 1, step)[..., ::apart].narrow(2 + d, 0, places[d])
    dims = len(kernel)
    order = (0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))  # m, channels, kernel, places
    return x.permute(order).reshape(x.shape[0], x.shape[1] * prod(kernel), prod(places))
