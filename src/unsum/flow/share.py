"""A module's share of the gradient of its input.

A hook on the input gives the sum over all its users (a residual connection!), not what came through this module. An
alias in the graph would separate them, but then torch adds the parts in another order, and `.grad` is no longer bit
for bit the same. So nothing is altered: autograd numbers its nodes as they are made, hence the nodes made during the
call are known, and those of them that lead to the input's node carry the share. They are found before each backward
by walking the graph that it is about to walk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from unsum import seams
from unsum.errors import SiteError
from unsum.flow import inplace
from unsum.flow.picking import Spot
from unsum.seams.nodes import next_number, number_of, token
from unsum.seams.tensors import base_of

Arrived = Callable[[Spot, Tensor], Tensor | None]
_Key = tuple[str, int, int] | int  # a node's name and number with one of its outputs, or the id of a leaf
_Edge = tuple[int, "Share", bool]  # which of a node's gradients, whose, and whether it is the base's


def _key(tensor: Tensor) -> _Key:
    node = tensor.grad_fn
    return id(tensor) if node is None else (node.name(), number_of(node), tensor.output_nr)


def _is_view_of(tensor: Tensor, other: Tensor) -> bool:
    base = base_of(tensor)
    return base is not None and (base is other or base is base_of(other))


class Share:
    """One input of one call, whose share of the gradient is wanted. Holds no part of the graph."""

    def __init__(self, spot: Spot, tensor: Tensor, start: int) -> None:
        self.spot = spot
        self.returned = False  # the module returned the input itself: part of the share comes through its output
        self.start, self.end = start, start  # the numbers of the nodes made during the call
        base = base_of(tensor)
        self.anchor = None if base is None else inplace.anchor(tensor, base)
        self.base_key = None if base is None or self.anchor is None or not self.anchor.chain else _key(base)
        self._changes = inplace.Changes(tensor)
        self._alive: seams.TensorHook | None = None
        # The output is a view of the input: if that memory is changed later on, the view's nodes leave the graph.
        self.exposed: inplace.Changes | None = None
        self.leaf = weakref.ref(tensor) if tensor.grad_fn is None else None
        self.key = _key(tensor)
        self._token = None if tensor.grad_fn is None else token(tensor.grad_fn)

    def carried_by(self, key: _Key, node: Any) -> bool:
        """Whether a node found under this key is the input's, or its base's: numbers are unique in a thread only."""
        if self.leaf is not None:
            return True
        if key == self.key:
            return token(node) is self._token
        return self.anchor is not None and token(node) is self.anchor.chain[-1][1]

    def is_dead(self) -> bool:
        """Whether the graph of the call is gone."""
        return self._alive is not None and self._alive.is_dead()

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the input itself, as a module may return it."""
        if not tensor.requires_grad or _key(tensor) != self.key:
            return False
        return tensor.grad_fn is None or token(tensor.grad_fn) is self._token

    def close(self, tensor: Tensor, outputs: Iterable[Tensor], alive: seams.TensorHook | None) -> None:
        """The call with this input has ended: what is made from now on is not part of it. `alive` is on an output."""
        self._alive = alive
        self.end = next_number()
        if not self._changes and any(_is_view_of(output, tensor) for output in outputs if not self.is_of(output)):
            self.exposed = inplace.Changes(tensor)


class Collection:
    """The shares that one backward brings: waits at the nodes that carry them, adds up, hands on."""

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived
        self._handles: list[seams.Handle] = []
        self._open: dict[Share, int] = {}  # how many parts are still to come
        self._sums: dict[Share, Tensor] = {}

    def wait(self, shares: Iterable[Share], roots: Sequence[Any], second_order: Sequence[range]) -> None:
        """Find, in the graph below `roots`, the nodes that carry these shares."""
        wanted: dict[_Key, list[Share]] = {}
        for share in shares:
            if share.end > share.start and (share.leaf is None or share.leaf() is not None):
                wanted.setdefault(share.key, []).append(share)
                if share.base_key is not None:
                    wanted.setdefault(share.base_key, []).append(share)
        if not wanted:
            return
        for node in inplace.walk(roots):
            edges = list(_edges(node, wanted, second_order))
            if edges:
                self._handles.append(seams.after_node(node, partial(self._come, edges)))
                for _, share, _ in edges:
                    self._open[share] = self._open.get(share, 0) + 1

    def _come(self, edges: Sequence[_Edge], grads: tuple[Tensor | None, ...], _: Any) -> None:
        for slot, share, from_base in edges:
            grad = grads[slot]
            if grad is not None:  # the engine has brought it into the input's shape and dtype
                self.add(share, share.anchor.to_view(grad) if from_base and share.anchor else grad)
            self._open[share] -= 1
            if not self._open[share] and not share.returned:
                self._hand_on(share)

    def add(self, share: Share, part: Tensor) -> None:
        """Another part of a share."""
        self._sums[share] = self._sums[share] + part if share in self._sums else part

    def _hand_on(self, share: Share) -> None:
        total = self._sums.pop(share, None)
        if total is not None:
            # The sum may be the very memory that torch goes on with, or a leaf's .grad to be.
            self._arrived(share.spot, total.clone() if share.leaf is not None else total)

    def end(self, *, failed: bool) -> None:
        """The backward is over: hand on what came without the rest, and let go of the nodes."""
        for handle in self._handles:
            handle.remove()
        if not failed:
            for share in list(self._sums):
                self._hand_on(share)


def _edges(node: Any, wanted: dict[_Key, list[Share]], second_order: Sequence[range]) -> Iterable[_Edge]:
    number = number_of(node)
    for slot, (below, output) in enumerate(node.next_functions):
        if below is None:
            continue
        name = below.name()
        key: _Key = id(below.variable) if name.endswith("AccumulateGrad") else (name, number_of(below), output)
        for share in wanted.get(key, ()):
            from_base = key != share.key
            if not share.carried_by(key, below):
                continue
            if isinstance(key, tuple) and number < key[1]:
                raise SiteError(
                    f"{share.spot}: part of the graph was made by another thread, so unsum cannot tell which part of "
                    "the input's gradient comes through this module.\n  capture the grad_output of the module before it"
                )
            if share.exposed:
                raise SiteError(
                    f"{share.spot}: the module returns a view of its input, which was changed in place afterwards, so "
                    "unsum cannot tell which part of the input's gradient comes through this module.\n  change it out "
                    "of place (y = y + 1, not y += 1; inplace=False), or take the module's grad_output"
                )
            if from_base and not node.name().endswith("CopySlices"):
                continue
            if share.start <= number < share.end:
                yield slot, share, from_base
            elif any(number in made for made in second_order):
                raise SiteError(
                    f"{share.spot}: in a second-order backward (create_graph=True) unsum cannot tell which part of the "
                    "input's gradient comes through this module.\n  capture the first-order gradient in a block of its "
                    "own, or the grad_output of the module before it"
                )
