"""`check`: are the gradients per sample those of plain autograd, on this very model?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import EmptyData, InteractionError, NoGradient, OptionError, UnsupportedError, WrongCount
from unsum.gradients import gradients
from unsum.learn.probe import mixing
from unsum.learn.state import State
from unsum.nested import leaves, put
from unsum.notebook import element, table
from unsum.samples import Dim, Samples
from unsum.seams.modules import without_hooks

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Row:
    """One parameter: how far its gradients per sample are from plain autograd's."""

    name: str
    error: float  # relative to the largest gradient of a sample, over all parameters


@dataclass(frozen=True, repr=False)
class Checked:
    """The result of `unsum.check`. It prints as a table, and shows itself as one in a notebook.

    Examples:
        >>> import torch, unsum
        >>> found = unsum.check(torch.nn.Linear(3, 1), lambda m, x: m(x).square().sum(1), torch.randn(4, 3))
        >>> found.ok, found.worst.error < 1e-4
        (True, True)
    """

    rows: list[Row]
    tolerance: float
    interacting: str | None = None  # why a sample alone is not a sample in the batch
    table: str = ""

    @property
    def ok(self) -> bool:
        """Whether every parameter is right and no samples interact."""
        return self.interacting is None and all(row.error <= self.tolerance for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The row of the parameter with the largest error."""
        return max(self.rows, key=lambda row: row.error, default=None)

    def __str__(self) -> str:
        lines = ["ok" if self.ok else "NOT ok"]
        if self.interacting is not None:
            lines.append(interaction_told(self.interacting))
        for row in sorted(self.rows, key=lambda row: -row.error):
            lines.append(f"  {'ok   ' if row.error <= self.tolerance else 'WRONG'} {row.error:.1e}  {row.name}")
        return "\n".join(lines + ([self.table] if self.table else []))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        word = '<b class="good">ok</b>' if self.ok else '<b class="bad">NOT ok</b>'
        told = f"gradients per sample of {len(self.rows):,} parameter tensors, compared with plain autograd"
        why = (
            "" if self.interacting is None else f'<div class="note">{escape(interaction_told(self.interacting))}</div>'
        )
        rows = [
            (row.name, f"{row.error:.1e}" if row.error else "0", "ok" if row.error <= self.tolerance else "WRONG")
            for row in sorted(self.rows, key=lambda row: -row.error)
        ]
        note = (
            "Error: the largest distance of a sample's gradient from autograd's, divided by the norm of the largest "
            f"gradient of a sample. Up to {self.tolerance:.0e} is rounding."
        )
        how = f"<details><summary>where each parameter meets data</summary><pre>{escape(self.table)}</pre></details>"
        return element(
            f'<div class="title">{word}: {told}</div>{why}{table(["parameter", "error", ""], rows, right=[1])}'
            f'<div class="note">{note}</div>{how if self.table else ""}'
        )


def check(model: nn.Module, loss_fn: LossFunction, batch: Any, *, samples: Samples | Tensor | None = None) -> Checked:
    """Compare per-sample gradients with plain autograd, which differentiates each sample's loss separately.

    The model does not change: `.grad`, buffers and random numbers are restored.

    Args:
        model: Any module.
        loss_fn: `loss_fn(model, batch)` returns one loss for each sample, (n,).
        batch: What the loss function takes. If all its tensors can be sliced at dimension 0, `check` also runs it with
            some samples' rows replaced by others', and with each sample alone: if a loss then differs, samples
            interact.
        samples: Where the samples are, as in `unsum.gradients`.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> batch = torch.randn(4, 3), torch.randn(4, 1)
        >>> print(check(model, lambda m, b: (m(b[0]) - b[1]).square().sum(1), batch).ok)
        True
    """
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        raise OptionError(
            f"check takes a model, then a loss function; got {type(model).__name__} and {type(loss_fn).__name__}.",
            write="unsum.check(model, loss_fn, batch)",
        )
    grads = {name: p.grad for name, p in model.named_parameters()}
    state = State(model)
    try:
        for parameter in model.parameters():
            parameter.grad = None
        return _check(model, loss_fn, batch, samples, state)
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name]
        state.restore()


def _check(
    model: nn.Module, loss_fn: LossFunction, batch: Any, samples: Samples | Tensor | None, state: State
) -> Checked:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NoGradient(
            "there is nothing to check: every parameter is frozen (requires_grad=False).",
            at=type(model).__name__,
            write="model.requires_grad_(True)",
        )
    interacting = None
    try:
        with gradients(model, samples=samples) as g:
            losses = losses_by_sample(loss_fn, model, batch)
            losses.sum().backward(retain_graph=True)
    except InteractionError as error:
        interacting = str(error).splitlines()[0]
        state.restore()
        with gradients(model, samples=samples, interacting="exact") as g:
            losses = losses_by_sample(loss_fn, model, batch)
            losses.sum().backward(retain_graph=True)
    if not len(losses):
        raise EmptyData("there is nothing to check: the batch has no samples.", write="batch = next(iter(loader))")
    if len(g.ids) != len(losses):
        raise WrongCount(
            f"loss_fn returned {len(losses)} losses for {len(g.ids)} samples.",
            write=[f"losses.view({len(g.ids)}, -1).sum(1)  # one loss for each sample",
                   "unsum.check(model, loss_fn, batch, samples=ids)  # the sample of each row"],
        )  # fmt: skip
    names, parameters = zip(
        *((name, dict(model.named_parameters(remove_duplicate=False))[name]) for name in g), strict=True
    )
    truth = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
    largest = max(float(sum(_square(t) for t in row)) ** 0.5 for row in truth) or 1.0
    rows = []
    for i, name in enumerate(names):
        ours = g[name].per_sample()
        off = max(float((ours[k] - _dense(row[i], ours[k])).norm()) for k, row in enumerate(truth))
        rows.append(Row(name, off / largest))
    interacting = interacting or _mixing(model, loss_fn, batch, losses.detach(), state)
    precise = all(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    return Checked(rows, 1e-9 if precise else 1e-4, interacting, g.coverage())


def interaction_told(why: str) -> str:
    """That samples interact, said once: some reasons begin with it."""
    return why if why.startswith("samples interact") else f"samples interact: {why}"


_INPUTS = 'inputs = {name: value for name, value in batch.items() if name != "labels"}'
_OF_CLASSES = (
    _INPUTS,
    'return torch.nn.functional.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")',
)
_OF_TOKENS = (
    _INPUTS,
    'logits, labels = model(**inputs).logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]',
    'return torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100).sum(1)',
)


def not_by_sample(what: str, losses: Any, batch: Any = None) -> WrongCount:
    """The error for something else than one loss for each sample."""
    is_whole = not isinstance(losses, Tensor) or losses.dim() == 0
    if is_whole and isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):  # as of transformers
        got = "a single number" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        return WrongCount(
            f"{what} returns one loss for each of the samples, of shape (n,); got {got}. What a model computes from "
            "labels is one number for the whole batch.",
            write="\n         ".join(_OF_TOKENS if batch["labels"].dim() > 1 else _OF_CLASSES),
        )
    if not isinstance(losses, Tensor):
        got, write = f"a {type(losses).__name__}", "torch.stack(losses)"
    elif losses.dim():
        got, write = f"shape {tuple(losses.shape)}", "losses.flatten(1).sum(1)"
    else:
        got, write = "shape (), a single number", 'torch.nn.functional.cross_entropy(model(x), y, reduction="none")'
    return WrongCount(
        f"{what} returns one loss for each of the samples, of shape (n,); got {got}.",
        write=f"return {write}  # (n,)",
    )


def losses_by_sample(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Tensor:
    """What `loss_fn` gives, if that is one loss for each sample."""
    if not callable(loss_fn):
        raise OptionError(
            f"loss_fn is a {type(loss_fn).__name__}: expected a function of the model and the batch, before the batch.",
            write="def loss_fn(model, batch): return losses  # (n,): one for each sample",
        )
    try:
        losses = loss_fn(model, batch)
    except TypeError as error:
        if isinstance(loss_fn, nn.Module) or str(getattr(loss_fn, "__module__", "")).startswith("torch"):
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise OptionError(
                f"loss_fn(model, batch) failed: {name} was called with the model and the batch.",
                write=f"lambda model, batch: {name}(model(batch[0]), batch[1], reduction='none')",
            ) from error
        error.add_note("loss_fn(model, batch) failed: unsum calls it with the model and the batch")
        raise
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise not_by_sample("loss_fn(model, batch)", losses, batch)
    return losses


def _square(grad: Tensor | None) -> Tensor | float:
    return 0.0 if grad is None else _dense(grad, grad).abs().square().sum()


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    return grad.to_dense() if grad.layout != torch.strided else grad


def _mixing(model: nn.Module, loss_fn: LossFunction, batch: Any, losses: Tensor, state: State) -> str | None:
    """Whether a sample's loss depends on the others; None too where that cannot be tried."""
    tensors = list(leaves(batch))
    n = len(losses)
    if not tensors or any(t.dim() == 0 or t.shape[0] != n for _, t in tensors):
        return None

    def run(args: Any, kwargs: Any) -> Tensor:
        state.restore()
        return losses_by_sample(loss_fn, without_hooks(model), *args)

    try:
        found, _ = mixing(run, (batch,), {}, losses, Dim(0).owners, n)
    except UnsupportedError:
        found = {}
    for told in found.values():
        return told.replace("output", "loss_fn's losses")
    with torch.no_grad():
        run((batch,), {})
        again = losses_by_sample(loss_fn, without_hooks(model), batch)  # with the random numbers that come next
        rounding = 1e-9 if losses.dtype == torch.float64 else 1e-3
        if not torch.allclose(again, losses, rtol=rounding, atol=rounding, equal_nan=True):
            return None  # the model draws random numbers: nothing to compare
        for k in range(n):
            try:
                loss = run((put(batch, {path: t[k : k + 1] for path, t in tensors}),), {})
            except Exception as error:
                return f"sample {k} cannot be run alone: {error}"
            if not torch.allclose(loss[0], losses[k], rtol=10 * rounding, atol=10 * rounding, equal_nan=True):
                return f"sample {k} has another loss alone than in the batch"
    return None
