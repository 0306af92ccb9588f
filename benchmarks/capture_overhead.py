"""What it costs to capture the inputs and the output gradients of the 12 residual blocks of a small GPT.

    python benchmarks/capture_overhead.py [--quick] [--json PATH] [--device cuda] [--threads N]

The unit is one training step: forward, loss, backward. Putting hooks on and taking them off belongs to it, reading the
values afterwards does not. In each repetition every way makes one step, in random order, and its time is divided by
that of the plain step of the same repetition, so that a slow moment of the machine is in both. Shown are the median of
these ratios and their quartiles. "plain, again" is the plain step once more: how far it is from 1 is the noise.

The clock is the processor time of this process, to which other programs on the machine add little; with CUDA or with
several threads it is the time on the wall. Garbage is collected between repetitions, not in the steps.

Every way's values are compared with those of a run without any hook (the blocks called one by one, the gradients from
`torch.autograd.grad`), and so are the gradients of all parameters: "equal" is bit for bit, "close" up to 1e-4
of the norm.

nnsight is measured last, against plain steps of its own: importing it replaces `Tensor.backward` for everyone.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from capture_ways import BLOCKS, HAND, KINDS, UNSUM, Values, Way, ways_for, ways_with_nnsight
from measuring import clock, machine, now, options_of, parsed, ratios, write
from models import GPT, loss_of

SIZES = {"small": {"d": 64, "B": 4, "T": 16}, "realistic": {"d": 256, "B": 8, "T": 128}}
LIMIT = 1.3  # of unsum.capture to hooks by hand


# ---- measuring ------------------------------------------------------------------------------------------------------


def timed(way: Way, x: Tensor, y: Tensor) -> float:
    way.model.zero_grad(set_to_none=True)
    start = now(x.device.type)
    kept = way.step(way.model, x, y)
    took = now(x.device.type) - start
    del kept  # only now: freeing what was captured is not part of the step
    return took


def measure(ways: Sequence[Way], x: Tensor, y: Tensor, *, seconds: float) -> dict[str, list[float]]:
    """Seconds of every way in every repetition. Every way has made a step before (`check`), which warms up."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    gc.collect()
    gc.freeze()
    gc.disable()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 3:
        for way in random.sample(ways, len(ways)):
            times[way.name].append(timed(way, x, y))
        gc.collect()
    gc.enable()
    return times


def reference(model: GPT, x: Tensor, y: Tensor) -> tuple[Values, list[Tensor]]:
    """What flows at the blocks, and the gradients of the parameters, without any hook."""
    flow = [model.embed(x)]
    for block in model.blocks:
        flow.append(block(flow[-1]))
    loss = loss_of(model.head(model.norm(flow[-1])), y)
    grads = torch.autograd.grad(loss, [*flow, *model.parameters()])
    at, parameters = list(grads[: len(flow)]), list(grads[len(flow) :])
    flow = [h.detach() for h in flow]
    return dict(zip(KINDS, (flow[:-1], at[1:], flow[1:], at[:-1]), strict=True)), parameters


def check(way: Way, x: Tensor, y: Tensor, values: Values, parameters: list[Tensor]) -> str:
    """Make one step, and say how near what it gives is to the reference."""
    way.model.zero_grad(set_to_none=True)
    got = way.read(way.step(way.model, x, y))
    if set(got) != set(way.kinds) or any(len(got[kind]) != BLOCKS for kind in got):
        return "WRONG"
    pairs = [pair for kind in got for pair in zip(got[kind], values[kind], strict=True)]
    pairs += zip([p.grad for p in way.model.parameters()], parameters, strict=True)
    if all(torch.equal(a, b) for a, b in pairs):
        return "equal" if got else "-"
    return "close" if all((a - b).norm() <= 1e-4 * b.norm() for a, b in pairs) else "WRONG"


def rows_for(
    ways: Sequence[Way], x: Tensor, y: Tensor, *, seconds: float
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Check and measure these ways: their rows, and all times."""
    expected = reference(ways[0].model, x, y)
    checked = [check(way, x, y, *expected) for way in ways]
    times = measure(ways, x, y, seconds=seconds)
    rows = [
        {
            "way": way.name,
            "ms": round(1e3 * statistics.median(times[way.name]), 3),
            "to_plain": ratios(times, way.name, "plain"),
            "repetitions": len(times[way.name]),
            "values": values,
        }
        for way, values in zip(ways, checked, strict=True)
    ]
    return rows, times


def setting(size: str, device: str) -> tuple[GPT, Tensor, Tensor]:
    d, B, T = SIZES[size].values()
    torch.manual_seed(0)
    model = GPT(width=d, length=T, depth=BLOCKS).to(device)
    x, y = torch.randint(256, (2, B, T), device=device)
    return model, x, y


def run(size: str, *, device: str, seconds: float) -> dict[str, Any]:
    model, x, y = setting(size, device)
    rows, times = rows_for(ways_for(model), x, y, seconds=seconds)
    return {"size": size, **SIZES[size], "rows": rows, "headline": ratios(times, UNSUM, HAND)}


def run_nnsight(size: str, *, device: str, seconds: float) -> dict[str, Any]:
    """The row of nnsight, or a row that says why there is none."""
    if importlib.util.find_spec("nnsight") is None:
        return {"way": "nnsight", "note": "not installed"}
    try:
        model, x, y = setting(size, device)
        return rows_for(ways_with_nnsight(model), x, y, seconds=seconds)[0][1]
    except Exception as error:
        return {"way": "nnsight", "note": f"failed: {type(error).__name__}: {error}".splitlines()[0]}


# ---- showing --------------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    d, B, T = (result[key] for key in "dBT")
    lines = [f"{result['size']}: d={d}, B={B}, T={T}; {result['rows'][0]['repetitions']} repetitions"]
    lines.append(f"  {'way':<24}{'step, ms':>9}{'to plain':>10}{'25 %':>8}{'75 %':>8}  values")
    for row in result["rows"]:
        if "note" in row:
            lines.append(f"  {row['way']:<24}{row['note']}")
            continue
        median, low, high = row["to_plain"].values()
        lines.append(f"  {row['way']:<24}{row['ms']:>9.2f}{median:>10.3f}{low:>8.3f}{high:>8.3f}  {row['values']}")
    median, low, high = result["headline"].values()
    verdict = "ok" if median <= LIMIT else "TOO SLOW"
    lines.append(f"  {UNSUM} / {HAND}: {median:.3f} (quartiles {low:.3f}, {high:.3f}); ≤ {LIMIT}: {verdict}")
    return "\n".join(lines)


def main() -> None:
    options = parsed(options_of(__doc__))
    random.seed(0)
    seconds = {"small": 3.0, "realistic": 9.0} if options.quick else {"small": 30.0, "realistic": 80.0}
    results = [run(size, device=options.device, seconds=seconds[size]) for size in SIZES]
    for result in results:
        result["rows"].append(run_nnsight(result["size"], device=options.device, seconds=seconds[result["size"]] / 4))
    about = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    print("\n\n".join(map(table, results)))
    settings = {"device": options.device, "threads": options.threads, "quick": options.quick, "blocks": BLOCKS}
    settings["clock"] = clock(options.device)
    write(options.json, {"machine": about, "settings": settings, "limit": LIMIT, "sizes": results})


if __name__ == "__main__":
    main()
