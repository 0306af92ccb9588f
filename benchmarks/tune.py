"""Measure what the ways to norms cost on this machine, and leave it where unsum looks for it.

    python benchmarks/tune.py [--device cuda]     (make tune)

Without it, round figures are used. The file is `unsum.kernels.costs.tuned()`; delete it to forget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from unsum.kernels import costs, fused, product, window_rows


def seconds(function: Callable[[], object], device: str) -> float:
    """The median of some runs."""
    times = []
    for _ in range(9):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def measure(device: str) -> dict[str, float]:
    """Time per operation of each kind, in units of that of a batched product."""
    n, t, i, o = (16, 128, 512, 512) if device == "cpu" else (16, 1024, 2048, 2048)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, delta = torch.randn(n, t, i, device=device, dtype=dtype), torch.randn(n, t, o, device=device, dtype=dtype)
    each = torch.bmm(delta.mT, a)
    per_operation = {
        "product": seconds(lambda: torch.bmm(delta.mT, a), device) / (2 * n * t * o * i),
        "pass": seconds(lambda: torch.linalg.vector_norm(each.flatten(1), dim=1), device) / (n * o * i),
        "gram": seconds(lambda: torch.bmm(a, a.mT), device) / (2 * n * t * t * i),
        "plain": seconds(lambda: delta.flatten(0, 1).T @ a.flatten(0, 1), device) / (2 * n * t * o * i),
    }
    if device == "cuda":
        per_operation |= fused_ways(a, delta)
    return {kind: round(value / per_operation["product"], 3) for kind, value in per_operation.items()}


def fused_ways(a: torch.Tensor, delta: torch.Tensor) -> dict[str, float]:
    """The product that stores no sample's gradient, for a linear layer and for windows; and unfolding windows."""
    (n, t, i), o = a.shape, delta.shape[2]
    linear = a[:, None], delta[:, None], *product.ONE_PLACE
    if not fused.serves("products", *linear):
        return {}
    x, at = (torch.randn(64, 28, 28, 128, device=a.device, dtype=a.dtype) for _ in range(2))
    image = x, at, [3, 3], [1, 1], [1, 1], [1, 1]
    numbers = 64 * 28 * 28 * 9 * 128
    return {
        "fused linear": seconds(lambda: fused.products(*linear, False), "cuda") / (2 * n * t * o * i),
        "fused": seconds(lambda: fused.products(*image, False), "cuda") / (2 * 128 * numbers),
        "unfold": seconds(lambda: window_rows.rows(*image), "cuda") / numbers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    path = costs.tuned()
    known = json.loads(path.read_text()) if path.exists() else {}
    known[device] = measure(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{path}: {known[device]}")


if __name__ == "__main__":
    main()
