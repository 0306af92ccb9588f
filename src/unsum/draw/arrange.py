"""Where things are drawn: layers from the inputs down to the loss, groups as boxes within boxes.

Every group is laid out by itself and is one box in the group around it, so that frames never overlap what is not in
them. Within a group: layers by the longest path, an order in each layer that crosses few arrows, and places as near
to the neighbours as widths allow. An arrow that crosses a layer or a frame gets a station there, through which it
passes straight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from unsum.draw.ranks import Edge, Item, Slot, order, straighten

STUB = 18.0  # how far an arrow goes straight before it bends, beside its label
BARE = 9.0  # the same without a label, and where it arrives
BEND = 14.0  # the least height in which it bends
PAD, HEAD = 14.0, 28.0  # around what is in a frame, and above it for the name
CLEAR = 8.0  # between a name and an arrow that crosses the frame beside it
_MOVES = 22.0  # how far such an arrow may still move when it is straightened


@dataclass(frozen=True)
class Link:
    """An arrow from one leaf to another."""

    key: str
    source: str
    target: str
    leaves: float = 0.0  # from where on the source, from its middle
    room: float = 0.0  # for a label, to its right


Station = tuple[float, float, float]  # x, and from where to where it is straight


def arrange(root: Item, links: Sequence[Link]) -> dict[str, list[Station]]:
    """Give every item its place; return the stations of every link, from the top down."""
    above: dict[str, list[Item]] = {}  # for each leaf, the groups around it, outermost first
    _ancestry(root, [], above)
    routes: dict[str, list[tuple[Item, Station]]] = {link.key: [] for link in links}
    _arrange(root, links, above, routes, {}, is_root=True)
    _shift(root, 0.0, 0.0)
    found: dict[str, list[Station]] = {}
    leaves = {item.key: item for item in _leaves(root)}
    for link in links:
        stations = [
            (g.x + x, g.y + (top or -g.lead), g.y + bottom) for g, (x, top, bottom) in routes[link.key]
        ]  # at the upper edge of a frame, from the top of its layer on
        source, target = leaves[link.source], leaves[link.target]
        start, end = source.y + source.height, target.y
        first = (source.x + source.width / 2 + link.leaves, start, start + source.stub)
        last = (target.x + target.width / 2, end - BARE - target.lead, end)
        found[link.key] = [first, *sorted(stations, key=lambda s: s[1]), last]
    return found


def _ancestry(item: Item, around: list[Item], above: dict[str, list[Item]]) -> None:
    if not item.is_group:
        above[item.key] = around
    for child in item.children:
        _ancestry(child, [*around, item], above)


def _leaves(item: Item) -> list[Item]:
    return [leaf for child in item.children for leaf in _leaves(child)] if item.is_group else [item]


def _shift(item: Item, x: float, y: float) -> None:
    item.x, item.y = item.x + x, item.y + y
    for child in item.children:
        _shift(child, item.x, item.y)


_Ports = dict[tuple[int, str], float]  # where a link crosses the frame of a group, from its middle


def _arrange(
    group: Item,
    links: Sequence[Link],
    above: dict[str, list[Item]],
    routes: dict[str, list[tuple[Item, Station]]],
    ports: _Ports,
    *,
    is_root: bool = False,
) -> None:
    inside = [link for link in links if _within(group, link.source, above) or _within(group, link.target, above)]
    for child in group.children:
        if child.is_group:
            _arrange(child, inside, above, routes, ports)
    ends = []  # (link, child at its start or None, child at its end or None)
    for link in inside:
        start, end = _child(group, link.source, above), _child(group, link.target, above)
        if start is not end:
            ends.append((link, start, end))
    rank = _ranks(group.children, [(s, e) for _, s, e in ends if s is not None and e is not None])
    layers, chains = _layers(group, ends, rank)
    edges = [edge for link, chain in chains.items() for edge in _edges(link, chain, ports)]
    order(layers, edges)
    straighten(layers, edges)
    labelled = {id(chain[0]) for link, chain in chains.items() if link.room}
    _settle(group, layers, labelled, is_root=is_root)
    borders = {id(slot) for layer in (layers[0], layers[-1]) for slot in layer}
    for link, chain in chains.items():
        for slot in chain:
            if slot.item is None:
                routes[link.key].append((group, (slot.x, slot.top, slot.bottom)))
            if id(slot) in borders:
                ports[id(group), link.key] = slot.x - group.width / 2


def _edges(link: Link, chain: Sequence[Slot], ports: _Ports) -> Iterator[Edge]:
    for start, end in pairwise(chain):
        leaves = arrives = 0.0
        if start.item is not None:
            leaves = ports.get((id(start.item), link.key), 0.0) if start.item.is_group else link.leaves
        if end.item is not None and end.item.is_group:
            arrives = ports.get((id(end.item), link.key), 0.0)
        yield Edge(start, end, leaves - arrives)


def _within(group: Item, leaf: str, above: dict[str, list[Item]]) -> bool:
    return any(item is group for item in above[leaf])


def _child(group: Item, leaf: str, above: dict[str, list[Item]]) -> Item | None:
    """The child of the group that holds a leaf."""
    around = above[leaf]
    for k, item in enumerate(around):
        if item is group:
            return around[k + 1] if k + 1 < len(around) else next(c for c in group.children if c.key == leaf)
    return None


def _ranks(children: Sequence[Item], edges: Sequence[tuple[Item, Item]]) -> dict[str, int]:
    """The layer of each child: after all that lead to it; sources just before what they lead to."""
    after: dict[str, list[str]] = {child.key: [] for child in children}
    for start, end in edges:
        if end.key not in after[start.key]:
            after[start.key].append(end.key)
    in_order = _sorted(after)
    place = {key: k for k, key in enumerate(in_order)}
    rank = dict.fromkeys(in_order, 0)
    for key in in_order:
        for other in after[key]:
            if place[other] > place[key]:  # else it closes a circle
                rank[other] = max(rank[other], rank[key] + 1)
    for child in children:
        below = [rank[other] for other in after[child.key] if place[other] > place[child.key]]
        if child.is_source and below:
            rank[child.key] = max(rank[child.key], min(below) - 1)
    return rank


def _sorted(after: dict[str, list[str]]) -> list[str]:
    """Each before all that it leads to, as far as there are no circles."""
    done: list[str] = []
    seen: set[str] = set()
    for first in after:
        waiting = [(first, False)]
        while waiting:
            key, left = waiting.pop()
            if left:
                done.append(key)
            elif key not in seen:
                seen.add(key)
                waiting.append((key, True))
                waiting += [(other, False) for other in after[key] if other not in seen]
    return done[::-1]


_Ends = list[tuple[Link, Item | None, Item | None]]


def _layers(group: Item, ends: _Ends, rank: dict[str, int]) -> tuple[list[list[Slot]], dict[Link, list[Slot]]]:
    """The slots of every layer, and for each link those that it passes."""
    last = max(rank.values(), default=0)
    layers: list[list[Slot]] = [[] for _ in range(last + 3)]  # one before and one after, where arrows cross the frame
    slots: dict[str, Slot] = {}
    for child in group.children:
        slots[child.key] = Slot(child, child.width, child.height)
        layers[rank[child.key] + 1].append(slots[child.key])
    chains: dict[Link, list[Slot]] = {}
    for link, start, end in ends:
        begin = 0 if start is None else rank[start.key] + 1
        stop = last + 2 if end is None else rank[end.key] + 1
        if start is not None and end is not None and stop <= begin:
            continue  # closes a circle: drawn straight
        chain: list[Slot] = []
        for level in range(begin, stop + 1):
            item = start if level == begin else end if level == stop else None
            if item is not None:
                chain.append(slots[item.key])
            else:
                passing = Slot(None, 14.0 + 2 * link.room, 0.0)
                layers[level].append(passing)
                chain.append(passing)
        chains[link] = chain
    return layers, chains


def _settle(group: Item, layers: list[list[Slot]], labelled: set[int], *, is_root: bool) -> None:
    """Heights: layer after layer. The group's own size, and its children's places in it."""
    pad, head = (0.0, 0.0) if is_root else (PAD, HEAD)
    slots = [slot for layer in layers for slot in layer]
    left = min((slot.x - slot.width / 2 for slot in slots), default=0.0)
    right = max((slot.x + slot.width / 2 for slot in slots), default=0.0)
    before, after = _beside_name(group, [slot.x - left for slot in layers[0]], right - left)
    for slot in slots:
        slot.x += pad + before - left
    y = head + (BEND if layers[0] and not is_root else 0.0)
    end = y
    for layer in layers[1:-1]:
        tall = max((slot.height for slot in layer), default=0.0)
        stub = STUB if any(id(slot) in labelled for slot in layer) else BARE
        for slot in layer:
            slot.top, slot.bottom = y - BARE, y + tall + stub
            if slot.item is not None:
                slot.item.stub, slot.item.lead = stub, tall - slot.height
                slot.item.x, slot.item.y = slot.x - slot.width / 2, y + slot.item.lead
        end = y + tall + (stub if layers[-1] else 0.0)
        y += tall + stub + BEND + BARE
    group.width, group.height = right - left + before + after + 2 * pad, end + pad
    for slot in layers[0]:
        slot.top, slot.bottom = 0.0, head - CLEAR / 2
    for slot in layers[-1]:
        slot.top, slot.bottom = end + BEND / 2, group.height


def _beside_name(group: Item, crossing: Sequence[float], wide: float) -> tuple[float, float]:
    """By how much a group is made wider to the left and to the right, so that its name has room beside the arrows that
    come in from above."""
    need = group.least
    if not crossing or not need:
        spare = max(0.0, need - wide) / 2
        return spare, spare
    clear = CLEAR + _MOVES
    to_left, to_right = need + clear - min(crossing), need + clear - (wide - max(crossing))
    if min(to_left, to_right) <= 0:
        return 0.0, 0.0
    return (to_left, 0.0) if to_left <= to_right else (0.0, to_right)
