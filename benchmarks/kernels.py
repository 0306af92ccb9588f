"""Where the time of a step goes on a GPU: time of its kernels by kind, plain and with norms, beside the wall clock.

    python benchmarks/kernels.py [--only NAME] [--top 12]

If the kernels of a step take less time than the step does, the processor (Python) is what is waited for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from measuring import now
from norms import CUDA, plain, with_unsum

STEPS = 5


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--top", type=int, default=12)
    arguments = parser.parse_args()
    for name, make in CUDA.items():
        if arguments.only not in name:
            continue
        torch.manual_seed(0)
        model, loss, x, y = make("cuda")
        model, x, y = model.to("cuda", torch.bfloat16), x.cuda(), y.cuda()
        ways = {"plain": plain(loss), "norms": with_unsum(loss)}
        by_kernel, wall, busy, ahead = {}, {}, {}, {}
        for label, way in ways.items():

            def step(way=way, model=model, x=x, y=y) -> None:
                model.zero_grad(set_to_none=True)
                way(model, x, y)

            for _ in range(4):
                step()
            times, calls = [], []
            for _ in range(12):
                start = now("cuda")
                step()
                calls.append(1e3 * (time.perf_counter() - start))
                times.append(1e3 * (now("cuda") - start))
            by_kernel[label] = kernels(step)
            wall[label], ahead[label] = statistics.median(times), statistics.median(calls)
            busy[label] = sum(ms for ms, _ in by_kernel[label].values())
        print(f"\n{name}")
        for label in ways:
            launches = sum(count for _, count in by_kernel[label].values())
            print(f"  {label:<6} wall {wall[label]:7.2f} ms, returns after {ahead[label]:7.2f} ms, kernels "
                  f"{busy[label]:7.2f} ms in {launches:.0f} launches")  # fmt: skip
        print(f"  ratio  wall {wall['norms'] / wall['plain']:.3f}, kernels {busy['norms'] / busy['plain']:.3f}")
        empty = (0.0, 0)
        more = {k: by_kernel["norms"].get(k, empty)[0] - by_kernel["plain"].get(k, empty)[0]
                for k in by_kernel["norms"].keys() | by_kernel["plain"].keys()}  # fmt: skip
        for kernel in sorted(more, key=lambda k: -abs(more[k]))[: arguments.top]:
            before, after = by_kernel["plain"].get(kernel, empty), by_kernel["norms"].get(kernel, empty)
            print(f"  {more[kernel]:+8.2f} ms  {before[1]:4.0f} → {after[1]:4.0f} launches  {kernel[:100]}")


if __name__ == "__main__":
    main()
