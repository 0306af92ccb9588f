"""`private`: differentially private training (DP-SGD) with any optimizer: Poisson sampling, clipping, noise, and
accounting."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unsum import samples as sample_maps
from unsum import seams
from unsum.errors import OptionError, WrongCount
from unsum.opened import Opened
from unsum.sites import unwrapped
from unsum.step.backward import Options
from unsum.training import accountant
from unsum.training.accountant import Account, Settings
from unsum.training.clip import Clip, ClipBlock, Clipped, Clipping, How, checked_how, checked_norm, options_of
from unsum.training.covered import Covered, Left, before_step, listed, refuse_unprotected, refuse_unserved
from unsum.training.gradient import all_summed
from unsum.training.noise import Source, sources
from unsum.training.poisson import Part, PoissonLoader, steps_of, world


class Private:
    """The result of `unsum.private`: `for batch in dp.loader(dataset)`, `with dp:` around the forward and the backward,
    then `dp.step()`. `print(dp)` shows the parameters covered, the noise and the epsilon so far.

    Examples:
        >>> import unsum
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dp = unsum.private(
        ...     model, optimizer, max_norm=1.0, noise_multiplier=1.0, expected_batch=8, sample_rate=8 / 32, seed=0
        ... )
        >>> for x in dp.loader(torch.randn(32, 3)):
        ...     with dp:
        ...         model(x).square().sum().backward()
        ...     _ = dp.step()
        >>> dp.steps
        4
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        clipping: Clipping,
        options: Options,
        randomness: tuple[Source, Source, str],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._settings, self._clipping, self._options = settings, clipping, options
        self._noise, self._sampling, self._told = randomness
        self._opened: tuple[Opened[Clipped], Clipped] | None = None
        self._covered, self._left = Covered(model, optimizer), Left()
        self._part: Part | None = None  # of a batch of dp.loader, as long as it waits for its step
        self._seen = 0  # samples that were clipped since the last step
        self._account = Account()
        self._is_told = False
        self._covered.parameters()  # what makes no sense shows here
        self._is_stepping = False
        before_step(optimizer, self._before_optimizer)
        if missing := self._covered.missing():
            warnings.warn(
                f"unsum.private: the optimizer does not have {listed(missing)}: trainable parameters that it will not "
                "train; they are not clipped, and get no gradient",
                stacklevel=3,
            )

    # ---- batches --------------------------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        steps: int | None = None,
        **options: Any,
    ) -> PoissonLoader:
        """Batches by Poisson sampling: every example is in a batch with probability `sample_rate`, independently.

        One pass has 1 / sample_rate batches, rounded (at least one). A batch may be empty: its tensors then have 0
        rows, and the step is taken as usual. With several processes each draws from its own part of the data set.

        Args:
            dataset: Examples: something with a length whose k-th example is `dataset[k]`. A DataLoader raises an error.
            batch_size: The largest number of rows at once; a larger batch comes in parts, and `dp.step()` acts
                after the last one. None: whole batches.
            collate_fn: As in a DataLoader: a list of examples → a batch with one row for each.
            num_workers: As in a DataLoader; so are further options, such as `pin_memory=True`.
            steps: How many batches one pass has, if not 1 / sample_rate.
        """
        rank, ranks = world()
        return PoissonLoader(
            dataset, self._sampling, self, sample_rate=self._settings.sample_rate,
            steps=steps_of(self._settings.sample_rate) if steps is None else steps, batch_size=batch_size,
            collate_fn=collate_fn, rank=rank, ranks=ranks, options={"num_workers": num_workers, **options},
        )  # fmt: skip

    def begin_sampling(self) -> None:
        """A loader begins."""
        if self._seen:
            raise OptionError(
                "unsum.private: a batch was clipped, and the loader started again before dp.step().",
                write="dp.step()  # after every batch",
            )
        self._part = None

    def begin_part(self, part: Part) -> None:
        """A batch, or a part of one, is handed out."""
        self._part = part

    def end_part(self, part: Part) -> None:
        """The next one is asked for."""
        if part.is_last and self._part is part:
            raise OptionError(
                "unsum.private: dp.step() was not called after the last batch.\n  call it after every batch and part, "
                "also after an empty one: each batch has its own noise"
            )

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def open(self, samples: sample_maps.Samples | Tensor | None = None) -> Clipped:
        """Open the block, as `with dp:` does. `samples=` says where the samples of this batch are, as in
        `unsum.gradients`."""
        if self._opened is not None:
            raise OptionError("unsum.private: a block is open already; close() it first")
        seams.refuse_capturing("unsum.private")
        covered = self._covered.parameters()
        refuse_unprotected(covered)
        self._left.settle(covered, self._covered.frozen())
        options = replace(self._options, params=list(covered))
        if samples is not None:
            options = replace(options, samples=sample_maps.read(samples))
        opened = Opened(Clip(lambda: ClipBlock(self._model, options, self._clipping)), "unsum.private")
        self._opened = opened, opened.open()
        return self._opened[1]

    def close(self) -> None:
        """Close the block. Calling it twice is allowed."""
        error = sys.exc_info()[1]
        self.__exit__(None if error is None else type(error), error, None)

    def __enter__(self) -> Clipped:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is None:
            return
        (opened, clipped), self._opened = self._opened, None
        opened.__exit__(kind, error, trace)
        self._seen += clipped.samples
        self._left.note(self._covered.parameters())

    # ---- steps ----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """How many were taken."""
        return self._account.steps

    def step(self) -> bool:
        """Add noise to the sum of clipped gradients, divide by the expected batch, let the optimizer step, and clear
        every `.grad`. True if it stepped; False after a part of a batch that is not the last one."""
        if self._opened is not None:
            raise OptionError("unsum.private: dp.step() comes after the block, not inside it")
        part, covered = self._part, self._covered.parameters()
        if part is not None and self._seen != part.rows:
            raise WrongCount(
                f"unsum.private: {part.rows} examples were drawn, and {self._seen} samples had a backward inside the "
                "block. Every example must be one sample, in one backward.",
                write=[
                    "with dp: losses(model, batch).sum().backward()  # the whole batch, once",
                    "dp.open(samples=ids)  # copies of an example (augmentation) have one id",
                ],
            )
        self._left.settle(covered, self._covered.frozen())
        if part is not None and not part.is_last:
            return False
        self._make_private(list(covered.values()))
        self._is_stepping = True
        try:
            self._optimizer.step()
        finally:
            self._is_stepping = False
        self._optimizer.zero_grad(set_to_none=True)
        self._left.clear()
        self._part, self._seen = None, 0
        self._account.add(self._settings, is_drawn=part is not None)
        return True

    def _before_optimizer(self) -> None:
        if not self._is_stepping and self._seen:
            raise OptionError("unsum.private: optimizer.step() would use gradients without noise: call dp.step()")

    def _make_private(self, parameters: list[nn.Parameter]) -> None:
        """`.grad` becomes (Σ clipped over all ranks + σ · C · N(0, 1)) / expected_batch."""
        rank, ranks = world()
        spread = self._settings.noise_multiplier * self._clipping.max_norm
        totals = []
        for parameter in parameters:
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            total = torch.zeros_like(parameter, dtype=wide) if parameter.grad is None else parameter.grad.to(wide)
            if spread and rank == 0:  # the sum over ranks brings it to all of them
                total.add_(self._noise.normal(total.shape, total.device, wide), alpha=spread)
            totals.append(total.detach())
        for parameter, total in zip(parameters, all_summed(totals) if ranks > 1 else totals, strict=True):
            dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
            parameter.grad = total.div_(self._settings.expected_batch).to(dtype)

    def epsilon(self, delta: float = 1e-5) -> float:
        """ε for which all steps so far are (ε, δ)-differentially private, if one example is added or removed. Takes
        about a second; needs dp-accounting (`pip install dp-accounting`)."""
        if self._account.undrawn and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"unsum.private: {self._account.undrawn} of {self.steps} steps had no batch of dp.loader; epsilon "
                "holds only if their batches came from Poisson sampling at this rate too",
                stacklevel=2,
            )
        return self._account.epsilon(delta)

    # ---- to go on later -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state needed to resume a run, beside model and optimizer: the steps taken, their noise and rate, and the
        state of the random numbers (using the same noise twice would give no protection)."""
        sources = {"noise": self._noise.state_dict(), "sampling": self._sampling.state_dict()}
        return {**self._account.state_dict(), **sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`. Noise and rate may differ from now on; earlier steps count with their own."""
        self._account.load_state_dict(state)
        self._noise.load_state_dict(state["noise"])
        self._sampling.load_state_dict(state["sampling"])

    def __repr__(self) -> str:
        settings, clipping = self._settings, self._clipping
        deviation = settings.noise_multiplier * clipping.max_norm / settings.expected_batch
        lines = [
            f"private training: {self.steps} steps",
            str(self._covered),
            f"  clipping: max_norm {clipping.max_norm:g}, {clipping.how}",
            f"  noise: multiplier {settings.noise_multiplier:g}, {self._told}; a standard deviation of {deviation:.4g} "
            "in each number of a step's gradient",
            f"  batches: rate {settings.sample_rate:g}, divided by {settings.expected_batch:g}",
        ]
        others = self._account.others(settings)
        lines += [f"  before: {'; '.join(others)}"] if others else []
        if self.steps and self._account.has_noise() and not accountant.is_there():
            return "\n".join([*lines, "  epsilon: needs dp-accounting (pip install dp-accounting)"])
        found = self._account.epsilon(1e-5)
        told = " if all batches came from Poisson sampling" if self._account.undrawn else ""
        return "\n".join([*lines, f"  epsilon {found:.4g} at delta 1e-05{told}"])

    def __reduce__(self) -> str:
        raise TypeError("private: it belongs to this process, and cannot be copied or pickled; save its state_dict()")


def private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float,
    noise_multiplier: float,
    expected_batch: float,
    sample_rate: float,
    how: How = "flat",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    secure: bool = False,
    samples: sample_maps.Samples | Tensor | None = None,
    loss_reduction: Literal["mean"] | None = None,
    memory: float | None = None,
    verify: bool | None = None,
    scaler: None = None,
) -> Private:
    """Train with differential privacy (DP-SGD): `dp.loader` draws batches by Poisson sampling, `with dp:` clips the
    gradient of every sample, `dp.step()` adds noise and steps, `dp.epsilon(delta)` accounts for all steps.

    A step's gradient is (Σ clipped + σ · C · N(0, 1)) / expected_batch. One example changes Σ clipped by at most C
    with every `how`: flat clipping leaves a norm of at most C; L layers with at most C / √L each have at most
    √(L · C² / L) = C together; automatic clipping leaves C · |g| / (|g| + 0.01) < C.

    Args:
        model: The model to train. Samples that interact raise `InteractionError`, as in `unsum.clip_per_sample`.
        optimizer: Any optimizer of torch, over parameters of the model.
        max_norm: C, the norm to which each sample's gradient is clipped.
        noise_multiplier: σ, the noise's standard deviation over C. 0: no noise, and epsilon is infinite.
        expected_batch: The number by which the noisy sum is divided: public, usually sample_rate · examples.
        sample_rate: The probability with which each example is in a batch.
        how: The kind of clipping: "flat", "layer" or "automatic", as in `unsum.clip_per_sample`.
        seed: A seed for noise and sampling, for runs that can be repeated. None: one from the operating system.
        generator: A generator for the noise instead; sampling is seeded from it.
        secure: True draws noise and samples from the operating system's cryptographic generator (slower).
        samples: Where the samples are, as in `unsum.gradients`.
        loss_reduction: "mean" says that losses are means over the samples of a backward.
        memory: Bytes that gradients may take until the norms are known, as in `unsum.WeightedSum`.
        verify: When to test whether samples interact: None in the first step, True in every step, False never.
        scaler: Not supported, raises an error: a step that a GradScaler skips reveals something about the data. Use
            bfloat16, which needs none.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dp = private(
        ...     model, optimizer, max_norm=1.0, noise_multiplier=0.0, expected_batch=2, sample_rate=0.5, seed=0
        ... )
        >>> with dp:
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> dp.step(), dp.steps
        (True, 1)
    """
    refuse_unserved(model, optimizer, scaler)
    settings = Settings(noise_multiplier, expected_batch, sample_rate)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise OptionError(f"unsum.private: seed={seed!r}: a whole number, or None")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(f"unsum.private: generator={generator!r}: a torch.Generator, or None")
    if not isinstance(secure, bool) or sum([secure, seed is not None, generator is not None]) > 1:
        raise OptionError("unsum.private: give one of seed=, generator= and secure=True, or none of them")
    clipping = Clipping(
        checked_norm("unsum.private", max_norm), checked_how("unsum.private", how), memory, verify,
        scaled=False, penalties=False, name="unsum.private",
    )  # fmt: skip
    options = options_of("unsum.private", samples, "*", loss_reduction, None, verify)
    randomness = sources(seed, generator, secure=secure, rank=world()[0])
    return Private(unwrapped(model), optimizer, settings, clipping, options, randomness)
