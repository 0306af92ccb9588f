"""Several matrices side by side, each with positions of its own: experts, block-diagonal layers."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.factors.outer import Outer
from unsum.factors.routed import Routed
from unsum.factors.scale import Scale
from unsum.graph.layout import Mapped, Regular
from unsum.graph.positions import Positions
from unsum.rules.registry import Call, rule, scaled


@rule("GroupedMmBackward0", 1)
def grouped_mm(call: Call) -> Routed | None:
    """Rows in the order of their experts; `offs` says where each expert's rows end."""
    ends, experts, by = call.saved("offs"), call.shape[0], call.by
    if ends is None or len(call.shape) != 3 or by.lead != 1:
        return None
    a, delta, device = call.saved("self"), call.delta, call.delta.device
    sample = by.rows.to(device)
    if call.only_nobodys:
        sample = torch.where(sample < 0, 0, -1)
        by = Positions(Mapped(sample), 1, 1)
    held = by.index(device) if by.is_full else None
    matrix = torch.searchsorted(ends, torch.arange(len(delta), device=device, dtype=ends.dtype), right=True)
    return Routed(
        a, delta, sample, matrix, by.n, experts, call.shape,
        turned=True, ends=None if by.has_nobodys else ends, held=held,
    )  # fmt: skip


@rule("BmmBackward0", 1)
def bmm(call: Call) -> Outer | None:
    """y[g] = a[g] @ W[g]."""
    return _stacked(call, call.saved("self"), 1)


@rule("BaddbmmBackward0", 2)
def baddbmm(call: Call) -> Outer | None:
    """y[g] = bias[g] + a[g] @ W[g]."""
    return _stacked(call, call.saved("batch1"), call.saved("alpha"))


def _stacked(call: Call, a: Tensor, factor: float) -> Outer | None:
    layout = call.by.layout
    if not isinstance(layout, Regular) or layout.dim != 1 or call.only_nobodys:
        return None
    groups, n = call.shape[0], layout.n
    apart = lambda x: x.unflatten(1, (-1, n, layout.block)).permute(2, 0, 1, 3, 4).reshape(n * groups, -1, x.shape[-1])
    return Outer(apart(a), scaled(apart(call.delta), factor), call.shape, turned=True, groups=groups)


@rule("BaddbmmBackward0", 0)
def baddbmm_bias(call: Call) -> Scale | None:
    """One bias for each group."""
    layout = call.by.layout
    if not isinstance(layout, Regular) or layout.dim != 1 or call.only_nobodys or len(call.shape) != 3:
        return None
    if call.shape[1] != 1 or call.shape[0] != call.delta.shape[0]:
        return None
    delta = call.delta.unflatten(1, (-1, layout.n, layout.block)).permute(2, 1, 3, 0, 4).flatten(1, 2)
    return Scale(scaled(delta, call.saved("beta")), None, call.shape, over=(call.shape[0], call.shape[2]))
