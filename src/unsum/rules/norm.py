"""Norm layers: their scale and shift."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from unsum.factors.scale import Scale
from unsum.graph.nodes import Node
from unsum.kernels import fused
from unsum.rules.registry import Call, Once, left, rule
from unsum.seams.nodes import outputs_of, saved_of, saved_or


def _normalized(node: Node, shape: tuple[int, ...]) -> int:
    return len(saved_of(node, "normalized_shape"))


@rule("NativeLayerNormBackward0", 1, _normalized, rows=("input", "result1", "result2"))
def layer_norm_scale(call: Call) -> Scale:
    """y = x̂·w + b, x̂ from what the node has saved."""
    delta, x, mean, rstd = map(call.take, (call.delta, *(call.saved(name) for name in ("input", "result1", "result2"))))
    if not call.only_nobodys:  # scale and shift in one pass
        call.memo["sums"] = Once(
            lambda: [s.view(-1, *delta.shape[2:]) for s in fused.scale_and_shift(*_flat(delta, x, mean, rstd))]
        )
        call.memo["tokens"] = Once(
            lambda: [
                s.view(delta.shape[:2])
                for s in fused.normalised_token_sq_norms(*[g.flatten(0, 1) for g in _flat(delta, x, mean, rstd)])
            ]
        )
    return Scale(
        delta, lambda: _normalised(x, mean, rstd), call.shape, summed=left(call, "sums", 0),
        token_squares=left(call, "tokens", 0), normalised=(x, mean, rstd),
    )  # fmt: skip


def _flat(delta: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """(n, t, d) twice, (n, t) twice."""
    rows = (delta, x) if delta.dim() == 3 else (delta.flatten(2), x.flatten(2))
    return *rows, mean.flatten(1), rstd.flatten(1)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean)·rstd, where mean and rstd have one number for each position."""
    return ((x - mean) * rstd).to(x.dtype)


@rule("NativeLayerNormBackward0", 2, _normalized, rows=())
def layer_norm_shift(call: Call) -> Scale:
    """The shift is added to every position."""
    return Scale(
        call.take(call.delta), None, call.shape, summed=left(call, "sums", 1), token_squares=left(call, "tokens", 1)
    )


@rule("FusedRmsNormBackward0", 1, _normalized, rows=("input", "result1"))
def rms_norm_scale(call: Call) -> Scale:
    """y = x·rstd·w."""
    x, rstd = call.take(call.saved("input")), call.take(call.saved("result1"))
    return Scale(call.take(call.delta), lambda: (x * rstd).to(x.dtype), call.shape)


def _per_sample(node: Node, shape: tuple[int, ...]) -> int:
    return len(outputs_of(node)[0].shape) - 1


@rule("NativeGroupNormBackward0", 1, _per_sample, rows=("input", "result1", "result2"))
def group_norm_scale(call: Call) -> Scale:
    """y = x̂·w + b with one w per channel."""
    x, mean, rstd = (call.take(call.saved(name)) for name in ("input", "result1", "result2"))

    def normalised() -> Tensor:
        grouped = x.reshape(*mean.shape, prod(x.shape[2:]) // mean.shape[2])
        return ((grouped - mean[..., None]) * rstd[..., None]).view(x.shape).to(x.dtype)

    return Scale(call.take(call.delta), normalised, call.shape, over=_channels(call))


@rule("NativeGroupNormBackward0", 2, _per_sample, rows=())
def group_norm_shift(call: Call) -> Scale:
    """One shift per channel."""
    return Scale(call.take(call.delta), None, call.shape, over=_channels(call))


@rule("NativeBatchNormLegitNoTrainingBackward0", 1, _per_sample)  # as torch.compile takes it down
@rule("CudnnBatchNormBackward0", 1, _per_sample)  # of float32 and float16 on a GPU
@rule("MiopenBatchNormBackward0", 1, _per_sample)
@rule("NativeBatchNormBackward0", 1, _per_sample)
def batch_norm_scale(call: Call) -> Scale | None:
    """In evaluation: y = (x - mean)·rstd·w + b with the running statistics."""
    if saved_or(call.node, "training", False):
        return None
    delta, x, over = call.take(call.delta), call.take(call.saved("input")), _channels(call)
    eps = call.saved("eps" if call.node.name().startswith("Native") else "epsilon")
    mean, variance = call.saved("running_mean"), call.saved("running_var")
    if call.is_kept:  # copies: training changes them in place, and no version says so
        mean, variance = torch.stack([mean, variance])
    rows = [rows for tensor in (delta, x) if (rows := _channels_last(tensor)) is not None]
    if not call.only_nobodys and len(rows) == 2 and fused.serves("channel_sums", *rows, mean, variance):
        call.memo["sums"] = Once(
            lambda: [s.view(len(s), *over) for s in fused.channel_sums(*rows, mean, variance, eps)]
        )

    def normalised() -> Tensor:
        return ((x - mean.view(over)) * (variance + eps).rsqrt().view(over)).to(x.dtype)

    return Scale(delta, normalised, call.shape, over=over, summed=left(call, "sums", 0))


def _channels_last(tensor: Tensor) -> Tensor | None:
    """(n, positions, channels) of (n, t, channels, *space), where that takes no copy."""
    moved = tensor.movedim(2, -1)
    try:
        return moved.view(len(moved), -1, moved.shape[-1])
    except RuntimeError:
        return None


@rule("NativeBatchNormLegitNoTrainingBackward0", 2, _per_sample)  # as torch.compile takes it down
@rule("CudnnBatchNormBackward0", 2, _per_sample)
@rule("MiopenBatchNormBackward0", 2, _per_sample)
@rule("NativeBatchNormBackward0", 2, _per_sample)
def batch_norm_shift(call: Call) -> Scale | None:
    """In evaluation: one shift per channel."""
    if saved_or(call.node, "training", False):
        return None
    return Scale(call.take(call.delta), None, call.shape, over=_channels(call), summed=left(call, "sums", 1))


def _channels(call: Call) -> tuple[int, ...]:
    """A value per channel beside (channels, *space)."""
    return (*call.shape, *(1 for _ in call.delta.shape[2:]))
