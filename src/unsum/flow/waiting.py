"""Waiting for the gradient of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from unsum import seams
from unsum.errors import SiteError
from unsum.flow import inplace
from unsum.flow.picking import Spot
from unsum.seams.tensors import base_of

Arrived = Callable[[Spot, Tensor], Tensor | None]


class Watch(seams.Hook):
    """The hook on one tensor that waits for its gradient, and hands it on with its spot.

    Holds no part of the graph: a hook that reached its own graph would never be collected.
    """

    __slots__ = ("_arrived", "_handle", "_moved", "_of_leaf", "_refusal", "anchor", "spot")

    def __init__(self, spot: Spot, tensor: Tensor, arrived: Arrived) -> None:
        self.spot = spot
        self._moved = False
        self._arrived: Arrived | None = arrived
        base = base_of(tensor)
        self.anchor = None if base is None else inplace.anchor(tensor, base)
        self._of_leaf = base is not None and base.grad_fn is None
        self._refusal: str | None = None
        self._handle = seams.on_gradient(tensor, self)

    def __call__(self, grad: Tensor) -> Tensor | None:
        """At the tensor itself."""
        return None if self._moved else self._hand_on(grad)

    def _at_base(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """The same, where the view was changed in place and its base stands for it."""
        anchor = self.anchor
        assert anchor is not None
        grad = grads[anchor.output]
        new = None if grad is None else self._hand_on(anchor.to_view(grad))
        if grad is None or new is None:
            return None
        return (*grads[: anchor.output], anchor.to_base(new, grad.shape), *grads[anchor.output + 1 :])

    def _hand_on(self, grad: Tensor | None) -> Tensor | None:
        if self._refusal is not None:
            raise SiteError(f"{self.spot}: {self._refusal}")
        if grad is None or self._arrived is None:  # a custom autograd.Function may return None
            return None
        if self._of_leaf:  # torch is about to make this memory the leaf's .grad, and to add to it next time
            grad = grad.clone()
        return self._arrived(self.spot, grad)

    def follow_changes(self, anchor: inplace.Anchor, roots: Sequence[Any]) -> None:
        """Before a backward from `roots`, the tensor having been changed in place: wait where its gradient will be."""
        if self._moved:
            return
        try:
            node = anchor.find(roots)
        except inplace.LostError as why:
            raise SiteError(
                f"{self.spot}: the tensor was changed in place afterwards, and the gradient of its old value cannot "
                f"be told from others: {why}.\n  change it out of place (y = y + 1; inplace=False), or take the "
                "gradient at another site"
            ) from None
        if node is not None:
            self._handle.remove()
            self._handle, self._moved = seams.on_node(node, self._at_base), True

    def is_dead(self) -> bool:
        """Whether the graph is gone without a backward."""
        return seams.is_dead(self._handle)

    def let_go(self, refusal: str | None = None) -> None:
        """Stop. With a refusal the hook stays in the graph, to raise if that is walked after all."""
        self._arrived, self._refusal = None, refusal
        if refusal is None:
            self._handle.remove()
