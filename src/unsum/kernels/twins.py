"""What each kernel gives, in plain torch: always there, on every device and in every dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from unsum.kernels import recurrence, window_rows
from unsum.seams.operators import is_stand_in


@cache
def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _squares(values: Tensor) -> Tensor:
    """The squared norm of each row, accumulated in float32 at least."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=wide(values.dtype)).square()


def norms_and_sum(each: Tensor) -> tuple[Tensor, Tensor]:
    """In two passes."""
    return _squares(each.flatten(1)), torch.sum(each, 0)  # torch adds up in float32 at least


def scale_and_shift(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Pass by pass."""
    return _summed(delta, (x - mean[..., None]) * rstd[..., None])


def channel_sums(delta: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Pass by pass."""
    return _summed(delta, (x - mean) * (variance + eps).rsqrt())


def _summed(delta: Tensor, normalised: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide(delta.dtype)
    return (delta * normalised.to(delta.dtype)).sum(1, dtype=dtype), delta.sum(1, dtype=dtype)


def token_sq_norms(a: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Pass by pass."""
    alone = _squares(delta)
    return _squares(a) * alone, alone


def normalised_token_sq_norms(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """x̂ is formed."""
    normalised = ((x - mean[:, None]) * rstd[:, None]).to(delta.dtype)
    return _squares(delta * normalised), _squares(delta)


def lookup_sq_norms(ids: Tensor, delta: Tensor) -> Tensor:
    """Sorted by row, so that no (n, rows, d) is formed."""
    order = ids.argsort(1)
    ids = ids.gather(1, order)
    delta = delta.gather(1, order[..., None].expand_as(delta)).to(wide(delta.dtype))
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = new.flatten().cumsum(0).view_as(ids) - 1  # which of all (sample, row) pairs
    sums = torch.zeros_like(delta.flatten(0, 1)).index_add_(0, place.flatten(), delta.flatten(0, 1))
    return (torch.linalg.vecdot(sums, sums).real[place] * new).sum(1)


def products(
    x: Tensor,
    delta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    with_shift: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows unfolded, gradients formed."""
    a, delta = window_rows.rows(x, delta, kernel, stride, padding, dilation)
    squares, total = norms_and_sum(torch.bmm(delta.mT, a))
    dtype = wide(delta.dtype)
    return squares, total, delta.sum(1, dtype=dtype) if with_shift else torch.empty(0, dtype=dtype, device=x.device)


def gram_sq_norms(
    x: Tensor,
    delta: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Windows unfolded, (n, t, t) formed."""
    a, delta = window_rows.rows(x, delta, kernel, stride, padding, dilation)
    return gram(a, delta, a, delta)


def gram(a: Tensor, delta: Tensor, other_a: Tensor, other_delta: Tensor) -> Tensor:
    """(n,): ⟨δᵀa, δ'ᵀa'⟩ of each sample, by pairs of positions."""
    left, right = torch.bmm(a, other_a.mT.conj()), torch.bmm(delta, other_delta.mT.conj())
    dtype = wide(a.dtype)
    return torch.linalg.vecdot(right.flatten(1).to(dtype).conj(), left.flatten(1).to(dtype)).real


def grouped_gram_sq_norms(a: Sequence[Tensor], delta: Sequence[Tensor], n: int, t: int, kept: bool = True) -> Tensor:
    """Layer by layer."""
    pairs = [(x.reshape(n, t, -1), y.reshape(n, t, -1)) for x, y in zip(a, delta, strict=True)]
    return torch.stack([gram(x, y, x, y) for x, y in pairs])


def grouped_shift_sq_norms(delta: Sequence[Tensor], n: int, t: int, kept: bool = True) -> Tensor:
    """Layer by layer."""
    return torch.stack([_squares(each.reshape(n, t, -1).sum(1, dtype=wide(each.dtype))) for each in delta])


def grouped_norm_sq_norms(
    delta: Sequence[Tensor], x: Sequence[Tensor], mean: Sequence[Tensor], rstd: Sequence[Tensor], n: int, t: int,
    kept: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layer by layer."""
    found = []
    for gradient, values, centre, by in zip(delta, x, mean, rstd, strict=True):
        rows = gradient.reshape(n, t, -1), values.reshape(n, t, -1), centre.reshape(n, t), by.reshape(n, t)
        found.append(torch.stack([_squares(summed) for summed in scale_and_shift(*rows)]))
    scale, shift = torch.stack(found, 1).unbind()
    return scale, shift


def weighted_sum(each: Tensor, w: Tensor) -> Tensor:
    """In low precision sample by sample, so that no wide copy of all is made. A compiler makes one pass of it."""
    dtype = wide(each.dtype)
    if is_stand_in(each):
        return (each.to(dtype) * w.to(each.device, dtype).view(-1, *[1] * (each.dim() - 1))).sum(0)
    if each.dtype == dtype:
        return torch.tensordot(w.to(each.device, dtype), each, 1)
    total = torch.zeros(each.shape[1:], dtype=dtype, device=each.device)
    for values, weight in zip(each, w.to(total), strict=True):
        total.addcmul_(values.to(dtype), weight)
    return total


def bfloat16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Part by part."""
    rest, found = x.float(), []
    for _ in range(3):
        found.append(rest.bfloat16())
        rest = rest - found[-1]
    return found[0], found[1], found[2]


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """Rounded once."""
    dtype = wide(x.dtype)
    each = w.to(x.device, dtype).view(-1, *(1 for _ in x.shape[1:]))
    if x.dtype == dtype:
        return x * each
    return (x * each).to(x.dtype) if is_stand_in(x) else torch.mul(x, each, out=torch.empty_like(x))


def two_sided(rows: Tensor, columns: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Both factors reduced first."""
    return torch.bmm((rows @ left.T).mT, columns @ right).to(wide(rows.dtype))


def lstm_gates(
    x: Tensor, before: Tensor, of_inputs: Tensor, of_states: Tensor, bias: Tensor, cell: Tensor,
    d_states: Tensor, d_last: Tensor, d_cell: Tensor, reverse: bool,
) -> Tensor:  # fmt: skip
    """All times at once but for what leads from one to another, in float32 at least."""
    x, before, of_inputs, of_states, bias, cell, given, d_last, d_cell = (
        t.to(wide(t.dtype)) for t in (x, before, of_inputs, of_states, bias, cell, d_states, d_last, d_cell)
    )
    biases = bias, torch.zeros_like(bias)
    layer = recurrence.Recurrence(x, before, (of_inputs, of_states), biases, reverse)
    return recurrence.lstm(layer, cell, given, d_last, d_cell).to(d_states.dtype)
