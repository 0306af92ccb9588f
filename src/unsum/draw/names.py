"""What readers call things: an operation by the function that they wrote, the inputs of attention, a module without
parameters where only one can have been called. The names of the autograd graph stay in the hover text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from unsum.draw.openings import spoken
from unsum.draw.scene import Arrow, Box, Operation, Scene

_LINEAR = ("addmm", "mm", "addmv", "mv")
_BETWEEN = (
    "mul",
    "div",
    "add",
    "where",
    "masked_fill",
    "dropout",
    "to_copy",
)  # the scores of attention and its softmax


def called(scene: Scene) -> Scene:
    """The scene with the names that readers know."""
    given: dict[str, list[Arrow]] = {}
    used: dict[str, list[Arrow]] = {}
    for arrow in scene.arrows:
        given.setdefault(arrow.target, []).append(arrow)
        used.setdefault(arrow.source, []).append(arrow)
    operations = {key: replace(op, said=_said(op, given.get(key, []), scene)) for key, op in scene.operations.items()}
    roles = _attention(scene, given, used)
    boxes = {
        key: replace(box, said=" = ".join(roles.get(key, [])) if not box.name else "", shown=_shown(box, used.get(key)))
        for key, box in scene.boxes.items()
    }
    return Scene(boxes, operations, scene.arrows, scene.notes)


def _said(op: Operation, given: Sequence[Arrow], scene: Scene) -> str:
    if op.name in _LINEAR and not any(scene.boxes[arrow.source].role == "parameter" for arrow in given):
        return "matmul"
    return spoken(op.name)


def _shown(box: Box, used: Sequence[Arrow] | None) -> tuple[int, ...] | None:
    """The shape in which a linear layer returns its rows."""
    shapes = {arrow.shape for arrow in used or ()}
    return shapes.pop() if len(shapes) == 1 and box.role == "intermediate" else None


def _attention(
    scene: Scene, given: Mapping[str, Sequence[Arrow]], used: Mapping[str, Sequence[Arrow]]
) -> dict[str, list[str]]:
    """The boxes that are queries, keys and values, by the places at which they go into attention."""
    found: dict[str, list[str]] = {}

    def name(op: str, slot: int, role: str) -> None:
        for arrow in given.get(op, ()):
            if arrow.slot == slot and role not in found.setdefault(arrow.source, []):
                found[arrow.source].append(role)

    maker = {box: op for op in scene.operations.values() for box in op.makes}
    for op in scene.operations.values():
        if op.name.startswith("sdp_"):
            for slot, role in enumerate("qkv"):
                name(op.key, slot, role)
        elif op.name == "softmax":
            scores = _before(op, given, maker)
            mixed = _after(op, used, scene)
            if scores is not None and mixed is not None:
                name(scores.key, 0 if scores.name == "bmm" else 1, "q")
                name(scores.key, 1 if scores.name == "bmm" else 2, "k")
                name(mixed.key, 1, "v")
    return found


def _before(op: Operation, given: Mapping[str, Sequence[Arrow]], maker: Mapping[str, Operation]) -> Operation | None:
    """The product of which a softmax is taken."""
    while True:
        sources = [maker[arrow.source] for arrow in given.get(op.key, ()) if arrow.source in maker]
        if len(sources) != 1:
            return None
        op = sources[0]
        if op.name in ("bmm", "baddbmm"):
            return op
        if op.name not in _BETWEEN:
            return None


def _after(op: Operation, used: Mapping[str, Sequence[Arrow]], scene: Scene) -> Operation | None:
    """The product that takes a softmax as its first argument."""
    while True:
        uses = [arrow for box in op.makes for arrow in used.get(box, ())]
        if len(uses) != 1:
            return None
        op = scene.operations[uses[0].target]
        if op.name == "bmm":
            return op if uses[0].slot == 0 else None
        if op.name not in _BETWEEN:
            return None


# ---- modules without parameters --------------------------------------------------------------------------------------


def is_alike(op: Operation, module: nn.Module) -> bool:
    """Whether an operation is called as a module is: relu, ReLU."""
    return type(module).__name__.lower().startswith(op.name.replace("_", "")[:4])


def with_modules(scene: Scene, owned: Mapping[str, str | None], modules: Mapping[str, nn.Module]) -> Scene:
    """The scene in which operations have the names of the modules that they are calls of: if a module holds exactly one
    without parameters that is called as the operation is."""
    operations = dict(scene.operations)
    for key, op in scene.operations.items():
        module = modules.get(owned[key] or "") if owned[key] is not None else None
        held = {} if module is None else {name: child for name, child in module._modules.items() if child is not None}
        fits = [name for name, child in held.items() if is_alike(op, child) and not list(child.parameters())]
        if len(fits) == 1 and not fits[0].isdecimal():
            own, short = op.name.replace("_", ""), fits[0].replace("_", "").lower()
            operations[key] = replace(op, said=fits[0] if own[:4] in short else f"{fits[0]} ({op.said})")
    return Scene(scene.boxes, operations, scene.arrows, scene.notes)
