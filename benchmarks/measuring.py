"""What all benchmarks share: the clock, ratios within one run, the machine's name, options, the file of results."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unsum


def options_of(about: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--seconds", type=float, metavar="S", help="for each model or size, instead of the usual")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU; 1 is the steadiest")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked for; torch is set to its threads."""
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device")
    torch.set_num_threads(options.threads)
    return options


@contextmanager
def threads_of(count: int | None) -> Iterator[None]:
    """torch has so many threads on the CPU inside; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write(path: Path | None, report: dict[str, Any]) -> None:
    """The results, if they are wanted."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def fill(maker: str, tables: str) -> None:
    """Put tables into the pages of docs/ that have a place for what this benchmark makes, and nowhere else."""
    begin, end = f"<!-- begin: {maker} -->\n", "<!-- end -->"
    for path in (Path(__file__).resolve().parent.parent / "docs").rglob("*.md"):
        before, mark, rest = path.read_text(encoding="utf-8").partition(begin)
        if mark:
            path.write_text(before + begin + tables + "\n" + end + rest.partition(end)[2], encoding="utf-8")


def clock(device: str) -> str:
    return "processor" if device == "cpu" and torch.get_num_threads() == 1 else "wall"


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if clock(device) == "processor" else time.perf_counter()


def ratios(times: dict[str, list[float]], way: str, to: str) -> dict[str, float]:
    """Median and quartiles of the ratio of two ways, repetition by repetition."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[way], times[to], strict=True)], n=4)
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def memory_of(step: Any, model: nn.Module) -> int:
    """Bytes on the GPU at the highest point of a step: the model, and what the step adds. Other models that lie there
    are not counted."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    added = torch.cuda.max_memory_allocated() - before
    model.zero_grad(set_to_none=True)
    return added + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def memory_on_cpu(step: Any, model: nn.Module) -> int:
    """Bytes of tensors at the highest point of a step beyond those there were before, as torch allocates them."""
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def machine(device: str) -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        **({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "unsum": unsum.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
