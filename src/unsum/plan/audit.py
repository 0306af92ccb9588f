"""The audit: a rule is checked where it is used. The rule's Σ w_n G_n with fresh random w must be what torch's own node
gives for δ·w[owner]: truth is torch's arithmetic on the user's own model, never a second copy of the rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from unsum.errors import UnsupportedError
from unsum.factors.outer import Outer
from unsum.factors.scale import Scale
from unsum.factors.total import Kind
from unsum.factors.windows import Windows
from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Node, below, is_leaf
from unsum.graph.owners import Owners
from unsum.graph.replay import Grads, replay
from unsum.holding import Size, size_of
from unsum.rules.follow import follow
from unsum.rules.registry import Call, Rule, find

_PRECISE = {torch.float64: 1e-9, torch.float32: 1e-3}


class Audit:
    """Collects the rules that hold, edge by edge, while the graph is swept."""

    def __init__(self, n: int, is_data: Callable[[Node], bool], *, strict: bool) -> None:
        self._n, self._is_data, self._strict = n, is_data, strict
        self._w = torch.rand(n + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
        self._w[n] = 0  # nobody's
        self.is_complete = True  # whether every rule could be tried
        self.rules: dict[tuple[Node, int], Rule] = {}
        self.followed: dict[tuple[Node, int], bool] = {}  # to the parameter; whether the sum comes with the norms
        self.sizes: dict[tuple[Node, int], Size] = {}  # of these: what holding them takes

    def __call__(self, node: Node, owners: Owners, grads: Grads) -> None:
        """A node has owners and got these gradients: see which of its edges have a rule, and try it."""
        layout, delta = owners[0], grads[0]
        if layout is None or delta is None or any(grad is not None for grad in grads[1:]) or delta.is_complex():
            return
        found = [
            (edge, rule, child, output)
            for edge, child, output in below(node)
            if (rule := find(node, edge)) is not None and (is_leaf(child) or not self._is_data(child))
        ]
        if not found:
            return
        delta = torch.where(delta.isfinite(), delta, 1)
        truth: list[Tensor | None] | None = None
        for edge, rule, child, output in found:
            if delta.dtype != torch.float64 and _leaf_dtype(child) == torch.float64:
                continue  # torch's own rounding, number by number, is what a test in float64 asks for
            kind = apply(rule, node, delta, layout, self._n, shape_of(child, output))
            if kind is None:
                continue
            if truth is None:
                truth = replay(node, [delta * self._of(layout, delta), *grads[1:]])
            wanted = truth[edge]
            assert wanted is not None
            off = (kind.weighted_sum(self._w[: self._n].to(delta.device)) - wanted).norm()
            tolerance = max(_PRECISE.get(dtype, 5e-2) for dtype in (delta.dtype, wanted.dtype))
            if not bool(wanted.isfinite().all()):
                self.is_complete = False  # a NaN in the data: to be tried again with the next batch
            elif not bool(off <= tolerance * wanted.norm()) and not bool(
                off <= tolerance * _without_cancelling(node, grads, edge)
            ):
                self._mismatch(rule, node)
                continue
            self.rules[node, edge] = rule
            if _is_followed(kind, child, output):
                self.followed[node, edge] = _sum_comes_with_norms(kind)
                self.sizes[node, edge] = size_of(kind)

    def _of(self, layout: Layout, delta: Tensor) -> Tensor:
        """Each position's w."""
        w = self._w.to(delta.device, delta.dtype)
        if isinstance(layout, Regular):
            return w[layout.owner(delta.device)]
        return layout.beside(w[layout.map.to(delta.device).long()])

    def _mismatch(self, rule: Rule, node: Node) -> None:
        text = f"the rule {rule.name} does not give what {node.name()} of torch {torch.__version__} gives"
        if self._strict:
            raise UnsupportedError(f"{text}.\n  without strict=True the node is called again for each sample instead")
        warnings.warn(f"{text}: the node is called again for each sample instead", stacklevel=2)


def _without_cancelling(node: Node, grads: Grads, edge: int) -> Tensor:
    """How large a gradient is before its parts cancel, as those of a key's bias do."""
    result = replay(node, [None if grad is None else grad.abs() for grad in grads])[edge]
    assert result is not None
    return 2 * result.norm()


def apply(rule: Rule, node: Node, delta: Tensor, layout: Layout, n: int, shape: tuple[int, ...]) -> Kind | None:
    """What a rule makes of a call; None where it does not hold."""
    by = rule.applies(node, layout, n, shape)
    return None if by is None else rule.make(Call(node, delta, by, shape))


def shape_of(child: Node, output: int) -> tuple[int, ...]:
    """The shape of the tensor at an edge."""
    return tuple(child.variable.shape if is_leaf(child) else child._input_metadata[output].shape)


def _sum_comes_with_norms(kind: Kind) -> bool:
    return isinstance(kind, Scale) or (isinstance(kind, Outer | Windows) and kind.way(want_sum=True) == "product")


def _leaf_dtype(child: Node) -> torch.dtype | None:
    while not is_leaf(child):
        if len(nexts := below(child)) != 1:
            return None
        child = nexts[0][1]
    return child.variable.dtype  # type: ignore[no-any-return]


def _is_followed(kind: Kind, child: Node, output: int) -> bool:
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
