"""The gradient of each sample: norms, outliers, tokens, similarity, coverage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unsum.check import LossFunction, losses_by_sample
from unsum.errors import InteractionError, NotAvailable, WrongCount
from unsum.gathered import Gradients
from unsum.gradients import gradients
from unsum.learn.state import set_aside
from unsum.reducers import Norms, Project, TokenNorms
from unsum.report.data import BySample, Similarity
from unsum.report.flags import outliers
from unsum.report.observe import differentiate, trainable
from unsum.samples import Ids, Samples, read
from unsum.sites import Names

COMPARED = 256  # samples: more make no readable matrix
HELD = 200_000_000  # numbers that may be held at once for exact inner products
PROJECTED = 8  # k of the projection where they may not


def by_sample(
    model: nn.Module, loss_fn: LossFunction, batch: Any, *, samples: Samples | Tensor | None, n: int, elements: int
) -> BySample:
    """All that is known of each sample's gradient. Samples that interact are told, and then each has its part."""
    exact = elements <= HELD and n <= COMPARED
    try:
        g, interacting = _run(model, loss_fn, batch, samples, exact, "error"), None
    except InteractionError as error:
        interacting = str(error).splitlines()[0]
        g = _run(model, loss_fn, batch, samples, exact, "exact")
    if len(g.ids) != n:
        raise WrongCount(
            f"loss_fn returned {n} losses for {len(g.ids)} samples.",
            write='unsum.report(model, loss_fn, batch, "report.html", samples=unsum.dim(1))  # where the samples are',
        )
    norms = g[Norms].norms().double().cpu()
    far, limit = outliers(norms)
    tokens, left_out = _tokens(g[TokenNorms])
    rows = list(range(n)) if n <= COMPARED else _spread(n, far)
    coverage, ruled = g.coverage_rows()
    by_parameter = {name: squares.double().sqrt().cpu() for name, squares in g[Norms].by_parameter().items()}
    return BySample(
        g.ids.tolist(), norms, by_parameter, far, limit, tokens, left_out, _similarity(g, rows, exact), coverage, ruled,
        interacting,
    )  # fmt: skip


def _run(
    model: nn.Module, loss_fn: LossFunction, batch: Any, samples: Samples | Tensor | None, exact: bool, interacting: Any
) -> Gradients:
    reducers: list[Any] = [Norms(), TokenNorms(_longest(read(samples)))]
    if not exact:
        reducers.append(Project(k=PROJECTED, seed=0))
    block = gradients(model, *reducers, samples=samples, interacting=interacting, keep=exact, grad=False)
    with set_aside(model, strict=False), block as g:
        losses = losses_by_sample(loss_fn, model, batch)
        differentiate(losses.sum(), trainable(Names(model)))
    return g


def _longest(samples: Samples) -> int | None:
    """Of documents in rows: the positions of the longest, which the input's shape does not tell."""
    if not isinstance(samples, Ids) or (samples.given.dim() == 1 and not samples.flat):
        return None
    own = samples.given[samples.given >= 0]
    return int(own.bincount().max()) if len(own) else None


def _tokens(reducer: TokenNorms) -> tuple[Tensor | None, list[str]]:
    try:
        norms = reducer.norms().double().cpu()
    except NotAvailable:
        return None, []
    return (norms, reducer.left_out) if norms.shape[1] > 1 else (None, [])


def _spread(n: int, far: list[int]) -> list[int]:
    """Some samples of many: the outliers, and others evenly over the batch."""
    chosen = far[: COMPARED // 4]
    evenly = [k for k in torch.linspace(0, n - 1, COMPARED).long().unique().tolist() if k not in set(chosen)]
    return sorted(chosen + evenly[: COMPARED - len(chosen)])


def _similarity(g: Gradients, rows: list[int], exact: bool) -> Similarity:
    if exact:
        products = g.dot(g).cpu()
        how = "exact: inner products of the gradients over all parameters, from their factors"
    else:
        matrix = g[Project].matrix()[rows].double().cpu()
        products = matrix @ matrix.T
        how = (
            f"estimated: inner products of random projections (unsum.Project, {PROJECTED}·{PROJECTED} numbers for each "
            "parameter), since the factors of so large a batch are not held"
        )
    lengths = products.diagonal().clamp_min(0).sqrt()
    cosines = products / (lengths[:, None] * lengths[None, :])
    return Similarity(rows, cosines.clamp(-1, 1), how)
