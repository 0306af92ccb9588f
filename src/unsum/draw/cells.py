"""What is written in boxes, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unsum.draw.fold import Folding, Group
from unsum.draw.scene import Arrow, Box, Operation, Scene
from unsum.svg import by, number, shorten, width_of

ROOM = 180.0  # for a name


@dataclass(frozen=True)
class Text:
    """A line of text in a box."""

    text: str
    kind: str
    size: float
    tall: float


@dataclass(frozen=True)
class Cell:
    """A box with lines of text: a tensor, or a folded group."""

    lines: tuple[Text, ...]
    width: float
    height: float


def label_of(norms: tuple[float, ...], is_sum: bool = False) -> str:
    """The size of a gradient as it is written; a range where several blocks are drawn as one.

    Examples:
        >>> label_of((0.5, 2.0, 1.0)), label_of(())
        ('0.5–2', '')
    """
    if not norms:
        return ""
    low, high = number(min(norms)), number(max(norms))
    return ("Σ " if is_sum else "") + (low if low == high else f"{low}–{high}")


def title_of(group: Group) -> str:
    """The name of a group as it is written."""
    return group.title or "model"


def kind_of(group: Group) -> str:
    """What a group is, as it is written: its class, and which block it looks like."""
    times = f"{group.times} × " if group.times > 1 else ""
    return times + ", ".join(filter(None, (group.kind, f"like {group.like}" if group.like else "")))


def title_width(group: Group) -> float:
    """How wide the name of an open group and its kind are."""
    return width_of(title_of(group), bold=True) + width_of(kind_of(group), 11.5) + 16


def pill_width(op: Operation | None) -> float:
    """How wide an operation is."""
    return 0.0 if op is None else width_of(pill_text(op), 12) + 22


def pill_text(op: Operation) -> str:
    """What is written on an operation."""
    return ("◆ " if op.is_meeting else "") + shorten(op.said or op.name, ROOM + 60, 12)


def elements_of(folding: Folding, group: Group) -> list[str]:
    """What is drawn in a group itself, if it is open."""
    made = [box for key in group.operations for box in folding.scene.operations[key].makes]
    return [*group.boxes, *group.operations, *made]


def tensor_cell(box: Box, stem: str, room: float) -> Cell:
    """A tensor: its name within the group it is seen in, shape, and what acts there; `room` is for its arrows."""
    name = box.name[len(stem) + 1 :] if stem and box.name.startswith(f"{stem}.") else box.name
    texts = []
    if name := name or box.said:
        texts.append(Text(shorten(name, ROOM, bold=True), "bold", 13, 17))
    texts.append(Text(by(box.shown or box.shape), "small" + (" faint" if name else ""), 11.5, 15))
    for how, site in box.sites[:3]:
        mark = "✎" if how == "edited" else "◉"
        texts.append(Text(f"{mark} {shorten(site, ROOM, 10.5)}", "tiny blue", 10.5, 14))
    if box.is_cut:
        texts.append(Text("✂ cut", "tiny bold", 10.5, 14))
    return _boxed(texts, max(52, room))


def group_cell(folding: Folding, group: Group, given_on: Sequence[Arrow], room: float) -> Cell:
    """A folded group; `given_on` are the arrows that leave it."""
    scene = folding.scene
    texts = [Text(shorten(title_of(group), ROOM + 30, bold=True), "bold", 13, 17)]
    if kind := kind_of(group):
        texts.append(Text(shorten(kind, ROOM + 120, 11.5), "small", 11.5, 15))
    inside = {element for each in group.everything() for element in elements_of(folding, each)}
    shapes = list(dict.fromkeys(_shape(scene, arrow) for arrow in given_on))
    taken = [arrow for arrow in scene.arrows_into(inside) if arrow.source not in inside]
    given = list(dict.fromkeys(_shape(scene, a) for a in taken if scene.boxes[a.source].role != "parameter"))
    if shapes:
        ways = dict.fromkeys([*given[:1], shapes[-1]])
        texts.append(Text(" → ".join(ways), "small faint", 11.5, 15))
    parameters = [scene.boxes[key] for each in group.everything() for key in each.boxes]
    if parameters:
        total = math.sqrt(sum(norm**2 for box in parameters for norm in box.norms))
        count = parameters_in(folding, group).numbers
        stored = f" · grad {number(total)}" if any(box.norms for box in parameters) else ""
        texts.append(Text(f"{count:,} parameter{'s' if count != 1 else ''}{stored}", "tiny faint", 10.5, 14))
    sites = [mark for key in inside if key in scene.boxes for mark in scene.boxes[key].sites]
    meets = any(scene.operations[key].is_meeting for key in inside if key in scene.operations)
    if sites or meets:
        found = {mark: sum(how == kind for how, _ in sites) for kind, mark in (("captured", "◉"), ("edited", "✎"))}
        told = [f"{mark} {count} site{'s' if count != 1 else ''}" for mark, count in found.items() if count]
        texts.append(Text(" ".join((["◆"] if meets else []) + told), "tiny blue", 10.5, 14))
    return _boxed(texts, max(90, room))


def _shape(scene: Scene, arrow: Arrow) -> str:
    return by(arrow.shape or scene.boxes[arrow.source].shape)


class Held(NamedTuple):
    """How many parameters, which are numbers, and in how many tensors."""

    numbers: int
    tensors: int

    def __str__(self) -> str:
        numbers, tensors = ("" if count == 1 else "s" for count in self)
        return f"{self.numbers:,} parameter{numbers} in {self.tensors:,} tensor{tensors}"


def parameters_in(folding: Folding, group: Group, times: int = 1) -> Held:
    """What a group holds, each block of those drawn once counted."""
    times *= group.times
    inside = [parameters_in(folding, child, times) for child in group.children]
    own = held_by(folding.scene.boxes[key] for key in group.boxes)
    return Held(
        times * own.numbers + sum(each.numbers for each in inside),
        times * own.tensors + sum(each.tensors for each in inside),
    )


def held_by(boxes: Iterable[Box]) -> Held:
    """The parameters among these boxes."""
    sizes = [math.prod(box.shape) for box in boxes if box.role == "parameter"]
    return Held(sum(sizes), len(sizes))


def _boxed(texts: list[Text], least: float) -> Cell:
    wide = max(width_of(t.text, t.size, bold="bold" in t.kind) for t in texts) + 22
    return Cell(tuple(texts), max(wide, least), sum(t.tall for t in texts) + 11)
