"""The errors for a backward whose samples are unknown, or interact. Each says what to write instead."""

from __future__ import annotations

from unsum.errors import InteractionError, SamplesError


def unknown_samples(mismatch: str = "") -> SamplesError:
    """The error for a loss whose samples nobody knows."""
    return SamplesError(
        "cannot tell whose gradient this is: no tensor with known samples lies between loss and model.\n"
        f"{mismatch}  call the model inside the block and let it return what its loss is made of, say "
        "samples=unsum.dim(k), or unsum.mark_samples(losses)"
    )


def other_rows(where: str = "") -> SamplesError:
    """The error for owners that are not those of the input's rows, at the operation `where`."""
    at = f"at {where} " if where else ""
    return SamplesError(
        f"{at}the samples of the loss are not those of the input's rows: some dimension that is no sample has the same "
        "size.\n  unsum.mark_samples(losses) says whose each loss is"
    )


def coincide(shape: tuple[int, ...], n: int, how: str = "returns") -> SamplesError:
    """The error for a tensor in which several dimensions may be the samples'."""
    dims = [str(dim) for dim, size in enumerate(shape) if size == n]
    return SamplesError(
        f"the model {how} a tensor of shape {shape}: dimensions {' and '.join(dims)} have as many rows as there are "
        "samples, and nothing shows which of them the samples lie along.\n  samples=unsum.dim(k) says it of all that "
        "the model is given and returns, unsum.mark_samples(losses) of each loss; or begin with a batch of another size"
    )


def in_a_list(n: int) -> SamplesError:
    """The error for a list of outputs that may be one for each sample."""
    return SamplesError(
        f"the model returns a list of {n} tensors with {n} rows each: whether each is a sample's, or each has a row of "
        "every sample, cannot be told.\n  unsum.mark_samples(losses) says whose each loss is"
    )


def interaction(operation: str, module: str, below: str = "") -> InteractionError:
    """The error for samples that interact."""
    where = (f" in module {module!r}" if module else "") + (
        f" (what it hands to {below} belongs to no sample)" if below else ""
    )
    return InteractionError(
        f"samples interact at {operation}{where}: a gradient per sample is not what the sample alone would give.\n"
        '  interacting="exact" gives the derivative of each sample\'s part of the loss all the same'
    )
