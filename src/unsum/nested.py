"""Tensors inside nested values: tuples, lists, mappings, named tuples, dataclasses, model outputs.

torch's own pytree does not look into dataclasses, and a rule for every container would have to be registered with it;
a module's output can be anything, so the walk is our own. A *path* is the tuple of steps that leads to a tensor:
`(1, "logits")` is written `[1].logits`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from unsum.errors import SiteError, UnsupportedError
from unsum.types import Path, PathStep

_TOKEN = re.compile(r"""\.(?P<name>\w+)|\[(?P<index>-?\d+)\]|\[(?P<quote>['"])(?P<key>.*?)(?P=quote)\]""")


def parse_path(text: str) -> Path:
    """The steps of a written path.

    Examples:
        >>> parse_path("[1].logits['a b']")
        (1, 'logits', 'a b')
    """
    steps: list[PathStep] = []
    end = 0
    for token in _TOKEN.finditer(text):
        if token.start() != end:
            break
        end = token.end()
        steps.append(int(token["index"]) if token["index"] else token["name"] or token["key"])
    if end != len(text):
        raise SiteError(f"cannot read the path {text!r}; a path looks like [0], .logits or ['any key']")
    return tuple(steps)


def format_path(path: Path) -> str:
    """How a path is written.

    Examples:
        >>> format_path((1, "logits", "a b"))
        "[1].logits['a b']"
    """
    return "".join(f".{s}" if isinstance(s, str) and s.isidentifier() else f"[{s!r}]" for s in path)


def listed(paths: Iterable[Path], path: Path, depth: int = 0) -> int:
    """How many items the innermost list, or tuple, has that leads to this path, of those that these paths show; 0 if
    there is none below `depth`."""
    for d in range(len(path) - 1, depth - 1, -1):
        if isinstance(path[d], int):
            return len({other[d] for other in paths if other[:d] == path[:d] and len(other) > d})
    return 0


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in `value` with its path, in order."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for step, child in children(value):
        yield from leaves(child, (*path, step))


def nested(found: Mapping[Path, Any]) -> Any:
    """A value in which `leaves` finds these tensors at these paths: mappings in one another."""
    if () in found:
        return found[()]
    inside: dict[PathStep, dict[Path, Any]] = {}
    for path, tensor in found.items():
        inside.setdefault(path[0], {})[path[1:]] = tensor
    return {step: nested(below) for step, below in inside.items()}


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """The parts of a container with the steps that lead to them; nothing for what is no container."""
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, part) for f in fields(value) if (part := _field(value, f.name)) is not None]
    return ()


def _field(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except Exception:  # a field that is not set, or one that may not be asked for
        return None


def find(value: Any, path: Path) -> tuple[Path, Any]:
    """What `path` leads to, and the path as `leaves` would give it.

    Steps are read as generously as the containers themselves read them: a field of a named tuple by name or place, a
    part of a model output by key or place, the last item of a list as -1. Raises LookupError where there is none.
    """
    found: list[PathStep] = []
    for step in path:
        step, value = _child(value, step)
        found.append(step)
    return tuple(found), value


def _child(value: Any, step: PathStep) -> tuple[PathStep, Any]:
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", ())
        if isinstance(step, str) and step in names:
            step = names.index(step)
        if isinstance(step, int) and -len(value) <= step < len(value):
            return step % len(value), value[step]
    elif isinstance(value, Mapping):
        if step in value:
            return step, value[step]
        keys = list(value)
        if isinstance(step, int) and is_dataclass(value) and -len(keys) <= step < len(keys):
            return keys[step], value[keys[step]]
    elif isinstance(step, str):
        parts = dict(children(value))
        if step in parts:
            return step, parts[step]
    raise LookupError(step)


def put(value: Any, changes: Mapping[Path, Any]) -> Any:
    """`value` with the parts at these paths replaced; what is not on the way to one is kept, not copied."""
    if not changes:
        return value
    if () in changes:
        return changes[()]
    inside: dict[PathStep, dict[Path, Any]] = {}
    for path, new in changes.items():
        inside.setdefault(path[0], {})[path[1:]] = new
    parts = dict(children(value))
    return _with_parts(value, {step: put(parts[step], below) for step, below in inside.items()})


def _with_parts(value: Any, new: Mapping[PathStep, Any]) -> Any:
    if isinstance(value, tuple):
        items = [new.get(i, item) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, list | MutableMapping) and not is_dataclass(value):
        raise UnsupportedError(
            f"cannot put another tensor into a {type(value).__name__}, only into a tuple, list, dict or dataclass.\n"
            "  edit the output of a module inside instead: unsum.sites(model) lists the sites"
        )
    result: Any = copy.copy(value)
    for step, item in new.items():
        if isinstance(value, list | MutableMapping):
            result[step] = item
        else:
            object.__setattr__(result, str(step), item)
    return result
