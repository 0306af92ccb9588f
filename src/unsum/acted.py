"""Where a block has acted, so that a picture can show it.

A block must not hold the graph, and a note in each node costs 20 µs. So it writes down the number and the name of the
node: torch numbers the nodes of a thread as they are made. With the tensor's shape and which output it is, that finds
the place again.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

_LAST, _PLANS = 32, 16  # of each site so many calls, of each block so many backwards: a long block must not grow

Key = tuple[int, str, int, tuple[int, ...]]  # number and name of the node, which output, its shape


@dataclass(eq=False)
class Acted:
    """What one block has done to the tensors that it met."""

    how: Literal["captured", "edited", "split"]
    sites: dict[str, deque[Key]] = field(default_factory=dict)
    loose: dict[str, deque[weakref.ref[Tensor]]] = field(default_factory=dict)  # tensors that no node has made
    leaves: dict[str, str] = field(default_factory=dict)  # parameter -> site
    plans: dict[tuple[int, str, int], Any] = field(default_factory=dict)  # node, its name, nodes below -> plan

    def at(self, tensor: Tensor, site: str) -> None:
        """A site acts on this tensor."""
        node: Any = tensor.grad_fn
        if node is None:
            self.loose.setdefault(site, deque(maxlen=_LAST)).append(weakref.ref(tensor))
        else:
            key = (node._sequence_nr(), node.name(), tensor.output_nr, tuple(tensor.shape))
            self.sites.setdefault(site, deque(maxlen=_LAST)).append(key)

    def by_plan(self, root: Any, plan: Any, size: int) -> None:
        """A backward from this node goes by a plan; the graph has so many nodes."""
        self.plans[root._sequence_nr(), root.name(), size] = plan
        if len(self.plans) > _PLANS:
            del self.plans[next(iter(self.plans))]

    def plan_of(self, root: Any, size: int) -> Any:
        """The plan by which the last backward from this node went; None if there was none."""
        return self.plans.get((root._sequence_nr(), root.name(), size))
