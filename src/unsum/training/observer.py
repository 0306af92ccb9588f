"""What is seen in one watched step: the blocks that are open, and what they hold until it is read.

Nothing here waits for a GPU: `Observer.pack` puts all numbers into one tensor and starts its copy to the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
from unsum.seams.tensors import largest_of
from unsum.sites import Names, parse, unwrapped
from unsum.step.backward import Options
from unsum.training.division import Division
from unsum.training.observed import Copy, Packed, Rows
from unsum.training.step_gradient import StepGradient, norms
from unsum.training.tolerant import Tolerant


class Flowing:
    """Looks at the outputs of modules, and at the gradients there, as they flow: a receiver of a `Flow`, as a capture
    is one. It keeps the norms of their rows, and no tensor."""

    edits, refuses, seen = False, None, None

    def __init__(self, requests: Requests, block: Tolerant) -> None:
        self.flow = Flow(requests, self)
        self._block = block
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

    def differentiated(self, roots: Sequence[Any]) -> None:
        """A backward begins."""

    def _look(self, spot: Spot, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
            return
        seen = tensor.detach()
        rows = _in_rows(seen)
        if rows.device.type == "cpu" and not math.isfinite(float(rows.sum())) and bool(seen.isfinite().all()):
            rows = _in_rows(seen.double())  # of very large numbers
        self.rows.append(Rows(spot, seen.shape, rows, self.micro_batch, self._block.last_call))


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

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        requests: Requests | None,
        *,
        refuses: bool,
        fails: Callable[[], None] | None,
    ) -> None:
        self._block = Tolerant(model, options, refuses=refuses, fails=fails, begins=self._begins, heard=self._heard)
        self._division: Division = options.scaler
        self._is_mean = options.mean
        self._norms: Norms = options.reducers[0]  # type: ignore[assignment]
        self._names = Names(model)
        self._flowing = None if requests is None else Flowing(requests, self._block)
        self._losses: list[Tensor] = []
        self._scales: list[Tensor] = []  # of the loss, in each micro-batch
        self._sizes: list[int] = []
        self._calls: list[frozenset[int]] = []  # the forwards whose backward each of these was
        self._gradient: StepGradient  # since it was opened

    def __enter__(self) -> Gradients:
        self._found = self._block.__enter__()
        self._gradient = StepGradient(self._names, self._found)
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

    def lacks_backward(self) -> bool:
        """Whether the model was called, and no backward came."""
        return self._block.lacks_backward

    def has_seen(self) -> bool:
        """Whether there was a backward of this model."""
        return bool(self._losses)

    # ---- while the step runs --------------------------------------------------------------------------------------

    def _begins(self) -> None:
        """A backward begins."""
        self._gradient.begins()

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
        self._calls.append(self._norms.calls_now() if self._block.refused is None else frozenset())
        if self._flowing is not None:
            self._flowing.micro_batch += 1
        self._gradient.heard(scale)

    # ---- after it -------------------------------------------------------------------------------------------------

    def pack(self, averaging: Any = None) -> Packed:
        """Put all numbers into one tensor, and send it to the host. `averaging` is the process group that has averaged
        `.grad`, if there is one: what is the ranks' together is added up over them, in one collective."""
        parts, weights = self._names.parts, []
        ranks = 1 if averaging is None else torch.distributed.get_world_size(averaging)
        for name in self._found:
            weights.append(local(parts.get(name, self._found.parameters[name]).detach()))
        names, squares = self._norms.table() if sum(self._sizes) else ([], torch.zeros(0, 0))
        together = [
            torch.stack([squares.sum().double(), *squares.new_tensor(self._weights()).double()]),
            self._gradient.norms.double().square(),
            (norms(weights) if weights else torch.zeros(0)).double().square(),
            (largest_of(weights) if weights else torch.zeros(0)).double(),
        ]
        if averaging is not None:
            together[0] = self._with_weight(together[0])
            together = _over_ranks(together, averaging, weights[0].device, whole=not parts)
            together[0] = _of_one_weight(together[0], ranks)
        order = self._order()
        rows = [] if self._flowing is None else self._differentiated(self._flowing.rows)
        for each in rows:
            each.microbatch = self._microbatch(each, order)
        shapes = _by_shape(rows)
        copy = Copy(
            [*(self._losses[k] for k in order), *(self._scales[k] for k in order)]
            + [self._division.factor_now(), squares, *together]
            + [part for numbers in shapes for part in _first_bad([rows[k].norms for k in numbers])]
        )
        return Packed(
            copy, rows, shapes, names, self._gradient.names, list(self._found), [self._sizes[k] for k in order],
            micro_batches=self._division.micro_batches(len(self._losses)),
            ranks=ranks,
            refused=None if self._block.refused is None else str(self._block.refused),
        )  # fmt: skip

    def _differentiated(self, rows: list[Rows]) -> list[Rows]:
        """Without the outputs of calls that had no backward, such as an evaluation inside the block."""
        if not all(self._calls):  # where a backward was refused, nobody knows
            return rows
        used = frozenset().union(*self._calls)
        return [each for each in rows if each.spot.kind != "output" or each.call in used]

    def _weights(self) -> tuple[float, float, float]:
        """How many samples there are, Σ w and Σ w²: the step's gradient is Σ w g over the samples' own gradients g.
        NaN if it is not."""
        n = float(sum(self._sizes))
        if not self._gradient.is_whole:
            return n, math.nan, math.nan
        sizes = [size for size in self._sizes if size]
        return (n, float(len(sizes)), sum(1 / size for size in sizes)) if self._is_mean else (n, n, n)

    def _order(self) -> list[int]:
        """The step's backwards, in the order of their forwards."""
        return sorted(range(len(self._calls)), key=lambda k: min(self._calls[k], default=k))

    def _microbatch(self, rows: Rows, order: Sequence[int]) -> int:
        """Which of the micro-batches, in the order of the forwards, a tensor flowed in."""
        if rows.spot.kind == "output":
            known = [place for place, k in enumerate(order) if rows.call in self._calls[k]]
            return known[0] if known else rows.microbatch
        return order.index(rows.microbatch) if rows.microbatch < len(order) else rows.microbatch

    def _with_weight(self, sums: Tensor) -> Tensor:
        """(6,): what a sample's gradient was divided by in this process's part of the step's gradient, and its square,
        join the sums over its samples."""
        size = self._sizes[0] if self._is_mean and self._sizes else 1
        known = self._division.micro_batches(len(self._losses)) * size
        weight = sums.new_full((), known) * (1.0 if self._division.factor is None else self._division.factor)
        return torch.cat([sums, torch.stack([weight, weight.square()])])


def _of_one_weight(sums: Tensor, ranks: int) -> Tensor:
    """(4,): the sums over all ranks' samples. Those of weights are NaN where samples of different ranks do not have the
    same weight in the step's gradient: the last two of what is given are Σ of weights and of squares over ranks."""
    weights, square_weights = sums[4:].unbind()
    differ = ranks * square_weights - weights.square() > 1e-9 * weights.square()
    return torch.cat([sums[:2], torch.where(differ, math.nan, sums[2:4])])


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


def _by_shape(rows: Sequence[Rows]) -> list[list[int]]:
    """Which of them have rows of one shape, device and dtype."""
    found: dict[Any, list[int]] = {}
    for k, each in enumerate(rows):
        found.setdefault((each.norms.shape, each.norms.device, each.norms.dtype), []).append(k)
    return list(found.values())


def _first_bad(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Σ of the squares of each, and the first row that is not finite, or -1."""
    stacked = torch.stack(list(values)).flatten(1)
    bad = ~stacked.isfinite()
    first = torch.where(bad.any(1), bad.int().argmax(1), -1)
    return stacked.double().square().sum(1), first
