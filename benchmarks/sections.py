"""What a block with norms costs in every step beside the reduction of factors, part by part: the model of overhead.py.

    python benchmarks/sections.py [--device cuda] [--quick] [--json PATH]

Shown are microseconds of this thread, each part without those inside it: medians over steps in which nothing is learnt.
The clock is read around every part, which adds about a microsecond to each. To compare two versions, run them by turns.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections import Counter, defaultdict
from typing import Any

import torch

import unsum
from measuring import machine, options_of, parsed, write
from models import GPT
from overhead import BATCH, SHAPE, ways_of
from unsum import block
from unsum.kernels import grouped
from unsum.step import backward, collect, deliver, forward, lanes, meetings, planner

PARTS: dict[str, list[tuple[Any, tuple[str, ...]]]] = {
    "opening and closing": [
        (unsum, ("gradients",)),
        (block.GradientsBlock, ("__init__", "__enter__", "__exit__")),
    ],
    "calls of the model": [(block.GradientsBlock, ("before_call", "after_call"))],
    "survey": [(block, ("survey",))],
    "plan": [(forward.Forward, ("find", "decide")), (planner.Planner, ("plan",))],
    "begin and end": [
        (block.GradientsBlock, ("before_backward", "after_backward")),
        (backward.Step, ("__init__",)),
    ],
    "hooks on nodes": [(meetings.Run, ("__init__", "attach", "detach"))],
    "collector": [(collect.Collector, ("__init__", "lanes", "digests", "finish"))],
    "meetings": [(meetings.Run, ("_waiting", "_ruled", "_owned"))],
    "reduction": [(lanes.Lanes, ("_stack", "flush")), (grouped, ("launched",))],
    ".grad": [(deliver.Delivery, ("put", "finish"))],
}


def watch(spent: Counter[str]) -> None:
    """Put clocks around all parts."""
    inside = [0.0]

    def timed(function: Any, part: str) -> Any:
        def clocked(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            inside.append(0.0)
            try:
                return function(*args, **options)
            finally:
                took = time.thread_time() - start
                spent[part] += took - inside.pop()
                inside[-1] += took

        return clocked

    for part, places in PARTS.items():
        for owner, names in places:
            for name in names:
                setattr(owner, name, timed(getattr(owner, name), part))


def main() -> None:
    options = parsed(options_of(__doc__))
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = GPT(**SHAPE).to(options.device)
    x, y = torch.randint(SHAPE["vocabulary"], (2, BATCH, SHAPE["length"]), device=options.device)
    step, spent = ways_of(model, x, y)["norms"], Counter[str]()
    watch(spent)
    for _ in range(10):
        model.zero_grad()
        step()
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(50 if options.quick else 200):
        spent.clear()
        model.zero_grad()
        step()
        for part in PARTS:
            times[part].append(spent[part])
    about = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    found = {part: round(1e6 * statistics.median(each)) for part, each in times.items()}
    for part, us in found.items():
        print(f"{part:<24}{us:>8}")
    rest = sum(found.values()) - found["reduction"]
    print(f"{'all but the reduction':<24}{rest:>8}")
    write(options.json, {"machine": about, "device": options.device, "rows": found})


if __name__ == "__main__":
    main()
