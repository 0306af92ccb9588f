"""`fit`: one pass over the data for the sides of Kronecker products, a second one for EK-FAC's eigenvalues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum.check import LossFunction
from unsum.curvature.corrected import Corrected
from unsum.curvature.curvature import KINDS, Curvature, Kind, Origin
from unsum.curvature.likelihood import Likelihood
from unsum.curvature.resumed import Resumed
from unsum.curvature.sums import ParameterSums, Setting, Sums
from unsum.errors import EmptyData, NotFinite, OptionError, WrongCount
from unsum.examples import (
    Examples,
    SamplesOfBatch,
    alone,
    is_loss_function,
    losses_of,
    refuse_not_finite,
    refuse_other_number,
    samples_of,
)
from unsum.fingerprint import fingerprint, of_others
from unsum.gradients import gradients
from unsum.reducers import Norms
from unsum.sites import Names

_LABELS = 1 << 20  # between the seeds of two passes


def fit(
    model: nn.Module,
    loss_fn: LossFunction | None,
    data: Any,
    kind: Kind = "ekfac",
    likelihood: Likelihood | None = None,
    *,
    setting: Setting = "expand",
    params: str | Sequence[str] = "*",
    samples: SamplesOfBatch = None,
    batch_size: int = 32,
    seed: int = 0,
    max_side: int = 8192,
    resume: str | os.PathLike[str] | None = None,
    chunk: int = 100,
) -> Curvature:
    """Fit the curvature of a model on data: K-FAC, EK-FAC or a diagonal, for every trained parameter.

    All quantities are means over samples. A weight whose gradients are sums of outer products (linear layers,
    convolutions, embeddings, experts, tied weights) is one Kronecker block, with its bias as one more column. All other
    parameters have the diagonal; `c.parameters` says which.

    Args:
        model: Any module, usually in eval mode: batch norm in training raises `InteractionError`.
        loss_fn: `loss_fn(model, batch)` returns one loss for each sample, (n,). Not needed with `likelihood`.
        data: A DataLoader or another iterable of batches, or a Dataset or a list of examples.
        kind: "kfac"; "ekfac", whose eigenvalues are second moments of per-sample gradients and which reads the data
            twice; "diagonal".
        likelihood: None uses the gradients of your losses (empirical Fisher); `categorical(forward)` or
            `gaussian(forward)` draws labels from the model instead, one at each position that counts.
        setting: "expand": every position counts as one data point; "reduce": a sample's inputs are averaged and its
            gradients summed over the positions first.
        params: A glob of parameter names, or a list of globs: only these parameters.
        samples: Where the samples are, as in `unsum.gradients`, or a function of the batch.
        batch_size: Examples per batch, where `data` gives single examples.
        seed: The seed for the labels that are drawn.
        max_side: A side of a matrix with more entries than this (a vocabulary) is approximated by its diagonal.
        resume: A file for the state, written after every `chunk` batches; a later call with the same arguments
            continues from there. It is removed when the fit is done.
        chunk: Batches between two writes of that file.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> data = [(torch.randn(4), torch.tensor(k % 2)) for k in range(10)]
        >>> loss = lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1], reduction="none")
        >>> fit(model, loss, data)
        ekfac of 10 samples (empirical, expand): 4 tensors, 4 in Kronecker products, 0 by their diagonal
    """
    _check_options(loss_fn, kind, likelihood, setting, seed, max_side, chunk)
    examples = Examples(data, batch_size=batch_size, what="fit")
    if kind == "ekfac" and examples.is_once:
        raise OptionError(
            "fit: EK-FAC reads the data twice, and an iterator can be read only once.\n"
            "  give a list, a Dataset or a DataLoader, or kind='kfac'"
        )
    if resume is not None and (examples.is_once or examples.is_shuffled):
        raise OptionError("fit(resume=...): the data must come in the same order again: no iterator, no shuffle=True")
    run = _Fit(model, loss_fn, examples, likelihood, params, samples, seed)
    drawn_from = "empirical" if likelihood is None else likelihood.name
    origin = Origin(kind, setting, drawn_from, run.fingerprints, run.others)
    options = {"seed": seed, "max_side": max_side, "batches": examples.batches(), "batch_size": examples.batch_size}
    state = None if resume is None else Resumed(resume, chunk, origin, options)
    sums = Sums(run.biases, kind=kind, setting=setting, max_side=max_side)
    done = 0 if state is None else state.begin(sums)
    run.read(sums, 0, done, None if state is None else lambda batches: state.keep(batches, sums))
    if sums.n == 0:
        raise EmptyData("fit: the data is empty.", write="unsum.curvature.fit(model, loss_fn, TensorDataset(x, y))")
    found = Curvature(origin, sums.n, run.in_order(sums.parameters), sums.paired())
    if kind == "ekfac":
        corrected = Corrected(found.blocks)
        done = 0 if state is None else state.begin_correction(corrected)
        run.read(corrected, 1, done, None if state is None else lambda n: state.keep(n, sums, corrected))
        if corrected.n != sums.n:
            raise WrongCount(
                f"fit: the data had {sums.n} samples when it was read first, and {corrected.n} the second time.",
                write='unsum.curvature.fit(model, loss_fn, list(data), kind="ekfac")  # the same samples every time',
            )
        found = corrected.curvature(found)
    if state is not None:
        state.remove()
    return found


def _check_options(
    loss_fn: Any, kind: Any, likelihood: Any, setting: Any, seed: Any, max_side: Any, chunk: Any
) -> None:
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r}: choose 'ekfac', 'kfac' or 'diagonal'")
    if setting not in ("expand", "reduce"):
        raise OptionError(f"setting={setting!r}: choose 'expand' or 'reduce'")
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise OptionError(
            f"likelihood={likelihood!r}: unsum.curvature.categorical(forward), .gaussian(forward), or None (empirical)"
        )
    if likelihood is None and not is_loss_function(loss_fn):
        raise OptionError("fit needs loss_fn(model, batch), which returns one loss for each sample, or likelihood=")
    for name, value, least in (("max_side", max_side, 1), ("chunk", chunk, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name}={value!r}: a whole number, {least} or more")


class _Fit:
    """The model and its data, read once or twice."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None, examples: Examples, likelihood: Likelihood | None,
        params: str | Sequence[str], samples: SamplesOfBatch, seed: int,
    ) -> None:  # fmt: skip
        self._model, self._loss_fn, self._examples, self._likelihood = model, loss_fn, examples, likelihood
        self._params, self._samples, self._seed = params, samples, seed
        opened = gradients(model, Norms(), params=params, grad=False)
        with opened as chosen:
            names = list(chosen)
            self._parameters = {name: chosen.parameters[name] for name in names}
        if not names:
            raise OptionError("fit: no parameters are trained (requires_grad=False, or params= chooses none)")
        self.fingerprints = {name: fingerprint(p) for name, p in self._parameters.items()}
        self.others = of_others(Names(model).parameters, self._parameters.values())
        self.biases = _biases(names, Names(model))

    def in_order(self, found: Mapping[str, ParameterSums]) -> dict[str, ParameterSums]:
        """In the model's order; those that nothing reached are there."""
        return {name: found.get(name, ParameterSums(tuple(p.shape))) for name, p in self._parameters.items()}

    def read(self, reducer: Any, number: int, done: int, write: Any) -> None:
        """The data, once: the reducer is given the gradients of every sample."""
        first, batches = reducer.n, done
        for batch in self._examples.shown(("curvature", "eigenvalues")[number], done):
            first += self._read_batch(reducer, batch, first, self._seed + number * _LABELS + batches)
            batches += 1
            if write is not None:
                write(batches)

    def _read_batch(self, reducer: Any, batch: Any, first: int, seed: int) -> int:
        samples, before = samples_of(self._samples, batch), reducer.n
        with alone("fit"), gradients(self._model, reducer, samples=samples, params=self._params, grad=False):
            losses = self._losses(batch, first, seed, are_samples=samples is None)
            if not len(losses):
                return 0
            losses.sum().backward()
        if self._likelihood is None or samples is None:  # drawn losses come by row, also of packed documents
            refuse_other_number(len(losses), reducer.n - before, "fit")
        if reducer.finite is not None and not bool(reducer.finite.isfinite()):
            self._name_not_finite(batch, first, seed)
        return int(reducer.n - before)

    def _losses(self, batch: Any, first: int, seed: int, *, are_samples: bool) -> Tensor:
        if self._likelihood is None:
            assert self._loss_fn is not None
            return losses_of(self._loss_fn, self._model, batch, first, "fit", are_samples=are_samples)

        def drawn(model: nn.Module, batch: Any) -> Tensor:
            assert self._likelihood is not None
            outputs = self._likelihood.outputs(model, batch)
            return self._likelihood.drawn_losses(outputs, batch, torch.Generator().manual_seed(seed))

        return losses_of(drawn, self._model, batch, first, "fit", are_samples=are_samples)

    def _name_not_finite(self, batch: Any, first: int, seed: int) -> None:
        norms, samples = Norms(), samples_of(self._samples, batch)
        with gradients(self._model, norms, samples=samples, params=self._params, grad=False):
            self._losses(batch, first, seed, are_samples=samples is None).sum().backward()
        refuse_not_finite(norms.norms(), first, "fit", "gradient")
        raise NotFinite(
            f"fit: a sum over the batch of example {first} is not finite: gradients or inputs are too large.",
            write="unsum.curvature.fit(model.double(), loss_fn, data)",
        )


def _biases(names: Sequence[str], known: Names) -> dict[str, str]:
    """Of each parameter, the one beside it that may be its bias: whether it is, the numbers say. A tied weight has one
    beside any of its names."""
    first = {id(known.parameters[name]): name for name in names}
    found = {}
    for name, parameter in known.parameters.items():
        owner, _, leaf = name.rpartition(".")
        for other in (leaf.replace("weight", "bias"), f"{leaf}_bias"):
            bias = known.parameters.get(f"{owner}.{other}" if owner else other)
            if (
                other != leaf
                and bias is not None
                and {id(bias), id(parameter)} <= first.keys()
                and bias.dim() < parameter.dim()
            ):
                found[first[id(parameter)]] = first[id(bias)]
    return found
