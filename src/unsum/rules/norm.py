"""Norm layers: their scale and shift."""

from __future__ import annotations

import torch
from torch import Tensor

from unsum.factors.scale import Scale
from unsum.graph.nodes import Node
from unsum.rules.registry import Call, rule


def _normalized(node: Node, shape: tuple[int, ...]) -> int:
    return len(node._saved_normalized_shape)


@rule("NativeLayerNormBackward0", 1, _normalized, rows=("input", "result1", "result2"))
def layer_norm_scale(call: Call) -> Scale:
    """y = x̂·w + b, x̂ from what the node has saved."""
    x, mean, rstd = (call.take(call.saved(name)) for name in ("input", "result1", "result2"))
    return Scale(call.take(call.delta), lambda: _normalised(x, mean, rstd), call.shape)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean)·rstd, where mean and rstd have one number for each position."""
    if not x.is_cuda:
        return ((x - mean) * rstd).to(x.dtype)
    # One pass instead of three: every position is a channel to this kernel.
    rows, stat = mean.numel(), torch.promote_types(x.dtype, torch.float32)
    return torch.batch_norm_elemt(
        x.reshape(1, rows, -1), None, None, mean.reshape(rows).to(stat), rstd.reshape(rows).to(stat), 0.0
    ).view(x.shape)


@rule("NativeLayerNormBackward0", 2, _normalized, rows=())
def layer_norm_shift(call: Call) -> Scale:
    """The shift is added to every position."""
    return Scale(call.take(call.delta), None, call.shape)


@rule("FusedRmsNormBackward0", 1, _normalized, rows=("input", "result1"))
def rms_norm_scale(call: Call) -> Scale:
    """y = x·rstd·w."""
    x, rstd = call.take(call.saved("input")), call.take(call.saved("result1"))
    return Scale(call.take(call.delta), lambda: (x * rstd).to(x.dtype), call.shape)


def _per_sample(node: Node, shape: tuple[int, ...]) -> int:
    return len(node._input_metadata[0].shape) - 1


@rule("NativeGroupNormBackward0", 1, _per_sample, rows=("input", "result1", "result2"))
def group_norm_scale(call: Call) -> Scale:
    """y = x̂·w + b with one w per channel."""
    x, mean, rstd = (call.take(call.saved(name)) for name in ("input", "result1", "result2"))

    def normalised() -> Tensor:
        grouped = x.reshape(*mean.shape, -1)
        return ((grouped - mean[..., None]) * rstd[..., None]).view(x.shape).to(x.dtype)

    return Scale(call.take(call.delta), normalised, call.shape, over=_channels(call))


@rule("NativeGroupNormBackward0", 2, _per_sample, rows=())
def group_norm_shift(call: Call) -> Scale:
    """One shift per channel."""
    return Scale(call.take(call.delta), None, call.shape, over=_channels(call))


@rule("NativeBatchNormBackward0", 1, _per_sample)
def batch_norm_scale(call: Call) -> Scale | None:
    """In evaluation: y = (x - mean)·rstd·w + b with the running statistics."""
    if call.saved("training"):
        return None
    x, over = call.take(call.saved("input")), _channels(call)
    mean, rstd = (
        call.saved("running_mean").view(over),
        (call.saved("running_var") + call.saved("eps")).rsqrt().view(over),
    )
    return Scale(call.take(call.delta), lambda: ((x - mean) * rstd).to(x.dtype), call.shape, over=over)


@rule("NativeBatchNormBackward0", 2, _per_sample)
def batch_norm_shift(call: Call) -> Scale | None:
    """In evaluation: one shift per channel."""
    if call.saved("training"):
        return None
    return Scale(call.take(call.delta), None, call.shape, over=_channels(call))


def _channels(call: Call) -> tuple[int, ...]:
    """A value per channel beside (channels, *space)."""
    return (*call.shape, *(1 for _ in call.delta.shape[2:]))
