"""The examples of a data set: in batches, in order, each with its number; and the loss of each.

A DataLoader, or any iterable, gives batches. A torch Dataset, or a list, gives examples, which are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from unsum import samples as sample_maps
from unsum.check import LossFunction, losses_by_sample
from unsum.errors import InteractionError, NoGradient, NotFinite, OptionError, WrongCount
from unsum.gradients import mark_samples
from unsum.nested import leaves
from unsum.progress import progress

First = int | Callable[[int], object]  # the number of a batch's first example, or what each row's is called
SamplesOfBatch = sample_maps.Samples | Tensor | None | Callable[[Any], sample_maps.Samples | Tensor | None]


class Examples:
    """A data set in batches, in order. A single last example joins the batch before it: a batch of one shows less than
    others (which dimension the samples lie along, say).

    Examples:
        >>> [batch.tolist() for batch in Examples([1, 2, 3, 4, 5], batch_size=3, what="data")]
        [[1, 2, 3], [4, 5]]
        >>> [batch.tolist() for batch in Examples([1, 2, 3], batch_size=2, what="data")]
        [[1, 2, 3]]
    """

    def __init__(self, data: Any, *, batch_size: int, what: str) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(f"batch_size={batch_size!r}: how many examples are taken at a time, 1 or more")
        if isinstance(data, Tensor | tuple | Mapping | str) or not isinstance(data, Iterable | Dataset):
            raise OptionError(
                f"{what}: got a {type(data).__name__}; give a DataLoader or another iterable of batches, or a Dataset "
                "or a list of examples.\n"
                "  tensors side by side: torch.utils.data.TensorDataset(x, y); one batch: "
                "DataLoader([batch], batch_size=None)"
            )
        self._data: Any = data
        self._batch_size, self._what = batch_size, what
        self.has_examples = isinstance(data, Dataset | list) or _is_hugging_face(data)
        loader = getattr(data, "batch_size", None)  # of a DataLoader; None where that is not known
        self.batch_size: int | None = batch_size if self.has_examples else loader if isinstance(loader, int) else None
        self.is_once = not self.has_examples and isinstance(data, Iterator)  # what it gave is gone
        self.is_shuffled = isinstance(data, DataLoader) and _shuffles(data)

    def batches(self) -> int | None:
        """How many batches there are, if that is known."""
        try:
            size = len(self._data)
        except TypeError:
            return None
        return len(self._starts(size)) if self.has_examples else size

    def _starts(self, size: int) -> range:
        """Where the batches of so many examples begin."""
        is_single = size % self._batch_size == 1 and size > self._batch_size > 1
        return range(0, size - is_single, self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self.skipping(0)

    def skipping(self, done: int) -> Iterator[Any]:
        """The batches after the first so many; examples that need not be read are not."""
        if not self.has_examples:
            yield from islice(iter(self._data), done, None)
            return
        is_listed = hasattr(self._data, "__getitem__") and not isinstance(self._data, IterableDataset)
        if is_listed and hasattr(self._data, "__len__"):
            size = len(self._data)
            starts = self._starts(size)
            for k, start in enumerate(starts[done:], done):
                end = size if k == len(starts) - 1 else start + self._batch_size
                yield collated([self._data[number] for number in range(start, end)], None, self._what)
            return
        examples = islice(iter(self._data), done * self._batch_size, None)
        while chunk := list(islice(examples, self._batch_size)):
            yield collated(chunk, None, self._what)

    def shown(self, label: str, done: int = 0) -> Iterator[Any]:
        """The same, with a line on the terminal that says how far they are."""
        total = self.batches()
        line: progress[Any] = progress(iter(()), label) if total is None else progress(total, label)
        with line:
            for _ in range(done):
                line.step()
            for batch in self.skipping(done):
                yield batch
                line.step()


def collated(chunk: list[Any], collate: Callable[[list[Any]], Any] | None, what: str) -> Any:
    """Examples as a batch, by a function of the user's or torch's own."""
    if collate is not None:
        return collate(chunk)
    try:
        return default_collate([_with_tensors(example) for example in chunk])
    except (RuntimeError, TypeError) as error:
        raise OptionError(
            f"{what}: {len(chunk)} examples cannot be made a batch ({str(error).splitlines()[0]}).\n"
            "  give a DataLoader with a collate_fn of your own (padding), or batch_size=1; batches that are ready: "
            "DataLoader(batches, batch_size=None)"
        ) from error


def _with_tensors(example: Any) -> Any:
    """A mapping, as Hugging Face's tokenizers give it, with its lists of numbers as tensors: torch puts these together
    as rows."""
    if not isinstance(example, Mapping):
        return example
    return {
        name: torch.tensor(value) if isinstance(value, list) and value and isinstance(value[0], int | float) else value
        for name, value in example.items()
    }


def _is_hugging_face(data: Any) -> bool:
    """Whether this is a data set of Hugging Face's, which gives examples and is no torch Dataset."""
    return any(each.__module__.partition(".")[0] == "datasets" for each in type(data).__mro__)


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether torch's own samplers give its examples in another order each time."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(
        isinstance(each, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        or (isinstance(each, DistributedSampler) and each.shuffle)
        for each in samplers
    )


def samples_of(samples: SamplesOfBatch, batch: Any) -> sample_maps.Samples | Tensor | None:
    """Where the samples of this batch are: `samples` itself, or what it says of the batch."""
    return samples(batch) if callable(samples) else samples


def is_loss_function(given: Any) -> bool:
    """Whether this may be `loss_fn(model, batch)`: a module in its place is a forgotten argument, or a criterion."""
    return callable(given) and not isinstance(given, nn.Module)


def losses_of(
    loss_fn: LossFunction, model: nn.Module, batch: Any, first: First, what: str, *, are_samples: bool = True,
    are_checked: bool = True,
) -> Tensor:  # fmt: skip
    """The loss of each example of a batch, (n,); an example whose loss is not finite is an error, with its number.
    `are_checked=False`: whoever calls looks at that after the backward, so that a GPU is not waited for before it.

    `are_samples`: nothing else says what the samples are, so the losses do. A loss that depends on other examples is
    then seen, and so is a loss_fn that calls the model for one example after the other."""
    losses = losses_by_sample(loss_fn, model, batch)
    if are_samples:
        _refuse_other_rows(len(losses), batch, what)
    if not losses.requires_grad:
        raise NoGradient(
            f"{what}: the losses do not depend on parameters that are trained (no_grad, or all are frozen).",
            write=["model.requires_grad_(True)", "with torch.enable_grad(): ...  # around the call"],
        )
    if are_checked:
        refuse_not_finite(losses.detach(), first, what, "loss")
    return mark_samples(losses) if are_samples else losses


def _refuse_other_rows(losses: int, batch: Any, what: str) -> None:
    """Raise if all tensors of a batch have as many rows as each other, and not as many as there are losses."""
    rows = {len(tensor) for _, tensor in leaves(batch) if tensor.dim()}
    if len(rows) == 1:
        refuse_other_number(losses, rows.pop(), what)


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Where examples depend on each other, an error that says what can be done about it here."""
    try:
        yield
    except InteractionError as error:
        raise InteractionError(
            f"{what}: {str(error).splitlines()[0]}",
            write=[
                "model.eval()  # if a layer of the model mixes samples in training, such as batch norm",
                'nn.functional.cross_entropy(model(x), y, reduction="none")  # each depends on its example alone',
            ],
        ) from error


def refuse_not_finite(values: Tensor, first: First, what: str, of: str) -> None:
    """Raise if an example's number is not finite; `first` is the number of the first one, or a function from a row to
    the number of its example. Waits for the device."""
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        k = int(bad[0])
        number = first(k) if callable(first) else first + k
        if len(bad) == len(values) > 1:
            raise NotFinite(
                f"{what}: the {of} of every example of a batch is not finite ({values[k].item()}), from example "
                f"{number} on: the model itself may hold NaN.",
                write="[name for name, v in model.state_dict().items() if not v.isfinite().all()]",
            )
        raise NotFinite(
            f"{what}: example {number} (row {k} of its batch): its {of} is not finite ({values[k].item()}).",
            write=[
                f"torch.utils.data.Subset(data, [k for k in range(len(data)) if k != {number}])  # without it",
                "with unsum.watch(model) as w: ...  # w.last.nonfinite names the first such value",
            ],
        )


def refuse_other_number(losses: int, samples: int, what: str) -> None:
    """Raise if there are not as many losses as samples."""
    if losses != samples:
        fits = losses > samples > 0 and losses % samples == 0
        raise WrongCount(
            f"{what}: loss_fn returned {losses} losses for a batch of {samples} samples; one for each is needed.",
            write=[
                "return losses.flatten(1).sum(1)  # (n,): the sum over all dimensions but the samples'",
                *([f"return losses.view({samples}, -1).sum(1)  # if those of a sample follow each other"] * fits),
            ],
        )
