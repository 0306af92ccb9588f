"""The gradient of one watched step, as the backwards bring it to `.grad`, and how far parameters move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unsum import seams
from unsum.block import GradientsBlock
from unsum.flow.flow import Flow
from unsum.gathered import Gradients
from unsum.seams.sharding import local
from unsum.seams.tensors import have_foreign_hooks, norms_of, version_of
from unsum.sites import Names


class StepGradient:
    """The sum of what the backwards of one step bring, read from `.grad`: without what was there before the step, and
    without what belongs to no sample."""

    def __init__(self, names: Names, found: Gradients) -> None:
        self._names, self._found = names, found
        self._before: dict[str, Tensor] = {}  # gradients that were there
        self._kept: dict[str, Tensor] = {}  # the sum so far, if another block holds `.grad` aside
        self._left: dict[str, tuple[int, int]] = {}  # memory and versions of `.grad` after the last backward
        self._backwards = 0
        self._is_aside = False
        self.is_whole = True  # whether it is the sum over the step's samples, as far as can be seen
        self.names: list[str] = []  # of parameters that have got something
        self.norms = torch.zeros(0)

    def begins(self) -> None:
        """A backward begins."""
        there, is_aside = self._there(), self._is_set_aside()
        if self._backwards and (is_aside != self._is_aside or (not is_aside and _marks(there) != self._left)):
            self.is_whole = False  # somebody has cleared or changed it between two micro-batches
        self._is_aside = is_aside
        if not there:
            self._before = {}
        elif not self._backwards and float(norms(list(there.values())).sum()) != 0:
            self._before = {name: grad.clone() for name, grad in there.items()}

    def heard(self, scale: Tensor | float | None) -> None:
        """A backward is over, from a loss with this scale."""
        there, shared = self._there(), self._found.nobodys()
        self._backwards += 1
        self._left = {} if self._is_aside else _marks(there)
        if self._is_aside:
            for name, grad in there.items():
                self._kept[name] = self._kept[name] + grad if name in self._kept else grad
            there = dict(self._kept)
        if self._may_be_changed():
            self.is_whole = False
        for name, grad in there.items():
            grad = grad - self._before[name] if name in self._before else grad
            there[name] = grad - shared[name] if name in shared and name not in self._names.parts else grad
        found = norms(list(there.values())) if there else torch.zeros(0)
        self.names, self.norms = list(there), found if scale is None else found / scale

    def _there(self) -> dict[str, Tensor]:
        """What this process holds of every `.grad`."""
        parts, found = self._names.parts, {}
        for name in self._found:
            grad = parts.get(name, self._found.parameters[name]).grad
            if grad is not None:
                found[name] = local(grad.detach())
        return found

    def _may_be_changed(self) -> bool:
        """Whether a hook, or an edit of parameters' gradients, may have changed or cleared what has arrived."""
        if any(
            isinstance(block, Flow) and block.receiver.edits and block.waits_at_parameters for block in seams.here()
        ):
            return True
        return not self._names.parts and have_foreign_hooks(list(self._found.parameters.values()))

    def _is_set_aside(self) -> bool:
        """Whether a block that clips, say, holds `.grad` while the backward runs."""
        model = self._names.model
        return any(
            isinstance(block, GradientsBlock) and block.sets_grad_aside and block.model is model
            for block in seams.here()
        )


def _marks(grads: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Numbers that are others if `.grad` was changed, or is another tensor."""
    return {
        name: (grad.data_ptr() if grad.layout == torch.strided else 0, version_of(grad)) for name, grad in grads.items()
    }


def norms(tensors: list[Tensor]) -> Tensor:
    """(tensors,): their norms."""
    plain = all(t.layout == torch.strided for t in tensors) and len({t.device for t in tensors}) == 1
    return norms_of(tensors) if plain else torch.stack([_norm(t).to(tensors[0].device) for t in tensors])


def _norm(tensor: Tensor) -> Tensor:
    values = tensor if tensor.layout == torch.strided else tensor.coalesce().values()
    wide = values.dtype if values.is_complex() else torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values.to(wide)).double()


def copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of what this process holds of parameters."""
    return {name: local(parameter.detach()).clone() for name, parameter in parameters.items()}


def distances(now: Mapping[str, Tensor], before: Mapping[str, Tensor], group: Any = None) -> dict[str, Tensor]:
    """How far each parameter is from what it was. Where each rank holds a part, that takes one collective."""
    found = torch.stack([_norm(local(now[name].detach()) - value) for name, value in before.items()])
    if group is not None and any(value.shape != now[name].shape for name, value in before.items()):
        found = found.square()
        torch.distributed.all_reduce(found, group=group)
        found = found.sqrt()
    return dict(zip(before, found.unbind(), strict=True))
