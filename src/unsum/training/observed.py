"""What is seen in one watched step: the blocks that are open, and what they hold until it is read.

Nothing here waits for a GPU: `Observed.pack` puts all numbers into one tensor and starts its copy; `unpack` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unsum import seams
from unsum.block import GradientsBlock
from unsum.capture import capture
from unsum.errors import UnsumError
from unsum.flow.captured import Captured
from unsum.gathered import Gradients
from unsum.reducers import Norms
from unsum.seams.scaler import current_scale
from unsum.seams.tensors import norms_of
from unsum.sites import unwrapped
from unsum.step.backward import Options


class Tolerant(GradientsBlock):
    """A `gradients` block that tells of each backward, and that may let a backward go on which it refuses."""

    def __init__(self, model: nn.Module, options: Options, *, refuses: bool, heard: Callable[[seams.Backward], None]):
        super().__init__(model, options)
        self._refuses, self._heard = refuses, heard
        self._call: seams.Backward | None = None
        self.refused: UnsumError | None = None

    def _let_go(self, error: UnsumError) -> None:
        if self._refuses:
            raise error
        self.refused = error

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        try:
            is_outermost = not self._forward.is_inside
            is_ours = self.refused is None and super().before_call(module, args, kwargs)
            if is_ours and is_outermost:
                self._options.scaler.called(kwargs)
            return is_ours
        except UnsumError as error:
            self._let_go(error)
            return False

    def after_call(self, output: Any) -> None:
        try:
            super().after_call(output)
        except UnsumError as error:
            self._let_go(error)

    def instead_of_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.refused is not None:
            return seams.NOTHING
        try:
            self._options.scaler.called(kwargs)
            return super().instead_of_call(module, args, kwargs)
        except UnsumError as error:
            self._let_go(error)
            return seams.NOTHING

    def before_backward(self, call: seams.Backward) -> Sequence[Tensor] | None:
        if not self._under_way:
            self._call = call
        if self.refused is not None:
            self._under_way.append((call.accumulates, None))
            return None
        try:
            return super().before_backward(call)
        except UnsumError as error:
            self._step = None
            self._let_go(error)
            return None

    def after_backward(self, *, failed: bool) -> None:
        is_ours = self._step is not None or self.refused is not None
        super().after_backward(failed=failed)
        if not self._under_way and is_ours and not failed and self._call is not None and self._call.accumulates:
            self._heard(self._call)


class Division:
    """What losses were multiplied or divided by before they were differentiated, which is taken out of the samples'
    gradients: the scale of a GradScaler, and what a trainer divides by: a number that it hands to the model (`reads`
    finds it among the arguments of a call), or the number of micro-batches of the step."""

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self.reads: Callable[[Mapping[str, Any]], Tensor | float | None] | None = None
        self.times = 1.0  # that number is this times what was found
        self.by_micro_batches = False  # where no number is found
        self.factor: Tensor | float | None = None  # found in the last call
        if scaler is not None:
            current_scale(scaler)  # what is no scaler shows here

    def called(self, kwargs: Mapping[str, Any]) -> None:
        """The model is called with these arguments."""
        if self.reads is not None:
            found = self.reads(kwargs)
            self.factor = None if found is None else found * self.times

    def is_enabled(self) -> bool:
        return self.scaler is not None or self.factor is not None

    def get_scale(self) -> Any:
        scale = self.loss_scale()
        return (1.0 if scale is None else scale) / (1.0 if self.factor is None else self.factor)

    def loss_scale(self) -> Tensor | float | None:
        """The scale of the GradScaler, if there is one."""
        return None if self.scaler is None else current_scale(self.scaler)

    def factor_now(self) -> Tensor:
        """(1,): the number that was found in the last call, or 1."""
        return torch.as_tensor(1.0 if self.factor is None else self.factor).reshape(1)


@dataclass
class Rows:
    """A tensor that flowed: the squared norms of its rows (all dimensions but the last)."""

    shape: tuple[int, ...]
    squares: Tensor
    microbatch: int
    site: str = ""


@dataclass
class Observed:
    """The numbers of one step, on the host."""

    losses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # samples of each micro-batch
    names: list[str] = field(default_factory=list)  # of parameters
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (names, n): squared norms of each one's part
    grads: dict[str, float] = field(default_factory=dict)  # norms of the step's gradient
    weights: dict[str, float] = field(default_factory=dict)  # norms of parameters
    total: float = 0.0  # squared norm of the sum over all samples, of all ranks
    all_squares: float = 0.0  # Σ of squared norms over samples of all ranks, and how many these are
    all_samples: int = 0
    rows: list[tuple[Rows, float, int]] = field(default_factory=list)  # with Σ of squares, and the first bad row or -1
    refused: str | None = None

    def first_bad(self) -> tuple[str, int] | None:
        """The first parameter with a sample whose gradient is not finite, and that sample."""
        if not self.squares.numel() or math.isfinite(float(self.squares.sum())):
            return None
        name, sample = (~self.squares.isfinite()).nonzero()[0].tolist()
        return self.names[name], sample


class Observer:
    """Watches one step, from `open` to `close`."""

    def __init__(self, model: nn.Module, options: Options, *, flows: bool, refuses: bool) -> None:
        self._block = Tolerant(model, options, refuses=refuses, heard=self._heard)
        self._division: Division = options.scaler
        self._is_mean = options.mean
        self._scales: list[Tensor] = []  # of the loss, in each micro-batch
        self._norms: Norms = options.reducers[0]  # type: ignore[assignment]
        self._rows: list[Rows] = []
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._grad_norms: Tensor | None = None
        self._before: dict[str, Tensor] = {}  # gradients that were there
        self._capture = capture(
            model, (_flows, "output"), (_has_parameters, "grad_output"), reduce=self._row_norms, missing="ignore"
        ) if flows and not _is_compiled(model) else None  # fmt: skip

    def __enter__(self) -> Gradients:
        self._found = self._block.__enter__()
        self._got: Captured | None = None
        try:
            self._got = None if self._capture is None else self._capture.open()
        except BaseException:
            self._block.__exit__(None, None, None)
            raise
        there = {name: p for name in self._found if (p := self._found.parameters[name]).grad is not None}
        if there and float(_norms([p.grad for p in there.values() if p.grad is not None]).sum()) != 0:
            self._before = {name: p.grad.clone() for name, p in there.items()}  # type: ignore[union-attr]
        return self._found

    def __exit__(self, *error: Any) -> None:
        try:
            if self._capture is not None:
                self._capture.__exit__(*error)
        finally:
            self._block.__exit__(*error)

    def has_seen(self) -> bool:
        """Whether there was a backward of this model."""
        return bool(self._losses)

    # ---- while the step runs --------------------------------------------------------------------------------------

    def _row_norms(self, tensor: Tensor) -> Tensor | None:
        """The norms of the rows of what flows; nothing of whole numbers."""
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_nested or not tensor.numel():
            norms = torch.zeros(1)
        else:
            norms = _in_rows(tensor)
            if norms.device.type == "cpu" and not math.isfinite(float(norms.sum())) and bool(tensor.isfinite().all()):
                norms = _in_rows(tensor.double())  # squares of very large numbers
        self._rows.append(Rows(tuple(tensor.shape), norms, len(self._sizes)))
        return None

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
        grads = self._own_grads()
        if grads:
            norms = _norms(list(grads.values()))
            self._grad_norms = norms if scale is None else norms / scale
        self._grad_names = list(grads)

    def _shares(self, squares: Tensor) -> Tensor:
        """Σ of squared norms, of what adds up to the step's gradient: of a mean over samples, each one's share. NaN
        where samples of different micro-batches do not have the same weight in it."""
        if not self._is_mean or not squares.numel():
            return squares.sum()
        return squares.sum() / self._sizes[0] ** 2 if len(set(self._sizes)) == 1 else squares.sum() * math.nan

    def _own_grads(self) -> dict[str, Tensor]:
        """The step's gradients so far: without what was there before, and without nobody's part."""
        shared = self._found.nobodys()
        found = {}
        for name in self._found:
            grad = self._found.parameters[name].grad
            if grad is None:
                continue
            grad = grad.detach()
            grad = grad - self._before[name] if name in self._before else grad
            found[name] = grad - shared[name] if name in shared else grad
        return found

    # ---- after it -------------------------------------------------------------------------------------------------

    def pack(self, averaging: Any = None) -> Packed:
        """Put all numbers into one tensor, and send it to the host. `averaging` is the process
        group that has averaged `.grad`, if there is one: over its ranks squared norms are summed, in one collective."""
        got = [] if self._got is None else self._got.sites()
        for rows, site in zip(self._rows, got, strict=False):
            rows.site = site
        names, squares = self._norms.table() if sum(self._sizes) else ([], torch.zeros(0, 0))
        parameters = {name: self._found.parameters[name].detach() for name in self._found}
        parts: list[Tensor] = []
        parts += [loss.reshape(1) for loss in self._losses] + self._scales + [self._division.factor_now()]
        sums = torch.stack([self._shares(squares), squares.new_full((), float(sum(self._sizes)))]).double()
        ranks = 1
        if averaging is not None:
            ranks = torch.distributed.get_world_size(averaging)
            device = next(iter(parameters.values())).device
            sums = sums.to(device)
            torch.distributed.all_reduce(sums, group=averaging)
        parts += [squares.reshape(-1), sums]
        grads = torch.zeros(0) if self._grad_norms is None else self._grad_norms
        parts += [grads, _norms(list(parameters.values())) if parameters else torch.zeros(0)]
        shapes = _by_shape(self._rows)
        for numbers in shapes:
            parts += list(_first_bad([self._rows[k].squares for k in numbers]))
        copy = Copy([part.double().reshape(-1) for part in parts])
        grad_names = getattr(self, "_grad_names", [])
        refused, all_rows, sizes, backwards = self._block.refused, self._rows, self._sizes, len(self._losses)
        divided = self._division.by_micro_batches and self._division.factor is None
        times = float(backwards) if divided else 1.0  # of the samples' gradients

        def unpack() -> Observed:
            values = iter(copy.read())
            found = Observed(refused=None if refused is None else str(refused), sizes=sizes)
            found.losses = [float(next(values)) for _ in range(backwards)]
            scales = [float(next(values)) for _ in range(backwards)]
            factor = times * float(next(values))
            flat = next(values) * times**2
            found.names, found.squares = names, flat.view(len(names), -1) if names else flat.view(0, 0)
            sum_of_squares, samples = next(values).tolist()
            found.all_squares = sum_of_squares * times**2
            found.all_samples = round(samples)
            norms = next(values)
            found.grads = dict(zip(grad_names, norms.tolist(), strict=False))
            found.total = float(norms.square().sum()) * (ranks * factor) ** 2
            found.weights = dict(zip(parameters, next(values).tolist(), strict=True))
            found.rows = [(rows, 0.0, -1) for rows in all_rows]
            for numbers in shapes:
                for k, total, bad in zip(numbers, next(values).tolist(), next(values).tolist(), strict=True):
                    rows = all_rows[k]
                    is_scaled = rows.site.endswith("grad_output") and rows.microbatch < len(scales)
                    found.rows[k] = rows, total / scales[rows.microbatch] ** 2 if is_scaled else total, round(bad)
            return found

        return Packed(copy, unpack)


def _flows(name: str, module: nn.Module) -> bool:
    """Whether a module's output is looked at: it has no modules inside, or parameters of its own."""
    return next(module.children(), None) is None or _has_parameters(name, module)


def _has_parameters(name: str, module: nn.Module) -> bool:
    """Whether the gradient at a module's output is looked at: it has parameters of its own."""
    return next(module.parameters(recurse=False), None) is not None


def _is_compiled(model: nn.Module) -> bool:
    return any(seams.is_compiled(module) for module in (model, *unwrapped(model).modules()))


def _in_rows(tensor: Tensor) -> Tensor:
    """Squared norms of the rows of a tensor."""
    if tensor.dim() < 2:
        return tensor.detach().reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32)).square()
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32)).square()


def _norm(tensor: Tensor) -> Tensor:
    values = tensor if tensor.layout == torch.strided else tensor.coalesce().values()
    wide = values.dtype if values.is_complex() else torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values.to(wide)).double()


def copies(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of parameters."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def distances(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each parameter is from what it was."""
    return {name: _norm(now[name].detach() - value) for name, value in before.items()}


def _norms(tensors: list[Tensor]) -> Tensor:
    """(tensors,): their norms."""
    plain = all(t.layout == torch.strided for t in tensors) and len({t.device for t in tensors}) == 1
    return norms_of(tensors) if plain else torch.stack([_norm(t).to(tensors[0].device) for t in tensors])


def _by_shape(rows: Sequence[Rows]) -> list[list[int]]:
    """Which of them have rows of one shape, device and dtype."""
    found: dict[Any, list[int]] = {}
    for k, each in enumerate(rows):
        found.setdefault((each.squares.shape, each.squares.device, each.squares.dtype), []).append(k)
    return list(found.values())


def _first_bad(squares: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Σ of each, and the first row that is not finite, or -1."""
    stacked = torch.stack(list(squares)).flatten(1)
    bad = ~stacked.isfinite()
    first = torch.where(bad.any(1), bad.int().argmax(1), -1)
    return stacked.sum(1, dtype=torch.float64), first


class Copy:
    """Parts of one step's numbers, on their way to the host: one copy for each device, which nobody waits for."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._order = [(len(part), part.device) for part in parts]
        self._there: dict[torch.device, Tensor] = {}
        self._events: list[Any] = []
        for device in {part.device for part in parts}:
            joined = torch.cat([part for part in parts if part.device == device])
            if device.type == "cuda":
                self._there[device] = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
                self._there[device].copy_(joined, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
            else:
                self._there[device] = joined.cpu()

    def is_done(self) -> bool:
        """Whether reading would not wait."""
        return all(event.query() for event in self._events)

    def read(self) -> list[Tensor]:
        """The parts, once they are there."""
        for event in self._events:
            event.synchronize()
        left = dict(self._there)
        found = []
        for size, device in self._order:
            found.append(left[device][:size])
            left[device] = left[device][size:]
        return found


@dataclass(frozen=True)
class Packed:
    """One step's numbers, on their way to the host, and what makes sense of them."""

    copy: Copy
    unpack: Callable[[], Observed]
