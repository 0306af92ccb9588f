"""Which way is cheaper? Operations, weighted by how fast each kind runs on a machine.

The weights are what `make tune` measures; without it, round figures from the machines at hand.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Literal

# Time per operation of: a batched product (per sample's gradient), one pass over its result, a Gram product; and of
# the plain product that torch would run for the weight's gradient. Relative to each other.
DEFAULT = {
    "cpu": {"product": 1.0, "pass": 8.0, "gram": 1.0, "plain": 0.9},
    "cuda": {"product": 1.0, "pass": 250.0, "gram": 1.3, "plain": 0.85},
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


@cache
def weights(device: str) -> dict[str, float]:
    """What each kind of operation costs on this machine."""
    path = tuned()
    if path.exists():
        measured: dict[str, dict[str, float]] = json.loads(path.read_text())
        if device in measured:
            return measured[device]
    return DEFAULT["cuda" if device == "cuda" else "cpu"]


def tuned() -> Path:
    """Where `make tune` leaves what it has measured."""
    folder = os.environ.get("UNSUM_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "unsum" / "costs.json"
