"""The table read upwards: from tensors whose samples are known to what is computed of them. A layout of a result is
right if the table leads from it to the layouts of the arguments, so no second table is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from unsum.errors import UnsumError
from unsum.graph.layout import UNSEEN, Layout, Mapped, Regular, complete, mapped, regular, reshaped, same
from unsum.graph.nodes import Edge, Node, below, is_leaf, signed
from unsum.seams.nodes import outputs_of, saved_of
from unsum.travel.table import SILENT, Answer, Journey, down, entry, start
from unsum.travel.values import ask
from unsum.travel.walk import is_alone


def climb(order: Sequence[Node], seeds: Mapping[Edge, Layout], n: int) -> dict[Edge, Layout]:
    """The owners of all results that follow from those at the seeds. `order` is from the roots to the leaves."""
    known = dict(seeds)
    journey = Journey(n)
    for node in reversed(order):
        if is_leaf(node):
            continue
        below_it = [(k, known[child, output]) for k, child, output in below(node) if (child, output) in known]
        if not below_it:
            continue
        for output, meta in enumerate(outputs_of(node)):
            if (node, output) not in known:
                found = _above(node, output, tuple(meta.shape), below_it, journey)
                if found is not None:
                    known[node, output] = found
    return known


def _above(
    node: Node, output: int, shape: tuple[int, ...], below_it: Sequence[tuple[int, Layout]], journey: Journey
) -> Layout | None:
    """The one layout of a result from which those of the arguments follow."""
    if 0 in shape:
        return Mapped(torch.zeros((), dtype=torch.int32), shape, is_whole=True)  # of no numbers, all are anybody's
    if is_alone([layout for _, layout in below_it], journey.n):
        return Regular(shape, 1, 0, shape[0]) if shape and 0 not in shape else None
    fitting: list[Layout] = []
    for layout in _candidates(node, output, shape, below_it, journey.n):
        outs: list[Layout | None] = [None] * len(outputs_of(node))
        outs[output] = layout
        at = start(node, outs, journey)
        assert at is not None
        answers = {k: down(at, k, wanted.shape) for k, wanted in below_it}
        if all(answer is SILENT for answer in answers.values()):
            answers = _by_values(node, outs, journey.n)
        told = {k: _fits(answers[k], wanted) for k, wanted in below_it}
        if any(told.values()) and all(fits or answers[k] is SILENT for k, fits in told.items()):
            fitting.append(layout)
    return fitting[0] if len(fitting) == 1 else None


def _by_values(node: Node, outs: list[Layout | None], n: int) -> dict[int, Layout | Answer]:
    try:
        found, _ = ask(node, outs, n)
    except UnsumError:
        found = []
    answers = {k: SILENT if answer is None else answer for k, answer in enumerate(found)}
    return {k: answers.get(k, SILENT) for k in range(len(node.next_functions))}


def _fits(said: Layout | Answer, wanted: Layout) -> bool:
    """Whether no position of an argument is said to be of another sample than it is."""
    if isinstance(said, Answer):
        return False
    both = isinstance(said, Regular) and isinstance(wanted, Regular)
    return said == wanted if both else said.shape == wanted.shape and _is_told(said) and same(said, wanted)


def _is_told(layout: Layout) -> bool:
    return isinstance(layout, Regular) or bool((layout.map != UNSEEN).any())


def _candidates(
    node: Node, output: int, shape: tuple[int, ...], below_it: Sequence[tuple[int, Layout]], n: int
) -> Iterator[Layout]:
    """Layouts that the result may have."""
    kind, _ = entry(node.name())
    if kind in MOVED:
        try:
            moved = MOVED[kind](node, output, {k: layout.owner().int() for k, layout in below_it})
        except (AttributeError, RuntimeError, IndexError, KeyError):
            moved = None
        if moved is not None and tuple(moved.shape) == shape and shape:
            whole = complete(moved, n)
            yield whole if isinstance(whole, Regular) else mapped(moved).narrowed()
            return
    yield from regular(shape, n)
    for _, layout in below_it:
        if isinstance(layout, Mapped) and shape:
            lead = layout.map.dim()
            if not lead:
                return  # all of it is one sample's; what else is joined to it is not known
            if shape[:lead] == tuple(layout.map.shape):
                yield Mapped(layout.map, shape[lead:], layout.is_whole)
            elif prod(shape) == prod(layout.shape):
                yield reshaped(layout, shape, n)
            return


# Operations that only move numbers move owners alike: what they made of the arguments, made of the arguments' owners.


def _cut_out(node: Node, output: int, owners: dict[int, Tensor]) -> Tensor:
    given = (
        None if p is None else signed(p)
        for p in (saved_of(node, "start"), saved_of(node, "end"), saved_of(node, "step"))
    )
    own = owners[0]
    dim = signed(saved_of(node, "dim")) % own.dim()
    places = torch.tensor(range(own.shape[dim])[slice(*given)])
    return own.index_select(dim, places)


def _piece(node: Node, output: int, owners: dict[int, Tensor]) -> Tensor:
    own = owners[0]
    dim = signed(saved_of(node, "dim")) % own.dim()
    sizes = [meta.shape[dim] for meta in outputs_of(node)]
    return own.narrow(dim, sum(sizes[:output]), sizes[output])


def _joined(node: Node, output: int, owners: dict[int, Tensor]) -> Tensor | None:
    if len(owners) != len(node.next_functions):
        return None
    return torch.cat([owners[k] for k in range(len(owners))], signed(saved_of(node, "dim")))


MOVED: dict[str, Callable[[Node, int, dict[int, Tensor]], Tensor | None]] = {
    "Slice": _cut_out,
    "Split": _piece,
    "SplitWithSizes": _piece,
    "Cat": _joined,
    "Index": lambda node, output, owners: owners[0][
        tuple(slice(None) if index is None else index.cpu() for index in saved_of(node, "indices"))
    ],
    "IndexSelect": lambda node, output, owners: owners[0].index_select(
        signed(saved_of(node, "dim")), saved_of(node, "index").cpu()
    ),
    "MaskedSelect": lambda node, output, owners: owners[0].masked_select(saved_of(node, "mask").cpu()),
    "Flip": lambda node, output, owners: owners[0].flip(tuple(saved_of(node, "dims"))),
    "Roll": lambda node, output, owners: owners[0].roll(
        tuple(map(signed, saved_of(node, "shifts"))), tuple(saved_of(node, "dims"))
    ),
}
