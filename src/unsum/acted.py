"""Where a block has acted, so that a picture can show it.

A block must not hold the graph, and a note in each node costs 20 µs. So it writes down the number and the name of the
node: torch numbers the nodes of a thread as they are made. With the tensor's shape and which output it is, that finds
the place again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

_MANY, _PLANS = 8192, 64

Key = tuple[int, str, int, tuple[int, ...]]  # number and name of the node, which output, its shape


@dataclass(eq=False)
class Acted:
    """What one block has done to the tensors that it met."""

    how: Literal["captured", "edited", "split"]
    sites: dict[tuple[Key, str], None] = field(default_factory=dict)
    loose: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict)  # tensors that no node has made
    leaves: dict[str, str] = field(default_factory=dict)  # parameter -> site
    plans: dict[tuple[int, str, int], Any] = field(default_factory=dict)  # node, its name, nodes below -> plan
    _count: int = 0

    def at(self, tensor: Tensor, site: str) -> None:
        """A site acts on this tensor."""
        node: Any = tensor.grad_fn
        if node is not None:
            self.sites[(node._sequence_nr(), node.name(), tensor.output_nr, tuple(tensor.shape)), site] = None
            _shorten(self.sites, _MANY)
        else:
            self._count += 1
            self.loose[self._count] = (weakref.ref(tensor), site)
            _shorten(self.loose, _MANY)

    def by_place(self) -> dict[Key, list[str]]:
        """The sites at each place."""
        found: dict[Key, list[str]] = {}
        for key, site in self.sites:
            found.setdefault(key, []).append(site)
        return found

    def by_plan(self, root: Any, plan: Any, size: int) -> None:
        """A backward from this node goes by a plan; the graph has so many nodes."""
        self.plans[root._sequence_nr(), root.name(), size] = plan
        _shorten(self.plans, _PLANS)

    def plan_of(self, root: Any, size: int) -> Any:
        """The plan by which the last backward from this node went; None if there was none."""
        return self.plans.get((root._sequence_nr(), root.name(), size))


def _shorten(notes: dict[Any, Any], most: int) -> None:
    """Let go of the older half of many notes: a long block goes over many graphs."""
    if len(notes) > most:
        for key in list(notes)[: most // 2]:
            del notes[key]
