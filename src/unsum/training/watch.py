"""`watch`: a record of every step of a training run, or of every k-th."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum.errors import OptionError
from unsum.reducers import Norms
from unsum.sites import Names
from unsum.step.backward import Options
from unsum.training import updates
from unsum.training.division import Division
from unsum.training.ids import Ids
from unsum.training.outliers import Outliers
from unsum.training.recorder import Watch
from unsum.training.sinks import Sink, Sinks


def watch(
    model: nn.Module,
    *misplaced: Any,
    every: int = 1,
    to: str | os.PathLike[str] | Sink | Sequence[str | os.PathLike[str] | Sink] | None = None,
    optimizer: Any = None,
    layers: bool = True,
    samples: sample_maps.Samples | Tensor | None = None,
    params: str | Sequence[str] = "*",
    loss_reduction: Literal["mean"] | None = None,
    accumulation: int | None = None,
    scaler: Any = None,
    interacting: Literal["error", "exact"] = "error",
    ids: str | Callable[[Any], Sequence[int | str]] | None = None,
    text: str | Callable[[Any], Sequence[str]] | None = None,
    threshold: float = 5.0,
    window: int = 512,
    history: int = 10_000,
) -> Watch:
    """Record every step of a training run, or every k-th: losses, per-sample gradient norms, outliers, the gradient
    noise scale, statistics of every layer, and the place of the first value that is not finite. Gradients are the
    same as without `watch`, up to rounding.

    Args:
        model: Any module; also wrapped (DDP) or compiled.
        every: Watch every k-th step; the others cost nothing.
        to: Where records go: a path (`run.jsonl`, `run.parquet`), a function of a record, or a list of them.
            `unsum.sinks` has TensorBoard, Weights & Biases, MLflow, Trackio and the console.
        optimizer: If given, one or a list, each layer's record has the size of the optimizer's update over that of its
            weights. Costs a copy of the parameters during the optimizer's step.
        layers: False records no activations and no gradients at layers' outputs; norms of parameters are still
            recorded. The same holds for a compiled model. On a GPU, every eighth record has gradients at outputs.
        samples: Where the samples are, as in `unsum.gradients`.
        params: A glob of parameter names, or a list of globs: only these parameters.
        loss_reduction: "mean" says that each micro-batch's loss is a mean over its samples: norms are then those of
            each sample's own loss.
        accumulation: Each loss was divided by this number of micro-batches before its backward, which is taken out.
        scaler: A GradScaler; gradients are divided by its scale.
        interacting: "error" raises `InteractionError` in the first step if samples interact (batch norm in training);
            a later step that unsum refuses has no norms, and a warning says why. "exact" records the gradient of each
            sample's part of the loss.
        ids: How to find the samples' ids in a batch: a key, an attribute, or a function of the batch. Used by
            `watch.loader(loader)` and `watch.note(batch)`. Without it, the keys "id", "ids", "idx" and "index" are
            tried; otherwise ids are row numbers of the step.
        text: How to find the samples' texts, in the same way; records of outliers then contain them.
        threshold: How far an outlier is from the others (`unsum.training.outliers` states the rule).
        window: How many samples' norms the rule looks at.
        history: How many records `watch.history` keeps.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 1)
        >>> w = watch(model, every=2)
        >>> for _ in range(4):
        ...     with w:
        ...         model(torch.ones(4, 3)).sum().backward()
        >>> [record.step for record in w.history]
        [0, 2]
    """
    if misplaced:
        raise OptionError(
            f"watch takes the model alone without a name; got a {type(misplaced[0]).__name__}, too.",
            write="unsum.watch(model, optimizer=optimizer)  # every option by its name",
        )
    numbers = {"every": every, "window": window, "history": history}
    if accumulation is not None:
        numbers["accumulation"] = accumulation
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"watch: {name}={value!r}: a whole number, 1 or more")
    if not isinstance(threshold, int | float) or not threshold > 0:
        raise OptionError(f"watch: threshold={threshold!r}: a positive number")
    if not isinstance(layers, bool):
        raise OptionError(f"watch: layers={layers!r}: True or False; params= chooses parameters")
    if interacting not in ("error", "exact"):
        raise OptionError(f"watch: interacting={interacting!r}: choose 'error' or 'exact'")
    if loss_reduction not in (None, "mean"):
        raise OptionError(f"watch: loss_reduction={loss_reduction!r}: None or 'mean'")
    Names(model)  # what is no module shows here
    division = Division(scaler)
    division.by_micro_batches = accumulation or False
    options = Options(
        reducers=(Norms(),), keep=False, rules=True, strict=False, samples=sample_maps.read(samples),
        exact=interacting == "exact", verify=False, mean=loss_reduction == "mean", params=params, grad=True,
        scaler=division,
    )  # fmt: skip
    return Watch(
        model, options, every=every, sinks=Sinks(to), optimizers=updates.read(optimizer), layers=layers,
        ids=Ids(ids, text), outliers=Outliers(threshold, window), history=history,
    )  # fmt: skip
