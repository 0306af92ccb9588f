"""Norms of many layers in one launch, beside layers of one shape put side by side, on a GPU.

    python benchmarks/groups.py [--quick] [--json PATH] [--device cpu]

First the kernels, for layers as in GPT-2: microseconds of the GPU (`device`) and of the processor until the call
returns (`host`); `off` is how far the kernel is from its twin in float32, relative to the largest number. Then whole
steps of a GPT-2 shape with B=8 and T=128, in milliseconds until the GPU has done and until the step returns: plain,
with norms by shape, with norms in groups, interleaved; the ratio is the median over rounds. With `--device cpu` (set
TRITON_INTERPRET=1) all is tiny and times mean nothing: it shows that the script runs.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import unsum
from fused import Made, off
from measuring import machine, options_of, parsed, write
from models import GPT
from unsum.kernels import fused, grouped, product
from unsum.plan import memory
from unsum.step import lanes

SHAPE = {"width": 768, "depth": 12, "heads": 12, "vocabulary": 50304, "length": 128}
TINY = {"width": 32, "depth": 2, "heads": 2, "vocabulary": 50, "length": 8}


def device_and_host(step: Callable[[], Any], device: str, repeats: int = 10) -> dict[str, float]:
    """Microseconds of a call: the GPU's, which is kept waiting until all calls are there, and the processor's."""
    for _ in range(3):
        step()
    times, ends = [], []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # cycles, some 50 ms
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        ends[0].record()
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
    found = {"host": round(statistics.median(times), 1)}
    if ends:
        ends[1].record()
        torch.cuda.synchronize()
        found["device"] = round(1e3 * ends[0].elapsed_time(ends[1]) / repeats, 1)
    return found


def _by_shape(*columns: list[Tensor]) -> list[list[Tensor]]:
    """Layers of one shape side by side, as one with more samples."""
    alike: dict[Any, list[tuple[Tensor, ...]]] = {}
    for each in zip(*columns, strict=True):
        alike.setdefault(tuple(t.shape for t in each), []).append(each)
    return [[torch.cat(column) for column in zip(*same, strict=True)] for same in alike.values()]


def launches(made: Made) -> Iterator[dict[str, Any]]:
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    for n, t, layers in ((8, 128, 12 * shapes + [(768, 50304)]), (32, 64, 12 * shapes), (8, 512, 12 * shapes[1:2])):
        n, t = made.less(n, t)
        sizes = [made.less(*size) for size in (layers[:5] if made.is_small else layers)]
        a, delta = [made(n, t, i) for i, _ in sizes], [made(n, t, o) for _, o in sizes]
        x = [made(n, t, sizes[0][0]) for _ in range(len(sizes) // 2)]
        given = [made(*each.shape) for each in x]
        numbers = [[torch.rand(n, t, device=made.device) for _ in x] for _ in range(2)]
        ways: dict[str, tuple[str, tuple[Any, ...], Callable[[], Any]]] = {
            "gram": ("gram_sq_norms", (a, delta), lambda a=a, delta=delta: [
                product.sq_norms(*pair, way="gram") for pair in _by_shape(a, delta)]),
            "shift": ("shift_sq_norms", (delta,), lambda delta=delta: [
                product.squares(each.sum(1, dtype=torch.float32)) for (each,) in _by_shape(delta)]),
            "norm": ("norm_sq_norms", (given, x, *numbers), lambda given=(given, x, *numbers): [
                product.squares(each) for four in _by_shape(*given) for each in fused.scale_and_shift(*four)]),
        }  # fmt: skip
        for way, (name, columns, by_shape) in ways.items():
            step = lambda name=name, columns=columns, n=n, t=t: getattr(grouped, name)(*columns, n, t, True)
            row: dict[str, Any] = {"layer": f"{way}: {len(columns[0])} layers, n={n} t={t}"}
            for what, run in (("in groups", step), ("by shape", by_shape)):
                row |= {f"{what}, {key}": value for key, value in device_and_host(run, made.device).items()}
            yield row | {"off": off(f"grouped_{name}", *columns, n, t, True)}


def taken(model: nn.Module, device: str, rows: int) -> None:
    """From now on layers wait for one launch if a step has no more rows."""
    grouped.ROWS[device] = rows
    for plan in memory.plans(model):
        plan.grouped.clear()
        plan.arranged.clear()


def steps(made: Made, rounds: int) -> Iterator[dict[str, Any]]:
    shape: dict[str, Any] = TINY if made.is_small else SHAPE
    device, rows = made.device, grouped.ROWS.get(made.device, 0)
    lanes.ROWS = {device: rows}  # as it is, whatever is done to the other
    model = GPT(**shape).to(device, made.dtype)
    x = torch.randint(shape["vocabulary"], (8, shape["length"]), device=device)
    found: dict[str, Tensor] = {}

    def step(name: str) -> None:
        if name == "plain":
            model(x).float().square().sum().backward()
            return
        with unsum.gradients(model, unsum.Norms()) as g:
            model(x).float().square().sum().backward()
        found[name] = g[unsum.Norms].sq_norms()

    times: dict[str, list[tuple[float, float]]] = {"plain": [], "by shape": [], "in groups": []}
    for name in list(times)[1:]:
        for _ in range(5):
            step(name)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name in random.sample(list(times), len(times)):
            taken(model, device, rows if name == "in groups" else 0)
            own = [_timed(lambda name=name: step(name), model, device) for _ in range(4)][1:]  # what is found is kept
            times[name].append(tuple(statistics.median(each) for each in zip(*own, strict=True)))
    taken(model, device, rows)
    for name, own in times.items():
        ratio = statistics.median([a[0] / b[0] for a, b in zip(own, times["plain"], strict=True)])
        done, returns = (round(statistics.median(each), 2) for each in zip(*own, strict=True))
        yield {"layer": f"step, {name}", "ms": done, "returns": returns, "to plain": round(ratio, 3)}
    apart = float((found["in groups"] / found["by shape"] - 1).abs().max())
    yield {"layer": "norms in groups beside norms by shape", "off": round(apart, 6)}


def _timed(step: Callable[[], Any], model: nn.Module, device: str) -> tuple[float, float]:
    """Milliseconds until the GPU has done, and until the step returns."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    model.zero_grad(set_to_none=True)
    wait()
    start = time.perf_counter()
    step()
    returned = time.perf_counter() - start
    wait()
    return 1e3 * (time.perf_counter() - start), 1e3 * returned


def main() -> None:
    parser = options_of(__doc__ or "")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(parser)
    random.seed(0)
    torch.manual_seed(0)
    made, found = Made(options.device), list[dict[str, Any]]()
    for rows in (launches(made), steps(made, 2 if made.is_small else 8 if options.quick else 30)):
        for row in rows:
            found.append(row)
            print("  ".join(str(v) if k == "layer" else f"{k} {v}" for k, v in row.items()), flush=True)
    write(options.json, {"machine": machine(options.device), "rows": found})


if __name__ == "__main__":
    main()
