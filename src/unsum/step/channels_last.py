"""Convolutions whose images have channels last. Torch copies the gradient at such a node into that order before it uses
it: that of a batch norm in evaluation, for example, has channels first. Rules read it in that order, too. So the copy
is made once, where the gradient arrives, and handed on to torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unsum.graph.nodes import Node
from unsum.graph.replay import Grads
from unsum.seams.nodes import is_convolution, saved_of

DEVICES = {"cuda"}  # on which torch does so
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def handing_on(node: Node, then: Callable[[Grads], None]) -> Callable[[Grads], Grads | None]:
    """A hook for a node that calls `then`. A convolution's gradient has its image's order by then, for torch too."""
    if not is_convolution(node):
        return then  # type: ignore[return-value]

    def hook(grads: Grads) -> Grads | None:
        delta = grads[0]
        laid = delta if delta is None else _as_image(node, delta)
        if laid is delta:
            then(grads)
            return None
        handed = (laid, *grads[1:])
        then(handed)
        return handed

    return hook


def _as_image(node: Node, delta: Tensor) -> Tensor:
    form = _FORMATS.get(delta.dim())
    if form is None or delta.is_contiguous(memory_format=form):
        return delta
    image = saved_of(node, "input")
    is_last = image.is_contiguous(memory_format=form) and not image.is_contiguous()
    return delta.contiguous(memory_format=form) if is_last else delta
