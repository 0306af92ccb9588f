"""Edited values that nothing uses: neither what the model returns nor a loss depends on them.

The autograd graph tells it, where gradients are on: the node of an edited value is looked for in the graph of what the
model returns, and of every loss. A value that is found there, or that somebody still holds when the block ends, is not
reported. Each site is looked for until it was found once, so a loop pays for its first step alone.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from unsum import seams
from unsum.errors import UnreadEdit
from unsum.nested import leaves
from unsum.seams.nodes import Token, number_of, token
from unsum.seams.tensors import base_of

_NAMED = 4  # sites that a warning names


class Unread:
    """The edited values of a block that nothing has been seen to use so far, by site."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, weakref.ref[Token]]]] = {}  # the node's number, and its token
        self._read: set[str] = set()
        self._looked: set[str] = set()  # sites that an output or a loss might have led to

    def add(self, site: str, edited: Tensor) -> None:
        """A site was edited. A value without a gradient leaves no trace in the graph, and a view may be rebuilt in it:
        nothing is said of those."""
        if site in self._read:
            return
        if edited.grad_fn is None or base_of(edited) is not None:
            self._found(site)
            return
        node = edited.grad_fn
        known = [one for one in self._waiting.get(site, ()) if one[1]() is not None]
        self._waiting[site] = [*known, (number_of(node), weakref.ref(token(node)))]

    def look(self, roots: Iterable[Any]) -> None:
        """Find edited values in the graph below these nodes."""
        stack = [node for node in roots if node is not None]
        if not self._waiting or not stack:
            return
        self._looked.update(self._waiting)
        wanted = {number: site for site, ones in self._waiting.items() for number, _ in ones}
        seen = {None, *stack}
        while stack and self._waiting:
            node = stack.pop()
            site = wanted.get(number_of(node))
            if site in self._waiting and any(ref() is token(node) for _, ref in self._waiting[site]):
                self._found(site)
            below = [child for child, _ in node.next_functions if child not in seen]
            seen.update(below)
            stack += below

    def _found(self, site: str) -> None:
        self._read.add(site)
        self._waiting.pop(site, None)

    def warn(self) -> None:
        """The block is over: warn of sites whose every value is gone and was found nowhere."""
        gone = [s for s, ones in self._waiting.items() if s in self._looked and not any(ref() for _, ref in ones)]
        if gone:
            more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
            warnings.warn(
                f"edited and never read: {', '.join(gone[:_NAMED])}{more}.\n"
                "  No gradient path leads from the edited value to what the model returned or to a loss: nothing uses "
                "it, so the edit had no effect (or only operations without a gradient do, such as argmax).\n"
                "  edit a value that the model uses: unsum.sites(model) lists the sites\n"
                '  to silence this warning: warnings.simplefilter("ignore", unsum.errors.UnreadEdit)',
                UnreadEdit,
                stacklevel=_users_level(),
            )


def _users_level() -> int:
    """The `stacklevel` of the first caller outside of unsum, as seen from whoever calls this."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("unsum."):
        frame, level = frame.f_back, level + 1
    return level


class Returned(seams.Hook):
    """The hook on the model itself: looks for edited values in the graph of what it returns."""

    __slots__ = ("_block", "_key", "_model", "_unread")

    def __init__(self, model: nn.Module, block: seams.Block, unread: Unread) -> None:
        self._model, self._block, self._unread = model, block, unread
        self._key = seams.on_call(model, seams.inert, self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not seams.is_traced() and self._block in seams.here():
            self._unread.look(tensor.grad_fn for _, tensor in leaves(output))

    def remove(self) -> None:
        """No longer follow the model."""
        seams.off_call(self._model, self._key)
