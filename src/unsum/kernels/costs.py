"""Which way is cheaper? Operations, weighted by how fast each kind runs on a machine.

The weights are what `make tune` measures; without it, round figures from the machines at hand.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Literal

# Time per operation of: a batched product (per sample's gradient), one pass over its result, a Gram product; of the
# plain product that torch would run for the weight's gradient; of copying a window's number; of the product that stores
# no sample's gradient and no window. Relative to each other. On an H200 the windows of ResNet-50 (0.9e9 numbers) were
# copied in 3.5 ms, 2300 operations' time each; an early version of the kernel took 1.5 to 2.7 times cuBLAS's time.
DEFAULT = {
    "cpu": {"product": 1.0, "pass": 8.0, "gram": 1.0, "plain": 0.9, "unfold": 8.0, "fused": 2.0},
    "cuda": {"product": 1.0, "pass": 250.0, "gram": 1.3, "plain": 0.85, "unfold": 2300.0, "fused": 2.0},
}

SHORT = 2.0  # how much longer an operation takes in products of a few rows each, as measured on a CPU


def cheaper(t: int, i: int, o: int, device: str, *, want_sum: bool, matrices: int = 1) -> Literal["product", "gram"]:
    """The cheaper of two ways to the norms of gradients of shape (o, i) from t positions each; or (matrices, o, i),
    where each position meets one of several matrices."""
    weight = weights(device)
    short = SHORT if matrices > 1 else 1.0
    product = short * weight["product"] * 2 * t * o * i + weight["pass"] * (2 if want_sum else 1) * matrices * o * i
    gram = weight["gram"] * 2 * t * t * (o + i) + weight["pass"] * 2 * t * t
    if want_sum:  # torch computes the weight's gradient itself
        gram += weight["plain"] * 2 * t * o * i
    return "gram" if gram < product else "product"


def spares_unfolding(t: int, i: int, o: int, device: str) -> bool:
    """Whether the product that reads windows from the image is cheaper than unfolding i·t numbers for a batched one."""
    weight = weights(device)
    by_rows = weight["product"] * 2 * t * o * i + weight["pass"] * 2 * o * i + weight["unfold"] * t * i
    return weight["fused"] * 2 * t * o * i < by_rows


def is_fused(t: int, i: int, o: int, device: str) -> bool:
    """Whether a linear layer's norms and sum come from the product that stores no sample's gradient: only where `make
    tune` has measured it faster."""
    weight = weights(device)
    if "fused linear" not in weight:
        return False
    return weight["fused linear"] * 2 * t * o * i < weight["product"] * 2 * t * o * i + weight["pass"] * 2 * o * i


@cache
def weights(device: str) -> dict[str, float]:
    """What each kind of operation costs on this machine."""
    path = tuned()
    measured: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    return DEFAULT["cuda" if device == "cuda" else "cpu"] | measured.get(device, {})


def tuned() -> Path:
    """Where `make tune` leaves what it has measured."""
    folder = os.environ.get("UNSUM_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "unsum" / "costs.json"
