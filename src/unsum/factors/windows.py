"""A convolution: its weight meets a window of the input at every place of the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from unsum.factors.outer import Outer
from unsum.kernels import costs, product
from unsum.kernels.product import RowNorms, Way, row_norms, wide


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
        windows = unfold(self.x.flatten(0, 1), self.geometry, tuple(self.delta.shape[3:]))  # (n·t, C·k, places)
        a = windows.view(n, t, g, -1, windows.shape[-1])
        delta = self.delta.reshape(n, t, g, -1, windows.shape[-1])
        a, delta = (x.permute(0, 2, 1, 4, 3).reshape(n * g, -1, x.shape[3]) for x in (a, delta))
        return Outer(a, delta, self.shape, groups=g, dtype=self.dtype)

    def way(self, *, want_sum: bool) -> Way:
        """The cheapest way to the norms."""
        (o, *rest), places = self.shape, prod(self.delta.shape[3:]) * self.delta.shape[1]
        return costs.cheaper(places, prod(rest), o // self.geometry.groups, self.x.device.type, want_sum=want_sum)

    def _one_by_one(self) -> Iterator[Tensor]:
        """Each sample's gradient, by torch's own convolution; as fast as that of the whole batch on a CPU."""
        geometry, like = self.geometry, self.x.new_empty(()).expand(self.shape)
        for x, delta in zip(self.x, self.delta, strict=True):
            yield torch.ops.aten.convolution_backward(
                delta, x, like, None, geometry.stride, geometry.padding, geometry.dilation, False,
                [0] * len(geometry.kernel), geometry.groups, [False, True, False],
            )[1]  # fmt: skip

    def _is_for_the_processor(self) -> bool:
        return self.x.device.type == "cpu" and not self.turned and self.n > 0 and self.x.dtype != torch.float16

    def per_sample(self) -> Tensor:
        """(n, *shape)."""
        if self._is_for_the_processor():
            each = torch.stack(list(self._one_by_one()))
            return each.to(wide(self.dtype or each.dtype))
        return self.outer().per_sample()

    def tokens(self) -> Tensor:
        """(n, places, *shape)."""
        return self.outer().tokens()

    def token_norms(self, norms: RowNorms = row_norms) -> tuple[Tensor, ...]:
        """(n, places) each: their product is the norm of each place's part."""
        return self.outer().token_norms(norms)

    def sum(self) -> Tensor:
        """The sum over samples."""
        return self.outer().sum()

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Σ w_n G_n."""
        return replace(self, delta=self.delta * w.to(self.delta).view(-1, *(1 for _ in self.delta.shape[1:]))).sum()

    def sq_norms(self) -> Tensor:
        """(n,)."""
        return self._reduced(want_sum=False)[0]

    def norms_and_sum(self) -> tuple[Tensor, Tensor]:
        """Both, from the same product."""
        sq, total = self._reduced(want_sum=True)
        return sq, self.sum() if total is None else total

    def rows(self) -> tuple[Tensor, Tensor]:
        """(n, places, kernel·channels) and (n, places, o): windows, channels last, as a GPU reads them best."""
        (n, t), geometry = self.x.shape[:2], self.geometry
        x, delta = (tensor.flatten(0, 1).movedim(1, -1) for tensor in (self.x, self.delta))
        places = tuple(delta.shape[1:-1])
        padding = [0, 0, *(p for pad in reversed(geometry.padding) for p in (pad, pad))]
        x = F.pad(x, padding) if any(padding) else x
        for d, (size, step, apart) in enumerate(
            zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), start=1
        ):
            x = x.unfold(d, apart * (size - 1) + 1, step)[..., ::apart].narrow(d, 0, places[d - 1])
        dims = len(places)
        x = x.permute(*range(dims + 1), *range(dims + 2, 2 * dims + 2), dims + 1)  # m, places, kernel, channels
        return x.reshape(n, t * prod(places), -1), delta.reshape(n, t * prod(places), -1)

    def _by_rows(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None]:
        a, delta = self.rows()
        sq, total = product.norms_and_sum(a, delta, want_sum=want_sum)
        if total is None:
            return sq, None
        o, channels = self.shape[:2]
        placed = total.view(o, *self.geometry.kernel, channels).movedim(-1, 1)
        return sq, placed

    def _reduced(self, *, want_sum: bool) -> tuple[Tensor, Tensor | None]:
        if self.x.is_cuda and not self.turned and self.geometry.groups == 1 and self.way(want_sum=want_sum) != "gram":
            return self._by_rows(want_sum=want_sum)
        if self.way(want_sum=want_sum) == "gram" or not self._is_for_the_processor():
            return self.outer().norms_and_sum() if want_sum else (self.outer().sq_norms(), None)
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

    def plus(self, other: Windows) -> Outer | None:
        """The sum with another one."""
        return self.outer().plus(other.outer())

    def dot(self, other: Windows) -> Tensor:
        """(n, m)."""
        return self.outer().dot(other.outer())

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, k, k): L G R for a parameter seen as a matrix (rows, rest)."""
        return self.outer().project(left, right)


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
