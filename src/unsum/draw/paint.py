"""From what is placed to SVG."""

from __future__ import annotations

from unsum.draw.arrange import CLEAR, HEAD, Station
from unsum.draw.cells import kind_of, parameters_in, pill_text, pill_width, title_of, title_width
from unsum.draw.fold import Folding, Group
from unsum.draw.ranks import Item
from unsum.draw.scene import Box, Scene
from unsum.draw.view import PILL, STEM, Line, View, cell_place, view
from unsum.svg import Svg, by, width_of, wrapped

_MARGIN = 20.0
_APART = 4.0  # a forward arrow and its backward one, each from the middle


def paint(folding: Folding, opened: frozenset[str], title: str) -> str:
    """The picture with these groups open."""
    found = view(folding, opened)
    svg = Svg()
    svg.open(transform=f"translate({_MARGIN:g} {_MARGIN:g})")
    for key, group in found.groups.items():
        if found.items[key].is_group:
            _frame(svg, folding, found, key, group)
        elif group.times > 1:
            _cards(svg, found.items[key])
    for line in found.lines:
        _arrow(svg, line)
    for key, group in found.groups.items():
        item = found.items[key]
        if item.is_group:
            svg.title(_name_place(found, item, title_width(group)), item.y + 17, title_of(group), kind_of(group))
        else:
            _folded(svg, folding, found, key, group)
    for key, box in found.boxes.items():
        _tensor(svg, found, key, box)
    for op in found.operations.values():
        _operation(svg, folding.scene, found, op.key)
    svg.close()
    wide = max(found.root.width, 320.0) + 2 * _MARGIN
    tall = _legend(svg, _entries(folding, found), folding.scene.notes, found.root.height + 2 * _MARGIN, wide)
    return svg.finish(title, _described(folding.scene), wide, tall)


def _name_place(found: View, item: Item, wide: float) -> float:
    """Where the name of a frame begins: at its left, or else at the right of the arrows that come in from above."""
    crossing = [
        x for line in found.lines for x, top, bottom in line.stations
        if top < item.y + HEAD and bottom > item.y and item.x < x < item.x + item.width
    ]  # fmt: skip
    reach = _APART + CLEAR
    if not crossing or item.x + 12 + wide < min(crossing) - reach + 4:
        return item.x + 12
    return max(crossing) + reach


def _described(scene: Scene) -> str:
    """What a picture says, in words."""
    boxes = scene.boxes.values()
    stored = [box.name or by(box.shape) for box in boxes if box.gradient == "stored"]
    none = [box.name for box in boxes if box.gradient == "none"]
    parts = [
        "From the inputs at the top to the loss at the bottom: tensors, the operations between them, and the gradients "
        "that come back.",
        f"Gradients are stored for: {', '.join(stored[:12]) or 'nothing'}{', …' if len(stored) > 12 else ''}.",
    ]
    if none:
        parts.append(f"No gradient is computed for: {', '.join(none[:12])}{', …' if len(none) > 12 else ''}.")
    return " ".join(parts)


def _times(found: View, key: str) -> int | None:
    return found.times[key] if found.times.get(key, 1) > 1 else None


def _frame(svg: Svg, folding: Folding, found: View, key: str, group: Group) -> None:
    item, held = found.items[key], parameters_in(folding, group)
    hover = f"{group.name or 'the model'}: {kind_of(group)}"
    svg.open(
        hover, class_="frame", data_role="group", data_name=group.name, data_type=group.kind, data_folded="false",
        data_times=_times(found, key), data_like=group.like or None, data_parameters=held.numbers,
        data_tensors=held.tensors,
    )  # fmt: skip
    svg.rect(item.x, item.y, item.width, item.height, "group", 10)
    svg.close()


def _cards(svg: Svg, item: Item) -> None:
    """The others behind the one that is drawn."""
    for shift in (8, 4):
        svg.rect(item.x + shift, item.y - shift, item.width, item.height, "box group", 8)


def _folded(svg: Svg, folding: Folding, found: View, key: str, group: Group) -> None:
    item, held = found.items[key], parameters_in(folding, group)
    hover = f"{group.name or 'the model'}: {kind_of(group)}"
    svg.open(
        f"{hover}, folded, {held}", class_="folded", data_role="group", data_name=group.name, data_type=group.kind,
        data_folded="true", data_times=_times(found, key), data_like=group.like or None, data_parameters=held.numbers,
        data_tensors=held.tensors,
    )  # fmt: skip
    svg.rect(item.x, item.y, item.width, item.height, "box group holds" if held.tensors else "box group", 8)
    _lines(svg, found, key, item.x + item.width / 2, item.y)
    svg.close()


def _lines(svg: Svg, found: View, key: str, middle: float, y: float) -> None:
    y += 4
    for text in found.cells[key].lines:
        y += text.tall
        svg.text(middle, y - 1, text.text, f"middle {text.kind}")


def _tensor(svg: Svg, found: View, key: str, box: Box) -> None:
    x, y = cell_place(found, key)
    cell = found.cells[key]
    wide = found.items[key].width if key in found.items else cell.width
    what = {"data": "data", "parameter": "parameter", "intermediate": "computed"}[box.role]
    many = f", drawn once for {found.times[key]}" if found.times.get(key, 1) > 1 else ""
    hover = f"{what} {box.name} {by(box.shape)}{many}: {box.why}".replace("  ", " ")
    for how, site in box.sites:
        hover += f"; {how}: {site}"
    if box.is_cut:
        hover += "; the cut: from here on positions belong to samples"
    svg.open(
        hover, class_="tensor", data_role=box.role, data_name=box.name, data_shape=by(box.shape), data_key=key,
        data_gradient=box.gradient, data_times=_times(found, key), data_cut="true" if box.is_cut else None,
        data_site=" ".join(site for _, site in box.sites) or None,
        data_captured=" ".join(site for how, site in box.sites if how == "captured") or None,
        data_edited=" ".join(site for how, site in box.sites if how == "edited") or None,
        data_norm=f"{box.norms[0]:.6g}" if len(box.norms) == 1 else None,
    )  # fmt: skip
    svg.rect(x, y, wide, cell.height, f"box {box.role}", 7)
    _lines(svg, found, key, x + wide / 2, y)
    if box.is_cut:
        svg.path(f"M{x - 8:.1f} {y + cell.height + 4:.1f}h{wide + 16:.1f}", "cut")
    svg.close()


def _operation(svg: Svg, scene: Scene, found: View, key: str) -> None:
    op, item = found.operations[key], found.items[key]
    middle, wide = item.x + item.width / 2, pill_width(op)
    tall = item.height - max(found.cells[made].height for made in op.makes) - STEM
    for made in op.makes:
        x, y = cell_place(found, made)
        svg.path(f"M{middle:.1f} {item.y + tall - 2:.1f}L{x + found.cells[made].width / 2:.1f} {y:.1f}", "forward")
    meeting = ""
    if op.is_meeting:
        meeting = f"; a meeting: {', '.join(op.meets) or 'a parameter'} meets data here"
    svg.open(
        f"operation {op.name} ({op.node}){meeting}", class_="op", data_role="operation", data_name=op.name,
        data_node=op.node, data_key=key, data_times=_times(found, key),
        data_meeting=" ".join(op.meets) if op.is_meeting else None,
    )  # fmt: skip
    svg.rect(middle - wide / 2, item.y, wide, PILL, "box operation", PILL / 2)
    svg.text(middle, item.y + 15.5, pill_text(op), "middle small")
    svg.close()
    for made in op.makes:
        _tensor(svg, found, made, scene.boxes[made])


# ---- arrows ----------------------------------------------------------------------------------------------------------


def _arrow(svg: Svg, line: Line) -> None:
    arrow = line.arrow
    through = f", through {', '.join(arrow.through)}" if arrow.through else ""
    name = f"{line.box.name} {by(line.box.shape)}".strip()
    has_gradient = arrow.gradient != "none"
    hover = f"forward: {name}{through}" + ("" if has_gradient else f". No gradient comes back: {arrow.why}")
    ends = {"data_tensor": arrow.source, "data_operation": arrow.target}
    svg.open(
        hover, class_="arrow", data_direction="forward", data_gradient=None if has_gradient else "none",
        data_through=" ".join(step.partition(" ")[0] for step in arrow.through) or None, **ends,
    )  # fmt: skip
    d = _path(line.stations, -_APART if has_gradient else 0.0)
    svg.path(d, "hit")
    svg.path(d, "forward", tip="forward")
    svg.close()
    if not has_gradient:
        return
    sizes = f" Norm {line.label}." if line.label else ""
    svg.open(
        f"backward: the gradient of {name} {by(line.box.shape) if not name else ''}{through}: {arrow.why}.{sizes}",
        class_="arrow", data_direction="backward", data_gradient=arrow.gradient, **ends,
        data_norm=f"{arrow.norms[0]:.6g}" if len(arrow.norms) == 1 and line.label else None,
    )  # fmt: skip
    d = _path(line.stations, _APART, back=True)
    svg.path(d, "hit")
    svg.path(d, f"backward {arrow.gradient}", tip="backward")
    if line.label:
        x, y, _ = line.stations[0]
        svg.text(x + _APART + 5, y + 15, line.label, "tiny coral halo")
    svg.close()


def _path(stations: list[Station], shift: float, *, back: bool = False) -> str:
    """Straight at each station, bent between them."""
    legs = [(x + shift, top, bottom) for x, top, bottom in stations]
    if back:  # from the loss up
        legs = [(x, bottom, top) for x, top, bottom in reversed(legs)]
    x, y, end = legs[0]
    d = f"M{x:.1f} {y:.1f}V{end:.1f}"
    for to_x, start, stop in legs[1:]:
        if abs(to_x - x) < 0.5:
            d += f"V{stop:.1f}"
        else:
            half = (start + end) / 2 - shift * (1 if (to_x > x) != back else -1)  # beside each other, also across
            d += f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {start:.1f}V{stop:.1f}"
        x, end = to_x, stop
    return d


# ---- legend ----------------------------------------------------------------------------------------------------------


def _entries(folding: Folding, found: View) -> list[tuple[str, str]]:
    """What is drawn, of all that needs to be explained."""
    boxes = [
        *found.boxes.values(),
        *(folding.scene.boxes[made] for op in found.operations.values() for made in op.makes),
    ]
    lines, ops = found.lines, found.operations.values()
    texts = [line.text for cell in found.cells.values() for line in cell.lines]
    entries = [(role, label) for role, label in _ROLES.items() if any(box.role == role for box in boxes)]
    folded = [parameters_in(folding, group).tensors for key, group in found.groups.items() if key in found.cells]
    if any(folded):
        entries.append(("group holds", "module with parameters, folded"))
    if not all(folded):
        entries.append(("group", "module without, folded" if any(folded) else "module, folded"))
    entries += [("forward", "forward")] if lines else []
    for kind in ("stored", "thrown-away"):
        if any(line.arrow.gradient == kind for line in lines):
            entries.append((kind, f"gradient, {kind.replace('-', ' ')}"))
    if any(op.is_meeting for op in ops) or any(text.startswith("◆") for text in texts):
        entries.append(("◆", "a parameter meets data"))
    if any(box.is_cut for box in boxes):
        entries.append(("✂", "the cut"))
    for how, mark in (("captured", "◉"), ("edited", "✎")):
        if any(mark in text for text in texts):
            entries.append((mark, how))
    if any(line.label for line in lines):
        entries.append(("12", "size (norm) of a gradient"))
    if any("· grad " in text for text in texts):
        entries.append(("grad 12", "size of the gradient stored for the parameters"))
    return entries


def _legend(svg: Svg, entries: list[tuple[str, str]], notes: list[str], y: float, wide: float) -> float:
    """What colours and lines mean, and what could not be drawn. Returns the height of the picture."""
    x = _MARGIN
    svg.open(class_="legend", data_role="legend")
    for kind, label in entries:
        sample = max(22.0, width_of(kind, 10.5)) if kind.startswith("grad") else 22.0
        room = sample + 8 + width_of(label, 11.5) + 18
        if x + room > wide - _MARGIN + 18 and x > _MARGIN:
            x, y = _MARGIN, y + 20
        _sample(svg, kind, x, y)
        svg.text(x + sample + 8, y + 4, label, "small faint")
        x += room
    y += 12
    for note in notes:
        for k, text in enumerate(wrapped(note, wide - 2 * _MARGIN - 14)):
            y += 16
            if k == 0:
                svg.open(data_role="note")
                svg.text(_MARGIN, y, "–", "small faint")
                svg.close()
            svg.text(_MARGIN + 14, y, text, "small faint")
    svg.close()
    return y + 16


_ROLES = {"data": "data", "parameter": "parameter", "intermediate": "computed"}


def _sample(svg: Svg, kind: str, x: float, y: float) -> None:
    if kind in _ROLES or kind.startswith("group"):
        svg.rect(x, y - 7, 22, 14, f"box {kind}", 4)
    elif kind == "forward":
        svg.path(f"M{x:.1f} {y:.1f}h23", "forward", tip="forward")
    elif kind in ("stored", "thrown-away"):
        svg.path(f"M{x:.1f} {y:.1f}h23", f"backward {kind}", tip="backward")
    elif kind.startswith("grad"):
        svg.text(x, y + 4, kind, "tiny faint")
    else:
        svg.text(x + 11, y + 4, kind, "middle tiny " + ("coral" if kind == "12" else "blue"))
