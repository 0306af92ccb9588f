"""The sweep: whose is each position of each node?

A fixed random gradient is sent from the cut to the leaves by calling the nodes ourselves, and beside it copies in
which every sample's part is multiplied by a factor of its own. At every position of every node the ratio spells the
owner. Where it does not, the position belongs to nobody: the node is on the weight side, or samples interact there.

Not the loss's own gradient: ignored labels, dead units and cancellation would hide owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from unsum.errors import UnsupportedError
from unsum.graph.codes import Codes
from unsum.graph.layout import Layout, Mapped
from unsum.graph.nodes import Edge, Node, is_leaf
from unsum.graph.replay import Grads, Heard, replay
from unsum.graph.saved import memory_of
from unsum.seams.nodes import outputs_of

IRREGULAR = Mapped(torch.empty(0, dtype=torch.int32))  # in the place of one that is not held

Owners = list[Layout | None]  # for each output of a node; None where no gradient arrives


@dataclass
class Swept:
    """What a sweep has learnt."""

    owners: dict[Node, Owners | None] = field(default_factory=dict)  # None where positions mix samples
    hidden: dict[Node, list[Owners]] = field(default_factory=dict)  # of the backwards that a node runs by itself


def sweep(
    model: Sequence[Node],
    starts: Mapping[Edge, Layout],
    n: int,
    *,
    only: Mapping[Edge, Tensor] | None = None,
    keep: Callable[[Node], bool] = lambda node: True,
    mixed: Callable[[Node, Node | None], None] = lambda node, above: None,
    seen: Callable[[Node, Owners, Grads], None] = lambda node, owners, grads: None,
    is_data: Callable[[Node], bool] = lambda node: True,
) -> Swept:
    """The owners of the nodes in `model`, which are in order. `mixed` is told of each node whose positions mix samples
    and of the last one before it that had owners, and may raise; `seen` of each that has owners, with the gradients
    that were sent to it. With `only`, the sweep starts just where that is true. Beside the sweep's front, only the
    owners of nodes that `keep` names are held."""
    half = any(meta.dtype == torch.float16 for node in model if not is_leaf(node) for meta in outputs_of(node))
    codes = Codes(n, signs=half)
    copies = len(codes.tables)
    front = _start(starts, codes, only)
    tops = {node for node, _ in starts}
    above: dict[Node, Node] = {}
    found = Swept()
    for node in model:
        streams = front.pop(node, None)
        if streams is None or is_leaf(node):
            continue
        owners = _read(streams, codes, only_regular=node not in tops and not is_data(node))
        is_silent = not any(_is_told(grad) for grad in streams[0])
        if owners is not None and node not in tops and not is_data(node):
            owners = None if is_silent or _is_chance(owners, n, streams[0]) else owners
        if owners is None:
            mixed(node, above.pop(node, None))
        else:
            seen(node, owners, streams[0])
        found.owners[node] = owners if owners is None or keep(node) else _light(owners)
        heard: list[list[Heard]] = [[] for _ in streams]
        results = [replay(node, grads, heard[k], still=True) for k, grads in enumerate(streams)]
        if isinstance(node, BackwardCFunction):
            refuse_changing(node, streams[0], results[0])
        for edge, (child, output) in enumerate(node.next_functions):
            if child is None or is_leaf(child) or results[0][edge] is None:
                continue
            values = in_range([result[edge] for result in results])
            for stream, value in enumerate(values):
                if value is not None:
                    _add(front, child, output, stream, value, copies)
            if owners is not None:
                above[child] = node
        if heard[0]:
            found.hidden[node] = hidden_owners(node, heard, codes)
    return found


Front = dict[Node, list[list[Tensor | None]]]  # node -> for each stream, for each output, the gradient so far


def _add(front: Front, node: Node, output: int, stream: int, value: Tensor, copies: int) -> None:
    if node not in front:
        front[node] = [[None] * len(outputs_of(node)) for _ in range(copies + 1)]
    known = front[node][stream][output]
    front[node][stream][output] = value if known is None else known + value


def in_range(values: list[Tensor | None]) -> list[Tensor | None]:
    """The same in all streams, made larger or smaller where numbers come near to what cannot be held: gradients that
    vanish would lose their owners, and only ratios count."""
    plain = values[0]
    if plain is None or not plain.numel() or not plain.dtype.is_floating_point:
        return values
    size = float(torch.where(plain.isfinite(), plain.abs(), 0).max())
    if size == 0 or 2.0**-20 < size < 2.0**20:
        return values
    power = -round(math.log2(size))
    first, second = 2.0 ** (power // 2), 2.0 ** (power - power // 2)  # both at once may be too large to hold
    return [None if value is None else value * first * second for value in values]


def _read(streams: list[list[Tensor | None]], codes: Codes, *, only_regular: bool = False) -> Owners | None:
    """The owners of a node's positions, from its gradients in all streams; None where they have none."""
    owners: Owners = []
    for plain, *scaled in zip(*streams, strict=True):
        if plain is None:
            owners.append(None)
            continue
        copies = [torch.zeros_like(plain) if copy is None else copy for copy in scaled]
        layout = codes.read(plain, copies, only_regular=only_regular)
        if layout is None:
            return None
        owners.append(layout.narrowed() if isinstance(layout, Mapped) else layout)
    return owners


def _light(owners: Owners) -> Owners:
    """Without what costs memory: of rows that each are of one sample, one number each."""
    return [_by_rows(owner) if isinstance(owner, Mapped) else owner for owner in owners]


def _by_rows(owner: Mapped) -> Mapped:
    rows = owner.rows()
    return IRREGULAR if rows is None else Mapped(rows).widened(owner.shape)


def _is_chance(owners: Owners, n: int, grads: Grads) -> bool:
    """Whether a weight may seem to have owners: of one sample it is all; each expert may have had one sample's tokens;
    a NaN hides everything."""
    return n == 1 or any(isinstance(owner, Mapped) for owner in owners) or not any(_is_finite(grad) for grad in grads)


def _is_told(grad: Tensor | None) -> bool:
    """Whether a gradient can say whose it is: zeros fit every layout."""
    return grad is not None and (not grad.numel() or bool((grad != 0).any()))


def _is_finite(grad: Tensor | None) -> bool:
    return grad is not None and (not grad.numel() or bool(grad.isfinite().any()))


def hidden_owners(node: Node, heard: list[list[Heard]], codes: Codes) -> list[Owners]:
    """Whose the gradients are that a node sends off by itself, backward by backward."""
    found = []
    for calls in zip(*heard, strict=True):
        streams = [[torch.ones_like(r) if g is None else g for r, g in zip(*call, strict=True)] for call in calls]
        owners = _read(streams, codes)  # type: ignore[arg-type]
        if owners is None:
            raise UnsupportedError(
                f"{node.name()} calls backward inside its own backward, and unsum cannot tell the samples apart there.",
                write="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # if it is a checkpoint",
            )
        found.append(owners)
    return found


def refuse_changing(node: Node, grads: Grads, results: Grads) -> None:
    """A custom Function must give the same twice: one that changes what it has saved cannot be called again. Nor can
    one that writes its results into the same memory each time."""
    handed_on = {None, *(memory_of(grad) for grad in grads if grad is not None)}  # as they came: straight-through
    for one, other in zip(results, replay(node, grads, still=True), strict=True):
        if one is None or other is None:
            continue
        if memory_of(one) == memory_of(other) not in handed_on and bool(other.any()):
            raise UnsupportedError(
                f"{node.name()} writes gradients into the same memory each time, as a CUDA graph does "
                "(torch.cuda.make_graphed_callables): what it gave for one sample is overwritten by the next.",
                write="with unsum.gradients(model) as g: loss_fn(model(x), y).backward()  # the model before it was "
                "graphed",
            )
        if not torch.allclose(one, other, equal_nan=True):
            raise UnsupportedError(
                f"{node.name()} gives another gradient when its backward is run a second time: it draws random numbers "
                "there, or changes what it has saved or was given.",
                write="model.body.requires_grad_(False)  # gradients of the parameters that lie after it alone",
            )


def all_are_seen(starts: Mapping[Edge, Layout], only: Mapping[Edge, Tensor], n: int) -> bool:
    """Whether every sample has a place at the cut where this is true."""
    seen = torch.zeros(n + 1, dtype=torch.bool)
    for edge, mask in only.items():
        seen[starts[edge].owner()[mask.cpu()].long()] = True
    return bool(seen[:n].all())


def _start(starts: Mapping[Edge, Layout], codes: Codes, only: Mapping[Edge, Tensor] | None) -> Front:
    front: Front = {}
    for place, ((node, output), layout) in enumerate(starts.items()):
        meta = outputs_of(node)[output]
        generator = torch.Generator(meta.device).manual_seed(place)
        drawn = torch.randn(tuple(meta.shape), generator=generator, dtype=meta.dtype, device=meta.device)
        drawn = drawn + 0.1 * drawn.sgn()
        mask = None if only is None else only.get((node, output), drawn.new_zeros((), dtype=torch.bool))
        for stream in range(len(codes.tables) + 1):
            value = drawn if stream == 0 else drawn * codes.factor(stream - 1, layout, drawn)
            _add(front, node, output, stream, value if mask is None else value * mask, len(codes.tables))
    return front
