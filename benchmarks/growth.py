"""How the cost of norms grows with the number of samples B and of tokens T, over a plain training step.

    python benchmarks/growth.py [--quick] [--json PATH] [--device cuda] [--threads N] [--limit S]

For each size: one GPT, plain steps and steps with `unsum.Norms()` in turn; shown are the medians of the time per sample
(in microseconds) and of the ratio within each repetition, on a GPU peak memory over that of a plain step, and how far
the first sample's norm is from that of its gradient computed alone. A size that does not fit in memory is measured with
one sample; one that fails is shown with its reason. Results are written after each size.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
import warnings
from typing import Any

import torch

from measuring import machine, memory_of, now, options_of, parsed, ratios, write
from models import GPT
from norms import plain, token_loss, truth, with_unsum
from peers import reason

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
    off = float((with_unsum(token_loss)(net, x, y)[:1].float() / truth(net, token_loss, x, y, 1) - 1).abs())
    for way in ways.values():
        for _ in range(2):
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
    row = {"B": batch, "T": length, "us_per_sample": each, "to_plain": ratios(times, "norms", "plain"),
           "repetitions": len(times["plain"]),
           "norms": f"{'off' if off < (0.05 if device == 'cuda' else 1e-3) else 'WRONG'} by {off:.0e}"}  # fmt: skip
    if device == "cuda":
        peaks = {name: memory_of(functools.partial(way, net, x, y), net) for name, way in ways.items()}
        row["memory"] = round(peaks["norms"] / peaks["plain"], 3)
    return row


def tried(batch: int, length: int, model: dict[str, int], *, device: str, seconds: float) -> dict[str, Any]:
    """With one sample where memory does not suffice; if that fails too, why."""
    for samples in dict.fromkeys((batch, 1)):
        try:
            return measure(samples, length, model, device=device, seconds=seconds)
        except torch.OutOfMemoryError as error:
            note = reason(error)
        except Exception as error:
            return {"B": samples, "T": length, "note": reason(error)}
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return {"B": batch, "T": length, "note": note}


def shown(row: dict[str, Any]) -> str:
    if "note" in row:
        return f"  {row['B']:>5}{row['T']:>7}  {row['note']}"
    each, memory = row["us_per_sample"], row.get("memory", "")
    ratio = row["to_plain"]["median"]
    return f"  {row['B']:>5}{row['T']:>7}{each['plain']:>18}{each['norms']:>18}{ratio:>10}{memory:>8}  {row['norms']}"


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="S", help="begin no size after so long")
    options = parsed(parser)
    warnings.simplefilter("ignore")
    sizes, begun = SIZES[options.device], time.perf_counter()
    seconds = options.seconds or (1 if options.quick else 8)
    report: dict[str, Any] = {"machine": machine(options.device), "device": options.device, "model": sizes["model"]}
    report |= {"samples": [], "tokens": []}
    for what in ("samples", "tokens"):
        print(f"growth with {what}: {sizes['model']}")
        print(f"  {'B':>5}{'T':>7}{'plain, µs/sample':>18}{'norms, µs/sample':>18}{'to plain':>10}{'memory':>8}  norms")
        for batch, length in sizes[what]:
            if time.perf_counter() - begun > options.limit:
                row: dict[str, Any] = {"B": batch, "T": length, "note": "not measured: the time was up"}
            else:
                row = tried(batch, length, sizes["model"], device=options.device, seconds=seconds)
            report[what].append(row)
            print(shown(row), flush=True)
            write(options.json, report)  # after each size: a limit of time loses nothing


if __name__ == "__main__":
    main()
