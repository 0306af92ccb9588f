"""`clip_per_sample`: `.grad` gets the sum of per-sample gradients, each clipped before it is added."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from unsum import samples as sample_maps
from unsum import seams
from unsum.block import GradientsBlock
from unsum.choice import choose
from unsum.compiled.tapped import Tapped
from unsum.errors import InteractionError, NoBackward, NotFinite, OptionError, UnsumError, UnsupportedError
from unsum.gathered import Gradients
from unsum.learn.probe import CannotBeAsked
from unsum.opened import Opened
from unsum.reducers import WeightedSum
from unsum.sites import Names
from unsum.step.backward import Options, Step
from unsum.training.gradient import add_to_grad, add_to_parts, average_over_ranks, refuse_unclipped
from unsum.training.optimizer_steps import OptimizerSteps, twice
from unsum.training.proposals import reworded
from unsum.user_warning import warn

How = Literal["flat", "layer", "automatic"]
STABILITY = 0.01  # added to the norm by how="automatic"

_verified: weakref.WeakKeyDictionary[nn.Module, set[Hashable]] = weakref.WeakKeyDictionary()  # modes that were asked


class Clipped:
    """The result of a `clip_per_sample` block.

    Examples:
        >>> import torch, unsum
        >>> model = nn.Linear(3, 1, bias=False)
        >>> with unsum.clip_per_sample(model, max_norm=1.0) as clipped:
        ...     model(2 * torch.eye(3)).sum().backward()
        >>> clipped.norms, model.weight.grad
        (tensor([2., 2., 2.]), tensor([[1., 1., 1.]]))
    """

    def __init__(self, reducer: WeightedSum) -> None:
        self._reducer = reducer

    @property
    def norms(self) -> Tensor:
        """(n,): the norm of each sample's gradient before clipping, over all parameters, in the order of the
        forwards."""
        try:
            return self._reducer.norms()
        except NoBackward:
            raise NoBackward(
                "no backward ran inside the block, so there are no samples: nothing was clipped.",
                write="with unsum.clip_per_sample(model) as clipped: loss_fn(model(x), y).backward()",
            ) from None

    @property
    def samples(self) -> int:
        """How many samples had a backward."""
        return self._reducer.samples()

    def __repr__(self) -> str:
        return f"clipped: {self.samples} samples; norms" if self.samples else "clipped: no samples yet"


@dataclass(frozen=True)
class Clipping:
    """How a block clips, beside the options that `gradients` has too."""

    max_norm: float
    how: How
    memory: float | None
    verify: bool | None
    scaled: bool = True  # whether `.grad` keeps the scale of a GradScaler
    penalties: bool = True  # whether what belongs to no sample is added as it is; else it is refused
    name: str = "clip_per_sample"  # who asks, for messages


class ClipBlock(GradientsBlock):
    """A `gradients` block that clips, and adds what it clipped to `.grad` after every backward."""

    adds_to_grad = True

    def __init__(self, model: nn.Module, options: Options, clipping: Clipping) -> None:
        names = Names(model)
        self._clipping, self._wrapper, self._given = clipping, model, choose(names, options.params)
        weights, groups = _weights(clipping, names, self._given.by_id)
        self.reducer = WeightedSum(weights, memory=clipping.memory, groups=groups)
        self._mode = _mode(names, options)
        self._asks = clipping.verify
        if clipping.verify is None:
            self._asks = self._mode not in _verified.get(names.model, ())
        self.name = clipping.name
        super().__init__(model, replace(options, reducers=(self.reducer,), verify=bool(self._asks)))

    def __enter__(self) -> Gradients:
        if any(isinstance(block, ClipBlock) and block.model is self.model for block in seams.here()):
            raise OptionError(
                f"{self.name}: this model's gradients are being clipped already, in a block that is open: of "
                "two bounds only one would hold.\n  leave the other block first"
            )
        return super().__enter__()

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        try:
            return super().before_call(module, args, kwargs)
        except CannotBeAsked as error:
            raise self._cannot_be_asked(error) from None

    def after_call(self, output: Any) -> None:
        try:
            super().after_call(output)
        except CannotBeAsked as error:
            raise self._cannot_be_asked(error) from None

    def before_backward(self, call: seams.Backward) -> Sequence[Tensor | GradientEdge] | None:
        if not self._under_way:
            refuse_unclipped(self.name, call, self._given, has_parts=bool(self._names.parts))
        try:
            return super().before_backward(call)
        except CannotBeAsked as error:
            raise self._cannot_be_asked(error) from None
        except InteractionError as error:
            raise InteractionError(
                f"{self.name}: {_first_line(error)}\n  Clipping bounds what one sample can do only if samples do not "
                "interact.",
                write=["model.eval()", "nn.GroupNorm(1, channels)  # or LayerNorm, in place of batch norm"],
            ) from None
        except UnsumError as error:
            block = f"unsum.{self.name}(model"
            error.args = (reworded(str(error), options=rf"{block}, \1)", plain=f"with {block}):"),)
            raise

    def after_backward(self, *, failed: bool) -> None:
        step = self._step if len(self._under_way) == 1 else None
        super().after_backward(failed=failed)
        if failed or step is None:
            return
        if self._asks and self._forward.verification is not None and self._forward.verification.has_told:
            _verified.setdefault(self._model, set()).add(self._mode)
        self._deliver(step)

    def _deliver(self, step: Step | Tapped) -> None:
        """Add the clipped sums of one backward, and what belongs to no sample."""
        norms = self.reducer.last_norms()
        is_scaled = step.reducing.unscale is not None  # by a scaler that skips the step then
        if norms is not None and not is_scaled and not bool(norms.isfinite().all()):
            row = int((~norms.isfinite()).int().argmax())
            self._forget(step)
            raise NotFinite(
                f"{self.name}: the gradient of sample {row} of this backward is not finite, and no bound "
                "holds for it; .grad is as it was.",
                write=[
                    "keep = losses.isfinite(); loss_fn(model(x[keep]), y[keep]).backward()  # without that sample",
                    "with unsum.watch(model) as w: ...  # w.last.nonfinite names the first such value",
                ],
            )
        sums, nobodys = self.reducer.taken(), self._nobodys(step)
        unscale = step.reducing.unscale
        if unscale is not None and self._clipping.scaled:
            sums = {name: value / unscale for name, value in sums.items()}
        elif unscale is not None:
            nobodys = {name: value * unscale for name, value in nobodys.items()}
        away = set(self.reducer.unreached)
        if isinstance(step, Step):  # where no row came to an expert, torch stores zeros
            away.difference_update(map(self._given.by_id.get, step.leaves))
        reached = {name: value for name, value in sums.items() if name not in away}
        for name, value in nobodys.items():
            reached[name] = reached[name] + value.to(reached[name].device) if name in reached else value
        parameters = self._given.parameters
        if parts := self._names.parts:
            named = self._given.by_id.values()  # every rank sends the same tensors
            values = {name: reached[name] if name in reached else torch.zeros(parts[name].shape) for name in named}
            add_to_parts([parts[name] for name in named], [v.to(parts[n].device) for n, v in values.items()])
            return
        add_to_grad([parameters[name] for name in reached], list(reached.values()))
        average_over_ranks(self._wrapper, list(self._given.unique.values()))

    def _forget(self, step: Step | Tapped) -> None:
        self._take_back(step.reducing, step.planned if isinstance(step, Step) else None)

    def _nobodys(self, step: Step | Tapped) -> dict[str, Tensor]:
        """What belongs to no sample: a penalty on the weights. It is not clipped, so it may not be data."""
        found = (
            step.nobodys if isinstance(step, Step) else {}
        )  # a compiled call whose loss has such a part runs eagerly
        if not found:
            return found
        ids = getattr(self._options.samples, "given", None)
        has_nobody = isinstance(ids, Tensor) and bool((ids < 0).any())
        if (has_nobody or not self._clipping.penalties) and any(bool((v != 0).any()) for v in found.values()):
            what = (
                "positions with id -1 may" if has_nobody else "a penalty in the loss, or a use of parameters alone, may"
            )
            self._forget(step)
            raise UnsupportedError(
                f"{self.name}: {', '.join(list(found)[:4])}: a part of the gradient belongs to no sample "
                f"({what} bring it), and cannot be clipped.",
                write="torch.optim.AdamW(model.parameters(), weight_decay=1e-2)  # not a penalty in the loss",
            )
        return found

    def _cannot_be_asked(self, error: CannotBeAsked) -> UnsupportedError:
        why = _first_line(error).removeprefix("verify=True: ")
        return UnsupportedError(
            f"{self.name}: {why}\n  The first step runs the model again with other samples' inputs, to see that "
            "samples do not interact. If you know that they do not, skip it.",
            write=f"{self.name}(..., verify=False)",
        )


class Clip:
    """What `clip_per_sample` opens: a new block every time."""

    def __init__(self, make: Callable[[], ClipBlock]) -> None:
        self._make = make
        self._block: ClipBlock | None = None

    def __enter__(self) -> Clipped:
        if self._block is not None:
            raise OptionError("this block is open already; make another one with unsum.clip_per_sample(...)")
        block = self._make()
        block.__enter__()
        self._block, self._steps = block, OptimizerSteps(block.model, self._tell_twice)
        self._steps.open()
        return Clipped(block.reducer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        self._steps.close()
        del self._steps  # which knows this object: the model is let go with it
        block.__exit__(kind, error, trace)
        if error is None and block.lacks_backward:
            warn(
                f"{block.name}: the model was called in the block, and no backward came: nothing is clipped.\n  call "
                "loss.backward() inside the block, too; it must reach the chosen parameters"
            )

    def _tell_twice(self) -> None:
        if self._block is not None:
            warn(twice(self._block.name, f"unsum.{self._block.name}(model)"))


def clip_per_sample(
    model: nn.Module,
    max_norm: float = 1.0,
    how: How = "flat",
    *,
    samples: sample_maps.Samples | Tensor | None = None,
    params: str | Sequence[str] = "*",
    loss_reduction: Literal["mean"] | None = None,
    scaler: Any = None,
    memory: float | None = None,
    verify: bool | None = None,
) -> Opened[Clipped]:
    """Clip every per-sample gradient before the sum over samples: each backward in the block adds the sum of the
    clipped gradients to `.grad`.

    Samples that interact (batch norm in training) raise `InteractionError`. The shared gradient (of a weight penalty
    in the loss) is added without clipping. A backward that fails leaves every `.grad` unchanged. Parameters that are
    frozen, that `params=` does not choose, or that no gradient reached keep their `.grad`.

    Args:
        model: Any module; its forward and its backward are inside the block.
        max_norm: C, the largest norm of a clipped gradient.
        how: "flat": g · min(1, C / |g|). "layer": a layer is a module with parameters of its own, and the part of each
            of the L layers is clipped to C / √L. "automatic": C · g / (|g| + 0.01).
        samples: Where the samples are, as in `unsum.gradients`.
        params: A glob of parameter names, or a list of globs; the other parameters get no gradient.
        loss_reduction: "mean" says that the loss is a mean over samples: the gradients of each sample's own loss are
            clipped, and `.grad` is their sum.
        scaler: A GradScaler. Norms and clipping are those of the unscaled gradients; `.grad` stays scaled, for
            `scaler.step`.
        memory: Bytes that gradients may take until the norms are known, as in `unsum.WeightedSum`.
        verify: None tests in the first step of each mode (train, eval) whether samples interact: unsum runs the model
            a few more times without gradients and restores random numbers and buffers, so dropout does no harm. True
            tests in every step, False never.

    Examples:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> with clip_per_sample(model, max_norm=1.0) as clipped:
        ...     losses = model(torch.tensor([[3.0, 4.0], [0.3, 0.4]])).sum(1)
        ...     losses.sum().backward()
        >>> clipped.norms, model.weight.grad
        (tensor([5.0000, 0.5000]), tensor([[0.9000, 1.2000]]))
    """
    clipping = Clipping(checked_norm("clip_per_sample", max_norm), checked_how("clip_per_sample", how), memory, verify)
    options = options_of("clip_per_sample", samples, params, loss_reduction, scaler, verify)
    ClipBlock(model, options, clipping)  # what makes no sense shows here
    return Opened(Clip(lambda: ClipBlock(model, options, clipping)), "unsum.clip_per_sample")


def checked_norm(name: str, max_norm: Any) -> float:
    """A positive number, or an error."""
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not 0 < max_norm < math.inf:
        raise OptionError(f"{name}: max_norm={max_norm!r}: a positive number")
    return float(max_norm)


def checked_how(name: str, how: Any) -> How:
    """A way of clipping, or an error."""
    if how not in ("flat", "layer", "automatic"):
        raise OptionError(f"{name}: how={how!r}: choose 'flat', 'layer' or 'automatic'")
    return how  # type: ignore[no-any-return]


def options_of(
    name: str,
    samples: sample_maps.Samples | Tensor | None,
    params: str | Sequence[str],
    loss_reduction: str | None,
    scaler: Any,
    verify: bool | None,
) -> Options:
    """The options of a block that clips."""
    if loss_reduction not in (None, "mean"):
        raise OptionError(f"{name}: loss_reduction={loss_reduction!r}: None or 'mean'")
    if verify not in (None, True, False):
        raise OptionError(f"{name}: verify={verify!r}: True, False, or None for the first step")
    return Options(
        reducers=(), keep=False, rules=True, strict=False, samples=sample_maps.read(samples), exact=False, verify=False,
        mean=loss_reduction == "mean", params=params, grad=False, scaler=scaler,
    )  # fmt: skip


def layers_of(names: Names, by_id: Mapping[int, str]) -> dict[str, int]:
    """{parameter: number of its layer}: a layer is a module with parameters of its own; a tied one counts where it
    comes first."""
    modules: dict[str, int] = {}
    return {name: modules.setdefault(names.owners[name], len(modules)) for name in by_id.values()}


def _weights(
    clipping: Clipping, names: Names, by_id: Mapping[int, str]
) -> tuple[Callable[[Tensor], Tensor], dict[str, int] | None]:
    """A function of the norms that gives weights, and the groups of parameters that have their own."""
    limit = clipping.max_norm
    if clipping.how == "automatic":
        return lambda norms: limit / (norms + STABILITY), None
    if clipping.how == "flat":
        return lambda norms: (limit / norms).clamp(max=1), None
    groups = layers_of(names, by_id)
    own = limit / math.sqrt(max(groups.values(), default=0) + 1)
    return lambda norms: (own / norms).clamp(max=1), groups


def _mode(names: Names, options: Options) -> Hashable:
    """What an answer about interaction holds for: the train / eval mode of every module, and where the samples are."""
    samples = options.samples
    where = samples if isinstance(samples, sample_maps.Dim) else type(samples).__name__
    return where, tuple([module.training for module in names.modules.values()])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
