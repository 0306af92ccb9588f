"""What the norms of all per-sample gradients cost, with `.grad` as ever, over a plain training step.

    python benchmarks/norms.py [--quick] [--json PATH] [--device cuda] [--threads N] [--only NAME]

The unit is one training step: forward, loss (a sum over samples), backward. In each repetition every way makes one
step, in random order, and its time is divided by that of the plain step of the same repetition; shown are the median of
these ratios and their quartiles. "plain, again" is the noise. "first batch" is the step in which unsum learns the
layout. Norms of every way are compared with those of gradients that were computed one sample at a time.

Peers take part where they are installed: Opacus (per-sample gradients by hooks; ghost norms, the first of its two
backwards), torch.func (vmap of grad), BackPACK (BatchL2Grad), dattri-llm (factors of every layer that it knows, then
its own norms). One that fails is shown with its reason.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unsum
from measuring import machine, memory_of, now, options_of, parsed, ratios, write
from models import CNN, GPT, RecurrentLM
from peers import Loss, Way, installed, peer, reason
from unsum.plan.memory import forget


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), reduction="sum")


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def gpt(depth: int, width: int, length: int, batch: int, vocabulary: int, heads: int) -> Callable[[str], Any]:
    def make(device: str) -> tuple[nn.Module, Loss, Tensor, Tensor]:
        model = GPT(width=width, length=length, depth=depth, heads=heads, vocabulary=vocabulary)
        x, y = torch.randint(vocabulary, (2, batch, length))
        return model, token_loss, x, y

    return make


def cnn(device: str) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    return CNN(), class_loss, torch.randn(32, 3, 64, 64), torch.randint(10, (32,))


def lstm(device: str) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    x, y = torch.randint(1000, (2, 16, 64))
    return RecurrentLM(vocabulary=1000, width=256), token_loss, x, y


CPU = {
    "GPT L=4 d=256 T=128 B=16": gpt(4, 256, 128, 16, 1000, 4),
    "GPT L=2 d=512 T=64 B=32": gpt(2, 512, 64, 32, 1000, 8),
    "CNN like ResNet-18, 64×64, B=32, GroupNorm": cnn,
    "LSTM language model": lstm,
}
CUDA = {
    "GPT-2 small shape B=16 T=1024": gpt(12, 768, 1024, 16, 50304, 12),
    "GPT L=8 d=2048 B=8 T=2048": gpt(8, 2048, 2048, 8, 32000, 16),
    "GPT-2 small shape B=8 T=128": gpt(12, 768, 128, 8, 50304, 12),
}


# ---- ways -----------------------------------------------------------------------------------------------------------


def plain(loss: Loss) -> Callable[..., None]:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        loss(model, x, y).backward()

    return step


def with_unsum(loss: Loss, *, anew: bool = False) -> Callable[..., Tensor]:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if anew:
            forget(model)
        with unsum.gradients(model, unsum.Norms()) as g:
            loss(model, x, y).backward()
        return g[unsum.Norms].sq_norms()

    return step


# ---- measuring ------------------------------------------------------------------------------------------------------


def truth(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, count: int) -> Tensor:
    """Squared norms of the first samples' gradients, one at a time."""
    squares = []
    for n in range(min(count, len(x))):
        grads = torch.autograd.grad(
            loss(model, x[n : n + 1], y[n : n + 1]), list(model.parameters()), allow_unused=True
        )
        squares.append(sum(g.float().square().sum() for g in grads if g is not None))
    return torch.stack(squares)


def check(way: Way, x: Tensor, y: Tensor, squares: Tensor, grads: list[Tensor | None]) -> str:
    way.model.zero_grad(set_to_none=True)
    found = way.step(way.model, x, y)
    loose = 0.05 if any(p.dtype == torch.bfloat16 for p in way.model.parameters()) else 1e-3
    scale = max(wanted.norm() for wanted in grads if wanted is not None)
    for p, wanted in zip(way.model.parameters(), grads, strict=True):
        if wanted is not None and p.grad is not None and (off := (p.grad - wanted).norm() / scale) > loose:
            return f"WRONG .grad, off by {off:.0e}"
    if found is None:
        return "-"
    off = (found[: len(squares)].float() / squares - 1).abs().max()
    return f"off by {off:.0e}" if off < loose else f"WRONG norms, off by {off:.0e}"


PROCESSES = 5  # in which the memory of a way is measured, with what the heap keeps
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc maps larger blocks one by one, and gives them back when freed


def peak_on_cpu(name: str, way: str, threads: int, *, with_heap: bool = False) -> int | None:
    """Bytes that one step adds to the memory of a process of its own, at its highest; None if it fails there.
    `with_heap`: with freed blocks that the heap keeps, which differ from process to process; the median of some."""
    command = [sys.executable, __file__, "--only", name, "--peak-of", way, "--threads", str(threads)]
    found = []
    for _ in range(PROCESSES if with_heap else 1):
        usual = os.environ if with_heap else os.environ | MAPPED
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=usual)
        if done.returncode:
            return None
        found.append(int(done.stdout.split()[-1]))
    return statistics.median_low(found)


def peak_of(make: Callable[[str], Any], key: str) -> int:
    """In this process: how much more memory a step takes than there was before, at its highest."""
    torch.manual_seed(0)
    model, loss, x, y = make("cpu")
    way = next(way for way in own_ways(model, loss) if way.key == key) if key in OWN else peer(key, model, loss)
    for _ in range(3):
        way.model.zero_grad(set_to_none=True)
        way.step(way.model, x, y)
    way.model.zero_grad(set_to_none=True)
    way.free()
    lines = lambda: Path("/proc/self/status").read_text().splitlines()
    status = lambda key: 1024 * int(next(line for line in lines() if line.startswith(key)).split()[1])
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = status("VmRSS")
    way.step(way.model, x, y)
    return status("VmHWM") - before


OWN = ("plain", "unsum")


def own_ways(model: nn.Module, loss: Loss) -> list[Way]:
    return [
        Way("plain", model, plain(loss), "plain"),
        Way("plain, again", model, plain(loss), "plain"),
        Way("unsum, Norms", model, with_unsum(loss), "unsum"),
        Way("unsum, first batch", copy.deepcopy(model), with_unsum(loss, anew=True)),
    ]


def run(name: str, make: Callable[[str], Any], *, device: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss, x, y = make(device)
    model = model.to(device, dtype)
    x, y = (t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in (x, y))
    squares = truth(model, loss, x, y, 4)
    model.zero_grad()
    loss(model, x, y).backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    peers, notes = installed(model, loss, x, y)
    checked: dict[str, str] = {}
    ways: list[Way] = []
    for way in own_ways(model, loss) + peers:
        try:
            checked[way.name] = check(way, x, y, squares, grads)
            for _ in range(3):  # warm
                way.step(way.model, x, y)
            ways.append(way)
        except Exception as error:
            if way.key in OWN:
                raise
            notes.append({"way": way.name, "note": reason(error)})
    del grads
    times = timed(ways, x, y, device=device, seconds=seconds)
    peaks = {way.name: peak for way in ways if (peak := peak_memory(name, way, x, y, device)) is not None}
    own = [way for way in ways if way.key in OWN and device == "cpu" and way.name in peaks]
    heaps = {way.name: peak_on_cpu(name, way.key, torch.get_num_threads(), with_heap=True) or 0 for way in own}
    rows: list[dict[str, Any]] = []
    for way in ways:
        row = {"way": way.name, "ms": round(1e3 * statistics.median(times[way.name]), 2),
               "to_plain": ratios(times, way.name, "plain"), "norms": checked[way.name]}  # fmt: skip
        if way.name in peaks:
            row["memory"] = round(peaks[way.name] / peaks["plain"], 3)
        if way.name in heaps:
            row["with_heap"] = round(heaps[way.name] / heaps["plain"], 3)
        rows.append(row)
    return {"model": name, "repetitions": len(times["plain"]), "rows": rows + notes}


def timed(ways: Sequence[Way], x: Tensor, y: Tensor, *, device: str, seconds: float) -> dict[str, list[float]]:
    """Seconds of each way, one step of each per repetition, in random order."""
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    gc.collect()
    gc.freeze()
    gc.disable()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for way in random.sample(ways, len(ways)):
            way.model.zero_grad(set_to_none=True)
            start = now(device)
            way.step(way.model, x, y)
            times[way.name].append(now(device) - start)
            way.model.zero_grad(set_to_none=True)
        gc.collect()
    gc.enable()
    gc.unfreeze()
    return times


def peak_memory(name: str, way: Way, x: Tensor, y: Tensor, device: str) -> int | None:
    """Of one step, if it can be told."""
    way.free()
    if device == "cuda":
        return memory_of(functools.partial(way.step, way.model, x, y), way.model)
    if not way.key or not Path("/proc/self/clear_refs").exists():
        return None
    return peak_on_cpu(name, way.key, torch.get_num_threads())


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}; {result['repetitions']} repetitions"]
    lines.append(f"  {'way':<30}{'step, ms':>9}{'to plain':>10}{'25 %':>8}{'75 %':>8}{'memory':>8}  norms")
    for row in result["rows"]:
        if "note" in row:
            lines.append(f"  {row['way']:<30}{row['note']}")
            continue
        median, low, high = row["to_plain"].values()
        peak = f"{row['memory']:.2f}" if "memory" in row else ""
        lines.append(
            f"  {row['way']:<30}{row['ms']:>9.2f}{median:>10.3f}{low:>8.3f}{high:>8.3f}{peak:>8}  {row['norms']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--peak-of", metavar="WAY", help="only print the bytes that a step takes: plain, unsum, a peer")
    options = parsed(parser)
    if options.peak_of:
        print(peak_of(next(make for name, make in CPU.items() if options.only in name), options.peak_of))
        return
    warnings.simplefilter("ignore")
    random.seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    models = {k: v for k, v in (CUDA if options.device == "cuda" else CPU).items() if options.only in k}
    about = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()), f"threads {options.threads}", end="\n\n")
    report = {"machine": about, "device": options.device, "threads": options.threads, "models": []}
    for name, make in models.items():
        seconds = options.seconds or (5 if options.quick else 40)
        try:
            report["models"].append(run(name, make, device=options.device, dtype=dtype, seconds=seconds))
            print(table(report["models"][-1]), end="\n\n", flush=True)
        except torch.OutOfMemoryError as error:
            print(f"{name}: {reason(error)}", flush=True)
        write(options.json, report)  # after each: a limit of time loses nothing
        gc.collect()


if __name__ == "__main__":
    main()
