"""Where a block has acted, so that a picture can show it.

A block must not hold the graph, and a note in each node costs 20 µs. So it writes down the number and the type of the
node: torch numbers the nodes of a thread as they are made. With the tensor's shape and which output it is, that finds
the place again.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from unsum.seams.nodes import number_of

_LAST, _PLANS = 32, 16  # of each site so many calls, of each block so many backwards: a long block must not grow

Key = tuple[int, type, int, tuple[int, ...]]  # number and type of the node, which output, its shape


@dataclass(eq=False, slots=True)
class Acted:
    """What one block has done to the tensors that it met."""

    how: Literal["captured", "edited", "split"]
    room: int = 64  # for notes that are not yet sorted by site
    notes: list[tuple[object, int, type, int, tuple[int, ...]]] = field(default_factory=list)  # a site, and a key
    _sites: dict[str, deque[Key]] = field(default_factory=dict)
    loose: dict[str, deque[weakref.ref[Tensor]]] = field(default_factory=dict)  # tensors that no node has made
    leaves: dict[str, str] = field(default_factory=dict)  # parameter -> site
    plans: dict[tuple[int, str, int], Any] = field(default_factory=dict)  # node, its name, nodes below -> plan

    def at(self, tensor: Tensor, site: object) -> Any:
        """Note that a site (whatever prints as one) acts on this tensor; returns the tensor's node. In every call: the
        notes are sorted by site when somebody looks."""
        node = tensor.grad_fn
        if node is None:
            self.loose.setdefault(str(site), deque(maxlen=_LAST)).append(weakref.ref(tensor))
            return None
        self.notes.append((site, number_of(node), type(node), tensor.output_nr, tensor.shape))
        self.sort_if_many()
        return node

    def sort_if_many(self) -> None:
        """Sort the notes before they take much memory."""
        if len(self.notes) > self.room:
            self.sort()

    def sort(self) -> None:
        """Put the notes where their sites are."""
        for site, *key in self.notes:
            name = str(site)
            if name not in self._sites:
                self._sites[name] = deque(maxlen=_LAST)
            self._sites[name].append(tuple(key))  # type: ignore[arg-type]
        self.notes.clear()

    @property
    def sites(self) -> dict[str, deque[Key]]:
        """What each site has acted on."""
        self.sort()
        return self._sites

    def by_plan(self, root: Any, plan: Any, size: int) -> None:
        """A backward from this node goes by a plan; the graph has so many nodes."""
        self.plans[number_of(root), root.name(), size] = plan
        if len(self.plans) > _PLANS:
            del self.plans[next(iter(self.plans))]

    def plan_of(self, root: Any, size: int) -> Any:
        """The plan by which the last backward from this node went; None if there was none."""
        return self.plans.get((number_of(root), root.name(), size))
