"""The truth: plain autograd, one sample at a time, in float64. No hooks, nothing of unsum."""

from __future__ import annotations

import copy

import torch
from torch import nn


def per_sample_gradients(model: nn.Module, loss, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """{parameter: (n, *shape)}: each sample run alone through a float64 copy. `loss(model, *batch)` is a scalar."""
    model = copy.deepcopy(model).double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    rows = []
    for i in range(len(batch[0])):
        alone = [t[i : i + 1] for t in batch]
        grads = torch.autograd.grad(loss(model, *alone), parameters, materialize_grads=True)
        rows.append([g.to_dense() if g.is_sparse else g for g in grads])
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(names)}


def gradient_of(function, *values: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of a scalar function at these values, in float64, each value a leaf of its own."""
    leaves = [v.detach().double().requires_grad_() for v in values]
    return list(torch.autograd.grad(function(*leaves), leaves))
