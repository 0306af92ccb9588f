"""`ggn`: exact products with the Gauss–Newton matrix, and solves by conjugate gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from unsum.curvature import vectors
from unsum.curvature.conjugate import conjugate_gradients
from unsum.curvature.curvature import Curvature
from unsum.curvature.likelihood import Convex, Likelihood
from unsum.errors import OptionError, SamplesError, UnsupportedError
from unsum.examples import Examples
from unsum.gradients import gradients
from unsum.graph.nodes import is_custom, ordered
from unsum.reducers import Norms
from unsum.seams.tensors import version_of

log = logging.getLogger("unsum")

_EXACT = 64  # outputs of a sample, up to which the trace is exact; with more it is estimated from labels that are drawn
_DRAWS = 8
_MISSING = ("not implemented", "once_differentiable", "double backward", "not differentiable", "twice")  # in messages


class GaussNewton:
    """The mean over samples of Jᵀ H J, where J is the derivative of the model's outputs in its parameters and H the
    second derivative of the loss in the outputs. What `unsum.curvature.ggn` gives; nothing is stored but the model and
    the data.

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
        if not self._parameters:
            raise OptionError("ggn: no parameters are trained (requires_grad=False, or params= chooses none)")
        self._shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._versions = self._now()
        self._in_rows = True  # whether several vectors may go through one backward
        self._is_checked = False  # whether a second backward gives what the first one does
        self.n, self._outputs = self._count()
        self._trace: float | None = None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that the matrix is about."""
        return self._parameters

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self._parameters.values())
        return f"Gauss–Newton matrix of {size:,} parameters ({self._likelihood.name}, {self.n} samples)"

    def matvec(self, v: Any) -> dict[str, Tensor]:
        """The matrix times v: {parameter: tensor}, or {parameter: (m, *shape)} for m vectors at once."""
        given = vectors.read(v, self._shapes, what="matvec")
        return given.back(self._times(given.parts))

    def solve(
        self,
        v: Any,
        damping: float | None = None,
        precondition: Curvature | None = None,
        tol: float = 1e-6,
        max_iter: int = 500,
    ) -> dict[str, Tensor]:
        """(matrix + damping)⁻¹ v by conjugate gradients.

        They stop where the residual |v − (matrix + damping) x| is at most `tol`·|v|; where `max_iter` steps do not get
        there, a warning says how far they got.

        Args:
            v: {parameter: tensor}, {parameter: (m, *shape)}, or what `unsum.gradients` gives.
            damping: A number; None for `h.damping`.
            precondition: A K-FAC, EK-FAC or diagonal of the same parameters: fewer steps.
            tol: How small the residual gets, relative to v.
            max_iter: Steps at most.
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
        given = vectors.read(v, self._shapes, what="solve")
        if precondition is not None:
            precondition.refuse_changed(self._parameters)
        apply = lambda parts: {name: value + damping * parts[name] for name, value in self._times(parts).items()}
        before = None if precondition is None else (lambda parts: precondition.solve(parts, damping=damping or None))
        return given.back(conjugate_gradients(apply, given.parts, before, tol=tol, max_iter=max_iter))

    @property
    def damping(self) -> float:
        """The default: the trace over the number of eigenvalues that may not be zero, min(parameters, outputs)."""
        size = sum(p.numel() for p in self._parameters.values())
        return self.trace / max(min(size, self._outputs), 1)

    @property
    def trace(self) -> float:
        """Of the matrix: exact where a sample has few outputs, else from labels that are drawn."""
        if self._trace is None:
            self._trace = self._find_trace()
        return self._trace

    # ---- the data -------------------------------------------------------------------------------------------------

    def _now(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), version_of(p)) for p in self._parameters.values()]

    def _refuse_changed(self) -> None:
        if self._now() != self._versions:
            raise UnsupportedError(
                "the parameters changed since the Gauss–Newton matrix was made: it would be that of another model.\n"
                "  make it again: unsum.curvature.ggn(...)"
            )

    def _count(self) -> tuple[int, int]:
        n = outputs = 0
        for k, batch in enumerate(self._examples.shown("outputs")):
            with torch.no_grad():
                found = self._outputs_of(batch)
                if k == 0 and len(found) and not torch.equal(found, again := self._outputs_of(batch)):
                    off = float((found - again).abs().max() / found.abs().max().clamp_min(1e-30))
                    if not off < 1e-3:
                        raise UnsupportedError(
                            "the model's outputs differ between two calls with the same batch (dropout?): there is no "
                            "one matrix.\n  call model.eval() first"
                        )
            if not bool(found.isfinite().all()):
                raise SamplesError(
                    f"ggn: outputs of example {n} or one of the {len(found) - 1} after it are not finite"
                )
            n += len(found)
            places = self._likelihood.places(found, batch) if found.dim() > 1 else found.new_ones(len(found))
            outputs += int((places != 0).sum()) * (found.shape[-1] if found.dim() > 1 else 1)
        if not n:
            raise SamplesError("ggn: the data is empty")
        return n, outputs

    def _outputs_of(self, batch: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
            return self._likelihood.outputs(self._model, batch)

    # ---- products -------------------------------------------------------------------------------------------------

    def _times(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._refuse_changed()
        total: dict[str, Tensor] = {}
        for batch in self._examples:
            for name, value in self._times_batch(batch, parts).items():
                total[name] = total[name] + value if name in total else value
        return {name: value / self.n for name, value in total.items()}

    def _times_batch(self, batch: Any, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names, parameters = list(self._parameters), list(self._parameters.values())
        with torch.enable_grad():
            outputs = self._outputs_of(batch)
            if not outputs.requires_grad:
                raise SamplesError("ggn: the outputs do not depend on parameters that are trained (no_grad?)")
            back = torch.zeros_like(outputs, requires_grad=True)
            with _refusing(outputs):
                pulled = torch.autograd.grad(outputs, parameters, back, create_graph=True, allow_unused=True)
        self._check_adjoint(outputs, pulled, back)
        reached = [
            (name, p, g)
            for name, p, g in zip(names, parameters, pulled, strict=True)
            if g is not None and g.requires_grad
        ]
        found = {name: torch.zeros_like(value) for name, value in parts.items()}
        if not reached:
            return found
        pushed = self._rows([g for _, _, g in reached], [back], [parts[name] for name, _, _ in reached])[0]
        curved = torch.stack([self._likelihood.hessian(outputs.detach(), batch, row) for row in pushed])
        products = self._rows([outputs], [p for _, p, _ in reached], [curved])
        for (name, _, _), value in zip(reached, products, strict=True):
            found[name] = value
        return found

    def _check_adjoint(self, outputs: Tensor, pulled: Sequence[Tensor | None], back: Tensor) -> None:
        """Once: that ⟨u, J v⟩ by a second backward is ⟨Jᵀ u, v⟩ by the first, with random u and v. An operation whose
        backward cannot be differentiated loses its part, most often without a word."""
        if self._is_checked:
            return
        self._is_checked = True
        generator = torch.Generator().manual_seed(self._seed)
        draw = lambda like: torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
        parameters = list(self._parameters.values())
        u, vs = draw(outputs), [draw(p.detach()) for p in parameters]
        first = torch.autograd.grad(outputs, parameters, u, retain_graph=True, allow_unused=True)
        reached = [(g.double(), v.double()) for g, v in zip(first, vs, strict=True) if g is not None]
        linked = [(g, v) for g, v in zip(pulled, vs, strict=True) if g is not None and g.requires_grad]
        pushed = None
        if linked:
            with _refusing(outputs):
                roots, rows = zip(*linked, strict=True)
                (pushed,) = torch.autograd.grad(roots, back, rows, retain_graph=True, allow_unused=True)
        left = 0.0 if pushed is None else float((u.double() * pushed.double()).sum())
        right = sum(float((g * v).sum()) for g, v in reached)
        size = sum(float(g.norm() * v.norm()) for g, v in reached)
        loose = 1e-8 if outputs.dtype == torch.float64 else 1e-4 if outputs.dtype == torch.float32 else 3e-2
        if abs(left - right) > loose * size:
            raise _no_second_backward(outputs, "what a second backward gives is not what the first one gives")

    def _rows(self, roots: list[Tensor], leaves: list[Tensor], rows: list[Tensor]) -> list[Tensor]:
        """The derivative of `roots` in `leaves`, times each row: all rows in one backward where that can be."""
        m = len(rows[0])
        like = [row.to(root.dtype) for row, root in zip(rows, roots, strict=True)]
        if self._in_rows and m > 1:
            try:
                found = torch.autograd.grad(
                    roots, leaves, like, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
                return [
                    leaf.new_zeros(m, *leaf.shape) if g is None else g for g, leaf in zip(found, leaves, strict=True)
                ]
            except RuntimeError as error:
                log.info("unsum: ggn takes one vector after the other (%s)", str(error).splitlines()[0])
                self._in_rows = False
        each = []
        with _refusing(roots[0]):
            for k in range(m):
                found = torch.autograd.grad(
                    roots, leaves, [row[k] for row in like], retain_graph=True, allow_unused=True
                )
                each.append([torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)])
        return [torch.stack(column) for column in zip(*each, strict=True)]

    # ---- the trace ------------------------------------------------------------------------------------------------

    def _find_trace(self) -> float:
        total = 0.0
        for k, batch in enumerate(self._examples.shown("trace")):
            with torch.no_grad():
                outputs = self._outputs_of(batch)
            if outputs[:1].numel() <= _EXACT:
                roots = self._roots(outputs, batch)
                for root in roots:
                    total += self._squares(batch, lambda found, root=root: (found * root).flatten(1).sum(1))
            elif isinstance(self._likelihood, Convex):
                return self._probed_trace()
            else:
                for draw in range(_DRAWS):
                    generator = torch.Generator().manual_seed(self._seed + _DRAWS * k + draw)
                    drawn = lambda found, batch=batch, by=generator: self._likelihood.drawn_losses(found, batch, by)
                    total += self._squares(batch, drawn) / _DRAWS
        return total / self.n

    def _squares(self, batch: Any, losses: Callable[..., Tensor]) -> float:
        """Σ over samples of the squared norms of the gradients of these losses."""
        norms = Norms()
        with gradients(self._model, norms, params=self._params, grad=False):
            losses(self._outputs_of(batch)).sum().backward()
        return float(norms.sq_norms().double().sum())

    def _roots(self, outputs: Tensor, batch: Any) -> list[Tensor]:
        """Vectors of the outputs' shape of which Σ r rᵀ is the second derivative, in every sample."""
        n, size, given = len(outputs), outputs[:1].numel(), outputs
        is_any = isinstance(self._likelihood, Convex)
        outputs = outputs if is_any else outputs.double()  # a loss of the user's may mind
        columns = []
        for k in range(size):
            one = outputs.new_zeros(n, size)
            one[:, k] = 1
            columns.append(self._likelihood.hessian(outputs, batch, one.view(outputs.shape)).reshape(n, size))
        matrix = torch.stack(columns, -1).double()
        values, directions = torch.linalg.eigh((matrix + matrix.mT) / 2)
        if is_any and bool((values < -1e-4 * values.abs().amax()).any()):
            raise UnsupportedError(
                "the loss is not convex in the outputs (its second derivative has a negative eigenvalue): there is no "
                "Gauss–Newton matrix"
            )
        roots = directions * values.clamp_min(0).sqrt()[:, None]
        return [root.view(outputs.shape).to(given) for root in roots.unbind(-1)]

    def _probed_trace(self) -> float:
        """The mean of vᵀ M v over vectors of random signs."""
        generator = torch.Generator().manual_seed(self._seed)
        sign = lambda p: torch.randint(0, 2, (_DRAWS, *p.shape), generator=generator).to(p) * 2 - 1
        probes = {name: sign(p.detach()) for name, p in self._parameters.items()}
        return float(vectors.dots(probes, self._times(probes)).mean())


@contextmanager
def _refusing(outputs: Tensor) -> Iterator[None]:
    """Where an operation has no second derivative, say which."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not any(part in str(error) for part in _MISSING):
            raise
        raise _no_second_backward(outputs, str(error).splitlines()[0]) from error


def _no_second_backward(outputs: Tensor, why: str) -> UnsupportedError:
    nodes = [] if outputs.grad_fn is None else ordered([outputs.grad_fn])
    own = ", ".join({node.name(): None for node in nodes if is_custom(node)})
    told = f"; autograd.Functions of one's own in this model: {own}" if own else ""
    return UnsupportedError(
        f"ggn needs a second backward, and an operation of the model has none: {why}{told}.\n"
        "  compute it by plain operations of torch (for attention the math kernel is chosen already)"
    )


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
        model: Any module whose operations have a second derivative; attention is computed by the math kernel.
        data: A DataLoader or another iterable of batches, or a Dataset or a list of examples; it is read in every
            product.
        likelihood: `categorical(forward)`, `gaussian(forward)`, or `convex(forward, loss)` for any loss that is convex
            in the outputs.
        params: A glob that chooses parameters by name, or a list of globs.
        batch_size: Of examples that are taken together, where `data` gives examples.
        seed: Of the labels from which the trace is estimated where samples have many outputs.

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
    examples = Examples(data, batch_size=batch_size, what="ggn")
    if examples.is_once:
        raise OptionError(
            "ggn: the data is read in every product, and this is an iterator, which gives everything once"
        )
    return GaussNewton(model, examples, likelihood, params, seed)
