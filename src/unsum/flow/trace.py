"""What fired, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unsum.flow.timeline import timeline
from unsum.picture import Picture


@dataclass(frozen=True)
class Event:
    """One firing of one site.

    Examples:
        >>> event = Event("fc:grad_output", call=0, backward=1, shape=(4, 2), dtype=torch.float32)
        >>> event.direction
        'backward'
        >>> print(event)
        fc:grad_output  (4, 2)  float32  backward 1, call 0
    """

    site: str
    call: int
    backward: int | None  # which backward, counted from 1; None in the forward
    shape: tuple[int, ...]
    dtype: torch.dtype
    type: str = ""  # of the module; a parameter and a mark have none

    @property
    def direction(self) -> str:
        return "forward" if self.backward is None else "backward"

    def __str__(self) -> str:
        when = "forward" if self.backward is None else f"backward {self.backward}"
        return f"{self.site}  {self.shape}  {str(self.dtype).removeprefix('torch.')}  {when}, call {self.call}"


class Trace(Sequence[Event]):
    """The events of a capture, oldest first. It prints one line for each event, and draws itself in a notebook.

    Examples:
        >>> import unsum
        >>> model = torch.nn.Linear(3, 2)
        >>> with unsum.capture(model, ":input", ":grad_output") as got:
        ...     model(torch.ones(4, 3)).sum().backward()
        >>> print(got.trace())
        :input        (4, 3)  float32  forward, call 0
        :grad_output  (4, 2)  float32  backward 1, call 0
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._events[index]

    def picture(self) -> Picture:
        """A time line: which site fired when, forward and backward.

        Examples:
            >>> Trace([Event("fc1:output", 0, None, (5, 3), torch.float32)]).picture()
            <Picture: a trace of 1 event>
        """
        what = f"a trace of {len(self)} event{'' if len(self) == 1 else 's'}"
        return Picture(timeline(self._events, what), what)

    def save(self, path: str | Path) -> Path:
        """Write the time line as `.svg` or `.html`."""
        return self.picture().save(path)

    def _repr_svg_(self) -> str:
        return self.picture().svg

    def __str__(self) -> str:
        width = max((len(e.site) for e in self._events), default=0)
        return "\n".join(f"{e.site:<{width}}{str(e)[len(e.site) :]}" for e in self._events)

    __repr__ = __str__
