"""How the cost of norms grows with the number of samples B and of tokens T, over a plain training step.

    python benchmarks/growth.py [--quick] [--json PATH] [--device cuda] [--threads N]

For each size: one GPT, plain steps and steps with `unsum.Norms()` in turn; shown are the medians of the time per sample
(in microseconds) and of the ratio within each repetition.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from typing import Any

import torch

from measuring import machine, now, options_of, parsed, ratios, write
from models import GPT
from norms import plain, token_loss, with_unsum

SIZES = {
    "cpu": {
        "samples": [(b, 64) for b in (4, 16, 64, 256)],
        "tokens": [(4, t) for t in (128, 512, 2048, 4096)],
        "model": {"width": 128, "depth": 2, "heads": 4, "vocabulary": 500},
    },
    "cuda": {
        "samples": [(b, 128) for b in (1, 4, 16, 64, 256, 512)],
        "tokens": [(4, t) for t in (128, 512, 2048, 4096, 8192, 16384)],
        "model": {"width": 768, "depth": 12, "heads": 12, "vocabulary": 8192},
    },
}


def measure(batch: int, length: int, model: dict[str, int], *, device: str, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    net = GPT(length=length, **model).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    x, y = torch.randint(model["vocabulary"], (2, batch, length), device=device)
    ways = {"plain": plain(token_loss), "norms": with_unsum(token_loss)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(3):
            way(net, x, y)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for name, way in ways.items():
            net.zero_grad(set_to_none=True)
            gc.collect()
            start = now(device)
            way(net, x, y)
            times[name].append(now(device) - start)
    each = {name: round(1e6 * statistics.median(values) / batch, 1) for name, values in times.items()}
    ratio = ratios(times, "norms", "plain")
    return {"B": batch, "T": length, "us_per_sample": each, "to_plain": ratio, "repetitions": len(times["plain"])}


def main() -> None:
    options = parsed(options_of(__doc__))
    warnings.simplefilter("ignore")
    sizes = SIZES[options.device]
    report: dict[str, Any] = {"machine": machine(options.device), "device": options.device, "model": sizes["model"]}
    for what in ("samples", "tokens"):
        print(f"growth with {what}: {sizes['model']}")
        print(f"  {'B':>5}{'T':>7}{'plain, µs/sample':>18}{'norms, µs/sample':>18}{'to plain':>10}")
        report[what] = []
        for batch, length in sizes[what]:
            row = measure(batch, length, sizes["model"], device=options.device, seconds=1 if options.quick else 8)
            report[what].append(row)
            each = row["us_per_sample"]
            print(f"  {batch:>5}{length:>7}{each['plain']:>18}{each['norms']:>18}{row['to_plain']['median']:>10}",
                  flush=True)  # fmt: skip
    write(options.json, report)


if __name__ == "__main__":
    main()
