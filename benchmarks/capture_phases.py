"""What a capture of every linear's input and grad_output adds to the processor's time, phase by phase.

    python benchmarks/capture_phases.py [--device cuda] [--quick] [--json PATH]

The model is so small that arithmetic is next to nothing (49 linears, as GPT-2 has). Shown are microseconds over a plain
step, medians of interleaved repetitions: opening and closing for the block, forward and backward also for each call of
a linear. "hooks by hand" is the least that hooks of PyTorch cost: a forward hook on each linear that keeps its input
and puts a hook on its output, checking nothing. On a CPU it is the time of this thread; on a GPU the time until a phase
returns.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import unsum
from measuring import machine, options_of, parsed, write
from models import GPT
from norms import token_loss
from overhead import BATCH, SHAPE

PHASES = ("open", "forward", "backward", "close")


@contextlib.contextmanager
def by_hand(model: nn.Module) -> Iterator[Any]:
    inputs: dict[int, Tensor] = {}
    grads: dict[int, Tensor] = {}
    handles: list[Any] = []

    def hook_for(i: int) -> Any:
        def keep_gradient(grad: Tensor) -> None:
            grads[i] = grad

        def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            inputs[i] = args[0].detach()
            handles.append(output.register_hook(keep_gradient))

        return hook

    try:
        for i, module in enumerate(model.modules()):
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_hook(hook_for(i)))
        yield inputs, grads
    finally:
        for handle in handles:
            handle.remove()


def ways_of(model: nn.Module) -> dict[str, Any]:
    return {
        "plain": contextlib.nullcontext,
        "hooks by hand": lambda: by_hand(model),
        "unsum.capture": lambda: unsum.capture(model, (nn.Linear, "input"), (nn.Linear, "grad_output")),
    }


def phases(way: Any, model: nn.Module, x: Tensor, y: Tensor, device: str) -> tuple[float, ...]:
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter if device == "cuda" else time.thread_time
    at = [clock()]
    block: AbstractContextManager[Any] = way()
    kept = block.__enter__()
    at.append(clock())
    loss = token_loss(model, x, y)
    at.append(clock())
    loss.backward()
    at.append(clock())
    block.__exit__(None, None, None)
    at.append(clock())
    del kept
    return tuple(b - a for a, b in itertools.pairwise(at))


def main() -> None:
    options = parsed(options_of(__doc__))
    random.seed(0)
    torch.manual_seed(0)
    model = GPT(**SHAPE).to(options.device)
    x, y = torch.randint(SHAPE["vocabulary"], (2, BATCH, SHAPE["length"]), device=options.device)
    ways, linears = ways_of(model), sum(isinstance(module, nn.Linear) for module in model.modules())
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for repetition in range(5 + (60 if options.quick else 300)):
        if repetition == 5:
            for rows in times.values():
                rows.clear()
            gc.collect()
            gc.freeze()
            gc.disable()
        for name in random.sample(list(ways), len(ways)):
            times[name].append(phases(ways[name], model, x, y, options.device))
        gc.collect()
    gc.enable()
    about = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    plain = [statistics.median(column) for column in zip(*times["plain"], strict=True)]
    print(f"plain step: {1e6 * sum(plain):.0f} µs; {linears} linears\n")
    print(f"{'adds, µs':<16}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'step':>10}{'per call':>10}")
    rows = []
    for name in list(ways)[1:]:
        over = [
            1e6 * statistics.median([a[k] - b[k] for a, b in zip(times[name], times["plain"], strict=True)])
            for k in range(len(PHASES))
        ]
        per_call = (over[1] + over[2]) / linears
        step = sum(over)
        print(f"{name:<16}" + "".join(f"{one:>10.0f}" for one in over) + f"{step:>10.0f}{per_call:>10.1f}")
        rows.append({"way": name, **dict(zip(PHASES, over, strict=True)), "step": step, "per_call": per_call})
    write(options.json, {"machine": about, "device": options.device, "linears": linears, "us": rows})


if __name__ == "__main__":
    main()
