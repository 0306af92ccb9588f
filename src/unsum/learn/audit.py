"""The audit: a rule is checked where it is used. The rule's Σ w_n G_n with random w must be what torch's own node
gives for δ·w[owner]: truth is torch's arithmetic on the user's own model, never a second copy of the rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor

from unsum.errors import UnsupportedError
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Term
from unsum.factors.windows import Windows
from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.owners import Owners
from unsum.graph.replay import Grads, replay
from unsum.graph.rounded import rounding_of
from unsum.reducers.holding import Size, size_of
from unsum.rules.registry import Call, Rule, find
from unsum.rules.to_parameter import follow
from unsum.seams.nodes import outputs_of
from unsum.travel.values import Claims, drawn

_PRECISE = {torch.float64: 1e-9, torch.float32: 1e-3}
_TF32 = 1e-2  # products of float32 as cuDNN rounds them by default, carried on from time to time


class Audit:
    """Collects the rules that hold, edge by edge. What was computed is compared at the end, all at once."""

    def __init__(self, n: int, is_data: Callable[[Node], bool], *, strict: bool) -> None:
        self._n, self._is_data, self._strict = n, is_data, strict
        self.is_complete = True  # whether every rule could be tried
        self.rules: dict[tuple[Node, int], Rule] = {}
        self.followed: dict[tuple[Node, int], bool] = {}  # to the parameter; whether the sum comes with the norms
        self.sizes: dict[tuple[Node, int], Size] = {}  # of these: what holding them takes
        self._open: list[tuple[Node, int, Tensor, float]] = []  # how far a rule is off, how large it is

    def candidates(self, node: Node, owners: Owners) -> list[tuple[int, Rule, Node, int]]:
        """The edges of a node that have a rule."""
        layout, *others = owners
        if layout is None or outputs_of(node)[0].dtype.is_complex:
            return []
        known = [owner for owner in others if owner is not None]
        is_one, are_alike = not known, self._n == 1 or all(_in_one_order(layout, owner) for owner in known)
        delta = outputs_of(node)[0].dtype
        return [
            (edge, rule, child, output)
            for edge, child, output in below(node)
            if (rule := find(node, edge)) is not None
            and (is_one or (rule.several and are_alike))
            and (is_leaf(child) or not self._is_data(child))
            # torch's own rounding, number by number, is what a test in float64 asks for
            and (delta == torch.float64 or _leaf_dtype(child) != torch.float64)
        ]

    def add(self, node: Node, owners: Owners, grads: Grads, sent: Sequence[Tensor | None], claims: Claims) -> None:
        """A node got these gradients, and sent these results for the same, each sample's part times its factor."""
        layout, delta = owners[0], grads[0]
        assert layout is not None and delta is not None
        w = claims.factors[: self._n].to(delta.device)
        for edge, rule, child, output in self.candidates(node, owners):
            kind = apply(rule, node, grads, layout, self._n, shape_of(child, output))
            wanted = sent[edge]
            if kind is None or wanted is None:
                continue
            found = kind.weighted_sum(w)
            norms = torch.stack([(found - wanted).norm().double(), wanted.norm().double()])
            precisions = [_PRECISE.get(dtype, 5e-2) for dtype in (delta.dtype, wanted.dtype)]
            tolerance = max(rounding_of(node), _TF32 if node.name().startswith("CudnnRnn") else 0, *precisions)
            self._open.append((node, edge, norms, tolerance))
            self.rules[node, edge] = rule
            if is_followed(kind, child, output):
                # a sum that torch computes anyway, or rounds, is left to torch
                own = rule.several or rounding_of(node)
                self.followed[node, edge] = not own and sum_comes_with_norms(kind)
                self.sizes[node, edge] = size_of(kind)

    def finish(self, owners: Mapping[Node, Owners | None]) -> None:
        """Compare."""
        places: dict[torch.device, list[int]] = {}
        for k, (_, _, norms, _) in enumerate(self._open):
            places.setdefault(norms.device, []).append(k)
        for there in places.values():
            sizes = torch.stack([self._open[k][2] for k in there]).tolist()
            for k, (off, size) in zip(there, sizes, strict=True):
                node, edge, _, tolerance = self._open[k]
                if not isfinite(size):
                    self.is_complete = False  # a NaN in the data: to be tried again with the next batch
                elif not off <= tolerance * size and (
                    rounding_of(node)
                    or not off <= tolerance * _without_cancelling(node, drawn(node, owners[node] or []), edge)
                ):
                    self._mismatch(self.rules.pop((node, edge)), node)
                    self.followed.pop((node, edge), None)
        self._open.clear()

    def _mismatch(self, rule: Rule, node: Node) -> None:
        text = f"the rule {rule.name} does not give what {node.name()} of torch {torch.__version__} gives"
        if self._strict:
            raise UnsupportedError(
                f"{text}.",
                write="with unsum.gradients(model) as g: ...  # without strict=True, its backward runs for each sample",
            )
        warnings.warn(f"{text}: the node is called again for each sample instead", stacklevel=2)


def _in_one_order(one: Layout, other: Layout) -> bool:
    """Whether the samples of two results follow each other in the same order, along whatever dimension."""
    return isinstance(one, Regular) and isinstance(other, Regular) and one.block == other.block


def _without_cancelling(node: Node, grads: Grads, edge: int) -> float:
    """How large a gradient is before its parts cancel, as those of a key's bias do."""
    result = replay(node, [None if grad is None else grad.abs() for grad in grads])[edge]
    assert result is not None
    return 8 * float(result.norm())


def apply(rule: Rule, node: Node, grads: Grads, layout: Layout, n: int, shape: tuple[int, ...]) -> Term | None:
    """What a rule makes of a call; None where it does not hold."""
    by, delta = rule.applies(node, layout, n, shape), grads[0]
    assert delta is not None
    return None if by is None else rule.make(Call(node, delta, by, shape, others=grads[1:]))


def shape_of(child: Node, output: int) -> tuple[int, ...]:
    """The shape of the tensor at an edge."""
    return tuple(child.variable.shape if is_leaf(child) else outputs_of(child)[output].shape)


def sum_comes_with_norms(kind: Term) -> bool:
    """Whether a parameter's gradient is had for nothing where its norms are computed."""
    return isinstance(kind, Scale) or (isinstance(kind, Outer | Windows) and kind.way(want_sum=True) == "product")


def _leaf_dtype(child: Node) -> torch.dtype | None:
    while not is_leaf(child):
        if len(nexts := below(child)) != 1:
            return None
        child = nexts[0][1]
    return child.variable.dtype  # type: ignore[no-any-return]


def is_followed(kind: Term, child: Node, output: int) -> bool:
    """Whether factors can be followed from here to a parameter."""
    while not is_leaf(child):
        nexts = below(child)
        if len(nexts) != 1:
            return False
        _, deeper, place = nexts[0]
        followed = follow(kind, child, output, shape_of(deeper, place))
        if followed is None:
            return False
        kind, child, output = followed, deeper, place
    return True
