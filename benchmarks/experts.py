"""Experts: what the norms of routed rows cost by each way, and how often a step waits for the GPU.

    python benchmarks/experts.py [--device cuda] [--quick]

First the ways by themselves, on rows that were routed at random and on rows that all go to one expert too: *gram*
(pairs of positions of a sample), *product* (every sample's gradient formed, one kernel for all segments), *padded*
(rows of each sample and expert, padded to the longest: waits for the device once). Then a step of a Mixtral-like model,
plain and with norms.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import quantities
from measuring import machine, now, options_of, parsed
from unsum.factors.routed import Routed
from unsum.graph.layout import Mapped
from unsum.graph.positions import Positions

SHAPES = {  # samples, tokens, experts, each token's, inputs, outputs
    "cuda": [(8, 512, 8, 2, 1024, 4096), (8, 512, 8, 2, 2048, 1024), (4, 4096, 8, 2, 1024, 4096),
             (16, 1024, 64, 8, 1024, 512)],
    "cpu": [(4, 64, 8, 2, 128, 512), (4, 64, 8, 2, 256, 128)],
}  # fmt: skip


def routed(n: int, t: int, experts: int, k: int, i: int, o: int, *, device: str, uneven: bool) -> Routed:
    """Rows as a model would sort them."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    liking = torch.zeros(experts)
    liking[0] = 2.0 if uneven else 0.0
    chosen = (torch.rand(n * t, experts) + liking).argsort(1, descending=True)[:, :k]
    matrix, order = torch.sort(chosen.flatten(), stable=True)
    sample = (order // (k * t)).int().to(device)
    a, delta = (torch.randn(len(order), size, device=device).to(dtype) for size in (i, o))
    held = torch.argsort(order).view(n, t * k).to(device)
    by = Positions(Mapped(sample, is_whole=True, held=held), n, 1)
    ends = torch.bincount(matrix, minlength=experts).cumsum(0).int().to(device)
    held, shape = by.index(a.device), (experts, o, i)
    return Routed(a, delta, sample, matrix.to(device), n, experts, shape, ends=ends, held=held)


def ways(device: str, seconds: float) -> None:
    """Each shape, by each way."""
    for n, t, experts, k, i, o in SHAPES[device]:
        for uneven in (False, True):
            torch.manual_seed(0)
            kind = routed(n, t, experts, k, i, o, device=device, uneven=uneven)
            made: dict[str, Callable[[], Tensor]] = {
                way: lambda kind=kind, way=way: _fresh(kind).sq_norms_by(way) for way in ("gram", "product", "padded")
            }
            made["chosen"] = lambda kind=kind: _fresh(kind).sq_norms()
            made["weight gradient alone"] = lambda kind=kind: _fresh(kind).sum()
            wanted = made["padded"]().double()
            found = {}
            for name, make in made.items():
                try:
                    off = (make().double() / wanted - 1).abs().max() if not name.startswith("weight") else 0.0
                    found[name] = f"{_time(make, device, seconds):.3f} ms (off {float(off):.0e})"
                except RuntimeError as error:
                    found[name] = f"fails: {str(error).splitlines()[0][:80]}"
                gc.collect()
            about = "all at one expert too" if uneven else "at random"
            print(f"n={n} t={t}·{k} experts={experts} {i}→{o}, {about}: {found}", flush=True)


def _fresh(kind: Routed) -> Routed:
    """Without what it has found out."""
    return type(kind)(**{name: getattr(kind, name) for name in kind.__dataclass_fields__})


def _time(make: Callable[[], Any], device: str, seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    make()
    while time.perf_counter() < end or len(times) < 3:
        start = now(device)
        make()
        times.append(now(device) - start)
    return 1e3 * statistics.median(times)


def waits(step: Callable[[], Any]) -> int:
    """How often a step waits for the GPU, as torch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in said)


def main() -> None:
    options = parsed(options_of(__doc__))
    warnings.simplefilter("ignore")
    random.seed(0)
    print(machine(options.device))
    ways(options.device, 0.05 if options.quick else 0.5)
    name, (make, names) = next(
        (name, made) for name, made in quantities.MODELS[options.device].items() if name.startswith("experts")
    )
    result = quantities.run(name, make, names, device=options.device, seconds=3 if options.quick else 15)
    print(quantities.table(result))
    if options.device == "cuda":
        model, losses, x, y = make()
        model, x, y = model.to("cuda", torch.bfloat16), x.cuda(), y.cuda()
        for key, step in quantities.ways_of(model, losses, x, y, names).items():
            for _ in range(3):
                step()
            print(f"{key}: waits for the GPU {waits(step)} times")


if __name__ == "__main__":
    main()
