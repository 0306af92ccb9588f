"""What watching a training run costs over the same run without, on a CPU or a GPU.

    python benchmarks/watching.py [--device cuda] [--quick] [--json PATH]

The unit is eight training steps with their optimizer (forward, loss, backward, AdamW, gradients cleared), as a loop
makes them that does not wait for a GPU after each; on a CPU, one. The ways take turns; each time is divided by that of
the plain way in the same turn; shown are the median of these ratios, their quartiles, and peak memory over that of the
plain step. "every=50" is the mean over 50 steps, one of them watched. Written to results/watching_cpu.json or
results/watching_cuda.json, the tables go to docs/watch.md too.

Beside it: the peak memory of a step with activation checkpointing, watched or not, over that of the step without
checkpointing; and a thousand steps of a small model with everything on (layers, updates, JSON lines): how much memory
the process holds more after them than after a hundred, and how far the weights are from those of the same run without.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unsum
from measuring import machine, memory_of, memory_on_cpu, now, options_of, parsed, ratios, write
from models import GPT

ROOT = Path(__file__).resolve().parent
PAGE, BEGIN, END = ROOT.parent / "docs" / "watch.md", "<!-- begin: benchmarks/watching.py -->\n", "<!-- end -->"
SHAPES: dict[str, dict[str, Any]] = {
    "GPT-2 shape": {"batch": 16, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50304},
    "B=8 T=128": {"batch": 8, "width": 768, "heads": 12, "length": 128, "vocabulary": 50304},
}
SMALL: dict[str, dict[str, Any]] = {
    "L=4 d=256": {"batch": 16, "width": 256, "heads": 4, "length": 128, "vocabulary": 512, "depth": 4},
    "L=6 d=384": {"batch": 4, "width": 384, "heads": 6, "length": 128, "vocabulary": 512, "depth": 6},
}


def step_of(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any, around: Any = None) -> Callable[[], None]:
    def backward() -> None:
        logits = model(x)
        F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()).backward()

    def step() -> None:
        if around is None:
            backward()
        else:
            with around:
                backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(shape: dict[str, Any], device: str, seconds: float) -> dict[str, Any]:
    options = {key: value for key, value in shape.items() if key != "batch"}
    torch.manual_seed(0)
    model = GPT(**options).to(device)
    model = model.bfloat16() if device == "cuda" else model
    x, y = torch.randint(options["vocabulary"], (2, shape["batch"], options["length"]), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=device == "cuda")
    watches = {
        "every=1": unsum.watch(model),
        "every=1, no layers": unsum.watch(model, layers=False),
        "every=50": unsum.watch(model, every=50),
    }
    steps = {"plain": step_of(model, x, y, optimizer), "plain again": step_of(model, x, y, optimizer)}
    alone = {name: watch for name, watch in watches.items() if name != "every=50"}
    steps |= {name: step_of(model, x, y, optimizer, watch) for name, watch in alone.items()}
    for step in steps.values():
        for _ in range(4):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["plain"]) < 5:
        for name in random.sample(list(steps), len(steps)):
            start = now(device)
            for _ in range(8 if device == "cuda" else 1):
                steps[name]()
            times[name].append(now(device) - start)
    found: dict[str, Any] = {name: ratios(times, name, "plain") for name in steps if name != "plain"}
    memory = memory_of if device == "cuda" else memory_on_cpu
    plain = memory(steps["plain"], model)
    for name in alone:
        found[name]["memory"] = round(memory(steps[name], model) / plain, 3)
    found["every=50"] = every_50(steps["plain"], step_of(model, x, y, optimizer, watches["every=50"]), device, seconds)
    found["step"] = f"{sorted(times['plain'])[len(times['plain']) // 2] * (125 if device == 'cuda' else 1000):.1f} ms"
    return found


def every_50(plain: Callable[[], None], watched: Callable[[], None], device: str, seconds: float) -> dict[str, float]:
    """The same number of steps of both, in turns."""
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times["plain"]) < 2:
        for name, step in (("plain", plain), ("watched", watched)):
            start = now(device)
            for _ in range(50):
                step()
            times[name].append(now(device) - start)
    return ratios(times, "watched", "plain")


def filled(page: str) -> str:
    """The page with the tables of the last results."""
    lines = []
    for device in ("cpu", "cuda"):
        path = ROOT / "results" / f"watching_{device}.json"
        if not path.exists():
            continue
        report = json.loads(path.read_text())
        lines += [", ".join(f"{key} {value}" for key, value in report["machine"].items()) + ".", ""]
        for name, ways in report["models"].items():
            lines += [f"**{name}**", "", "| way | to a plain step | quartiles | peak memory |", "|---|---|---|---|"]
            for way, ratio in ways.items():
                memory = f"{ratio['memory']:.2f}×" if "memory" in ratio else ""
                lines.append(f"| {way} | {ratio['median']:.3f}× | {ratio['low']:.3f}, {ratio['high']:.3f} | {memory} |")
            lines.append("")
        if "checkpointed" in report:
            held = report["checkpointed"]
            plain, watched, steps = held["checkpointed"], held["checkpointed, watched"], report["thousand"]
            lines += [
                f"With activation checkpointing, the peak memory is {plain:.2f}× that of the first model's plain step; "
                f"with `watch` it is {watched:.2f}×. A thousand steps of a small model with all options on take "
                f"{steps['more_megabytes']} MB more memory than a hundred. The final weights differ by "
                f"{steps['off']:.0e} from those of the same run without `watch`: float32 rounding, which grows over a "
                "thousand steps. In float64, with small steps, a test finds them equal to 1e-12.",
                "",
            ]
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n".join(lines) + END + rest.split(END, 1)[1]


class Checkpointed(GPT):
    """The same model; each block is computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(self.norm(h))


def with_checkpoints(shape: dict[str, Any], device: str) -> dict[str, float]:
    """Peak memory of a step with checkpoints over one without: plain, and watched."""
    options = {key: value for key, value in shape.items() if key != "batch"}
    memory = memory_of if device == "cuda" else memory_on_cpu
    found: dict[str, int] = {}
    for name, kind in (("whole", GPT), ("checkpointed", Checkpointed)):
        torch.manual_seed(0)
        model = kind(**options).to(device)
        model = model.bfloat16() if device == "cuda" else model
        x, y = torch.randint(options["vocabulary"], (2, shape["batch"], options["length"]), device=device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-5)
        ways = {name: step_of(model, x, y, optimizer)}
        ways[f"{name}, watched"] = step_of(model, x, y, optimizer, unsum.watch(model))
        for way, step in ways.items():
            for _ in range(3):
                step()
            found[way] = memory(step, model)
    return {way: round(held / found["whole"], 3) for way, held in found.items()}


def thousand() -> dict[str, float]:
    """A thousand steps with everything on."""

    def run(watched: bool) -> tuple[nn.Module, list[int]]:
        torch.manual_seed(0)
        model = GPT(width=32, heads=2, length=16, vocabulary=50, depth=2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        folder, held = tempfile.mkdtemp(), []
        watch = unsum.watch(model, optimizer=optimizer, to=folder + "/run.jsonl", history=100) if watched else None
        for step in range(1000):
            x, y = torch.randint(50, (2, 4 + step % 3, 12 + step % 5))
            step_of(model, x, y, optimizer, watch)()
            if step in (100, 999):
                gc.collect()
                held.append(resident())
        return model, held

    (plain, _), (model, held) = run(False), run(True)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    off = max(float((p - q).detach().norm() / p.detach().norm()) for p, q in pairs)
    return {
        "more_megabytes": round((held[1] - held[0]) / 1e6, 1),
        "off": off,
    }


def resident() -> int:
    """Bytes of memory that the process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    options = parsed(options_of(__doc__ or ""))
    seconds = options.seconds or (6 if options.quick else 30)
    report: dict[str, Any] = {"machine": machine(options.device), "models": {}}
    shapes = SHAPES if options.device == "cuda" else SMALL
    report["checkpointed"] = with_checkpoints(next(iter(shapes.values())), options.device)
    report["thousand"] = thousand()
    print("peak memory over a plain step:", report["checkpointed"])
    print("a thousand steps:", report["thousand"])
    for name, shape in shapes.items():
        found = report["models"][name] = measure(shape, options.device, seconds)
        print(f"{name}: a step takes {found.pop('step')}")
        for way, ratio in found.items():
            memory = f"  memory {ratio['memory']:.3f}" if "memory" in ratio else ""
            print(f"  {way:<20}{ratio['median']:.3f}  ({ratio['low']:.3f} to {ratio['high']:.3f}){memory}")
        gc.collect()
    write(options.json, report)
    if options.json is not None and options.json.resolve().parent == ROOT / "results":
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
