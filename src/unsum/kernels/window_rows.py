"""Windows of an image as rows of a matrix, channels last: what a product can be made of."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.nn import functional as F


def rows(
    x: Tensor,
    delta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(n, places, kernel·channels) and (n, places, o), from x (n, *space, channels) and δ (n, *places, o). Windows of
    one place are not copied."""
    places = tuple(delta.shape[1:-1])
    dims, n = len(places), x.shape[0]
    if any(padding):
        x = F.pad(x, [0, 0, *(p for pad in reversed(padding) for p in (pad, pad))])
    for d, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=1):
        x = x.unfold(d, apart * (size - 1) + 1, step)[..., ::apart].narrow(d, 0, places[d - 1])
    x = x.permute(*range(dims + 1), *range(dims + 2, 2 * dims + 2), dims + 1)  # n, places, kernel, channels
    return x.reshape(n, prod(places), prod(x.shape[dims + 1 :])), delta.reshape(n, prod(places), delta.shape[-1])
