"""The errors for a backward whose samples are unknown, or interact. Each says what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from unsum.errors import InteractionError, UnknownSamples

MARK = "unsum.mark_samples(losses).sum().backward()  # losses of shape (n,), one for each sample"
"""The way out that always works: the user says which loss is which sample's."""


def unknown_samples(seen: str = "") -> UnknownSamples:
    """The error for a loss whose samples nobody knows. `seen`: what the model was given."""
    return UnknownSamples(
        "cannot tell which samples the loss is made of: no tensor with known samples lies between the loss and the "
        "model.",
        at=seen,
        write=[
            "loss_fn(model(x), y).backward()  # inside the block: the model's forward, and a loss of what it returns",
            MARK,
            "with unsum.gradients(model, samples=unsum.dim(1)) as g: ...  # samples along dimension 1",
        ],
    )


def other_rows(where: str = "") -> UnknownSamples:
    """The error for owners that are not those of the input's rows, at the operation `where`."""
    return UnknownSamples(
        "the samples of the loss are not those of the input's rows: the model returns its rows in another order, or a "
        "dimension that is not the samples' has the same size.",
        at=where,
        write=[MARK, "with unsum.gradients(model, samples=unsum.dim(1)) as g: ...  # the samples' dimension"],
    )


def moved_unseen() -> UnknownSamples:
    """The error for a call that nobody watched, and that has not used its inputs as earlier calls did."""
    return UnknownSamples(
        "cannot tell whose the input's rows are in this step: the model has done something with its input that it did "
        "not do before (it copied it, perhaps in another order), and its calls were no longer watched. Now they "
        "are.",
        write=["model.zero_grad()  # and run the step again: it is watched", MARK],
    )


def coincide(shape: tuple[int, ...], n: int, how: str = "returns") -> UnknownSamples:
    """The error for a tensor in which several dimensions may be the samples'."""
    dims = [dim for dim, size in enumerate(shape) if size == n]
    return UnknownSamples(
        f"cannot tell along which dimension the samples lie: dimensions {' and '.join(map(str, dims))} have as many "
        "rows as there are samples.",
        at=f"the model {how} a tensor of shape {shape}; the batch has {n} samples",
        write=[
            *(f"with unsum.gradients(model, samples=unsum.dim({dim})) as g: ..." for dim in dims),
            MARK,
        ],
    )


def in_a_list(n: int) -> UnknownSamples:
    """The error for a list of outputs that may be one for each sample."""
    return UnknownSamples(
        "cannot tell whether each tensor of a list is one sample's, or has a row of every sample.",
        at=f"the model returns a list of {n} tensors with {n} rows each",
        write=MARK,
    )


def given_in_a_list(items: int) -> UnknownSamples:
    """The error for a list of inputs that may be one for each sample."""
    return UnknownSamples(
        "cannot tell whether each tensor of a list is one sample, or has a row of every sample.",
        at=f"the model is given a list of {items} tensors",
        write=MARK,
    )


def several_numbers(numbers: Sequence[int]) -> UnknownSamples:
    """The error for inputs of different numbers of rows, of which the output does not show the samples'."""
    told = ", ".join(map(str, numbers))
    return UnknownSamples(
        "cannot tell which of the model's inputs has the samples: what the model returns does not show it.",
        at=f"the model was given tensors with {told} rows",
        write=[
            MARK,
            f"with unsum.gradients(model, samples=torch.arange({numbers[0]})) as g: ...  # {numbers[0]} samples",
        ],
    )


def met_outside(name: str, operation: str, shape: tuple[int, ...], n: int) -> UnknownSamples:
    """The error for a parameter that meets data where the samples are unknown, in an operation with a result of this
    shape."""
    return UnknownSamples(
        f"cannot tell which sample each part of the gradient of {name} belongs to: where the parameter is used, the "
        "samples are already summed, or unsum cannot follow them so far.",
        at=f"{operation}, parameter {name}, result of shape {shape}; the batch has {n} samples",
        write=[
            MARK,
            f"with unsum.gradients(model, params=[p for p, _ in model.named_parameters() if p != {name!r}]) as g: ...",
            'model.register_buffer("name", tensor)  # for a tensor that the model holds and that is not data',
            "with unsum.gradients(model, samples=unsum.dim(1)) as g: ...  # if the input is (positions, samples, ...)",
        ],
    )


def interaction(operation: str, module: str, below: str = "") -> InteractionError:
    """The error for samples that interact."""
    where = operation + (f" in module {module!r}" if module else "")
    lost = f"; what it hands to {below} belongs to no single sample" if below else ""
    return InteractionError(
        f"samples interact at {where}: the gradient of a sample is not what that sample alone would give{lost}.",
        write=[
            'with unsum.gradients(model, interacting="exact") as g: ...  # the derivative of each sample\'s part of '
            "the loss",
            "model.eval()  # if it is batch norm or another layer that mixes the batch in training only",
        ],
    )


def one_scale(operation: str, module: str) -> InteractionError:
    """The error for a float8 layer that rounds all samples by one scale."""
    where = operation + (f" in module {module!r}" if module else "")
    return InteractionError(
        f"samples interact at {where}: float8 with one scale for the whole batch (tensorwise). The largest number of "
        "one sample decides how those of another are rounded.",
        write=[
            'with unsum.gradients(model, interacting="exact") as g: ...  # each sample\'s part of this backward',
            'torchao.float8.Float8LinearConfig.from_recipe_name("rowwise")  # a scale for each row',
        ],
    )
