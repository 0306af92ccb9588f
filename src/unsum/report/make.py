"""`report`: runs what is needed, and writes the page."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from unsum.check import Checked, LossFunction, interaction_told
from unsum.check import check as compare
from unsum.destination import writable
from unsum.draw.draw import draw
from unsum.errors import OptionError
from unsum.learn.state import set_aside
from unsum.nested import format_path, leaves
from unsum.progress import progress as Progress
from unsum.report.bysample import by_sample
from unsum.report.data import BySample, Flag, Report, Statistics
from unsum.report.flags import flagged
from unsum.report.observe import in_words, statistics
from unsum.report.page import write
from unsum.report.words import Text, labelled, words
from unsum.samples import Samples
from unsum.seams.tensors import has_late_hooks
from unsum.sites import Names

LONG = 20_000_000  # numbers in all samples' gradients, written out: above, the check is not run unasked
WALKED = 200_000_000  # samples times elements of all that flows, since each sample has a backward: above, likewise
SIZED = 20_000_000  # elements of all that flows: above, the picture does not show the sizes of gradients

T = TypeVar("T")


def report(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    text: Text | None = None,
    ahead: int = 0,
    labels: Sequence[str] | None = None,
    samples: Samples | Tensor | None = None,
    title: str | None = None,
    check: bool | None = None,
    progress: bool | None = None,
) -> Report:
    """Write one self-contained HTML page about a training step: per-sample gradient norms with outliers, tokens and
    similarity, statistics of every layer with flags, the graph, coverage, and the check.

    The model runs as in a training step, and your hooks fire. Afterwards `.grad`, buffers and random numbers are
    restored. A section that cannot be made (samples interact, unsum refuses the model) says why.

    Args:
        model: Any module.
        loss_fn: `loss_fn(model, batch)` returns one loss for each sample, (n,).
        batch: What the loss function takes.
        path: Where to write. Missing folders are created. None: a new file in the system's temporary folder, for
            notebooks, in which the report shows itself.
        text: The tokens, for sequences: a list of strings for each sample, a tokenizer, or a function from a token id
            to a string; the ids are then the first integer tensor (n, t) in the batch.
        ahead: How many positions later the coloured token is. With 1, for models that predict the next token, the
            colour is on the token that is predicted, not on the one that is read.
        labels: A few words about each sample, shown beside it.
        samples: Where the samples are, as in `unsum.gradients`.
        title: The page's heading; the model's class otherwise.
        check: True compares with plain autograd (`unsum.check`), False does not; None compares if the model is small.
        progress: Whether to show progress on standard error; None: only on a terminal.

    Examples:
        >>> import tempfile, torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> batch = torch.randn(6, 3), torch.randn(6, 1)
        >>> made = report(
        ...     model, lambda m, b: (m(b[0]) - b[1]).square().sum(1), batch, tempfile.mkdtemp() + "/report.html"
        ... )
        >>> made.norms.shape, [layer.name for layer in made.layers]
        (torch.Size([6]), ['0', '1', '2', ''])
    """
    where = writable(tempfile.mkdtemp(prefix="unsum-") + "/report.html" if path is None else path)
    if not isinstance(ahead, int) or ahead < 0:
        raise OptionError(
            f"report(ahead={ahead!r}): a number of positions, 0 or more; 1 where the next token is predicted"
        )
    missing: dict[str, str] = {}
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    with Progress[None](5, "report", shown=progress) as line, _grads_as_before(grads):
        found, picture = _seen(model, loss_fn, batch, missing, line)
        n = len(found.losses)
        tokens, said = words(text, batch, n), labelled(labels, n)
        line.step("per-sample gradients")
        ask = lambda: by_sample(model, loss_fn, batch, samples=samples, n=n, elements=found.elements)
        each = _part("per-sample gradients", missing, ask)
        line.step("the check")
        checked = _checked(model, loss_fn, batch, samples, check, found, missing)
        line.step("the page")
        layers, flags = flagged(found, model, batch)
        made = Report(
            where, title or type(Names(model).model).__name__, flags + _more(each, checked), layers, found.losses.cpu(),
            each, checked, *picture, tokens, ahead, said, missing,
        )  # fmt: skip
        write(made, model)
        line.step("")
    return made


def _seen(
    model: nn.Module, loss_fn: LossFunction, batch: Any, missing: dict[str, str], line: Progress[None]
) -> tuple[Statistics, tuple[str, str]]:
    """One forward and backward: statistics, and the picture of the graph, which is then let go."""
    line.say("statistics of the layers")
    with set_aside(model, strict=False):
        found, losses = statistics(model, loss_fn, batch)
        missing.update(found.missing)
        line.step("the picture")
        sized = found.elements <= SIZED
        return found, _part("picture", missing, lambda: _drawn(losses.sum(), model, batch, sized)) or ("", "")


def data_of(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch, under names that a picture can show."""
    single = isinstance(batch, Tensor)
    return {"batch" if single else f"batch{format_path(path)}": tensor for path, tensor in leaves(batch)}


def _drawn(loss: Tensor, model: nn.Module, batch: Any, sized: bool) -> tuple[str, str]:
    """The picture and its page, with the sizes of the gradients if these are not too many to be computed again."""
    picture = None
    if sized:
        with contextlib.suppress(OptionError):  # a checkpoint, say
            picture = draw(loss, model=model, data=data_of(batch), flow=True)
    picture = picture or draw(loss, model=model, data=data_of(batch))
    return picture.svg, picture.html


@contextlib.contextmanager
def _grads_as_before(grads: dict[nn.Parameter, Tensor | None]) -> Iterator[None]:
    for parameter in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad


def _part(name: str, missing: dict[str, str], make: Callable[[], T]) -> T | None:
    """A part of the report; if it cannot be had, the others are not lost for it."""
    try:
        return make()
    except Exception as error:
        missing[name] = in_words(error)
        return None


def _checked(
    model: nn.Module, loss_fn: LossFunction, batch: Any, samples: Samples | Tensor | None, asked: bool | None,
    found: Statistics, missing: dict[str, str],
) -> Checked | None:  # fmt: skip
    n = len(found.losses)
    numbers = n * sum(p.numel() for p in model.parameters() if p.requires_grad)
    waits = any(map(has_late_hooks, model.parameters()))
    if asked is False:
        missing["check"] = "it was not asked for (check=False)"
    elif asked is None and numbers > LONG:
        missing["check"] = (
            f"not run unasked: it writes out {numbers:,} numbers one sample at a time; check=True runs it"
        )
    elif asked is None and n * found.elements > WALKED:
        missing["check"] = (
            f"not run unasked: it takes {n:,} backwards, one for each sample, through {found.elements:,} numbers each; "
            "check=True runs it"
        )
    elif asked is None and waits:
        missing["check"] = (
            "not run unasked: something waits for a parameter's gradient after it was added (an optimiser that steps "
            "in the backward?), and the check's backward would call it; check=True runs it"
        )
    else:
        with set_aside(model, strict=False):
            return _part("check", missing, lambda: compare(model, loss_fn, batch, samples=samples))
    return None


def _far(norm: float, limit: float) -> str:
    return f"gradient norm {norm:.3g}, limit {limit:.3g}" if math.isfinite(norm) else "its gradient is not finite"


def _more(each: BySample | None, checked: Checked | None) -> list[Flag]:
    """What the per-sample gradients and the check have to say."""
    flags = []
    if each is not None:
        for k in each.outliers:
            flags.append(Flag("outlier", f"sample {each.ids[k]}", _far(float(each.norms[k]), each.limit)))
    interacting = (each and each.interacting) or (checked and checked.interacting)
    if interacting:
        flags.append(Flag("interacting", "samples", interaction_told(interacting).removeprefix("samples ")))
    if checked is not None and not checked.ok and any(row.error > checked.tolerance for row in checked.rows):
        worst = checked.worst
        assert worst is not None
        flags.append(Flag("check", worst.name, f"differs from plain autograd by {worst.error:.1g} of the gradient"))
    return flags
