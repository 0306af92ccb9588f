"""What is held until the weights of a sum are known? Weights that come from the norms (clipping) are known when the
backward is over, and the gradients have gone by then. Two ways, parameter by parameter:

- *gradients*: those of all samples, which the norms' product forms anyway; the sum is one pass over them;
- *factors*: a and δ; the sum is one more product.

Held gradients fit a budget in bytes; they come first where they save the most time for a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path

import torch

from unsum.factors.dense import Dense
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.factors.windows import Windows
from unsum.kernels import costs

GRADIENTS, FACTORS = "gradients", "factors"
FREE = 0.5  # the share of free memory that is the budget, if none is given
FAR = {"cpu": 140.0}  # what a number costs that is written to memory and read again later, in the units of `costs`


@dataclass(frozen=True)
class Size:
    """What holding the gradients of one parameter takes and saves."""

    gradients: int  # bytes
    factors: int  # bytes
    saved: float  # time that held gradients save, in the units of `costs`
    formed: bool  # whether they are formed anyway, and holding them saves time
    sides: tuple[int, int] | None = None  # numbers of `a` and of δ at one position, if gradients are outer products

    def __add__(self, other: Size) -> Size:
        """A parameter that is met twice: its norms have cross terms, and no gradient is formed for them."""
        factors = self.factors + other.factors
        return Size(max(self.gradients, other.gradients), factors, 0.0, formed=False)


def size_of(kind: Term) -> Size:
    """What the gradients of one meeting take."""
    numbers, factors = kind.n * prod(kind.shape), kind.n * kind.numel()
    values = kind.values if isinstance(kind, Dense) else kind.delta
    width, weight = values.element_size(), costs.weights(values.device.type)
    if isinstance(kind, Scale | Dense):
        wide = max(width, 4)
        return Size(numbers * wide, factors * width, weight["pass"] * factors, formed=True)
    formed = isinstance(kind, Outer | Windows) and kind.forms()
    positions = kind.positions if isinstance(kind, Outer | Windows) else 0
    saved = numbers * (2 * weight["plain"] * positions - FAR.get(values.device.type, weight["pass"]))
    return Size(numbers * width, factors * width, saved, formed and saved > 0, _sides(kind))


def _sides(kind: Term) -> tuple[int, int] | None:
    if isinstance(kind, Outer) and kind.groups == 1:
        return kind.a.shape[-1], kind.delta.shape[-1]
    if isinstance(kind, Windows) and kind.geometry.groups == 1:
        return kind.x.shape[2] * prod(kind.geometry.kernel), kind.delta.shape[2]
    return None


def grown(size: Size, times: int) -> Size:
    """The same for so many times as many samples."""
    return replace(size, gradients=size.gradients * times, factors=size.factors * times, saved=size.saved * times)


def choose(sizes: Mapping[str, Size], budget: float) -> dict[str, str]:
    """{parameter: way}: gradients where they are formed and fit the budget, those first that save the most time for a
    byte."""
    ways = {name: GRADIENTS if size.formed else FACTORS for name, size in sizes.items()}
    over = sum(size.gradients if ways[name] == GRADIENTS else size.factors for name, size in sizes.items()) - budget
    dear = [name for name in ways if ways[name] == GRADIENTS and sizes[name].factors < sizes[name].gradients]
    for name in sorted(dear, key=lambda name: _worth(sizes[name], sizes[name].gradients - sizes[name].factors)):
        if over <= 0:
            break
        ways[name] = FACTORS
        over -= sizes[name].gradients - sizes[name].factors
    return ways


def _worth(size: Size, takes: int) -> float:
    return size.saved / takes if takes else inf


def free_memory(devices: Iterable[torch.device]) -> float:
    """The budget if none is given: half of what is free where there is least; endless where that cannot be known."""
    return min([FREE * _free(device) for device in set(devices)], default=inf)


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        held = torch.cuda.memory_stats_as_nested_dict(device)  # `memory_reserved` would make all its names anew
        unused = held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"] if held else 0
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    return _free_for_the_processor() if device.type == "cpu" else inf


def _free_for_the_processor() -> float:
    """By the system, and by the container that we may be in."""
    found = [inf]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text().strip()
        if most != "max":
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
            found.append(float(int(most) - used))
    except (OSError, ValueError):  # another system: what is known counts
        pass
    return max(min(found), 0.0)
