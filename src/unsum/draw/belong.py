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

from unsum.draw.names import is_alike
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
    own = _owned(scene, owners, modules, in_time)
    found: dict[str, str | None] = {op.key: None for op in scene.operations.values()}
    found.update({key: common(paths) for key, paths in own.items()})
    seeded = [k for k, op in enumerate(in_time) if op.key in own]
    for before, after in pairwise(seeded):
        first, last = found[in_time[before].key] or "", found[in_time[after].key] or ""
        run = in_time[before + 1 : after]
        found.update(zip([op.key for op in run], _between(run, first, last, modules), strict=True))
        found.update(_after(run, first, modules, common([first, last])))
    if seeded:
        run = in_time[seeded[-1] + 1 :]
        found.update(_after(run, found[in_time[seeded[-1]].key] or "", modules))
    _before_weights(scene, own, found, modules)
    _end_alike(in_time, seeded, found, modules)
    _weights_with_users(scene, weights, found)
    _without_circles(scene, in_time, found)
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
        if op.is_open or op.name.startswith("embedding") or not given:
            continue
        if all(scene.boxes[b].role == "parameter" or maker.get(b) in found for b in given):
            found.add(op.key)
    return found


def _owned(
    scene: Scene, owners: Mapping[str, Sequence[str]], modules: Mapping[str, nn.Module], in_time: Sequence[Operation]
) -> dict[str, list[str]]:
    """The modules of operations that take parameters. A parameter that several modules share belongs to the one that
    fits: an embedding looks up, a head does not; then to the one nearest to what was recorded just before and after."""
    fitting: dict[str, list[list[str]]] = {}
    for arrow in scene.arrows:
        if arrow.source in owners:
            fits = _fitting(scene.operations[arrow.target], owners[arrow.source], modules)
            fitting.setdefault(arrow.target, []).append(fits)
    order = [op.key for op in in_time if op.key in fitting]
    found: dict[str, list[str]] = {}
    for k, key in enumerate(order):
        after = next((fitting[later][0] for later in order[k + 1 :] if len(fitting[later][0]) == 1), [])
        before = found[order[k - 1]][:1] if k else []
        is_first = scene.operations[key].name.startswith("embedding")  # a module begins with it
        around = after if is_first and after else [*before, *after]
        found[key] = [max(fits, key=lambda path: _nearness(path, around)) for fits in fitting[key]]
    return found


def _nearness(path: str, around: Sequence[str]) -> int:
    return max((common([path, other]).count(".") + 1 for other in around if common([path, other])), default=0)


def _fitting(op: Operation, owners: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    looks_up = op.name.startswith("embedding")
    fits = [o for o in owners if isinstance(modules.get(o), nn.Embedding | nn.EmbeddingBag) == looks_up]
    return fits or [owners[0]]


def _only_calls(module: nn.Module | None) -> bool:
    """Whether a module computes nothing by itself."""
    return is_container(module) or (isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward)


def _between(run: Sequence[Operation], first: str, last: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules of operations that were recorded between two whose modules are known."""
    base = common([first, last])
    module, rest = modules.get(base), first[len(base) :].lstrip(".").partition(".")[0]
    if not _only_calls(module) or not rest:
        return [base] * len(run)
    names, ahead = list(module._modules) if module is not None else [], last[len(base) :].lstrip(".").partition(".")[0]
    own = names[names.index(rest) + 1 : names.index(ahead)] if rest in names and ahead in names else []
    candidates = [f"{base}.{name}".lstrip(".") for name in own]  # children without parameters
    current, found = f"{base}.{rest}".lstrip("."), []
    for k, op in enumerate(run):
        named = next((c for c in candidates if is_alike(op, modules[c])), None)
        if named is None and candidates and not any(is_alike(later, modules[candidates[0]]) for later in run[k:]):
            named = candidates[0]
        if named is not None:
            current, candidates = named, candidates[candidates.index(named) + 1 :]
        found.append(current)
    return found


def _after(run: Sequence[Operation], last: str, modules: Mapping[str, nn.Module], within: str = "") -> dict[str, str]:
    """Of operations after a parameter, those of a `Sequential`'s last children, told by their names."""
    found: dict[str, str] = {}
    base, waiting = last, list(run)
    while base:
        base, _, own = base.rpartition(".")
        if within and not base.startswith(f"{within}."):
            break
        module = modules.get(base)
        names = list(module._modules) if isinstance(module, nn.Sequential) and _only_calls(module) else []
        for name in names[names.index(own) + 1 :] if own in names else []:
            path = f"{base}.{name}".lstrip(".")
            if waiting and is_alike(waiting[0], modules[path]):
                found[waiting.pop(0).key] = path
    return found


_STATISTICS = ("pow", "square", "mul", "mean", "sum", "rsqrt", "sqrt", "div", "sub", "reciprocal", "abs", "var")


def _before_weights(
    scene: Scene, own: Mapping[str, object], found: dict[str, str | None], modules: Mapping[str, nn.Module]
) -> None:
    """A normalization computes its statistics before its weight comes in: they belong to it."""
    maker = {box: op for op in scene.operations.values() for box in op.makes}
    given: dict[str, list[Operation]] = {}
    for arrow in scene.arrows:
        if arrow.source in maker:
            given.setdefault(arrow.target, []).append(maker[arrow.source])
    for key in own:
        path = found[key]
        if path is None or scene.operations[key].name != "mul" or "Norm" not in type(modules[path]).__name__:
            continue
        waiting = list(given.get(key, ()))
        while waiting:
            op = waiting.pop()
            is_eps = op.name == "add" and len(given.get(op.key, ())) == 1
            if op.key not in own and (op.name in _STATISTICS or is_eps) and found[op.key] != path:
                found[op.key] = path
                waiting += given.get(op.key, ())


def _end_alike(
    in_time: Sequence[Operation], seeded: Sequence[int], found: dict[str, str | None], modules: Mapping[str, nn.Module]
) -> None:
    """The last of several blocks ends as the one before it: a residual sum belongs to its block there too."""
    tails: dict[str, dict[str, list[str]]] = {}  # container -> block -> what came after its last parameter
    for before, after in pairwise([*seeded, len(in_time)]):
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


def _without_circles(scene: Scene, in_time: Sequence[Operation], found: dict[str, str | None]) -> None:
    """What leaves a module and comes back is not in it: put the operation at which it comes back one module higher."""
    maker = {box: op.key for op in scene.operations.values() for box in op.makes}
    given: dict[str, list[str]] = {}
    for arrow in scene.arrows:
        if arrow.source in maker:
            given.setdefault(arrow.target, []).append(maker[arrow.source])
    members: dict[str, list[int]] = {}
    for k, op in enumerate(in_time):
        path = found[op.key]
        while path:
            members.setdefault(path, []).append(k)
            path = path.rpartition(".")[0]
    for module in sorted(members, key=lambda name: -name.count(".")):
        left: set[str] = set()  # outside of the module, after it
        inside: set[str] = set()
        for op in in_time[members[module][0] : members[module][-1] + 1]:
            comes_back = any(source in left for source in given.get(op.key, ()))
            if not f"{found[op.key] or ''}.".startswith(f"{module}."):
                if comes_back or any(source in inside for source in given.get(op.key, ())):
                    left.add(op.key)
            elif comes_back and found[op.key] == module:
                found[op.key] = module.rpartition(".")[0]
                left.add(op.key)
            else:
                inside.add(op.key)
