"""What each quantity adds to the processor's time of a step: a model so small that arithmetic is next to nothing.

    python benchmarks/overhead.py [--device cuda] [--quick] [--json PATH] [--profile WAY]

Shown are microseconds per step and per parameter over a plain step: medians of interleaved repetitions, each of which
takes a plain step beside every way. On a CPU it is the time of this thread; on a GPU the time until the step returns,
which is what a step takes where the processor is slower than the GPU. "norms, large layers" goes the way of layers that
are too large to wait for others of their shape. `--profile` prints where a way spends its time.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import pstats
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import unsum
from measuring import machine, options_of, parsed, write
from models import GPT
from norms import token_loss
from unsum.step import lanes

Step = Callable[[], Any]
SHAPE = {"width": 16, "length": 16, "depth": 12, "heads": 2, "vocabulary": 32}
BATCH = 4
FORMED = 1024  # numbers: gradients of biases and norm layers have fewer, factors of any layer more


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Layers do not wait for others of their shape."""
    small = dict(lanes.SMALL)
    lanes.SMALL.update(dict.fromkeys(small, FORMED))
    try:
        yield
    finally:
        lanes.SMALL.update(small)


def ways_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Step]:
    def plain() -> None:
        token_loss(model, x, y).backward()

    def block(*reducers: Any, **options: Any) -> None:
        with unsum.gradients(model, *reducers, **options):
            token_loss(model, x, y).backward()

    def large() -> None:
        with as_if_large():
            block(unsum.Norms())

    def captured() -> None:
        with unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output")):
            token_loss(model, x, y).backward()

    return {
        "plain": plain,
        "norms": lambda: block(unsum.Norms()),
        "norms, large layers": large,
        "token norms": lambda: block(unsum.TokenNorms()),
        "projections": lambda: block(unsum.Project(k=4), grad=False),
        "clipped sum": lambda: block(unsum.WeightedSum(lambda norms: norms.reciprocal()), grad=False),
        "capture": captured,
    }


def timed(step: Step, model: nn.Module, device: str) -> float:
    """Seconds of the processor's."""
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.thread_time
    start = clock()
    step()
    return clock() - start


def measured(ways: dict[str, Step], model: nn.Module, device: str, repetitions: int) -> dict[str, list[float]]:
    for step in ways.values():
        for _ in range(5):
            timed(step, model, device)
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name in random.sample(list(ways), len(ways)):
            times[name].append(timed(ways[name], model, device))
    gc.unfreeze()
    return times


def profiled(step: Step, model: nn.Module, device: str) -> None:
    profile = cProfile.Profile()
    for _ in range(20):
        profile.enable()
        timed(step, model, device)
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--profile", metavar="WAY", help="print where this way spends its time")
    options = parsed(parser)
    warnings.simplefilter("ignore")
    random.seed(0)
    torch.manual_seed(0)
    model = GPT(**SHAPE).to(options.device)
    x, y = torch.randint(SHAPE["vocabulary"], (2, BATCH, SHAPE["length"]), device=options.device)
    ways, parameters = ways_of(model, x, y), len(list(model.parameters()))
    times = measured(ways, model, options.device, 20 if options.quick else 100)
    about, rows = machine(options.device), []
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"plain step: {1e6 * statistics.median(times['plain']):.0f} µs; {parameters} parameters\n")
    print(f"{'adds':<24}{'µs per step':>12}{'per parameter':>15}")
    for name in list(ways)[1:]:
        over = 1e6 * statistics.median([a - b for a, b in zip(times[name], times["plain"], strict=True)])
        rows.append({"way": name, "us": round(over), "us_per_parameter": round(over / parameters, 1)})
        print(f"{name:<24}{over:>12.0f}{over / parameters:>15.1f}")
    write(options.json, {"machine": about, "device": options.device, "rows": rows})
    if options.profile:
        profiled(ways[options.profile], model, options.device)


if __name__ == "__main__":
    main()
