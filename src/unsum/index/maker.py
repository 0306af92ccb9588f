"""Makes the rows of one batch: its gradients, projected while backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum.chance import Chance
from unsum.check import LossFunction
from unsum.choice import exactly
from unsum.curvature import Curvature, load
from unsum.errors import NotAvailable, OptionError, UnsumError, UnsupportedError
from unsum.examples import First, SamplesOfBatch, alone, losses_of, refuse_not_finite, refuse_other_number, samples_of
from unsum.fingerprint import content, fingerprint, of_others
from unsum.gradients import gradients
from unsum.index import store
from unsum.index.reducers import TokenRows
from unsum.index.sketch import Leading, Projected, Sketch
from unsum.reducers import Norms
from unsum.seams.sharding import local, whole

Params = str | Sequence[str] | None


class Maker:
    """A model, its losses, and how its gradients become rows."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, samples: SamplesOfBatch, sketch: Sketch, params: Params
    ) -> None:
        self.model, self._loss_fn, self._samples, self.sketch = model, loss_fn, samples, sketch
        self._params: str | Sequence[str] = "*" if params is None else params
        self.parameters = parameters_of(model, self._params)

    @property
    def has_documents(self) -> bool:
        """Whether somebody says where the samples are: a batch may then have more or fewer of them than examples."""
        return self._samples is not None

    def rows(self, batch: Any, what: str, first: First = 0) -> Tensor:
        """(n, K) of a batch whose first example has this number; with rows for tokens (n, t, K)."""
        reducer = self.sketch.rows()
        samples = samples_of(self._samples, batch)
        with alone(what), _unsynchronised(self.model), gradients(
            self.model, reducer, samples=samples, params=self._params, grad=False
        ):  # fmt: skip
            losses = losses_of(
                self._loss_fn, self.model, batch, first, what, are_samples=samples is None, are_checked=False
            )
            if not len(losses):
                return torch.zeros(0, self.sketch.width)
            losses.sum().backward()
        if isinstance(reducer, TokenRows):
            reducer.refuse_left_out()
        found = reducer.matrix()
        refuse_not_finite(losses.detach(), first, what, "loss")
        refuse_other_number(len(losses), len(found), what)
        refuse_not_finite(found.flatten(1).sum(1), first, what, "gradient")
        return found

    def first_rows(self, batch: Any, what: str, first: First = 0) -> Tensor:
        """The same, of a batch that stands for all: raises if the model draws random numbers, as dropout does."""
        chance = Chance()
        found = self.rows(batch, what, first)
        if chance.was_drawn():
            raise OptionError(
                f"{what}: the model or its loss draws random numbers (dropout in train mode?): the same example "
                "has another gradient each time.",
                write="model.eval()",
            )
        return found

    def leave_out(self, batch: Any, first: First = 0) -> None:
        """With rows for tokens: find the parameters that have no gradient for each position, and leave them out."""
        samples = samples_of(self._samples, batch)
        reducer = self.sketch.rows()
        if not isinstance(reducer, TokenRows):
            return
        if isinstance(where := sample_maps.read(samples), sample_maps.Ids) and (where.flat or where.given.dim() > 1):
            raise UnsupportedError(
                "build(tokens=True): packed documents have no rows for tokens.\n  build rows for documents, without "
                "tokens=True"
            )
        with alone("build"), _unsynchronised(self.model), gradients(
            self.model, reducer, samples=samples, params=self._params, grad=False
        ):  # fmt: skip
            losses_of(self._loss_fn, self.model, batch, first, "build", are_samples=samples is None).sum().backward()
        self.keep([name for name in self.sketch.columns if name not in reducer.left_out])

    def keep(self, names: Iterable[str]) -> None:
        """Only these parameters have columns."""
        if isinstance(self.sketch, Projected):
            self.sketch = self.sketch.of(names)
        if not self.sketch.columns:
            raise NotAvailable(
                "tokens=True: no parameter has a gradient for each position of the input.",
                write="unsum.index.build(model, loss_fn, data, path)  # without tokens=True",
            )

    def audit(self, batch: Any) -> float:
        """How far the sum of the samples' gradients is from plain autograd's, on one batch, relative to it. Where
        parameters are spread over processes, each looks at the whole of them, and all at the same batch."""
        samples = samples_of(self._samples, batch)
        with _unsynchronised(self.model), gradients(
            self.model, samples=samples, params=self._params, grad=False
        ) as g:  # fmt: skip
            losses = losses_of(self._loss_fn, self.model, batch, 0, "build", are_samples=samples is None)
            losses.sum().backward(retain_graph=True)
        wanted = torch.autograd.grad(losses.sum(), list(self.parameters.values()), allow_unused=True)
        off = size = 0.0
        for name, grad in zip(self.parameters, wanted, strict=True):
            if grad is not None:
                grad = grad.to_dense() if grad.layout != torch.strided else grad
                off += _size(g[name].sum() + g[name].shared() - grad) ** 2
                size += _size(grad) ** 2
        return float((off / size) ** 0.5) if size else 0.0

    def marks(self) -> dict[str, Any]:
        """The fingerprints of the parameters, and one of everything else that the model holds."""
        with whole(self.model):
            chosen = {name: fingerprint(_gathered(p)) for name, p in self.parameters.items()}
            every = (*self.model.named_parameters(), *self.model.named_buffers())
            named = {name.removeprefix("module."): _gathered(value) for name, value in every}  # as DDP has it
            rest = of_others({n: value for n, value in named.items() if n not in chosen}, self.parameters.values())
        return {"parameters": chosen, "rest": content(rest)}


def sketch_of(
    model: nn.Module, k: int, seed: int, sketches: int, curvature: Curvature | None, params: Params, *, tokens: bool
) -> tuple[Sketch, Params]:
    """How the gradients of a model become rows, and which parameters they are of."""
    if curvature is not None:
        if params is not None:
            raise OptionError("params= and curvature=: the curvature says which parameters it covers; give one of them")
        names = [exactly(name) for name in curvature.parameters]
        chosen = parameters_of(model, names)
        curvature.refuse_changed(chosen)
        if others := [name for name, p in chosen.items() if p.is_complex()]:
            raise UnsupportedError(f"build(curvature=...): {others[0]} is complex; build by random projections")
        return Leading(curvature, k), names
    chosen = parameters_of(model, "*" if params is None else params)
    return Projected(chosen, k, seed, sketches, tokens=tokens), params


def sketch_from(folder: Path, model: nn.Module, plan: Mapping[str, Any]) -> tuple[Sketch, Curvature | None]:
    """How queries of an index become rows."""
    told = plan["sketch"]
    if told["kind"] == "eigenbasis":
        curvature = curvature_at(folder, told)
        return Leading(curvature, told["k"]), curvature
    chosen = parameters_of(model, [exactly(name) for name in plan["columns"]])
    kept = {name: chosen[name] for name in plan["columns"]}
    return Projected(kept, told["k"], told["seed"], told["sketches"]), None


def curvature_at(folder: Path, told: Mapping[str, Any]) -> Curvature:
    """The curvature beside the rows of an index, which says this of it."""
    path = folder / store.CURVATURE
    remedy = "unsum.index.build(...), called again, writes it anew"
    try:
        found = load(path)
    except (*store.DAMAGED, RuntimeError, UnsumError) as error:
        raise OptionError(f"{path}: damaged or missing ({str(error).splitlines()[0]}).\n  {remedy}") from error
    if Leading(found, told["k"]).told() != told:
        raise OptionError(f"{path}: not the curvature that the index was built with.\n  {remedy}")
    return found


def parameters_of(model: nn.Module, params: str | Sequence[str]) -> dict[str, Tensor]:
    """The parameters that are chosen, by their first names."""
    with gradients(model, Norms(), params=params, grad=False) as chosen:
        found: dict[str, Tensor] = {name: chosen.parameters[name] for name in chosen}
    if not found:
        raise OptionError("no parameters are trained (requires_grad=False, or params= chooses none)")
    return found


@contextlib.contextmanager
def _unsynchronised(model: Any) -> Iterator[None]:
    """DDP waits for others in every backward, and in a forward for their buffers, unless it is told not to. Here
    each process has batches of its own, and perhaps none."""
    if not hasattr(model, "no_sync"):
        yield
        return
    before = getattr(model, "require_forward_param_sync", None)
    with model.no_sync():
        if before is not None:
            model.require_forward_param_sync = False
        try:
            yield
        finally:
            if before is not None:
                model.require_forward_param_sync = before


def _size(value: Tensor) -> float:
    return float((torch.view_as_real(value) if value.is_complex() else value).double().norm())


def _gathered(parameter: Tensor) -> Tensor:
    """The whole of a parameter; every process must come here where it is spread over processes."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else local(parameter)
