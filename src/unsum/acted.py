"""Where a block has acted, noted in the graph itself so that a picture can show it.

A note is held by the node of the graph, never the other way round: to hold a node would hold the graph.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

_KEY, _PLAN = "unsum.acted", "unsum.plan"
_MANY = 256


@dataclass(eq=False)
class Acted:
    """What one block has done to the tensors that it met."""

    how: Literal["captured", "edited", "split"]
    loose: list[tuple[weakref.ref[Tensor], str]] = field(default_factory=list)  # tensors that no node has made
    leaves: dict[str, str] = field(default_factory=dict)  # parameter -> site

    def at(self, tensor: Tensor, site: str) -> None:
        """A site acts on this tensor."""
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(_KEY, []).append((self, tensor.output_nr, site))
            return
        if len(self.loose) >= _MANY:
            self.loose[:] = [(ref, name) for ref, name in self.loose if ref() is not None][-_MANY // 2 :]
        self.loose.append((weakref.ref(tensor), site))

    def on(self, node: Any) -> list[tuple[int, str]]:
        """What this block has done at a node: (which output, site)."""
        notes = node.metadata.get(_KEY, ())
        return list(dict.fromkeys((output, site) for who, output, site in notes if who is self))

    def by_plan(self, root: Any, plan: Any, size: int) -> None:
        """A backward from this node goes by a plan; the graph has so many nodes."""
        root.metadata.setdefault(_PLAN, []).append((self, plan, size))

    def plan_of(self, root: Any, size: int) -> Any:
        """The plan by which the last backward from this node went; None if there was none."""
        plans = [plan for who, plan, nodes in root.metadata.get(_PLAN, ()) if who is self and nodes == size]
        return plans[-1] if plans else None
