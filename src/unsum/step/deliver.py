"""Weight gradients that torch was spared, put into `.grad` as torch would: memory of its own for each, laid out as the
parameter is. Those of small layers are put there together, since to allocate and copy them one by one takes longer than
to compute them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from unsum.seams.tensors import add_to, copies, copy_to, is_view

BOUND = 1 << 22  # numbers that may wait

_grad, _dtype = attrgetter("grad"), attrgetter("dtype")


class Delivery:
    """The gradients of one backward, on their way."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._values: list[Tensor] = []
        self._held = 0

    def put(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        """These are to be added to `.grad`, before `finish` returns."""
        if len(values) == 1:  # perhaps a part of what flows, which somebody may change in place: not to be waited with
            _add(parameters, values)
            return
        self._parameters += parameters
        self._values += values
        self._held += sum([value.numel() for value in values])
        if self._held > BOUND:
            self.finish()

    def finish(self) -> None:
        """Add what waits."""
        parameters, values = self._parameters, self._values
        self.forget()
        if parameters:
            accumulate(parameters, values)

    def forget(self) -> None:
        """A backward has failed: what waits is let go."""
        self._parameters, self._values, self._held = [], [], 0


def accumulate(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Add to `.grad`."""
    dtypes, devices = list(map(_dtype, values)), list(map(Tensor.get_device, values))
    if len(values) == 1 or not _are_new(parameters) or not _are_alike(parameters, values, dtypes):
        _add(parameters, values)
    elif len(set(dtypes)) == 1 and len(set(devices)) == 1:
        _set(parameters, copies(values))
    else:  # together, torch would copy them one by one
        kinds = list(zip(dtypes, devices, strict=True))
        for each in set(kinds):
            which = [k for k, kind in enumerate(kinds) if kind == each]
            _set([parameters[k] for k in which], copies([values[k] for k in which]))


def _set(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value


def _are_new(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether none of these has a gradient, and none is there twice."""
    return len(set(map(id, parameters))) == len(parameters) and set(map(id, map(_grad, parameters))) == {id(None)}


def _are_alike(parameters: Sequence[nn.Parameter], values: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a copy of each value is laid out as its parameter is."""
    if list(map(_dtype, parameters)) != dtypes:
        return False
    if all(map(Tensor.is_contiguous, parameters)) and all(map(Tensor.is_contiguous, values)):
        return True
    return list(map(Tensor.stride, parameters)) == list(map(Tensor.stride, values))


def _lies_as(value: Tensor, parameter: Tensor) -> bool:
    """Whether numbers follow each other as in the parameter; dimensions of size 1 have no say in it, as with torch."""
    ours, theirs = value.stride(), parameter.stride()
    return ours == theirs or all(
        size == 1 or one == other for size, one, other in zip(value.shape, ours, theirs, strict=True)
    )


def _is_whole(value: Tensor) -> bool:
    """Whether the memory is this tensor's alone."""
    return not is_view(value) or value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _add(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    sums: tuple[list[Tensor], list[Tensor]] = ([], [])
    copied: tuple[list[Tensor], list[Tensor]] = ([], [])
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.grad is not None:
            sums[0].append(parameter.grad)
            sums[1].append(value)
        elif value.dtype == parameter.dtype and _lies_as(value, parameter) and _is_whole(value):
            parameter.grad = value.data  # no view of what it was made of
        else:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
            copied[0].append(parameter.grad)
            copied[1].append(value)
    if copied[0]:
        copy_to(*copied)
    if sums[0]:
        add_to(*sums)
