"""Ids and texts of samples, taken from the batches that a loader gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unsum.errors import OptionError

_KEYS = ("id", "ids", "idx", "index")


@dataclass
class Named:
    """Ids and texts of the samples of one step, as far as its batches have them."""

    ids: list[int | str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Ids:
    """Where batches have their samples' ids and texts, and what was found since the last step."""

    def __init__(
        self,
        ids: str | Callable[[Any], Sequence[int | str]] | None = None,
        text: str | Callable[[Any], Sequence[str]] | None = None,
    ) -> None:
        for name, value in (("ids", ids), ("text", text)):
            if value is not None and not isinstance(value, str) and not callable(value):
                raise OptionError(f"watch: {name}={value!r}: a key of the batch, or a function of it")
        self._ids, self._text = ids, text
        self._found, self._is_stopped = Named(), False

    def is_known(self) -> bool:
        """Whether batches have shown ids or texts since the last step."""
        return bool(self._found.ids or self._found.texts)

    def stop(self) -> None:
        """Take no more: batches and steps no longer go together."""
        self._found, self._is_stopped = Named(), True

    def note(self, batch: Any) -> None:
        """A batch, of the step under way or of the next one."""
        if self._is_stopped:
            return
        self._found.ids += _read(batch, self._ids, _KEYS, "ids")
        self._found.texts += _read(batch, self._text, (), "text")

    def take(self) -> Named:
        """What was found since the last step."""
        found, self._found = self._found, Named()
        return found


def _read(batch: Any, where: Any, keys: Sequence[str], name: str) -> list[Any]:
    if callable(where):
        return _listed(where(batch))
    if not isinstance(batch, Mapping):
        if where is not None:
            raise OptionError(
                f"watch: {name}={where!r} is a key, and the batch is a {type(batch).__name__}, not a dict"
            )
        return []
    if where is not None and where not in batch:
        raise OptionError(f"watch: {name}={where!r}: the batch has {', '.join(map(repr, batch))}")
    key = where if where is not None else next((key for key in keys if key in batch), None)
    return [] if key is None else _listed(batch[key])


def _listed(values: Any) -> list[Any]:
    if isinstance(values, Tensor):
        return values.reshape(-1).tolist()
    return [value.item() if isinstance(value, Tensor) else value for value in values]
