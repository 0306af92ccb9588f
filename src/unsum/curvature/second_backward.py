"""Derivatives of a backward: whether the operations of a model have one, and an error that names what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from unsum.curvature.likelihood import Likelihood
from unsum.curvature.vectors import real_rows
from unsum.errors import UnsupportedError
from unsum.graph.nodes import is_custom, ordered
from unsum.seams.nodes import outputs_of as metas_of

_MISSING = ("not implemented", "once_differentiable", "double backward", "not differentiable", "twice")  # in messages
_REENTRANT = "use_reentrant"  # torch's own message says what to do
_ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}  # a model in float64 may compute its norms in float32


def outputs_of(model: nn.Module, likelihood: Likelihood, batch: Any) -> Tensor:
    """The outputs, with attention by the math kernel: the other kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return likelihood.outputs(model, batch)


def check_adjoint(
    outputs: Tensor, parameters: Sequence[Tensor], pulled: Sequence[Tensor | None], back: Tensor, seed: int
) -> None:
    """That ⟨u, J v⟩ by a second backward is ⟨Jᵀ u, v⟩ by the first. An operation whose backward cannot be
    differentiated loses its part, most often without a word. u is random; v is Jᵀ u, of norm 1 in every parameter, so
    that in a large model, too, a part that is lost shows."""
    u = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(outputs)
    first = torch.autograd.grad(outputs, parameters, u, retain_graph=True, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.layout != torch.strided else g for g in first]
    norms = [0.0 if g is None else float(torch.linalg.vector_norm(g)) for g in dense]
    linked = [
        (second, g / norm)
        for second, g, norm in zip(pulled, dense, norms, strict=True)
        if second is not None and second.requires_grad and g is not None and norm > 0
    ]
    pushed = None
    if linked:
        with refusing_missing(outputs):
            roots, rows = zip(*linked, strict=True)
            (pushed,) = torch.autograd.grad(roots, back, rows, retain_graph=True, allow_unused=True)
    left = 0.0 if pushed is None else float((real_rows(u[None]) * real_rows(pushed[None])).sum())
    if abs(left - sum(norms)) > _rounding(outputs) * sum(norms):
        raise _no_second_backward(outputs, "what a second backward gives is not what the first one gives")


def _rounding(outputs: Tensor) -> float:
    """Of the least exact dtype through which gradients go: logits in float32 may come from a model in bfloat16."""
    metas = [meta for node in ordered([outputs.grad_fn]) for meta in metas_of(node)]
    dtypes = {outputs.dtype, *(meta.dtype for meta in metas)}
    return max(_ROUNDING.get(dtype.to_real() if dtype.is_complex else dtype, 3e-2) for dtype in dtypes)


@contextmanager
def refusing_missing(outputs: Tensor) -> Iterator[None]:
    """Where an operation has no second derivative, say which."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if _REENTRANT in str(error):
            raise UnsupportedError(
                "ggn needs a second backward, which torch.utils.checkpoint does not have with use_reentrant=True.\n"
                "  checkpoint(..., use_reentrant=False), or no checkpoints for it"
            ) from error
        if not any(part in str(error) for part in _MISSING):
            raise
        raise _no_second_backward(outputs, str(error).splitlines()[0].rstrip(".")) from error


def _no_second_backward(outputs: Tensor, why: str) -> UnsupportedError:
    nodes = [] if outputs.grad_fn is None else ordered([outputs.grad_fn])
    own = ", ".join({node.name(): None for node in nodes if is_custom(node)})
    told = f"; autograd.Functions of one's own in this model: {own}" if own else ""
    return UnsupportedError(
        f"ggn needs a second backward, and an operation of the model has none: {why}{told}.\n"
        "  compute it by plain operations of torch (for attention the math kernel is chosen already)"
    )
