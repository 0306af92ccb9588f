"""Ids and texts of samples, taken from the batches that a loader gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unsum.errors import OptionError
from unsum.nested import children

_KEYS = ("id", "ids", "idx", "index")
NO_BATCH = (
    "ids= or text= was given, and no batch was seen: samples go by their rows in the step.\n"
    "  write: for batch in watch.loader(loader): ...\n     or: watch.note(batch)  # once for each batch of a step"
)


@dataclass
class Named:
    """Ids and texts of the samples of one step, as far as its batches have them."""

    ids: list[int | str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def misfit(self, ids: Sequence[int | str]) -> str | None:
        """Why a step that came out with these ids has others than were found, or no texts, if so."""
        n = len(ids)
        if self.ids and len(self.ids) != n and ids == list(range(n)):
            return f"{len(self.ids)} ids were found in the batches of a step with {n} samples, which go by rows instead"
        if self.texts and len(self.texts) != n:
            return f"{len(self.texts)} texts were found in the batches of a step with {n} samples, and are left out"
        return None


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
        self._has_seen = False  # a batch

    def lacks_batches(self) -> bool:
        """Whether ids or texts were asked for, and no batch was seen."""
        return (self._ids is not None or self._text is not None) and not self._has_seen

    def is_known(self) -> bool:
        """Whether batches have shown ids or texts since the last step."""
        return bool(self._found.ids or self._found.texts)

    def stop(self) -> None:
        """Take no more: batches and steps no longer go together."""
        self._found, self._is_stopped = Named(), True

    def note(self, batch: Any) -> None:
        """A batch, of the step under way or of the next one."""
        self._has_seen = True
        if self._is_stopped:
            return
        self._found.ids += _read(batch, self._ids, _KEYS, "ids")
        texts = _read(batch, self._text, (), "text")
        self._found.texts += [str(text).encode("utf-8", "replace").decode() for text in texts]  # what files can hold

    def take(self) -> Named:
        """What was found since the last step."""
        found, self._found = self._found, Named()
        return found


def _read(batch: Any, where: Any, keys: Sequence[str], name: str) -> list[Any]:
    if callable(where):
        return _listed(where(batch), f"{name}=")
    named = _members(batch)
    if where is None:
        key = next((key for key in keys if key in named), None)
        return [] if key is None or isinstance(named[key], Mapping) else _listed(named[key], repr(key))
    if where in named:
        return _listed(named[where], f"{name}={where!r}")
    if not named and hasattr(batch, where):
        return _listed(getattr(batch, where), f"{name}={where!r}")
    if not named:
        raise OptionError(
            f"watch: {name}={where!r} is a key, and the batch is a {type(batch).__name__} without names.\n  give a "
            "function of the batch"
        )
    near = next((key for key in keys if key in named), None)
    raise OptionError(
        f"watch: {name}={where!r}: the batch has no key {where!r}; it has {', '.join(map(repr, named))}",
        write=() if near is None else f'{name}="{near}"',
    )


def _members(batch: Any) -> Mapping[Any, Any]:
    """What a batch has by name: a dict, a dataclass or a named tuple."""
    if isinstance(batch, tuple):
        return {name: getattr(batch, name) for name in getattr(batch, "_fields", ())}
    return {} if isinstance(batch, list) else dict(children(batch))


def _listed(values: Any, where: str) -> list[Any]:
    """One for each sample, as plain data; of a single value, that one."""
    if isinstance(values, Tensor) or hasattr(values, "tolist"):  # arrays, too
        plain = (values.reshape(-1) if hasattr(values, "reshape") else values).tolist()
        return plain if isinstance(plain, list) else [plain]
    if values is None or isinstance(values, str | bytes | int | float):
        return [] if values is None else [values]
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise OptionError(f"watch: {where} gives a {type(values).__name__}: a list is needed, one for each sample")
    return [value.item() if hasattr(value, "item") else value for value in values]
