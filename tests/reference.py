"""The truth: plain autograd, one sample at a time, in float64. No hooks, nothing of unsum."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def each_of(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """{parameter: (n, *shape)}: the gradients of these losses, one loss after the other, in the model's own dtype."""
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    rows = []
    for loss in losses:
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        rows.append([g.to_dense() if g.is_sparse else g for g in grads])
    return {name: torch.stack(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def alone(model: nn.Module, losses: Callable[[nn.Module], Iterable[Tensor]]) -> dict[str, Tensor]:
    """{parameter: (n, *shape)}: `losses(model)` gives each sample's part of the loss, in a float64 copy."""
    model = copy.deepcopy(model).double()
    return each_of(model, losses(model))


def per_sample_gradients(model: nn.Module, loss, *batch: Tensor) -> dict[str, Tensor]:
    """{parameter: (n, *shape)}: each sample run alone through a float64 copy. `loss(model, *batch)` is a scalar."""
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    return alone(model, lambda m: (loss(m, *(t[i : i + 1] for t in batch)) for i in range(len(batch[0]))))


def norms_of_all(each: dict[str, Tensor]) -> Tensor:
    """(n,): the norm of each sample's gradient over all parameters, from {parameter: (n, *shape)}."""
    return torch.stack([value.flatten(1).square().sum(1) for value in each.values()]).sum(0).sqrt()


def gradient_of(function, *values: Tensor) -> list[Tensor]:
    """The gradient of a scalar function at these values, in float64, each value a leaf of its own."""
    leaves = [v.detach().double().requires_grad_() for v in values]
    return list(torch.autograd.grad(function(*leaves), leaves))
