"""What norms and the like cost in a compiled model, over the compiled model's plain step and over the eager one.

    python benchmarks/compiled.py [--device cuda] [--quick] [--json PATH] [--only NAME] [--mode reduce-overhead]

Every way makes one step in each repetition, in random order; shown are medians of the ratios to the compiled plain step
of the same repetition, with quartiles, peak memory over that of the compiled plain step, and how far results are from
those of the model that was not compiled.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import warnings
from typing import Any

import torch

import unsum
from measuring import machine, memory_of, now, options_of, parsed, ratios, write
from quantities import LARGE, SMALL, gpt, resnet, token_losses

MODELS = {
    "cuda": {
        "GPT-2 small shape B=16 T=1024": gpt(16, length=1024, **SMALL),
        "GPT L=8 d=2048 B=8 T=2048": gpt(8, length=2048, **LARGE),
        "launch-bound: GPT-2 small shape B=8 T=128": gpt(8, length=128, **SMALL),
        "ResNet-50 224×224 B=64, channels last, eval": resnet(64, 224),
    },
    "cpu": {"GPT L=2 d=128 T=64 B=8": gpt(8, width=128, depth=2, heads=4, vocabulary=500, length=64)},
}


def ways_of(model: Any, compiled: Any, losses: Any, x: Any, y: Any) -> dict[str, Any]:
    def block(which: Any, reducer: Any, **options: Any) -> Any:
        with unsum.gradients(which, reducer, **options) as g:
            losses(which, x, y).sum().backward()
        return g[reducer]

    def clip(norms: Any) -> Any:
        return (1 / norms).clamp(max=1)

    def captured(which: Any) -> Any:
        with unsum.capture(which, (torch.nn.Linear, "input"), (torch.nn.Linear, "grad_output")) as got:
            losses(which, x, y).sum().backward()
        return got

    ways = {
        "plain, compiled": lambda: losses(compiled, x, y).sum().backward(),
        "plain, compiled, again": lambda: losses(compiled, x, y).sum().backward(),
        "plain, eager": lambda: losses(model, x, y).sum().backward(),
        "norms, compiled": lambda: block(compiled, unsum.Norms()).sq_norms(),
        "norms, eager": lambda: block(model, unsum.Norms()).sq_norms(),
        "clipped sum, compiled": lambda: block(compiled, unsum.WeightedSum(clip), grad=False).sum(),
        "clipped sum, eager": lambda: block(model, unsum.WeightedSum(clip), grad=False).sum(),
    }
    if losses is token_losses:
        ways |= {
            "captured, compiled": lambda: captured(compiled),
            "captured, eager": lambda: captured(model),
            "token norms, compiled": lambda: block(compiled, unsum.TokenNorms()).norms(),
            "projected, compiled": lambda: block(compiled, unsum.Project(k=16), grad=False).matrix(),
        }
    return ways


def run(name: str, make: Any, *, device: str, seconds: float, chosen: Any, mode: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, losses, x, y = make()
    model = model.to(device, dtype)
    x, y = (t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in (x, y))
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    ways = {key: step for key, step in ways_of(model, compiled, losses, x, y).items() if chosen(key)}
    checks = {}
    for key, step in ways.items():
        start = time.perf_counter()
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            found = step()
        checks[key] = found
        print(f"  {key}: warm after {time.perf_counter() - start:.1f} s", flush=True)
    off = float((checks["norms, compiled"] / checks["norms, eager"] - 1).abs().max())
    times: dict[str, list[float]] = {key: [] for key in ways}
    gc.collect()
    gc.freeze()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain, eager"]) < 5:
        for key in random.sample(list(ways), len(ways)):
            model.zero_grad(set_to_none=True)
            start = now(device)
            ways[key]()
            times[key].append(now(device) - start)
    peaks = {key: memory_of(step, model) for key, step in ways.items()} if device == "cuda" else {}
    rows = []
    for key in ways:
        row = {"way": key, "ms": round(1e3 * statistics.median(times[key]), 2),
               "to_compiled": ratios(times, key, "plain, compiled"),
               "to_eager": ratios(times, key, "plain, eager")}  # fmt: skip
        if peaks:
            row["memory"] = round(peaks[key] / peaks["plain, compiled"], 3)
        rows.append(row)
    name = name if mode is None else f"{name}, {mode}"
    return {"model": name, "repetitions": len(times["plain, eager"]), "norms_off_by": off, "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}; {result['repetitions']} repetitions; norms off by {result['norms_off_by']:.0e}"]
    for row in result["rows"]:
        median, low, high = row["to_compiled"].values()
        peak = f"{row['memory']:.2f}" if "memory" in row else ""
        eager = row["to_eager"]["median"]
        lines.append(f"  {row['way']:<24}{row['ms']:>9.2f}{median:>9.3f}{low:>8.3f}{high:>8.3f}{eager:>9.3f}{peak:>7}")
    return "\n".join(lines)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--ways", default="", help="besides plain steps and norms, ways whose name contains this")
    parser.add_argument("--mode", help="that of torch.compile: reduce-overhead, max-autotune")
    options = parsed(parser)
    chosen = lambda way: way.startswith(("plain", "norms")) or options.ways in way
    warnings.simplefilter("ignore")
    random.seed(0)
    about, results = machine(options.device), []
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    for name, make in MODELS[options.device].items():
        if options.only in name:
            given = {
                "device": options.device,
                "seconds": options.seconds or (3 if options.quick else 20),
                "chosen": chosen,
            }
            results.append(run(name, make, **given, mode=options.mode))
            print(table(results[-1]), end="\n\n", flush=True)
            write(options.json, {"machine": about, "device": options.device, "models": results})
            gc.unfreeze()
            gc.collect()


if __name__ == "__main__":
    main()
