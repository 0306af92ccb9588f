"""One walk from the cut to the leaves, by the table: whose is each position of each node?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from unsum.graph.layout import NOBODY, Layout, Mapped, Regular, complete
from unsum.graph.nodes import Edge, Node, is_custom, is_leaf
from unsum.graph.owners import Owners
from unsum.graph.rounded import rounding_of, scales_by_batch
from unsum.seams.nodes import outputs_of, saved_or
from unsum.travel.table import MIXED, SILENT, Answer, Journey, down, start
from unsum.travel.values import ask


@dataclass
class Walked:
    """What a walk has found."""

    owners: dict[Node, Owners | None] = field(default_factory=dict)  # None where positions mix samples
    said: dict[Node, dict[int, Layout]] = field(default_factory=dict)  # by the table alone: what it said of which edge
    asked: dict[Node, None] = field(default_factory=dict)  # where values decided
    moved: dict[tuple[Node, int], str] = field(default_factory=dict)  # edges at which indices decided, and how it was
    hidden: dict[Node, list[Owners]] = field(default_factory=dict)  # of the backwards that a node runs by itself
    mixed: dict[Node, Node] = field(default_factory=dict)  # the first nodes without owners, and the last one above each
    mixing: dict[Node, Node] = field(default_factory=dict)  # those of them that depend on data: samples interact there


def walk(
    order: Sequence[Node],
    starts: Mapping[Edge, Layout],
    journey: Journey,
    is_data: Callable[[Node], bool],
    silent: Collection[Node] = (),
    has_rows: Callable[[Node], bool] = lambda node: False,
) -> Walked:
    """The owners of the nodes in `order`. At the `silent` ones values decide, as where the table says nothing.
    `has_rows`: whether rows of an input lie below a node, of which nothing else says that it is data."""
    found, n, alone = Walked(), journey.n, is_alone(starts.values(), journey.n)
    arriving: dict[Node, Owners | None] = {}  # None: mixed
    for (node, output), layout in starts.items():
        _arrive(arriving, node, output, layout, journey)
    for node in order:
        if node not in arriving or is_leaf(node):
            continue
        outs = found.owners[node] = with_states(node, filled(arriving.pop(node), journey))
        edges = [(k, child, output) for k, (child, output) in enumerate(node.next_functions) if child is not None]
        if outs is None:
            for _, child, _ in edges:
                arriving[child] = None
            continue
        if not alone and mixes(node, outs, journey):
            found.mixing.setdefault(node, node)
        at = start(node, outs, journey)
        answers: list[Layout | Answer | None] = [None] * len(node.next_functions)
        must_ask = node in silent
        for k, child, output in edges:
            if not is_leaf(child):
                shape = tuple(outputs_of(child)[output].shape)
                answer = _alone(shape, is_data(child)) if alone else SILENT if at is None else down(at, k, shape)
                answers[k] = answer
                must_ask = must_ask or answer is SILENT
        if must_ask or (is_custom(node) and not rounding_of(node)):
            found.asked[node] = None
            values, hidden = ask(node, outs, n)
            if is_custom(node):
                values = [MIXED if isinstance(each, Mapped) and _lost(each, outs) else each for each in values]
            answers = [
                answer if alone and answer is not None else value for value, answer in zip(values, answers, strict=True)
            ]
            if hidden:
                found.hidden[node] = hidden
        else:
            found.said[node] = {k: said for k, said in enumerate(answers) if isinstance(said, Regular | Mapped)}
            if at is not None and at.kind in INDEXED:
                found.moved.update({(node, k): _form(said) for k, said in found.said[node].items()})
        for k, child, output in edges:
            told = answers[k]
            if told is None or is_leaf(child):
                continue
            if isinstance(told, Mapped) and not is_data(child) and not has_rows(child):
                told = MIXED  # each expert may have had one sample's tokens
            if isinstance(told, Answer) or not _arrive(arriving, child, output, told, journey):
                arriving[child] = None
                found.mixed.setdefault(child, node)
                if is_data(child):
                    found.mixing.setdefault(child, node)
    return found


INDEXED = frozenset({"Index", "UnsafeIndex", "IndexSelect", "IndexAdd", "IndexCopy", "IndexPut", "IndexPutImpl"})


# Layers that see several numbers of their input at once. Where that is raw, no gradient shows whose it was; where it is
# raw and requires gradients, no node below does.
WIDE = ("Convolution", "SlowConv", "MkldnnConvolution", "CudnnConvolution", "ConvDepthwise", "NativeLayerNorm",
        "FusedRmsNorm", "NativeGroupNorm", "CudnnRnn", "MkldnnRnn")  # fmt: skip


def may_mix(node: Node) -> bool:
    """Whether `mixes` has to look at a node in every batch."""
    name = node.name()
    return _is_wide(node) or "BatchNorm" in name or name.startswith("Embedding") or bool(rounding_of(node))


def _is_wide(node: Node) -> bool:
    """Whether a node is a layer of torch's own that sees raw input as a whole. A custom Function may have any name."""
    if not node.name().startswith(WIDE) or is_custom(node):
        return False
    given = node.next_functions[0][0]
    return given is None or (is_leaf(given) and not isinstance(given.variable, nn.Parameter))


def mixes(node: Node, outs: Owners, journey: Journey) -> bool:
    """Whether values mix whatever the gradients do: batch norm in training, counts of ids over the batch, samples along
    a dimension of a raw input that a layer sees as a whole, float8 with one scale for the batch."""
    name = node.name()
    if rounding_of(node):
        return scales_by_batch(node)
    if _is_wide(node):
        given, at = saved_or(node, "input", None), start(node, outs, journey)
        if at is None or given is None or (given.dim() < 3 and "Rnn" in name):
            return False
        is_along_channels = isinstance(outs[0], Regular) and outs[0].dim == 1
        if "Conv" in name and is_along_channels and saved_or(node, "groups", 1) % journey.n == 0:
            return False  # samples along the groups
        return isinstance(down(at, 0, tuple(given.shape)), Answer)
    if "BatchNorm" in name and not name.startswith("NativeBatchNormLegitNoTraining"):
        out = outs[0]
        return bool(saved_or(node, "training", True)) and not (isinstance(out, Regular) and out.dim == 1)
    return name.startswith("Embedding") and bool(saved_or(node, "scale_grad_by_freq", False))


def is_alone(starts: Iterable[Layout], n: int) -> bool:
    """Whether there is one sample, and all data is its own: no row belongs to nobody."""
    return n == 1 and all(isinstance(each, Regular) or each.is_whole for each in starts)


def _alone(shape: tuple[int, ...], is_data: bool) -> Layout | Answer:
    """Of one sample, all data is its own."""
    if not is_data:
        return MIXED
    is_there = shape and 0 not in shape
    return (
        Regular(shape, 1, 0, shape[0]) if is_there else Mapped(torch.zeros((), dtype=torch.int32), shape, is_whole=True)
    )


def _arrive(arriving: dict[Node, Owners | None], node: Node, output: int, layout: Layout, journey: Journey) -> bool:
    """Note whose a node's output is; False if that contradicts what is known of it."""
    if node not in arriving:
        arriving[node] = [None] * len(outputs_of(node))
    outs = arriving[node]
    if outs is None:
        return True  # mixed already, and told of
    both = journey.joined(outs[output], layout)
    if both is None:
        return False
    outs[output] = both
    return True


def _lost(layout: Mapped, outs: Owners) -> bool:
    """Whether samples have become nobody: a custom Function that clips or rounds each number gives the same whatever
    its gradient is multiplied with."""
    if not bool((layout.map == NOBODY).any()):
        return False
    known = [out for out in outs if out is not None]
    some = [isinstance(out, Mapped) and bool((out.map == NOBODY).any()) for out in known]
    return not any(some) or not bool((layout.map >= 0).any())


def filled(outs: Owners | None, journey: Journey) -> Owners | None:
    """Positions that get no gradient from anywhere follow the others, if these fit just one regular layout."""
    if outs is None:
        return None
    for k, out in enumerate(outs):
        if isinstance(out, Mapped) and not out.is_whole and out.map.dim() and out.map.device.type == "cpu":
            whole = complete(out.map, journey.n)
            if isinstance(whole, Regular):
                outs[k] = Regular(out.shape, whole.n, whole.dim, whole.block)
    return outs


def with_states(node: Node, outs: Owners | None) -> Owners | None:
    """The owners of a recurrent layer's results, of which some are known: sequences and states have the same samples,
    also where only one of them is looked at by what the samples were followed through."""
    if outs is None or "Rnn" not in node.name() or None not in outs[:3]:
        return outs
    known = next((out for out in outs if isinstance(out, Regular)), None)
    if known is None or (known.n > 1 and (known.block != 1 or known.shape[known.dim] != known.n)):
        return outs
    sequence = outputs_of(node)[0].shape
    batch = 0 if node.name().startswith("Cudnn") and saved_or(node, "batch_first", False) else 1
    for k, meta in list(enumerate(outputs_of(node)))[:3]:
        dim = batch if k == 0 else len(meta.shape) - 2
        if outs[k] is None and known.n == 1:
            outs[k] = Regular(tuple(meta.shape), 1, 0, meta.shape[0])
        elif outs[k] is None and len(sequence) == 3 and dim >= 0 and meta.shape[dim] == known.n:
            outs[k] = Regular(tuple(meta.shape), known.n, dim, 1)
    return outs


def _form(layout: Layout) -> str:
    """What is expected of rows that indices move, in a later batch."""
    if isinstance(layout, Regular):
        return str(layout.dim) if layout.n * layout.block == layout.shape[layout.dim] else ""
    return "rows" if layout.is_whole and layout.map.dim() == 1 else ""
