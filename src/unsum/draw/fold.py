"""Groups of the picture: modules within modules, and blocks that repeat: the first by itself, the others as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from unsum.draw.belong import common
from unsum.draw.scene import Arrow, Scene
from unsum.repeats import repeats, span
from unsum.sites import is_container

_PERIODS = (1, 2, 3, 4)  # so many neighbours may repeat together: a layer and its activation


@dataclass
class Group:
    """A module, and what of the picture is in it."""

    name: str
    title: str  # relative to the group around it
    kind: str  # the module's class
    children: list[Group] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)  # parameters; what operations make comes with them
    times: int = 1
    like: str = ""  # the title of the block before it that looks the same
    stands_for: int = 0  # how many blocks after it look the same

    def everything(self) -> Iterator[Group]:
        """This group and all in it."""
        yield self
        for child in self.children:
            yield from child.everything()


@dataclass(frozen=True)
class Folding:
    """A scene in which, of repeated blocks, all but the first are one, and the tree of its groups."""

    scene: Scene
    top: Group  # holds the model's group, and what is in no module
    operations: int  # how many there are, each block of those drawn as one counted


def gather(
    scene: Scene, owned: Mapping[str, str | None], modules: Mapping[str, nn.Module], *, repeat: bool = True
) -> Folding:
    """Put operations and parameters into groups; where blocks repeat, the second stands for all after the first."""
    top = Group("", "", "")
    groups: dict[str, Group] = {}

    def group_of(name: str) -> Group:
        if name in groups:
            return groups[name]
        parent, own = top, name
        if name:
            above = name.rpartition(".")[0]
            while above and is_container(modules.get(above)):
                above = above.rpartition(".")[0]
            parent = group_of(above)
            own = name[len(above) :].lstrip(".")
        made = groups[name] = Group(name, own, type(modules[name]).__name__)
        parent.children.append(made)
        return made

    for op in sorted(scene.operations.values(), key=lambda op: op.number):
        path = owned[op.key]
        while path and is_container(modules.get(path)):
            path = path.rpartition(".")[0]
        (top if path is None else group_of(path)).operations.append(op.key)
    inside = {key: group for group in top.everything() for key in group.operations}
    users: dict[str, list[str | None]] = {}
    for arrow in scene.arrows:
        group = inside[arrow.target]
        users.setdefault(arrow.source, []).append(None if group is top else group.name)
    made = {box for op in scene.operations.values() for box in op.makes}
    for key, box in scene.boxes.items():
        if key not in made:
            _home(top, groups, box.role, users.get(key, [None])).boxes.append(key)
    return _repeated(scene, top) if repeat else Folding(scene, top, len(scene.operations))


def _home(top: Group, groups: Mapping[str, Group], role: str, users: Sequence[str | None]) -> Group:
    """Where a leaf is drawn: a parameter with all that use it; data outside of everything."""
    if role != "parameter" or None in users:
        return top
    name = common([user for user in users if user is not None])
    while name not in groups:
        name = name.rpartition(".")[0]
    return groups[name]


# ---- blocks that repeat ----------------------------------------------------------------------------------------------


Run = dict[str, tuple[int, str]]  # element -> which of the blocks it is in, and what is drawn in its place


def _repeated(scene: Scene, top: Group) -> Folding:
    runs: list[Run] = []
    count = len(scene.operations)

    def visit(group: Group) -> None:
        group.children.sort(key=lambda child: _first(child, scene))
        kept: list[Group] = []
        signatures = [_signature(child, scene) for child in group.children]
        k, chained = 0, _chained(group.children, scene)
        while k < len(group.children):
            period, times = _run(group.children, signatures, chained, k)
            kept += group.children[k : k + period]
            others = group.children[k + period : k + period * times]
            if others:
                blocks = [_elements(others[j : j + period], scene) for j in range(0, len(others), period)]
                runs.append(
                    {e: (j, shown) for j, own in enumerate(blocks) for e, shown in zip(own, blocks[0], strict=True)}
                )
                kept.append(_as_one(kept[-period:], others, times - 1))
            k += period * times
        group.children = kept
        for child in group.children:
            visit(child)

    visit(top)
    for run in runs:  # outer blocks before those inside them
        scene = _merged(scene, run)
    return Folding(scene, top, count)


def _first(group: Group, scene: Scene) -> int:
    return min((scene.operations[key].number for g in group.everything() for key in g.operations), default=0)


def _chained(groups: Sequence[Group], scene: Scene) -> set[tuple[int, int]]:
    """Which of these groups give something to which others."""
    inside: dict[str, int] = {}
    for k, group in enumerate(groups):
        inside.update((element, k) for element in _elements([group], scene))
    return {
        (inside[arrow.source], inside[arrow.target])
        for arrow in scene.arrows
        if arrow.source in inside and arrow.target in inside
    }


def _run(
    groups: Sequence[Group], signatures: Sequence[object], chained: set[tuple[int, int]], k: int
) -> tuple[int, int]:
    """How many neighbours repeat from here, and how often. Each must feed the next: what stands side by side (towers,
    queries and keys) is not the same thing again. Twice is enough for a block of modules, not for single layers."""

    def is_next(first: int, other: int, period: int) -> bool:
        if signatures[first : first + period] != signatures[other : other + period]:
            return False
        return any((other - period + i, other + j) in chained for i in range(period) for j in range(period))

    period, times = repeats(k, len(signatures), is_next, _PERIODS)
    return (period, times) if times > 2 or (period == 1 and groups[k].children) else (1, 1)


def _as_one(first: Sequence[Group], others: list[Group], times: int) -> Group:
    """The blocks after the first, of which one stands for all."""
    stands, last = others[: len(first)], others[-1]
    title = span(stands[0].title, last.title, len(others))
    like = span(first[0].title, first[-1].title, len(first))
    for group in first:
        group.stands_for = times
    if len(first) == 1:
        stands[0].title, stands[0].times, stands[0].like = title, times, like
        return stands[0]
    return Group(f"{stands[0].name}–{last.name}", title, "", stands, times=times, like=like)


def _elements(groups: Sequence[Group], scene: Scene) -> list[str]:
    """Everything drawn in these groups, in an order that depends on nothing but their structure."""
    found = []
    for group in (inner for outer in groups for inner in outer.everything()):
        found += sorted(group.boxes, key=lambda key: scene.boxes[key].name)
        for key in sorted(group.operations, key=lambda key: scene.operations[key].number):
            found += [key, *scene.operations[key].makes]
    return found


def _signature(group: Group, scene: Scene) -> object:
    """Equal for blocks that look the same."""
    elements = _elements([group], scene)
    number = {key: k for k, key in enumerate(elements)}
    stem = len(group.name) + 1 if group.name else 0
    parts: list[object] = [group.kind]
    for key in elements:
        op = scene.operations.get(key)
        if op is not None:
            parts.append((op.name, tuple(name[stem:] for name in op.meets), op.is_meeting))
            continue
        box = scene.boxes[key]
        name = box.name[stem:] if box.role == "parameter" else box.name
        sites = tuple((how, site[stem:]) for how, site in box.sites)
        parts.append((box.role, name, box.shape, box.gradient, bool(box.norms), sites, box.is_cut))
    for arrow in scene.arrows_into(number):
        through = arrow.through if arrow.source in number else ()  # what happens before a block is none of it
        parts.append((number.get(arrow.source), number[arrow.target], arrow.gradient, through))
    return tuple(parts)


def _merged(scene: Scene, run: Run) -> Scene:
    """The first of the blocks stands for all of them."""

    def shown(key: str) -> str:
        return run[key][1] if key in run else key

    norms: dict[str, tuple[float, ...]] = {}
    for key, box in scene.boxes.items():
        norms[shown(key)] = norms.get(shown(key), ()) + box.norms
    boxes = {key: replace(box, norms=norms[key]) for key, box in scene.boxes.items() if shown(key) == key}
    operations = {key: op for key, op in scene.operations.items() if shown(key) == key}
    arrows: dict[tuple[str, str], Arrow] = {}
    for arrow in scene.arrows:
        start, end = run.get(arrow.source), run.get(arrow.target)
        if start is not None and end is not None and start[0] != end[0]:
            continue  # from one block to the next of its kind
        ends = shown(arrow.source), shown(arrow.target)
        known = arrows.get(ends)
        more = arrow.norms if known is None else known.norms + arrow.norms
        arrows[ends] = replace(known or arrow, source=ends[0], target=ends[1], norms=more)
    return Scene(boxes, operations, list(arrows.values()), scene.notes)
