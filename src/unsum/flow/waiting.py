"""Waiting for gradients: the hook on one tensor, and all that a block waits for, backward by backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from unsum import seams
from unsum.acted import Acted
from unsum.errors import SiteError, UnsupportedError
from unsum.flow import inplace
from unsum.flow.picking import Spot
from unsum.flow.share import Collection, Share
from unsum.seams.nodes import next_number
from unsum.seams.tensors import base_of, version_of

Arrived = Callable[[Spot, Tensor], Tensor | None]
_is_batched = seams.is_batched


class Watch(seams.TensorHook):
    """The hook on one tensor that waits for its gradient, and hands it on with its spot.

    Holds no part of the graph: a hook that reached its own graph would never be collected.
    """

    __slots__ = ("_arrived", "anchor", "spot")

    def __init__(self, spot: Spot, tensor: Tensor, arrived: Arrived) -> None:
        self.spot = spot
        self._arrived: Arrived | None = arrived
        base = base_of(tensor)
        self.anchor = anchor = None if base is None else inplace.anchor(tensor, base)
        if base is not None and (anchor is None or not anchor.chain) and base.grad_fn is None:
            self._arrived = partial(_copied, arrived)
        self.put_on(tensor)

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """At the tensor itself. A custom autograd.Function may return None."""
        arrived = self._arrived
        return None if grad is None or arrived is None else arrived(self.spot, grad)

    def _at_base(self, anchor: inplace.Anchor, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """The same, where the view was changed in place and its base stands for it."""
        grad = grads[anchor.output]
        new = None if grad is None else self(anchor.to_view(grad))
        if grad is None or new is None:
            return None
        return (*grads[: anchor.output], anchor.to_base(new, grad.shape), *grads[anchor.output + 1 :])

    def follow_changes(self, anchor: inplace.Anchor, roots: Sequence[Any]) -> None:
        """Before a backward from `roots`, the tensor having been changed in place: wait where its gradient will be."""
        try:
            node = anchor.find(roots)
        except inplace.LostError as why:
            raise SiteError(
                f"{self.spot}: the tensor was changed in place afterwards, and the gradient of its old value is lost: "
                f"{why}.\n  change it out of place (y = y + 1, not y += 1; inplace=False), or take the gradient at "
                "another site"
            ) from None
        if node is not None:
            self.move_to(node, partial(self._at_base, anchor))
            self.anchor = None

    @staticmethod
    def take_off(watches: Iterable[Watch]) -> None:
        """Stop waiting."""
        for watch in watches:
            watch._arrived = None
            hooks = watch.hooks_dict_ref()
            if hooks is not None:
                hooks.pop(watch.key, None)

    def refuse(self, why: str) -> None:
        """Stop waiting, but stay in the graph, to raise if that is walked after all."""
        self._arrived = partial(_refuse, why)


def _copied(arrived: Arrived, spot: Spot, grad: Tensor) -> Tensor | None:
    """Hand on a copy: torch is about to make this memory a leaf's .grad, and to add to it next time."""
    return arrived(spot, grad.clone())


def _refuse(why: str, spot: Spot, grad: Tensor) -> None:
    raise SiteError(f"{spot}: {why}")


class _Receiver(Protocol):
    """What gets the gradients: where they are put down by reference, or else `gradient`."""

    @property
    def seen(self) -> list[Any] | None: ...
    def gradient(self, spot: Spot, grad: Tensor, backward: int) -> Tensor | None: ...


class Expected:
    """The gradients that a block waits for, and the backwards that bring them."""

    def __init__(self, receiver: _Receiver, acted: Acted) -> None:
        self._receiver, self._acted = receiver, acted
        self.backwards = 0  # so many have begun
        self.watches: list[Watch] = []
        self.shares: list[Share] = []
        self._many = 1024  # watches, after which those of graphs that are gone are let go
        self._collections: list[Collection] = []  # one for each backward that is under way
        self._accumulates: list[bool] = []  # for each of them, whether it adds to .grad
        self._first_node: int | None = None  # that a backward with create_graph makes
        self._second_order: list[range] = []  # the nodes that such backwards have made

    def add(self, spot: Spot, tensor: Tensor) -> None:
        """Wait for the gradient of a tensor until its graph is gone, or the block is left."""
        watches = self.watches
        if len(watches) > self._many:
            self.watches = watches = [watch for watch in watches if not watch.is_dead()]
            self._many = 1024 + 2 * len(watches)
            self._acted.sort_if_many()
        watches.append(Watch(spot, tensor, self.arrived))

    def add_returned(self, share: Share, alias: Tensor) -> None:
        """Wait for the part of a share that comes through an output, which is an alias of the input."""
        self.watches.append(Watch(share.spot, alias, partial(self._returned, share)))

    def _returned(self, share: Share, spot: Spot, grad: Tensor) -> None:
        self._collections[-1].add(share, grad)

    def arrived(self, spot: Spot, grad: Tensor) -> Tensor | None:
        """The gradient of a spot has come. What flows on instead, or None."""
        if _is_batched(grad):
            raise UnsupportedError(
                f"{spot}: torch.autograd.grad(..., is_grads_batched=True) runs the backward under vmap, where what "
                "flows cannot be captured or edited.\n  call it once for each row"
            )
        receiver = self._receiver
        seen = receiver.seen
        if seen is not None and spot.kind != "grad" and not grad.requires_grad:
            seen.append((spot, grad, version_of(grad), self.backwards))
            return None
        return receiver.gradient(spot, grad, self.backwards)

    def is_somebodys(self) -> bool:
        """Whether this is somebody's `torch.autograd.grad` inside a backward, whose result he handles himself."""
        return len(self._accumulates) > 1 and not self._accumulates[-1]

    def let_go(self, refusal: str | None) -> None:
        """Stop waiting. With a refusal the hooks stay in the graph, to raise if that is walked after all."""
        if refusal is None:
            Watch.take_off(self.watches)
        else:
            for watch in self.watches:
                watch.refuse(refusal)
        self.watches.clear()
        self.shares.clear()

    def before_backward(self, call: seams.Backward) -> None:
        self._accumulates.append(call.accumulates)
        self._collections.append(Collection(self.arrived))
        if len(self._accumulates) == 1:
            self.backwards += 1
            self._first_node = next_number() if call.create_graph else None
        for watch in self.watches:
            if (anchor := watch.anchor) is not None and version_of(anchor.counter) != anchor.version:
                watch.follow_changes(anchor, call.roots)
        self._collections[-1].wait(self.shares, call.roots, self._second_order)

    def after_backward(self, *, failed: bool) -> None:
        self._acted.sort_if_many()
        self._accumulates.pop()
        self._collections.pop().end(failed=failed)
        if self._accumulates:
            return
        if self._first_node is not None:
            self._second_order.append(range(self._first_node, next_number()))
        # What was walked may be walked again, even without retain_graph where nothing was saved: only what is gone is
        # let go.
        self.watches = [watch for watch in self.watches if not watch.is_dead()]
        self.shares = [share for share in self.shares if not share.is_dead()]
