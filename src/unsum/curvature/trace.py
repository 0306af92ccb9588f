"""The trace of a Gauss–Newton matrix, from norms of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.curvature.likelihood import Convex, Likelihood
from unsum.curvature.second_backward import outputs_of
from unsum.errors import InteractionError, UnsumError, UnsupportedError
from unsum.examples import alone
from unsum.gradients import gradients
from unsum.kernels.product import wide
from unsum.reducers import Norms

EXACT = 64  # outputs of a sample, up to which the trace is exact; with more it is estimated from labels that are drawn
DRAWS = 8


def trace_of(
    model: nn.Module, batches: Iterable[Any], likelihood: Likelihood, params: str | Sequence[str], seed: int
) -> float | None:
    """The sum over samples of the traces of Jᵀ H J; None where neither roots of H nor drawn labels give it."""
    total = 0.0
    for k, batch in enumerate(batches):
        with torch.no_grad():
            outputs = outputs_of(model, likelihood, batch)
        squares = _Squares(model, likelihood, batch, params)
        if not len(outputs):
            continue
        if outputs[:1].numel() <= EXACT:
            for root in _roots(outputs, likelihood, batch):
                total += squares.of(lambda found, root=root: (found * root).reshape(len(found), -1).sum(1))
        elif isinstance(likelihood, Convex):
            return None
        else:
            for draw in range(DRAWS):
                generator = torch.Generator().manual_seed(seed + DRAWS * k + draw)
                drawn = lambda found, batch=batch, by=generator: likelihood.drawn_losses(found, batch, by)
                total += squares.of(drawn) / DRAWS
    return total


def refuse_interaction(model: nn.Module, likelihood: Likelihood, batch: Any, params: str | Sequence[str]) -> None:
    """Raise if a sample's outputs depend on the other samples: what is not a sum over samples has no mean over them."""
    squares = _Squares(model, likelihood, batch, params)
    try:
        with alone("ggn"):
            squares.of(lambda found: found.reshape(len(found), -1).nan_to_num().sum(1))
    except InteractionError:
        raise
    except UnsumError:
        return  # it is not known whether they do; products need no gradient of each sample


class _Squares:
    """Squared norms of gradients, of one batch."""

    def __init__(self, model: nn.Module, likelihood: Likelihood, batch: Any, params: str | Sequence[str]) -> None:
        self._model, self._likelihood, self._batch, self._params = model, likelihood, batch, params

    def of(self, losses: Callable[..., Tensor]) -> float:
        """Σ over samples, of the gradients of these losses."""
        norms = Norms()
        with gradients(self._model, norms, params=self._params, grad=False):
            losses(outputs_of(self._model, self._likelihood, self._batch)).sum().backward()
        return float(norms.sq_norms().double().sum())


def _roots(outputs: Tensor, likelihood: Likelihood, batch: Any) -> list[Tensor]:
    """Vectors of the outputs' shape of which Σ r rᵀ is the second derivative, in every sample."""
    n, size = len(outputs), outputs[:1].numel()
    is_any = isinstance(likelihood, Convex)
    wider = outputs.to(wide(outputs.dtype)) if is_any else outputs.double()  # a loss of the user's may mind
    columns = []
    for k in range(size):
        one = wider.new_zeros(n, size)
        one[:, k] = 1
        columns.append(likelihood.hessian(wider, batch, one.view(outputs.shape)).reshape(n, size))
    matrix = torch.stack(columns, -1).double()
    values, directions = torch.linalg.eigh((matrix + matrix.mT) / 2)
    if is_any and values.numel() and bool((values < -1e-4 * values.abs().amax()).any()):
        raise UnsupportedError(
            "the loss is not convex in the outputs (its second derivative has a negative eigenvalue), so it has no "
            "Gauss–Newton matrix.",
            write="unsum.curvature.categorical(forward)  # or .gaussian(forward): likelihoods whose loss is convex",
        )
    roots = directions * values.clamp_min(0).sqrt()[:, None]
    return [root.reshape(outputs.shape).to(outputs) for root in roots.unbind(-1)]
