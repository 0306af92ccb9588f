"""What is to be seen of a folding when some groups are open: items with sizes, lines between them, and their places."""

from __future__ import annotations

from dataclasses import dataclass, field

from unsum.draw.arrange import PAD, Link, Station, arrange
from unsum.draw.cells import Cell, elements_of, group_cell, label_of, pill_width, tensor_cell, title_width
from unsum.draw.fold import Folding, Group
from unsum.draw.ranks import Item
from unsum.draw.scene import Arrow, Box, Operation
from unsum.svg import width_of

PILL, STEM = 22.0, 7.0
_PITCH = 18.0
_SLACK = 14.0


@dataclass
class Line:
    """An arrow between things that are to be seen."""

    key: str
    arrow: Arrow
    box: Box  # the tensor that goes forward
    source: str  # items
    target: str
    label: str
    stations: list[Station] = field(default_factory=list)


@dataclass
class View:
    """Everything with its place."""

    root: Item
    items: dict[str, Item]
    groups: dict[str, Group]  # by the key of the item
    opened: frozenset[str]
    operations: dict[str, Operation]
    boxes: dict[str, Box]  # leaves
    cells: dict[str, Cell]  # by the key of the tensor or the folded group
    lines: list[Line]
    times: dict[str, int]  # how often each thing is there
    stems: dict[str, str]  # the group that each thing is seen in


def view(folding: Folding, opened: frozenset[str]) -> View:
    """Place what is to be seen."""
    seen: dict[str, str] = {}  # element -> item
    found = View(Item("", is_group=True), {}, {}, opened, {}, {}, {}, [], {}, {})
    _fill(folding, folding.top, found.root, found, seen, 1, "")
    _draw_lines(folding, found, seen)
    _sizes(folding, found)
    links = [
        Link(
            line.key, line.source, line.target, _offset(found, line), width_of(line.label, 10.5) if line.label else 0.0
        )
        for line in found.lines
    ]
    stations = arrange(found.root, links)
    for line in found.lines:
        line.stations = stations[line.key]
    _ports(found)
    for line in found.lines:
        _straighten(line, found)
    return found


def _fill(folding: Folding, group: Group, item: Item, found: View, seen: dict[str, str], times: int, stem: str) -> None:
    for child in group.children:
        key = f"g{child.name}"
        found.groups[key] = child
        found.times[key] = times * child.times
        found.stems[key] = stem
        inner = Item(key, is_group=child.name in found.opened)
        item.children.append(inner)
        found.items[key] = inner
        if inner.is_group:
            inner.least = title_width(child) + 8
            _fill(folding, child, inner, found, seen, times * child.times, child.name or stem)
        else:
            for each in child.everything():
                for element in elements_of(folding, each):
                    seen[element] = key
    for element in group.boxes:
        found.boxes[element] = folding.scene.boxes[element]
        _add(found, item, seen, element, [element], times, stem).is_source = True
    for element in group.operations:
        op = folding.scene.operations[element]
        found.operations[element] = op
        _add(found, item, seen, element, [element, *op.makes], times, stem)


def _add(found: View, item: Item, seen: dict[str, str], key: str, elements: list[str], times: int, stem: str) -> Item:
    leaf = Item(key)
    item.children.append(leaf)
    found.items[key] = leaf
    for element in elements:
        seen[element] = key
        found.times[element], found.stems[element] = times, stem
    return leaf


def _draw_lines(folding: Folding, found: View, seen: dict[str, str]) -> None:
    known: dict[tuple[str, str], Line] = {}
    for arrow in folding.scene.arrows:
        source, target = seen[arrow.source], seen[arrow.target]
        if source == target:
            continue
        box = folding.scene.boxes[arrow.source]
        key = (arrow.source, target)
        if key not in known:
            text = label_of(arrow.norms, arrow.is_sum) if arrow.gradient != "none" else ""
            known[key] = Line(f"{arrow.source}>{target}", arrow, box, source, target, text)
        elif len(known[key].arrow.norms) == len(arrow.norms) and arrow.norms:
            known[key].label = ""  # several parts come back together: neither is what flows here
    found.lines = list(known.values())


# ---- sizes -----------------------------------------------------------------------------------------------------------


def _sizes(folding: Folding, found: View) -> None:
    out: dict[str, list[Line]] = {}
    into: dict[str, int] = {}
    for line in found.lines:
        out.setdefault(line.arrow.source if line.source not in found.groups else line.source, []).append(line)
        into[line.target] = into.get(line.target, 0) + 1
    for key, item in found.items.items():
        if item.is_group:
            continue
        if key in found.groups:
            cell = found.cells[key] = group_cell(
                folding, found.groups[key], [line.arrow for line in out.get(key, [])], _ports_width(out.get(key, []))
            )
            item.width, item.height = cell.width, cell.height
        elif key in found.boxes:
            cell = found.cells[key] = tensor_cell(found.boxes[key], found.stems[key], _ports_width(out.get(key, [])))
            item.width, item.height = cell.width, cell.height
        else:
            op = found.operations[key]
            cells = [
                tensor_cell(folding.scene.boxes[made], found.stems[key], _ports_width(out.get(made, [])))
                for made in op.makes
            ]
            found.cells.update(zip(op.makes, cells, strict=True))
            item.width = sum(cell.width for cell in cells) + 8 * (len(cells) - 1)
            item.height = PILL + STEM + max(cell.height for cell in cells)
        item.width = max(item.width, pill_width(found.operations.get(key)), _PITCH * into.get(key, 0))


def _ports_width(lines: list[Line]) -> float:
    if not lines:
        return 0.0
    if len(lines) == 1:
        return 2 * (width_of(lines[0].label, 10.5) + 14) if lines[0].label else 0.0
    return sum(_pitch(line) for line in lines)


def _pitch(line: Line) -> float:
    return _PITCH + (width_of(line.label, 10.5) + 6 if line.label else 0.0)


# ---- where arrows leave and arrive -----------------------------------------------------------------------------------


def cell_place(found: View, key: str) -> tuple[float, float]:
    """The left upper corner of a tensor or a folded group."""
    item = found.items.get(key)
    if item is not None:
        return item.x, item.y
    op = found.operations[_maker(found, key)]
    item = found.items[op.key]
    x = item.x + (item.width - sum(found.cells[m].width for m in op.makes) - 8 * (len(op.makes) - 1)) / 2
    for made in op.makes:
        if made == key:
            break
        x += found.cells[made].width + 8
    return x, item.y + item.height - found.cells[key].height


def _offset(found: View, line: Line) -> float:
    """From where on a unit of several tensors an arrow leaves, from its middle."""
    op = found.operations.get(line.source)
    if op is None or len(op.makes) < 2:
        return 0.0
    widths = [found.cells[made].width for made in op.makes]
    before = sum(widths[: op.makes.index(line.arrow.source)]) + 8 * op.makes.index(line.arrow.source)
    own = widths[op.makes.index(line.arrow.source)]
    return before + own / 2 - (sum(widths) + 8 * (len(widths) - 1)) / 2


def _maker(found: View, key: str) -> str:
    return f"o{key[1:].partition('.')[0]}"


def _ports(found: View) -> None:
    """Spread arrows along the edges that they leave and reach, in the order in which they go on."""
    out: dict[str, list[Line]] = {}
    into: dict[str, list[Line]] = {}
    for line in found.lines:
        out.setdefault(line.source if line.source in found.groups else line.arrow.source, []).append(line)
        into.setdefault(line.target, []).append(line)
    for key, lines in out.items():
        x, y = cell_place(found, key)
        cell = found.cells[key]
        lines.sort(key=lambda line: line.stations[1][0])
        cursor = x + (found.items[key].width if key in found.items else cell.width) / 2
        if len(lines) > 1:
            cursor -= sum(map(_pitch, lines)) / 2 - _PITCH / 2
        for line in lines:
            _, _, bottom = line.stations[0]
            line.stations[0] = (cursor, y + cell.height, max(bottom, y + cell.height))
            cursor += _pitch(line)
    for key, lines in into.items():
        item = found.items[key]
        lines.sort(key=lambda line: line.stations[-2][0])
        cursor = item.x + item.width / 2 - (len(lines) - 1) * _PITCH / 2
        for line in lines:
            line.stations[-1] = (cursor, *line.stations[-1][1:])
            cursor += _PITCH


def _straighten(line: Line, found: View) -> None:
    """Take small steps out of an arrow: what it passes, and where it leaves, gives way to where it arrives."""
    stations = line.stations
    for k in range(len(stations) - 2, 0, -1):
        if abs(stations[k][0] - stations[k + 1][0]) < _SLACK:
            stations[k] = (stations[k + 1][0], *stations[k][1:])
    for k in range(1, len(stations) - 1):
        if abs(stations[k][0] - stations[k - 1][0]) < _SLACK / 2:
            stations[k] = (stations[k - 1][0], *stations[k][1:])
    alone = sum(other.source == line.source for other in found.lines) == 1
    if alone and abs(stations[0][0] - stations[1][0]) < _SLACK:
        stations[0] = (stations[1][0], *stations[0][1:])


def size(found: View) -> tuple[float, float]:
    """Width and height of all that was placed."""
    return found.root.width + 2 * PAD, found.root.height + 2 * PAD
