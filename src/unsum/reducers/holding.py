"""What is held until the weights of a sum are known? Weights that come from the norms (clipping) are known when the
backward is over, and the gradients have gone by then. Two ways, parameter by parameter:

- *gradients*: those of all samples, which the norms' product forms anyway; the sum is one pass over them;
- *factors*: a and δ; the sum is one more product.

Held gradients fit a budget in bytes; they come first where they save the most time for a byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from pathlib import Path
from time import monotonic

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
LASTS = 1.0  # seconds for which a look at the free memory counts, where `ROOM` times what is wanted was free
ROOM = 16

_looks: dict[torch.device, tuple[float, float]] = {}  # when the free memory was looked at last, and what was free


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


class Sizes(dict[str, Size]):
    """{parameter: Size}: those of one plan, the same in every backward; they are not changed once they were read."""

    @cached_property
    def ways(self) -> dict[str, str]:
        """{parameter: way}, if memory is no matter."""
        return {name: GRADIENTS if size.formed else FACTORS for name, size in self.items()}

    @cached_property
    def needed(self) -> int:
        """The bytes that are held these ways."""
        return sum([size.gradients if size.formed else size.factors for size in self.values()])


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


def choose(sizes: Sizes, budget: float) -> dict[str, str]:
    """{parameter: way}: gradients where they are formed and fit the budget, those first that save the most time for a
    byte."""
    over = sizes.needed - budget
    if over <= 0:
        return sizes.ways
    ways = dict(sizes.ways)
    dear = [name for name in ways if ways[name] == GRADIENTS and sizes[name].factors < sizes[name].gradients]
    for name in sorted(dear, key=lambda name: _worth(sizes[name], sizes[name].gradients - sizes[name].factors)):
        if over <= 0:
            break
        ways[name] = FACTORS
        over -= sizes[name].gradients - sizes[name].factors
    return ways


def _worth(size: Size, takes: int) -> float:
    return size.saved / takes if takes else inf


def free_memory(devices: Iterable[torch.device], wanted: float = inf) -> float:
    """The budget if none is given: half of what is free where there is least; endless where that cannot be known.
    `wanted`: the bytes that it is asked for. Where far more was free a moment ago, that counts: to look takes as long
    as several layers of a small model do."""
    return min([FREE * _lately_free(device, wanted) for device in set(devices)], default=inf)


def _lately_free(device: torch.device, wanted: float) -> float:
    when, free = _looks.get(device, (-inf, 0.0))
    now = monotonic()
    if ROOM * wanted > free or now > when + LASTS:
        free = _free(device)
        _looks[device] = now, free
    return free


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
