"""Which calls of a block are watched: those of which it is not known what they lead to."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from torch import nn

from unsum import seams
from unsum.learn.sides import Sides
from unsum.plan import memory
from unsum.plan.memory import Seen


class Watching:
    """The watch over the calls of a block: it is turned on and off, and remembers what calls have led to."""

    def __init__(self, model: nn.Module, sides: Sides, purpose: Hashable) -> None:
        self._model, self.sides, self._purpose = model, sides, purpose
        self._is_on = False
        self._found: dict[
            int, tuple[memory.CallKey, Hashable, Seen]
        ] = {}  # of calls: flags, sizes, what was seen of them
        self._unwatched: set[int] = set()  # calls that were not watched

    def turn(self, on: bool) -> None:
        """Watch what is computed from now on, or do not."""
        if on and not self._is_on:
            seams.watch(self.sides)
        elif self._is_on and not on:
            seams.unwatch(self.sides)
        self._is_on = on

    def open(self) -> None:
        """A block begins. What it computes is watched until a forward is known."""
        self.turn(not memory.is_in_a_loop(self._model, self._purpose))

    def missed(self, call: int) -> None:
        """This call was not watched."""
        self._unwatched.add(call)

    def saw(self, calls: Collection[int]) -> bool:
        """Whether these calls were watched."""
        return self._unwatched.isdisjoint(calls)

    def note(self, call: int, key: memory.CallKey, sizes: Hashable, seen: Seen) -> None:
        """What a call was like, and what was seen of it."""
        self._found[call] = key, sizes, seen

    def led_to(self, structure: Hashable | None, calls: Collection[int]) -> None:
        """The graph of these calls has this structure; None if it cannot be remembered."""
        for call in calls:
            if call not in self._found:
                continue
            key, sizes, seen = self._found[call]
            if structure is None:
                memory.forget_call(self._model, key)
            else:
                memory.know_call(self._model, key, sizes, seen, structure)

    def always(self, calls: Collection[int]) -> None:
        """What these calls led to did not follow from what is known of such calls: each is watched from now on."""
        for call in calls:
            if call in self._found:
                key, _, seen = self._found[call]
                memory.always_watch(self._model, key, seen)
