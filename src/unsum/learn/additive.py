"""Custom Functions whose backward is not linear. Replay gives such a node one sample's part of its gradient: the
results add up to `.grad` only if the node's backward is additive. One that rounds by the largest gradient of the
batch, clips by a norm over the batch or draws random numbers is not, and is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from unsum.errors import UnsupportedError
from unsum.graph.layout import Layout, Mapped
from unsum.graph.nodes import Node, below, is_custom, is_leaf
from unsum.graph.owners import Owners, refuse_changing
from unsum.graph.replay import Grads, replay
from unsum.graph.rounded import rounding_of
from unsum.kernels.product import wide
from unsum.learn.audit import Audit
from unsum.learn.setting import Setting
from unsum.seams.nodes import number_of, outputs_of
from unsum.travel.values import drawn
from unsum.travel.walk import Walked

_LARGE = 2.0**20  # what is clipped above a bound is clipped at such gradients
# How far sums may be off; elsewhere 4e-3. Rounding to bfloat16, which a Function may do inside, moves a result by 2e-3
# of its norm, rounding to int8 by 1e-2.
_LOOSE = {torch.float64: 1e-6, torch.complex128: 1e-6}
_FINE = {**_LOOSE, torch.float32: 1e-4, torch.complex64: 1e-4}

_WRITE = (
    "h.register_hook(lambda g: ...)  # a tensor hook in its place: gradients are split after it",
    "model.body.requires_grad_(False)  # gradients of the parameters that lie after it alone",
)
_BY_RULE = "with unsum.gradients(model) as g: ...  # without engine='graph': from the factors before they are rounded"


def refuse_nonlinear(order: Sequence[Node], walked: Walked, audit: Audit | None, setting: Setting) -> None:
    """Raise for the first custom Function in `order` that gradients of single samples are to pass through, and whose
    backward is not additive; or at which samples are lost because it does not scale."""
    if not any(map(is_custom, order)):
        return
    leads: set[Node] = set()  # nodes that lead to a parameter
    for node in reversed(order):
        if id(node.variable) in setting.wanted if is_leaf(node) else any(c in leads for _, c, _ in below(node)):
            leads.add(node)
    lost = set() if setting.exact else {above for node, above in walked.mixing.items() if above is not node}
    by_rule = {} if audit is None else audit.rules
    for node in order:
        if is_custom(node) and node in walked.owners and node not in walked.hidden:
            edges = [
                edge
                for edge, child, _ in below(node)
                if child in leads
                and (node, edge) not in by_rule
                # where float8 rounds what flows on, each sample's part is its rows, as they are
                and not (rounding_of(node) and walked.owners.get(child) is not None)
            ]
            if edges:
                _refuse(node, walked.owners[node], edges, _where(node, setting), is_lost=node in lost)


def _refuse(node: Node, outs: Owners | None, edges: Sequence[int], where: str, *, is_lost: bool) -> None:
    if outs is None:  # the others were asked more than once
        small = _gradient(node, outs, large=False)
        refuse_changing(node, small, replay(node, small, still=True))
    if not _adds_up(node, outs, edges):
        raise _not_additive(where, is_known=bool(rounding_of(node)))
    if is_lost and not _scales(node, outs, edges):
        exact = 'with unsum.gradients(model, interacting="exact") as g: ...  # slower, without following them'
        raise UnsupportedError(
            f"{where}: its backward is not linear (it clips or rounds each number), so that unsum cannot follow "
            "samples through it.",
            write=(exact, *_WRITE),
        )


def _not_additive(where: str, *, is_known: bool) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: its backward is not linear, so per-sample gradients would not add up to .grad. It "
        "rounds by the largest gradient of the batch, clips by a norm over the batch, or draws random numbers.",
        write=_BY_RULE if is_known else _WRITE,
    )


class Split:
    """The sum of what a custom Function gives for each sample, along these edges."""

    def __init__(self, node: Node, module: str, edges: Sequence[int]) -> None:
        self.node, self.module, self.count = node, module, 0
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}  # the sum, and that of squared norms
        self._edges = edges

    def add(self, results: Grads) -> None:
        """The results for one more sample."""
        self.count += 1
        for edge in self._edges:
            value = results[edge]
            if value is not None and value.numel():
                value = value.to(wide(value.dtype))
                square = torch.linalg.vector_norm(value.flatten()).double().square()
                total, squares = self.sums.get(edge, (0, 0))
                self.sums[edge] = total + value, squares + square


class Sums:
    """What custom Functions gave for each sample in one backward, beside what they give for all: a Function may begin
    to clip or to round in a later step than the one in which its graph was learnt."""

    def __init__(self) -> None:
        self._found: list[tuple[str, bool, float, Tensor]] = []  # where, known to round, tolerance, how far off

    def add(self, split: Split, grads: Grads) -> None:
        """All samples' parts of these gradients have passed."""
        if split.count < 2:
            return
        node, whole = split.node, replay(split.node, grads)
        for edge, (total, squares) in split.sums.items():
            wanted = whole[edge]
            if wanted is None:
                continue
            off, size = (torch.linalg.vector_norm(each.flatten()).double() for each in (total - wanted, wanted))
            size = torch.maximum(size, squares.sqrt()).clamp_min(1e-300)  # parts may cancel
            dtypes = (wanted.dtype, *(meta.dtype for meta in outputs_of(node)))
            tolerance = max(_LOOSE.get(dtype, 4e-3) for dtype in dtypes)
            where = node.name() + (f" in module {split.module!r}" if split.module else "")
            self._found.append((where, bool(rounding_of(node)), tolerance, off / size))

    def check(self) -> None:
        """Raise where parts do not add up."""
        found, self._found = self._found, []
        for where, is_known, tolerance, off in found:
            if float(off) > tolerance:  # not so where a NaN hides it
                raise _not_additive(where, is_known=is_known)


def _where(node: Node, setting: Setting) -> str:
    module = setting.module_of(number_of(node))
    return node.name() + (f" in module {module!r}" if module else "")


def _adds_up(node: Node, outs: Owners | None, edges: Sequence[int]) -> bool:
    """Whether the node gives for two parts of a gradient what it gives for their sum. The parts are those of every
    second sample; of what belongs to nobody, any two."""
    whole = _gradient(node, outs)
    one = [_part(grad, out) for grad, out in zip(whole, [None] * len(whole) if outs is None else outs, strict=True)]
    other = [None if grad is None or part is None else grad - part for grad, part in zip(whole, one, strict=True)]
    results = list(zip(replay(node, one), replay(node, other), strict=True))
    sums = [None if left is None or right is None else left + right for left, right in results]
    # Where each part has positions of its own nothing is summed, and nothing is rounded otherwise than in the whole.
    apart = [k for k, sum_ in enumerate(sums) if sum_ is not None and not _overlap(*results[k])]
    return _are_close(node, replay(node, whole), sums, edges, apart)


def _overlap(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and bool(((one != 0) & (other != 0)).any())


def _scales(node: Node, outs: Owners | None, edges: Sequence[int]) -> bool:
    """Whether the node gives for a multiple of a gradient the multiple of what it gives."""
    whole = _gradient(node, outs)
    less = replay(node, [None if g is None else g * 0.75 for g in whole])
    return _are_close(node, replay(node, whole), [None if g is None else g / 0.75 for g in less], edges)


def _gradient(node: Node, outs: Owners | None, *, large: bool = True) -> list[Tensor | None]:
    """A random gradient for each result of the node that has one; with `large`, so large that a node that clips does
    so."""
    metas = outputs_of(node)
    known: Owners = [_whole(meta) for meta in metas] if outs is None else outs
    return [
        grad * _LARGE if large and grad is not None and meta.dtype != torch.float16 else grad
        for grad, meta in zip(drawn(node, known), metas, strict=True)
    ]


def _whole(meta: Any) -> Mapped | None:
    """All of a result, as one; None if it is of whole numbers, which have no gradient."""
    if not (meta.dtype.is_floating_point or meta.dtype.is_complex):
        return None
    return Mapped(torch.zeros((), dtype=torch.int32), tuple(meta.shape), is_whole=True)


def _part(grad: Tensor | None, out: Layout | None) -> Tensor | None:
    """The gradient of every second sample; where these are not known, any part."""
    if grad is None:
        return None
    if out is None:
        return grad.flatten().flip(0).view(grad.shape) * 0.7
    return grad.masked_fill(out.owner(grad.device) % 2 == 1, 0)


def _are_close(node: Node, found: Grads, wanted: Grads, edges: Sequence[int], apart: Collection[int] = ()) -> bool:
    """Whether results are the same to rounding; to that of their own dtype at the edges that are `apart`."""
    for edge in edges:
        one, other = found[edge], wanted[edge]
        if one is None or other is None or not one.numel():
            continue
        dtypes = (one.dtype, *(meta.dtype for meta in outputs_of(node)))
        tolerance = max((_FINE if edge in apart else _LOOSE).get(dtype, 4e-3) for dtype in dtypes)
        off, size = (float(torch.linalg.vector_norm(each.flatten())) for each in (one - other, one))
        if off > tolerance * size:  # not so where a NaN hides it
            return False
    return True
