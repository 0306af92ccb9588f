"""Where the time of a step goes on a GPU: time of its kernels by kind, plain and with unsum, beside the wall clock.

    python benchmarks/kernels.py [--only NAME] [--ways norms,clipped] [--top 12] [--mode reduce-overhead] [--python 0]
        [--json benchmarks/results/kernels_cuda.json]

If the kernels of a step take less time than the step does, the processor (Python) is what is waited for; `--python N`
prints the N functions of Python that take most of such a step. `--mode` compiles the model first ("default", or a mode
of torch.compile). The models are those of quantities.py.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import quantities
from measuring import machine, now, write

STEPS = 5
KINDS = {  # what is in a kernel's name, and what it does
    ("nvjet", "gemm", "wgrad"): "products",
    ("direct_copy", "CatArray", "Memcpy"): "copies",
    ("reduce_kernel", "_sums", "GammaBeta", "batch_norm_backward_reduce"): "sums",
    ("gather", "index_", "scatter", "radix", "Sort"): "routing",
    ("elementwise", "Functor"): "elementwise",
}


def kernels(step: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Kernel -> (ms, launches) of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name][0] += event.device_time / 1e3 / STEPS
            found[event.name][1] += 1 / STEPS
    return {name: (ms, count) for name, (ms, count) in found.items()}


def wall(step: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of a step until the GPU has done, and until the call returns."""
    times, calls = [], []
    for _ in range(repeats):
        start = now("cuda")
        step()
        calls.append(1e3 * (time.perf_counter() - start))
        times.append(1e3 * (now("cuda") - start))
    return statistics.median(times), statistics.median(calls)


def python(step: Callable[[], Any], top: int) -> None:
    """The functions of Python that a step spends its time in."""
    seen = cProfile.Profile()
    seen.enable()
    for _ in range(STEPS):
        step()
    seen.disable()
    torch.cuda.synchronize()
    pstats.Stats(seen).strip_dirs().sort_stats("tottime").print_stats(top)
    pstats.Stats(seen).sort_stats("cumtime").print_stats("src/unsum", top)  # and those of unsum, with what they call


def show(name: str, make: Callable[[], Any], chosen: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a model's table. Returns a row for each way."""
    torch.manual_seed(0)
    model, losses, x, y = make()
    model, y = model.to("cuda", torch.bfloat16), y.cuda()
    x = x.to("cuda", torch.bfloat16) if x.is_floating_point() else x.cuda()
    if options.mode:
        model = torch.compile(model, fullgraph=True, mode=None if options.mode == "default" else options.mode)
    ways = quantities.ways_of(model, losses, x, y, tuple(chosen))
    by_kernel, steps = {}, {}
    for label in ("plain", *chosen):

        def step(way=ways[label]) -> None:
            model.zero_grad(set_to_none=True)
            way()

        for _ in range(6):
            step()
        steps[label] = step
        by_kernel[label] = kernels(step)
    print(f"\n{name}")
    rows = []
    for label, step in steps.items():
        took, returned = wall(step, 12)
        busy, launches = map(sum, zip(*by_kernel[label].values(), strict=True))
        rows.append({"model": name, "way": label, "wall_ms": round(took, 2), "returns_after_ms": round(returned, 2),
                     "kernels_ms": round(busy, 2), "launches": round(launches)})  # fmt: skip
        print(f"  {label:<12} wall {took:7.2f} ms, returns after {returned:7.2f} ms, kernels {busy:7.2f} ms in "
              f"{launches:.0f} launches")  # fmt: skip
    empty = (0.0, 0)
    for label in chosen:
        plain, other = by_kernel["plain"], by_kernel[label]
        more = {k: other.get(k, empty)[0] - plain.get(k, empty)[0] for k in other.keys() | plain.keys()}
        print(f"  {label}, beyond plain:")
        largest = sorted(more, key=lambda k: -abs(more[k]))
        kinds: dict[str, float] = defaultdict(float)
        for kernel, ms in more.items():
            kinds[_short(kernel)] += ms
        own = next(row for row in rows if row["way"] == label)
        own["beyond_plain"] = {kind: round(ms, 2) for kind, ms in sorted(kinds.items(), key=lambda each: -each[1])[:3]}
        for kernel in largest[: options.top]:
            before, after = plain.get(kernel, empty), other.get(kernel, empty)
            print(f"  {more[kernel]:+8.2f} ms  {before[1]:4.0f} → {after[1]:4.0f} launches  {kernel[:100]}")
        if options.python:
            python(steps[label], options.python)
    return rows


def _short(kernel: str) -> str:
    """What a reader needs of a kernel's name."""
    for parts, name in KINDS.items():
        if any(part in kernel for part in parts):
            return name
    return kernel.partition("<")[0].partition("(")[0].removeprefix("void ")[:40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--ways", default="norms", help="those of quantities.py, with commas between")
    parser.add_argument("--top", type=int, default=12, help="so many kernels")
    parser.add_argument("--python", type=int, default=0, help="so many functions of Python")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--mode", help="of torch.compile; `default` for none of its modes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name, (make, possible) in quantities.MODELS["cuda"].items():
        if options.only in name:
            rows += show(name, make, [way for way in options.ways.split(",") if way in possible], options)
            write(options.json, {"machine": machine("cuda"), "device": "cuda", "rows": rows})


if __name__ == "__main__":
    main()
