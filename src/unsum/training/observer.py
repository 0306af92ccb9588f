"""What is seen in one watched step: the blocks that are open, and what they hold until it is read.

Nothing here waits for a GPU: `Observer.pack` puts all numbers into one tensor and starts its copy to the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.flow.flow import Flow
from unsum.flow.picking import Spot
from unsum.flow.requests import Requests
from unsum.gathered import Gradients
from unsum.reducers import Norms
from unsum.seams.checkpoints import ModuleCall
from unsum.seams.sharding import local
from unsum.seams.tensors import norms_of
from unsum.sites import Names, parse, unwrapped
from unsum.step.backward import Options
from unsum.training.division import Division
from unsum.training.observed import Copy, Packed, Rows
from unsum.training.tolerant import Tolerant


class Flowing:
    """Looks at the outputs of modules, and at the gradients there, as they flow: a receiver of a `Flow`, as a capture
    is one. It keeps the norms of their rows, and no tensor."""

    edits, refuses = False, None

    def __init__(self, requests: Requests) -> None:
        self.flow = Flow(requests, self)
        self.rows: list[Rows] = []
        self.micro_batch = 0

    def value(self, spot: Spot, tensor: Tensor, call: ModuleCall) -> None:
        """A module's output."""
        if not call.again and tensor.is_floating_point():
            self._look(spot, tensor)

    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> None:
        """The gradient at a module's output."""
        self._look(spot, grad)

    def called(self) -> None:
        """A call is over."""

    def _look(self, spot: Spot, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
            return
        seen = tensor.detach()
        norms = _in_rows(seen)
        if norms.device.type == "cpu" and not math.isfinite(float(norms.sum())) and bool(seen.isfinite().all()):
            norms = _in_rows(seen.double())  # of very large numbers
        self.rows.append(Rows(spot, seen.shape, norms, self.micro_batch))


class Looks:
    """Which outputs of a model, and which gradients there, are looked at in a step: all of them on a CPU. On a GPU,
    where reading what flows takes its time, outputs of modules with parameters, and gradients in every eighth step."""

    EVERY = 8

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[bool, Requests] = {}
        self._steps = 0
        self.has_checkpoints = False  # then gradients are left alone: what a checkpoint spares would be lost

    def next(self) -> Requests | None:
        """For the next step. None if there is nothing to look at, or if the model is compiled, which shows nothing."""
        names = Names(self._model)
        on_gpu = any(p.is_cuda for p in names.parameters.values())
        with_gradients = not self.has_checkpoints and (not on_gpu or self._steps % self.EVERY == 0)
        self._steps += 1
        if not any(map(_has_parameters, names.modules, names.modules.values())) or _is_compiled(self._model):
            return None
        known = self._known.get(with_gradients)
        if known is None or known.names is None or known.names.modules is not names.modules:
            sites = [parse((_has_parameters if on_gpu else _flows, "output"))]
            sites += [parse((_has_parameters, "grad_output"))] if with_gradients else []
            known = self._known[with_gradients] = Requests(self._model, sites)
        return known


class Observer:
    """Watches one step, from `with` to its end."""

    def __init__(self, model: nn.Module, options: Options, requests: Requests | None, *, refuses: bool) -> None:
        self._block = Tolerant(model, options, refuses=refuses, begins=self._begins, heard=self._heard)
        self._division: Division = options.scaler
        self._is_mean = options.mean
        self._norms: Norms = options.reducers[0]  # type: ignore[assignment]
        self._names = Names(model)
        self._flowing = None if requests is None else Flowing(requests)
        self._losses: list[Tensor] = []
        self._scales: list[Tensor] = []  # of the loss, in each micro-batch
        self._sizes: list[int] = []
        self._grad_names: list[str] = []
        self._grad_norms = torch.zeros(0)
        self._before: dict[str, Tensor] = {}  # gradients that were there

    def __enter__(self) -> Gradients:
        self._found = self._block.__enter__()
        try:
            if self._flowing is not None:
                self._flowing.flow.open()
        except BaseException:
            self._block.__exit__(None, None, None)
            raise
        return self._found

    def __exit__(self, *error: Any) -> None:
        if self._flowing is not None:
            self._flowing.flow.close()
        self._block.__exit__(*error)

    def has_checkpoints(self) -> bool:
        """Whether a part of the model was under a checkpoint."""
        return self._block.has_checkpoints

    def has_seen(self) -> bool:
        """Whether there was a backward of this model."""
        return bool(self._losses)

    # ---- while the step runs --------------------------------------------------------------------------------------

    def _begins(self) -> None:
        """A backward begins. What is in `.grad` before the step's first one, or was left there by somebody who cleared
        it in between, is not the step's."""
        there = self._grads()
        if not there:
            self._before = {}
        elif not self._losses and float(_norms(list(there.values())).sum()) != 0:
            self._before = {name: grad.clone() for name, grad in there.items()}

    def _heard(self, call: seams.Backward) -> None:
        """A backward of this model is over."""
        loss = sum(
            (root.detach() if grad is None else root.detach() * grad).sum().double()
            for root, grad in zip(call.roots, call.grads, strict=True)
        )
        scale = self._division.loss_scale()
        self._losses.append(loss if scale is None else loss / scale)  # type: ignore[arg-type]
        self._scales.append(torch.ones(1) if scale is None else torch.as_tensor(scale).reshape(1))
        self._sizes.append(self._norms.size_now() if self._block.refused is None else 0)
        if self._flowing is not None:
            self._flowing.micro_batch += 1
        grads = self._own_grads()
        norms = _norms(list(grads.values())) if grads else torch.zeros(0)
        norms = norms if scale is None else norms / scale
        self._grad_names, self._grad_norms = list(grads), norms

    def _grads(self) -> dict[str, Tensor]:
        """What this process holds of every gradient."""
        parts, found = self._names.parts, {}
        for name in self._found:
            grad = parts.get(name, self._found.parameters[name]).grad
            if grad is not None:
                found[name] = local(grad.detach())
        return found

    def _own_grads(self) -> dict[str, Tensor]:
        """The step's gradients so far: without what was there before, and without nobody's part."""
        shared, found = self._found.nobodys(), self._grads()
        for name, grad in found.items():
            grad = grad - self._before[name] if name in self._before else grad
            found[name] = grad - shared[name] if name in shared and name not in self._names.parts else grad
        return found

    # ---- after it -------------------------------------------------------------------------------------------------

    def pack(self, averaging: Any = None) -> Packed:
        """Put all numbers into one tensor, and send it to the host. `averaging` is the process group that has averaged
        `.grad`, if there is one: what is the ranks' together is added up over them, in one collective."""
        parts, weights = self._names.parts, []
        ranks = 1 if averaging is None else torch.distributed.get_world_size(averaging)
        for name in self._found:
            weights.append(local(parts.get(name, self._found.parameters[name]).detach()))
        names, squares = self._norms.table() if sum(self._sizes) else ([], torch.zeros(0, 0))
        sums = torch.stack([self._shares(squares), squares.new_full((), float(sum(self._sizes)))]).double()
        together = [
            sums,
            self._grad_norms.square().double(),
            (_norms(weights) if weights else torch.zeros(0)).square().double(),
        ]
        if averaging is not None:
            together[0] = self._with_weight(sums)
            together = _over_ranks(together, averaging, weights[0].device, whole=not parts)
            together[0] = _of_one_weight(together[0], ranks)
        rows = [] if self._flowing is None else self._flowing.rows
        shapes = _by_shape(rows)
        copy = Copy(
            [*self._losses, *self._scales, self._division.factor_now(), squares, *together]
            + [part for numbers in shapes for part in _first_bad([rows[k].norms for k in numbers])]
        )
        return Packed(
            copy, rows, shapes, names, self._grad_names, list(self._found), self._sizes,
            micro_batches=self._division.micro_batches(len(self._losses)),
            ranks=ranks,
            refused=None if self._block.refused is None else str(self._block.refused),
        )  # fmt: skip

    def _shares(self, squares: Tensor) -> Tensor:
        """Σ of squared norms, of what adds up to the step's gradient: of a mean over samples, each one's share. NaN
        where samples of different micro-batches do not have the same weight in it."""
        if not self._is_mean or not squares.numel():
            return squares.sum()
        return squares.sum() / self._sizes[0] ** 2 if len(set(self._sizes)) == 1 else squares.sum() * math.nan

    def _with_weight(self, sums: Tensor) -> Tensor:
        """(4,): what a sample's gradient was divided by in this process's part of the step's gradient, and its square,
        join the sums over its samples."""
        size = self._sizes[0] if self._is_mean and self._sizes else 1
        known = self._division.micro_batches(len(self._losses)) * size
        weight = sums.new_full((), known) * (1.0 if self._division.factor is None else self._division.factor)
        return torch.cat([sums, torch.stack([weight, weight.square()])])


def _of_one_weight(sums: Tensor, ranks: int) -> Tensor:
    """(2,): Σ of squared norms over all ranks' samples, and how many these are. The first is NaN where samples of
    different ranks do not have the same weight in the step's gradient: the last two are Σ of weights and of squares."""
    squares, samples, weights, square_weights = sums.unbind()
    differ = ranks * square_weights - weights.square() > 1e-9 * weights.square()
    return torch.stack([torch.where(differ, math.nan, squares), samples])


def averaging_group(model: nn.Module) -> Any:
    """The process group that averages this model's gradients, if it is under DDP or FSDP2."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    return torch.distributed.group.WORLD if Names(model).parts else None


def _over_ranks(numbers: Sequence[Tensor], group: Any, device: torch.device, *, whole: bool) -> list[Tensor]:
    """Sums over all ranks, in one collective; of gradients and weights only where each rank holds a part."""
    summed = list(numbers[:1] if whole else numbers)
    joined = torch.cat([each.to(device) for each in summed])
    torch.distributed.all_reduce(joined, group=group)
    return [*joined.split([len(each) for each in summed]), *numbers[len(summed) :]]


def _flows(name: str, module: nn.Module) -> bool:
    """Whether a module's output is looked at: it has no modules inside, or parameters of its own."""
    return next(module.children(), None) is None or _has_parameters(name, module)


def _has_parameters(name: str, module: nn.Module) -> bool:
    """Whether a module has parameters of its own. Only of these a GPU looks at outputs, and the gradient there is."""
    return next(module.parameters(recurse=False), None) is not None


def _is_compiled(model: nn.Module) -> bool:
    return any(seams.is_compiled(module) for module in (model, *unwrapped(model).modules()))


def _in_rows(tensor: Tensor) -> Tensor:
    """The norms of the rows of a tensor."""
    if tensor.dim() < 2:
        return tensor.abs().to(_wide(tensor.dtype)).reshape(-1)
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=_wide(tensor.dtype))


@functools.cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _norms(tensors: list[Tensor]) -> Tensor:
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


def _by_shape(rows: Sequence[Rows]) -> list[list[int]]:
    """Which of them have rows of one shape, device and dtype."""
    found: dict[Any, list[int]] = {}
    for k, each in enumerate(rows):
        found.setdefault((each.norms.shape, each.norms.device, each.norms.dtype), []).append(k)
    return list(found.values())


def _first_bad(norms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Σ of the squares of each, and the first row that is not finite, or -1."""
    stacked = torch.stack(list(norms)).flatten(1)
    bad = ~stacked.isfinite()
    first = torch.where(bad.any(1), bad.int().argmax(1), -1)
    return stacked.double().square().sum(1), first
