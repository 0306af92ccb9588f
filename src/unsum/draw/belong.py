"""Which module an operation belongs to.

The graph does not know modules. It knows parameters, which have names, and the order in which operations were recorded.
An operation that takes a parameter belongs to that parameter's module. What lies between two such operations belongs to
the innermost module that holds both; where that is a list or a `Sequential`, which compute nothing by themselves, to
the block that came last. What comes after the last parameter is the loss's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch import nn

from unsum.draw.scene import Operation, Scene
from unsum.sites import is_container


def common(paths: Iterable[str]) -> str:
    """The innermost module that holds all of these.

    Examples:
        >>> common(["h.3.attn.q", "h.3.mlp"]), common(["h.3", "head"])
        ('h.3', '')
    """
    first, *rest = [path.split(".") if path else [] for path in paths]
    for other in rest:
        same = 0
        while same < min(len(first), len(other)) and first[same] == other[same]:
            same += 1
        first = first[:same]
    return ".".join(first)


def belonging(
    scene: Scene, owners: Mapping[str, Sequence[str]], modules: Mapping[str, nn.Module]
) -> dict[str, str | None]:
    """The module of each operation; None for those of no module. `owners` are the modules of each parameter's box."""
    weights = _weight_side(scene)
    in_time = sorted((op for op in scene.operations.values() if op.key not in weights), key=lambda op: op.number)
    own: dict[str, list[str]] = {}
    for arrow in scene.arrows:
        if arrow.source in owners and arrow.target not in weights:
            own.setdefault(arrow.target, []).append(
                _owner(scene.operations[arrow.target], owners[arrow.source], modules)
            )
    found: dict[str, str | None] = {op.key: None for op in scene.operations.values()}
    found.update({key: common(paths) for key, paths in own.items()})
    seeded = [k for k, op in enumerate(in_time) if op.key in own]
    for before, after in pairwise(seeded):
        first, last = found[in_time[before].key] or "", found[in_time[after].key] or ""
        for op in in_time[before + 1 : after]:
            found[op.key] = _between(op, first, last, modules)
    _end_alike(in_time, seeded, found, modules)
    _weights_with_users(scene, weights, found)
    return found


def _weight_side(scene: Scene) -> set[str]:
    """Operations that parameters alone lead to: a cast, a normalised weight, a penalty."""
    sources: dict[str, list[str]] = {}
    for arrow in scene.arrows:
        sources.setdefault(arrow.target, []).append(arrow.source)
    maker = {box: op.key for op in scene.operations.values() for box in op.makes}
    found: set[str] = set()
    for op in scene.operations.values():  # in the order of the forward
        given = sources.get(op.key, [])
        if op.name.startswith("embedding") or not given:
            continue
        if all(scene.boxes[b].role == "parameter" or maker.get(b) in found for b in given):
            found.add(op.key)
    return found


def _owner(op: Operation, owners: Sequence[str], modules: Mapping[str, nn.Module]) -> str:
    """Of the modules that share a parameter, the one that fits: an embedding looks up, a head does not."""
    looks_up = op.name.startswith("embedding")
    for owner in owners:
        if isinstance(modules.get(owner), nn.Embedding | nn.EmbeddingBag) == looks_up:
            return owner
    return owners[0]


def _only_calls(module: nn.Module | None) -> bool:
    """Whether a module computes nothing by itself."""
    return is_container(module) or (isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward)


def _between(op: Operation, first: str, last: str, modules: Mapping[str, nn.Module]) -> str:
    base = common([first, last])
    module = modules.get(base)
    if not _only_calls(module):
        return base
    rest = first[len(base) :].lstrip(".").split(".")
    if rest == [""]:
        return base
    names = list(module._modules) if module is not None else []
    ahead = last[len(base) :].lstrip(".").split(".")[0]
    if rest[0] in names and ahead in names:
        for name in names[names.index(rest[0]) + 1 : names.index(ahead)]:  # children without parameters
            child = modules.get(f"{base}.{name}".lstrip("."))
            if type(child).__name__.lower().startswith(op.name.replace("_", "")[:4]):
                return f"{base}.{name}".lstrip(".")
    return f"{base}.{rest[0]}".lstrip(".")


def _end_alike(
    in_time: Sequence[Operation], seeded: Sequence[int], found: dict[str, str | None], modules: Mapping[str, nn.Module]
) -> None:
    """The last of several blocks ends as the one before it: a residual sum belongs to its block there too."""
    tails: dict[str, dict[str, list[str]]] = {}  # container -> block -> what came after its last parameter
    for before, after in zip(seeded, [*seeded[1:], len(in_time)], strict=True):
        parts = (found[in_time[before].key] or "").split(".")
        run = in_time[before + 1 : after]
        for depth in range(len(parts) - 1, -1, -1):
            container, block = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
            if not _only_calls(modules.get(container)):
                continue
            blocks = tails.setdefault(container, {})
            blocks[block] = [op.name for op in run if found[op.key] == block]
            others = [tail for name, tail in blocks.items() if name != block]
            if others and others[-1] and not blocks[block] and _leaves(block, after, in_time, found):
                size = len(others[-1])
                if [op.name for op in run[:size]] == others[-1]:
                    found.update((op.key, block) for op in run[:size])


def _leaves(block: str, after: int, in_time: Sequence[Operation], found: Mapping[str, str | None]) -> bool:
    """Whether the next operation with a parameter, if there is one, is outside of a block."""
    following = (found[in_time[after].key] or "") if after < len(in_time) else ""
    return not f"{following}.".startswith(f"{block}.")


def _weights_with_users(scene: Scene, weights: set[str], found: dict[str, str | None]) -> None:
    users: dict[str, list[str]] = {}
    for arrow in scene.arrows:
        users.setdefault(arrow.source, []).append(arrow.target)
    for op in reversed(list(scene.operations.values())):
        if op.key in weights:
            paths = [found[user] for box in op.makes for user in users.get(box, ())]
            found[op.key] = common([p for p in paths if p is not None]) if paths and None not in paths else None
