"""`ggn`: exact products with the Gauss–Newton matrix, and solves by conjugate gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.curvature import vectors
from unsum.curvature.conjugate import conjugate_gradients
from unsum.curvature.curvature import Curvature
from unsum.curvature.likelihood import Likelihood
from unsum.curvature.second_backward import check_adjoint, outputs_of, refusing_missing
from unsum.curvature.trace import DRAWS, refuse_interaction, trace_of
from unsum.errors import EmptyData, NoGradient, OptionError, UnsupportedError
from unsum.examples import Examples, refuse_not_finite
from unsum.fingerprint import changed, fingerprint, of_others
from unsum.gathered import Gradients
from unsum.gradients import gradients
from unsum.kernels.product import wide
from unsum.reducers import Norms
from unsum.seams.tensors import version_of

log = logging.getLogger("unsum")


class GaussNewton:
    """The mean over samples of Jᵀ H J, where J is the derivative of the model's outputs in its parameters and H the
    second derivative of the loss in the outputs. The result of `unsum.curvature.ggn`; it stores only the model and the
    data.

    Examples:
        >>> model, data = nn.Linear(2, 1, bias=False), [torch.eye(2)[k] for k in (0, 0, 0, 1)]
        >>> import unsum
        >>> h = ggn(model, data, unsum.curvature.gaussian(lambda model, x: model(x)))
        >>> h
        Gauss–Newton matrix of 2 parameters (gaussian, 4 samples)
        >>> h.matvec({"weight": torch.ones(1, 2)})["weight"]  # x xᵀ, averaged
        tensor([[0.7500, 0.2500]])
    """

    def __init__(
        self, model: nn.Module, examples: Examples, likelihood: Likelihood, params: str | Sequence[str], seed: int
    ) -> None:
        self._model, self._examples, self._likelihood = model, examples, likelihood
        self._params, self._seed = params, seed
        with gradients(model, Norms(), params=params, grad=False) as chosen:
            self._parameters = {name: chosen.parameters[name] for name in chosen}
            self._of_model = chosen.names.parameters
        if not self._parameters:
            raise OptionError("ggn: no parameters are trained (requires_grad=False, or params= chooses none)")
        self._shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._fingerprints = {name: fingerprint(p) for name, p in self._parameters.items()}
        self._others = of_others(self._of_model, self._parameters.values())
        self._versions = self._now()
        self._in_rows = True  # whether several vectors may go through one backward
        self._is_checked = False  # whether a second backward gives what the first one does
        self.n, self._outputs = self._count()
        self._trace: float | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The names of the parameters that the matrix covers."""
        return self._parameters

    def __repr__(self) -> str:
        size = sum(p.numel() * (2 if p.is_complex() else 1) for p in self._parameters.values())
        return f"Gauss–Newton matrix of {size:,} parameters ({self._likelihood.name}, {self.n} samples)"

    def matvec(self, v: Any) -> dict[str, Tensor]:
        """The matrix times v: {parameter: tensor}, or {parameter: (m, *shape)} for m vectors at once."""
        given = self._read(v, "matvec")
        return given.back({name: value.to(given.parts[name].dtype) for name, value in self._times(given.parts).items()})

    def solve(
        self,
        v: Any,
        damping: float | None = None,
        precondition: Curvature | None = None,
        tol: float = 1e-6,
        max_iter: int = 500,
    ) -> dict[str, Tensor]:
        """(matrix + damping)⁻¹ v by conjugate gradients.

        The iteration stops when its estimate of the residual |v − (matrix + damping) x| is at most `tol`·|v|. At the
        end the residual is computed again; if it is above 10 times that, a warning gives its size and the reason.

        Args:
            v: {parameter: tensor}, {parameter: (m, *shape)}, or the `g` of `unsum.gradients`.
            damping: A number; None for `h.damping`.
            precondition: A K-FAC, EK-FAC or diagonal of the same parameters, which reduces the number of steps.
            tol: The largest residual, relative to v.
            max_iter: The largest number of steps.
        """
        damping = self.damping if damping is None else damping
        if not vectors.is_number(damping) or not 0 <= damping < float("inf"):
            raise OptionError(f"damping={damping!r}: a number, 0 or more, or None")
        if not vectors.is_number(tol) or tol <= 0:
            raise OptionError(f"tol={tol!r}: a number above 0")
        if isinstance(max_iter, bool) or not isinstance(max_iter, int) or max_iter < 1:
            raise OptionError(f"max_iter={max_iter!r}: a whole number, 1 or more")
        if precondition is not None and not isinstance(precondition, Curvature):
            raise OptionError(f"precondition takes what unsum.curvature.fit gives, got {type(precondition).__name__}")
        given = self._read(v, "solve")
        refuse_not_finite(vectors.dots(given.parts, given.parts), 0, "solve", "right side")
        self.refuse_changed(self._parameters)
        if precondition is not None:
            precondition.refuse_changed(self._parameters, self._of_model)
        apply = lambda parts: {name: value + damping * parts[name] for name, value in self._times(parts).items()}
        before = None if precondition is None else (lambda parts: precondition.solve(parts, damping=damping or None))
        right = {name: part.to(wide(part.dtype)) for name, part in given.parts.items()}
        found = conjugate_gradients(apply, right, before, tol=tol, max_iter=max_iter)
        return given.back({name: value.to(given.parts[name].dtype) for name, value in found.items()})

    @property
    def damping(self) -> float:
        """The default damping: the trace divided by the number of eigenvalues that can differ from zero,
        min(parameters, outputs)."""
        size = sum(p.numel() * (2 if p.is_complex() else 1) for p in self._parameters.values())
        return self.trace / max(min(size, self._outputs), 1)

    @property
    def trace(self) -> float:
        """The trace of the matrix: exact where a sample has few outputs, otherwise estimated from drawn labels."""
        if self._trace is None:
            self.refuse_changed()
            batches = self._examples.shown("trace")
            found = trace_of(self._model, batches, self._likelihood, self._params, self._seed)
            self._trace = (self._probed_trace() if found is None else found) / self.n
        return self._trace

    def _probed_trace(self) -> float:
        """n times the trace: the mean of vᵀ M v over vectors of random signs."""
        generator = torch.Generator().manual_seed(self._seed)
        sign = lambda p: torch.randint(0, 2, (DRAWS, *p.shape), generator=generator).to(p) * 2 - 1
        probes = {name: sign(p.detach()) for name, p in self._parameters.items()}
        return float(vectors.dots(probes, self._times(probes)).mean()) * self.n

    # ---- the data -------------------------------------------------------------------------------------------------

    def _now(self) -> list[tuple[int, int]]:
        others = [self._of_model[name] for name in self._others]
        return [(p.data_ptr(), version_of(p)) for p in (*self._parameters.values(), *others)]

    def refuse_changed(
        self, parameters: Mapping[str, Tensor] | None = None, of_model: Mapping[str, Tensor] | None = None
    ) -> None:
        """Raise if these are not the parameters that the matrix was made with, or (without any) if its own have been
        written to. The others of the model, frozen ones, are compared as well."""
        if parameters is None:
            off = self._now() != self._versions
        else:
            off = bool(changed(self._fingerprints, parameters) or (of_model and changed(self._others, of_model)))
        if off:
            raise UnsupportedError(
                "the parameters changed since the Gauss–Newton matrix was made: it would be that of another model.\n"
                "  make it again: unsum.curvature.ggn(...)"
            )

    def _read(self, v: Any, what: str) -> vectors.Vectors:
        if isinstance(v, Gradients):
            self.refuse_changed(v.parameters, v.names.parameters)
        return vectors.read(v, self._shapes, what=what)

    def _count(self) -> tuple[int, int]:
        n = outputs = 0
        for k, batch in enumerate(self._examples.shown("outputs")):
            with torch.no_grad():
                found = outputs_of(self._model, self._likelihood, batch)
                if (
                    k == 0
                    and len(found)
                    and not torch.equal(found, again := outputs_of(self._model, self._likelihood, batch))
                ):
                    off = float((found - again).abs().max() / found.abs().max().clamp_min(1e-30))
                    if not off < 1e-3:
                        raise UnsupportedError(
                            "the model's outputs differ between two calls with the same batch (dropout?): there is no "
                            "one matrix.\n  call model.eval() first"
                        )
            self._likelihood.refuse_not_finite(found, n)
            if not n and len(found):
                refuse_interaction(self._model, self._likelihood, batch, self._params)
            n += len(found)
            places = self._likelihood.places(found, batch) if found.dim() > 1 else found.new_ones(len(found))
            outputs += int((places != 0).sum()) * (found.shape[-1] if found.dim() > 1 else 1)
        if not n:
            raise EmptyData(
                "ggn: the data is empty.", write="unsum.curvature.ggn(model, TensorDataset(x, y), likelihood)"
            )
        return n, outputs

    # ---- products -------------------------------------------------------------------------------------------------

    def _times(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.refuse_changed()
        total: dict[str, Tensor] = {}
        for batch in self._examples:
            for name, value in self._times_batch(batch, parts).items():
                value = value.to(wide(value.dtype))  # a sum over many batches
                total[name] = total[name] + value if name in total else value
        return {name: value / self.n for name, value in total.items()}

    def _times_batch(self, batch: Any, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names, parameters = list(self._parameters), list(self._parameters.values())
        with torch.enable_grad():
            outputs = outputs_of(self._model, self._likelihood, batch)
            if not outputs.requires_grad:
                raise NoGradient(
                    "ggn: the outputs do not depend on parameters that are trained (no_grad, or all are frozen).",
                    write=[
                        "model.requires_grad_(True)",
                        "unsum.curvature.categorical(lambda m, b: m(b[0]))  # no no_grad",
                    ],
                )
            back = torch.zeros_like(outputs, requires_grad=True)
            with refusing_missing(outputs):
                pulled = torch.autograd.grad(outputs, parameters, back, create_graph=True, allow_unused=True)
        if not self._is_checked:
            check_adjoint(outputs, parameters, pulled, back, self._seed)
            self._is_checked = True
        reached = [
            (name, p, g)
            for name, p, g in zip(names, parameters, pulled, strict=True)
            if g is not None and g.requires_grad
        ]
        found = {name: torch.zeros_like(value) for name, value in parts.items()}
        if not reached:
            return found
        pushed = self._rows([g for _, _, g in reached], [back], [parts[name] for name, _, _ in reached])[0]
        if not len(pushed):
            return found
        at = outputs.detach().to(wide(outputs.dtype))
        curved = torch.stack([self._likelihood.hessian(at, batch, row.to(at.dtype)) for row in pushed])
        products = self._rows([outputs], [p for _, p, _ in reached], [curved])
        for (name, _, _), value in zip(reached, products, strict=True):
            found[name] = value
        return found

    def _rows(self, roots: list[Tensor], leaves: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
        """The derivative of `roots` in `leaves`, times each row: all rows in one backward where that can be."""
        m = len(rows[0])
        if not m:
            return [leaf.new_zeros(0, *leaf.shape) for leaf in leaves]
        like = [row.to(root.dtype) for row, root in zip(rows, roots, strict=True)]
        if self._in_rows and m > 1:
            try:
                found = torch.autograd.grad(
                    roots, leaves, like, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
                return [
                    leaf.new_zeros(m, *leaf.shape) if g is None else _dense(g)
                    for g, leaf in zip(found, leaves, strict=True)
                ]
            except RuntimeError as error:
                log.info("unsum: ggn takes one vector after the other (%s)", str(error).splitlines()[0])
                self._in_rows = False
        each = []
        with refusing_missing(roots[0]):
            for k in range(m):
                found = torch.autograd.grad(
                    roots, leaves, [row[k] for row in like], retain_graph=True, allow_unused=True
                )
                each.append(
                    [torch.zeros_like(leaf) if g is None else _dense(g) for g, leaf in zip(found, leaves, strict=True)]
                )
        return [torch.stack(column) for column in zip(*each, strict=True)]


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()


def ggn(
    model: nn.Module,
    data: Any,
    likelihood: Likelihood,
    *,
    params: str | Sequence[str] = "*",
    batch_size: int = 32,
    seed: int = 0,
) -> GaussNewton:
    """The exact Gauss–Newton matrix of a model on data, as products and solves: `h.matvec(v)`, `h.solve(v)`.

    Args:
        model: Any module whose operations have a second derivative; attention uses torch's math kernel.
        data: A DataLoader or another iterable of batches, or a Dataset or a list of examples; it is read in every
            product.
        likelihood: `categorical(forward)`, `gaussian(forward)`, or `convex(forward, loss)` for any loss that is convex
            in the outputs.
        params: A glob of parameter names, or a list of globs: only these parameters.
        batch_size: Examples per batch, where `data` gives single examples.
        seed: The seed for the labels from which the trace is estimated where samples have many outputs.

    Examples:
        >>> model, data = nn.Linear(3, 2), [(torch.randn(3), torch.tensor(k % 2)) for k in range(8)]
        >>> import unsum
        >>> h = ggn(model, data, unsum.curvature.categorical(lambda model, batch: model(batch[0])))
        >>> v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        >>> x = h.solve(v, damping=0.1)
        >>> torch.allclose(h.matvec(x)["bias"] + 0.1 * x["bias"], v["bias"], atol=1e-4)
        True
    """
    if not isinstance(likelihood, Likelihood):
        raise OptionError(
            f"likelihood={likelihood!r}: unsum.curvature.categorical(forward), .gaussian(forward) or "
            ".convex(forward, loss)"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OptionError(f"seed={seed!r}: a whole number, 0 or more")
    examples = Examples(data, batch_size=batch_size, what="ggn")
    if examples.is_once:
        raise OptionError(
            "ggn: the data is read in every product, and an iterator can be read only once.\n"
            "  give a list, a Dataset or a DataLoader: list(data)"
        )
    return GaussNewton(model, examples, likelihood, params, seed)
