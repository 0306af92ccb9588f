"""`draw`: the autograd graph as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unsum.draw.belong import belonging
from unsum.draw.cells import held_by
from unsum.draw.choose import asked, choose
from unsum.draw.fold import gather
from unsum.draw.names import with_modules
from unsum.draw.page import page
from unsum.draw.paint import paint
from unsum.draw.read import read
from unsum.draw.scene import Scene
from unsum.errors import OptionError
from unsum.picture import Picture
from unsum.sites import Names


def draw(
    loss: Tensor,
    model: nn.Module | None = None,
    data: Mapping[str, Tensor] | None = None,
    *,
    fold: int | str | Sequence[str] | None = None,
    repeat: bool = True,
    views: bool = False,
    flow: bool | None = None,
    show: Iterable[Any] = (),
) -> Picture:
    """The graph that `loss.backward()` walks, or has walked, as a picture: tensors, operations, gradients.

    Grey is data, teal are parameters, purple what was computed. Grey arrows go forward. Coral ones come back: solid
    where the gradient is stored, dashed where it is computed and thrown away; there is none where autograd computes
    none. Nothing is changed: no hook fires, no `.grad` moves, and a backward can follow.

    Args:
        loss: What is differentiated: any tensor with a graph, before or after its backward.
        model: Gives parameters their names, and groups.
        data: Names for tensors: inputs, targets, and also intermediate ones.
        fold: None opens as much as can be taken in: of blocks that repeat the first, by one level. A number opens
            groups down to that depth, 0 being the model itself; a glob, or several, names the modules that are folded.
        repeat: False draws each block by itself. True folds those that look like the one before them into one box.
        views: True draws transposes, reshapes and casts as operations of their own, not as part of an arrow.
        flow: Whether to compute the sizes of gradients that nobody has stored, by calling the nodes by hand (custom
            functions excepted). None: if a backward has run and left the graph alive.
        show: What `capture`, `edit` and `gradients` gave you, to show where they acted. Open blocks are shown anyway.

    Examples:
        >>> import torch
        >>> model, x = nn.Linear(4, 3), torch.ones(5, 4)
        >>> picture = draw(model(x).sum(), model, {"x": x})
        >>> picture
        <Picture: the graph of loss: 1 data, 15 parameters in 2 tensors, 2 operations>
        >>> 'data-name="weight"' in picture.svg
        True
    """
    names, given = _checked(loss, model, data)
    scene, owners = read(loss, names, given, views=views, flow=flow, show=show)
    modules = {} if names is None else names.modules
    owned = belonging(scene, owners, modules)
    folding = gather(with_modules(scene, owned, modules), owned, modules, repeat=repeat)
    opened = choose(folding) if fold is None else asked(folding, fold)
    title = _title(scene)
    return Picture(paint(folding, opened, title), title, lambda: page(folding, opened, title))


def _checked(
    loss: Tensor, model: nn.Module | None, data: Mapping[str, Tensor] | None
) -> tuple[Names | None, Mapping[str, Tensor]]:
    if not isinstance(loss, Tensor):
        raise OptionError(f"draw(loss): a tensor is drawn, got {type(loss).__name__}")
    if loss.grad_fn is None and loss.requires_grad:
        raise OptionError(
            "draw(loss): this tensor is a leaf (a parameter, or made with requires_grad=True): no operation has made "
            "it, so there is no graph to draw; draw what was computed from it"
        )
    if loss.grad_fn is None:
        raise OptionError(
            "draw(loss): this tensor has no graph (no grad_fn): it was computed from nothing that requires a gradient, "
            "or under no_grad, or it was detached"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise OptionError(f"draw(model=): expected an nn.Module, got {type(model).__name__}; data goes in data=")
    if data is not None and not isinstance(data, Mapping):
        raise OptionError(
            f'draw(data=): expected names for tensors, as in {{"x": x, "y": y}}, got {type(data).__name__}'
        )
    for name, tensor in (data or {}).items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise OptionError(f"draw(data=): {name!r} names {type(tensor).__name__}, not a tensor")
    return (None if model is None else Names(model)), data or {}


def _title(scene: Scene) -> str:
    data = sum(box.role == "data" for box in scene.boxes.values())
    name = next(box.name for box in scene.boxes.values() if box.is_loss)
    return f"the graph of {name}: {data} data, {held_by(scene.boxes.values())}, {len(scene.operations)} operations"
