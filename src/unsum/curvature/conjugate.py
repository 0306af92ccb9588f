"""Conjugate gradients for several right sides at once, each with steps of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from unsum.curvature.vectors import dots
from unsum.progress import progress

Parts = Mapping[str, Tensor]  # {parameter: (m, *shape)}
Apply = Callable[[Parts], Parts]
_ROUNDING = 10  # times tol: where the residual that is left, computed anew, is above that, it is said


def conjugate_gradients(
    apply: Apply, right: Parts, precondition: Apply | None, *, tol: float, max_iter: int
) -> dict[str, Tensor]:
    """x with apply(x) = right, to a residual of at most tol·|right| in every row; a warning says where that was not
    reached. `apply` is symmetric and positive, and so is `precondition`, which comes near its inverse."""
    near: Apply = precondition or (lambda parts: dict(parts))
    x = {name: torch.zeros_like(value) for name, value in right.items()}
    residual = {name: value.clone() for name, value in right.items()}
    size = dots(right, right).sqrt()
    wanted = tol * size
    step = dict(near(residual))
    slope = dots(residual, step)
    going = size > 0
    is_stuck = torch.zeros_like(going)  # by a direction without curvature: there is no way on
    steps = 0
    shown: progress[None] = progress(max_iter, "conjugate gradients")
    with shown as line:
        for _ in range(max_iter):
            if not bool(going.any()):
                break
            steps += 1
            moved = apply(step)
            curved = dots(step, moved)
            is_stuck |= going & (curved <= 0)
            going &= curved > 0
            length = torch.where(going, slope / curved.where(going, torch.ones_like(curved)), 0.0)
            x = _added(x, step, length)
            residual = _added(residual, moved, -length)
            left = dots(residual, residual).sqrt()
            going &= left > wanted
            turned = near(residual)
            new = dots(residual, turned)
            again = torch.where(going, new / slope.where(slope != 0, torch.ones_like(slope)), 0.0)
            step, slope = _added(turned, step, again), new
            line.step()
    if bool((size > 0).any()):  # what the steps kept track of has rounding of its own
        residual = _added(right, apply(x), -torch.ones_like(size))
    left = dots(residual, residual).sqrt()
    short = (left > _ROUNDING * wanted) | ~left.isfinite()
    if bool(short.any()):
        worst = float((left / size.clamp_min(1e-300))[short].max())
        way = "more damping, a preconditioner (precondition=c) or max_iter= gets further"
        if bool(is_stuck.any()):
            way = "a direction has no curvature above 0: more damping, or a loss that is convex in the outputs"
        elif steps < max_iter:
            way = (
                "products are not exact enough for more: a larger tol=, more damping, or a model in float32 or float64"
            )
        warnings.warn(
            f"conjugate gradients stopped early: after {steps} steps the residual of {int(short.sum())} of "
            f"{len(short)} right sides is above tol={tol:g} (the largest is {worst:.2g} of its right side).\n  {way}",
            stacklevel=3,
        )
    return x


def _added(one: Parts, other: Parts, factor: Tensor) -> dict[str, Tensor]:
    """one + factor · other, row by row."""
    return {
        name: value + factor.to(value).view(-1, *[1] * (value.dim() - 1)) * other[name] for name, value in one.items()
    }
