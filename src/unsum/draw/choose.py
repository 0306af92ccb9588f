"""Which groups of a picture are open: those that the reader asks for, or as many as can be taken in at first sight."""

from __future__ import annotations

import fnmatch
from collections import deque
from collections.abc import Callable, Sequence

from unsum.draw.fold import Folding, Group
from unsum.draw.view import size, view
from unsum.errors import OptionError

_FEW = 24  # operations of a graph that may be open as a whole
_SMALL = (1760.0, 1500.0)  # the size up to which it is
_LARGE = (1400.0, 2300.0)  # of other pictures: as wide as a screen, and not too far to scroll
_MANY = 44  # things that are drawn in them


def choose(folding: Folding) -> frozenset[str]:
    """The groups that are open if nobody asks.

    A small graph is open as a whole. In others, modules that hold no modules stay folded; so do those that look like
    one that is open. Modules in which a block has captured or edited something come first. Then blocks that repeat: the
    first of them is opened by one level. The others follow, outer ones first, as long as the picture can be taken in.
    """
    everything = _all(folding)
    if folding.operations <= _FEW and _is_within(folding, everything, _SMALL):
        return everything
    opened = frozenset(group.name for group in folding.top.children)
    marked = _marked(folding)
    for is_wanted in (lambda group: group.name in marked, _holds_blocks, lambda group: True):
        opened = _wider(folding, opened, is_wanted)
    return opened


def _wider(folding: Folding, opened: frozenset[str], is_wanted: Callable[[Group], bool]) -> frozenset[str]:
    """Open what is wanted, outer modules before inner ones."""
    kinds: set[object] = set()
    waiting = deque(folding.top.children)
    while waiting:
        group = waiting.popleft()
        wider, kind = opened | {group.name}, _kinds(group)
        if not group.children or group.like or kind in kinds or not is_wanted(group):
            continue
        if wider != opened and not (_seen(folding.top, wider) <= _MANY and _is_within(folding, wider, _LARGE)):
            continue
        opened = wider
        kinds.add(kind)
        if not group.stands_for:
            waiting.extend(group.children)
    return opened


def _marked(folding: Folding) -> frozenset[str]:
    """The groups with a tensor inside that was captured or edited."""
    scene = folding.scene

    def own(group: Group) -> bool:
        made = (box for key in group.operations for box in scene.operations[key].makes)
        return any(scene.boxes[key].sites for key in (*group.boxes, *made))

    groups = (group for child in folding.top.children for group in child.everything())
    return frozenset(group.name for group in groups if any(map(own, group.everything())))


def _holds_blocks(group: Group) -> bool:
    return any(each.stands_for for each in group.everything())


def asked(folding: Folding, fold: int | str | Sequence[str]) -> frozenset[str]:
    """The groups that are open if the reader says how far, or which ones are not."""
    groups = [group for child in folding.top.children for group in child.everything()]
    if isinstance(fold, int):
        depth = {id(child): 0 for child in folding.top.children}
        for group in groups:
            depth.update((id(child), depth[id(group)] + 1) for child in group.children)
        return _all(folding) & {group.name for group in groups if depth[id(group)] < fold}
    globs = [fold] if isinstance(fold, str) else list(fold)
    if not all(isinstance(glob, str) for glob in globs):
        raise OptionError(f"draw(fold={fold!r}): a number, or globs of module names such as 'blocks.*.attn'")
    folded = {group.name for group in groups if any(fnmatch.fnmatchcase(group.name, glob) for glob in globs)}
    if globs and not folded:
        there = [group.name for group in groups if group.name]
        some = f"there are: {', '.join(there[:8])}{', …' if len(there) > 8 else ''}"
        none = "the model has no modules in it" if groups else "there are none without model="
        raise OptionError(f"draw(fold={fold!r}): fits no group; {some if there else none}")
    return _all(folding) - folded


def _all(folding: Folding) -> frozenset[str]:
    """All groups but those that look like the one before them."""
    groups = (group for child in folding.top.children for group in child.everything())
    return frozenset(group.name for group in groups if not group.like)


def _kinds(group: Group) -> object:
    """Equal for modules of the same classes, whatever their sizes."""
    return (group.kind, *(_kinds(child) for child in group.children if not child.like))


def _is_within(folding: Folding, opened: frozenset[str], most: tuple[float, float]) -> bool:
    wide, tall = size(view(folding, opened))
    return wide <= most[0] and tall <= most[1]


def _seen(group: Group, opened: frozenset[str]) -> int:
    inner = sum(_seen(child, opened) if child.name in opened else 1 for child in group.children)
    return inner + len(group.operations) + len(group.boxes)
