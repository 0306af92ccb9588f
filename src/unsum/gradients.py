"""`gradients`: per-sample gradients of any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.block import GradientsBlock
from unsum.errors import BadSamples, OptionError
from unsum.gathered import Gradients
from unsum.opened import Opened
from unsum.reducers import Reducer
from unsum.step.backward import Options


def mark_samples(tensor: Tensor) -> Tensor:
    """Tell the open `gradients` blocks that dimension 0 of this tensor is the samples, and return the tensor. Without
    an open block, or with gradients off, it only returns the tensor.

    Examples:
        >>> import torch
        >>> weight = nn.Parameter(torch.ones(2))
        >>> holder = nn.ParameterList([weight])
        >>> with gradients(holder) as g:
        ...     losses = mark_samples(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) @ weight)
        ...     losses.sum().backward()
        >>> g["0"].per_sample()
        tensor([[1., 2.],
                [3., 4.]])
    """
    blocks = [block for block in seams.here() if isinstance(block, GradientsBlock)]
    if isinstance(tensor, Tensor) and (not blocks or not torch.is_grad_enabled()):
        return tensor
    if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
        what = "was not computed from parameters" if isinstance(tensor, Tensor) else f"is a {type(tensor).__name__}"
        raise BadSamples(
            f"mark_samples names a tensor that was computed from parameters; this one {what}.",
            write="unsum.mark_samples(losses).sum().backward()  # losses of shape (n,), one for each sample",
        )
    for block in blocks:
        block.mark(tensor)
    return tensor


def gradients(
    model: nn.Module,
    *reducers: Reducer,
    samples: sample_maps.Samples | Tensor | None = None,
    engine: Literal["auto", "graph"] = "auto",
    interacting: Literal["error", "exact"] = "error",
    verify: bool = False,
    loss_reduction: Literal["mean"] | None = None,
    params: str | Sequence[str] = "*",
    grad: bool = True,
    scaler: Any = None,
    keep: bool = False,
    strict: bool = False,
) -> Opened[Gradients]:
    """Per-sample gradients of every parameter of any model, from the graph that `backward` walks.

    Args:
        model: Any module that is called inside the block.
        reducers: Objects such as `unsum.Norms()`: they consume the gradients while backward runs, and no factors are
            kept.
        samples: Where the samples are: dimension 0 (None), `unsum.dim(k)`, `unsum.packed(cu_seqlens)`, or ids of shape
            (rows,) or (rows, positions); -1 for rows that belong to no sample.
        engine: "auto" uses a rule where there is one that agrees with torch on this model, and reuses what it learned
            about the graph. "graph" calls the graph's own nodes again for each sample in every backward, without rules.
        interacting: "error" raises `InteractionError` if samples interact inside the model; "exact" accepts it and
            gives the derivative of each sample's part of the loss.
        verify: True runs the model a few more times without gradients, with other samples' inputs, and raises an error
            if samples interact without a trace in the graph (detached statistics of the batch, mixup).
        loss_reduction: "mean" says that the loss is a mean over samples; the gradients are then those of each sample's
            own loss.
        params: A glob of parameter names, or a list of globs: only these parameters.
        grad: False leaves every `.grad` unchanged.
        scaler: A GradScaler; gradients are divided by its scale.
        keep: True keeps the factors although there are reducers.
        strict: True raises an error if a rule disagrees with torch. False warns, and calls the node again for each
            sample instead.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1, bias=False)
        >>> with gradients(model) as g:
        ...     model(torch.eye(3)).sum().backward()
        >>> g["weight"].per_sample().shape
        torch.Size([3, 1, 3])
        >>> g.norms()
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    for reducer in reducers:
        if not isinstance(reducer, Reducer) or isinstance(reducer, type):
            raise OptionError(
                f"{reducer!r} is not a reducer: give an object with begin, take and end, such as unsum.Norms()"
            )
    if len({id(reducer) for reducer in reducers}) < len(reducers):
        raise OptionError("the same reducer is given twice: make one for each place")
    for option, value in (("verify", verify), ("grad", grad), ("keep", keep), ("strict", strict)):
        if not isinstance(value, bool):
            raise OptionError(f"{option}={value!r}: True or False")
    if engine not in ("auto", "graph"):
        raise OptionError(f"engine={engine!r}: choose 'auto' or 'graph'")
    if interacting not in ("error", "exact"):
        raise OptionError(f"interacting={interacting!r}: choose 'error' or 'exact'")
    if loss_reduction not in (None, "mean"):
        raise OptionError(f"loss_reduction={loss_reduction!r}: None or 'mean'")
    block = GradientsBlock(
        model,
        Options(
            reducers=reducers, keep=keep or not reducers, rules=engine == "auto", strict=strict,
            samples=sample_maps.read(samples), exact=interacting == "exact", verify=verify,
            mean=loss_reduction == "mean", params=params, grad=grad, scaler=scaler,
        ),
    )  # fmt: skip
    return Opened(block, "unsum.gradients")
