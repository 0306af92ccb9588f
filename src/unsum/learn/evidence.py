"""Evidence of whose a tensor is: the rows of the inputs, found again in what the nodes of a graph have saved.

Sizes may coincide (n samples, n tokens, n classes), so a dimension of the right size says nothing by itself. Where a
node has saved rows of an input, or a copy of them, these say which samples its positions belong to.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from unsum.graph.layout import Layout, Regular, same
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered
from unsum.graph.owners import Owners
from unsum.learn.cut import Cut
from unsum.learn.refusals import coincide, in_a_list, moved_unseen, other_rows
from unsum.learn.rows import Rows
from unsum.learn.setting import Setting
from unsum.travel import Journey
from unsum.travel.table import Answer, down, start
from unsum.travel.walk import Walked, is_alone, walk


def walk_by_evidence(
    cut: Cut, starts: Mapping[Edge, Layout], n: int, setting: Setting, silent: Collection[Node] = ()
) -> Walked:
    """Walk from these starts, and find where samples interact. Nodes that nobody saw being made (the forward was not
    watched, another thread made them) count as data if nodes with owners, or with rows of an input, lie below them."""
    has_rows = lambda node: any(setting.rows.are_saved_by(each) for each in ordered([node]))
    walked = walk(cut.model, starts, Journey(n), setting.may_be_data, silent, has_rows)
    if is_alone(starts.values(), n):
        return walked
    told = {node for node in walked.owners if setting.rows.are_saved_by(node)}
    if setting.sides.is_blind:
        told |= {node for node, owners in walked.owners.items() if owners is not None}
        walked.mixing = {node: above for node, above in walked.mixing.items() if node is above}
    for node, above in walked.mixed.items():
        if node in walked.mixing:
            continue
        under = ordered([node])
        if any(each in told for each in under) or (setting.sides.is_blind and setting.may_hide_data(under, n)):
            walked.mixing[node] = above
    return walked


@dataclass
class Shown:
    """What rows of inputs have shown of a model: for calls with another structure that nobody has watched."""

    dims: set[Hashable] = field(default_factory=set)  # along which its outputs' samples lay
    by_copies: bool = False  # whether layers met copies of inputs: otherwise a call in which they do is unlike others

    def add(self, walked: Walked, layouts: Sequence[Layout], setting: Setting) -> None:
        self.dims.add(_dims_of(layouts))
        nodes = [node for node, _, _ in with_rows(walked, setting)]
        self.by_copies |= not all(map(setting.rows.are_given_to, nodes))


_shown: weakref.WeakKeyDictionary[nn.Module, Shown] = weakref.WeakKeyDictionary()


def _dims_of(layouts: Sequence[Layout]) -> Hashable:
    return tuple([(len(each.shape), each.dim) if isinstance(each, Regular) else None for each in layouts])


def agreeing(cut: Cut, n: int, setting: Setting) -> Cut:
    """The cut with its samples along dimensions that fit the rows of the inputs, where sizes coincide."""
    edges = list(cut.starts)
    choices = [
        [Regular(layout.shape, n, dim, 1) for dim, size in enumerate(layout.shape) if size == n]
        if isinstance(layout, Regular) and layout.block == 1 and layout.shape[layout.dim] == n
        else [layout]
        for layout in cut.starts.values()
    ]
    likely = [
        (layout, *(other for other in others if other != layout))
        for layout, others in zip(cut.starts.values(), choices, strict=True)
    ]
    tried = list(itertools.islice(itertools.product(*likely), 32))
    lists = any(map(setting.may_be_one, edges))
    if n < 2 or (len(tried) == 1 and not setting.rows and not lists):
        return cut
    contradicts = interacts = False
    for k, layouts in enumerate(tried):
        starts = dict(zip(edges, layouts, strict=True))
        walked = walk_by_evidence(cut, starts, n, setting)
        agrees = _agrees(walked, setting)
        agrees = _reaches_inputs(walked, n, setting) if agrees is None else agrees
        if agrees:
            _shown.setdefault(setting.model, Shown()).add(walked, layouts, setting)
            return replace(cut, starts=starts)
        contradicts = contradicts or (agrees is False and not k)
        interacts = interacts or (bool(walked.mixing) and not k)
    if contradicts:
        raise other_rows()
    if interacts:
        return cut  # which is refused for it, or else shows whose it is
    if lists:
        raise in_a_list(n)
    shown = _shown.get(setting.model) if setting.sides.is_blind else None
    if shown is not None and not shown.by_copies:
        raise moved_unseen()
    if len(tried) > 1 and not setting.is_said and (shown is None or _dims_of(tried[0]) not in shown.dims):
        raise coincide(next(layout.shape for layout, others in zip(cut.starts.values(), choices, strict=True)
                            if len(others) > 1), n)  # fmt: skip
    return cut


def refuse_contradiction(walked: Walked, setting: Setting) -> None:
    """Raise where rows of inputs say other samples than a walk, after values have corrected the table."""
    if _agrees(walked, setting) is False:
        raise other_rows()


def _agrees(walked: Walked, setting: Setting) -> bool | None:
    """Whether nodes that have saved rows of an input have the owners that these rows say; None if none has."""
    found = [same(owner, said) for _, owner, said in with_rows(walked, setting)]
    return all(found) if found else None


def _reaches_inputs(walked: Walked, n: int, setting: Setting) -> bool | None:
    """Whether the walk has come to inputs that require gradients and found each number there with its own sample; None
    if it came to none. What is computed from such inputs has nodes, and perhaps no weight has saved their rows."""
    found, journey = [], Journey(n)
    for node, owners in walked.owners.items():
        for k, (leaf, _) in enumerate(node.next_functions):
            if owners is None or leaf is None or not is_leaf(leaf) or setting.leads_to_parameters(leaf):
                continue
            said, at = setting.rows.of(leaf.variable), start(node, owners, journey)
            if said is None or at is None:
                continue
            told = down(at, k, tuple(leaf.variable.shape))
            if not isinstance(told, Answer):
                found.append(same(told, said))
    return all(found) if found else None


def with_rows(walked: Walked, setting: Setting) -> list[tuple[Node, Layout, Layout]]:
    """The nodes that have saved rows of an input: whose they are, and what the rows say."""
    found = []
    for node, owners in walked.owners.items():
        if owners is None or owners[0] is None:
            continue
        if "Rnn" not in node.name() and any(other is not None for other in owners[1:]):
            continue  # of norm layers there are statistics besides, which have no gradients
        if not any(_is_weight(child, setting) for _, child, _ in below(node)):
            continue
        said = setting.rows.owners(node, owners[0].shape)
        if said is not None:
            found.append((node, owners[0], said))
    return found


def _is_weight(node: Node, setting: Setting) -> bool:
    """Whether this is a parameter, or computed without data."""
    return setting.leads_to_parameters(node) or (not is_leaf(node) and not setting.may_be_data(node))


def contradicts(cut: Cut, edge: Edge, owners: Layout, n: int, setting: Setting) -> bool:
    """Whether rows of inputs say that no dimension of this tensor is the samples'."""
    choices: list[Layout] = [Regular(owners.shape, n, dim, 1) for dim, size in enumerate(owners.shape) if size == n]
    walks = [walk_by_evidence(cut, {edge: layout}, n, setting) for layout in choices or [owners]]
    return all(walked.mixing or _agrees(walked, setting) is False for walked in walks)


def refuse_other_rows(node: Node, owners: Owners, rows: Rows) -> None:
    """Raise where a node has saved rows of an input that belong to other samples than its owners say."""
    if len(owners) != 1 or owners[0] is None:
        return
    said = rows.owners(node, owners[0].shape)
    if said is not None and not same(owners[0], said):
        raise other_rows(node.name())
