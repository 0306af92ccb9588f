"""Learning: from the graph that is about to be walked to a plan of where parameters meet data, and whose it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unsum.errors import InteractionError, SamplesError
from unsum.graph.cut import Cut, find_cut, is_penalty, parameters_met_outside
from unsum.graph.layout import Layout, Mapped, Regular, same
from unsum.graph.nodes import Edge, Node, below, is_leaf
from unsum.graph.owners import Owners, Swept, all_are_seen, sweep
from unsum.graph.replay import Grads, flow
from unsum.graph.rows import Rows
from unsum.graph.sides import Sides
from unsum.plan.audit import Audit
from unsum.plan.lasting import lasting as find_lasting
from unsum.plan.plan import Plan
from unsum.plan.routes import routes, rule_routes
from unsum.plan.teams import teams


@dataclass(frozen=True)
class Setting:
    """What a block knows of the forward, and what its user asked for."""

    sides: Sides
    rows: Rows
    wanted: Mapping[int, nn.Parameter]  # by id
    names: Mapping[int, str]
    module_of: Callable[[int], str]  # by the number of a node
    exact: bool  # samples may interact
    rules: bool  # whether rules may speak, or all is replayed
    strict: bool  # a rule that does not hold is an error


def learn(
    roots: Sequence[Any],
    grads: Grads,
    nodes: Sequence[Node],
    known: Mapping[Edge, Layout],
    setting: Setting,
    count: Count,
) -> Plan:
    """Find the cut, sweep, and say where to wait. Refuses by raising, before anything of the user's has run."""
    cut, known = _cut(roots, known, setting)
    n = count(cut.starts)
    if setting.sides.mixing and not setting.exact:
        operation, number = setting.sides.mixing[0]
        raise interaction(operation, setting.module_of(number))
    everywhere = True
    audit = Audit(n, setting.sides.is_data, strict=setting.strict) if setting.rules else None
    try:
        swept = _sweep(cut, n, known, None, setting, audit)
    except InteractionError:
        # Perhaps only where the loss does not look: a loss on the diagonal of n × n similarities, say.
        looked_at = {edge: grad != 0 for edge, grad in flow(roots, grads, cut.starts).items() if edge in cut.starts}
        if not all_are_seen(cut.starts, looked_at, n):
            raise
        everywhere = False
        swept = _sweep(cut, n, known, looked_at, setting, audit)
    lasting = everywhere and (audit is None or audit.is_complete)
    return _plan(cut, swept, n, nodes, setting, audit, lasting=lasting)


Count = Callable[[Mapping[Edge, Layout]], int]


def _cut(roots: Sequence[Any], known: Mapping[Edge, Layout], setting: Setting) -> tuple[Cut, Mapping[Edge, Layout]]:
    """The cut; further down in the loss's code where a parameter is met there and rows tell whose its data is."""
    while True:
        cut = find_cut(roots, known, setting.sides.is_data)
        met = parameters_met_outside(cut, setting.names, setting.sides.is_weight)
        if not met:
            return cut, known
        told: dict[Edge, Layout] = {}
        for node, _ in met:
            if len(node._input_metadata) == 1:
                owners = setting.rows.owners(node, tuple(node._input_metadata[0].shape))
                if owners is not None:
                    told[node, 0] = owners
        if not told:
            node, name = met[0]
            raise SamplesError(
                f"{name} meets data at {node.name()}, outside the model's outputs, where the samples are unknown.\n"
                "  unsum.mark_samples(losses) says whose each loss is"
            )
        known = {**known, **told}


def _sweep(
    cut: Cut,
    n: int,
    known: Mapping[Edge, Layout],
    only: Mapping[Edge, Tensor] | None,
    setting: Setting,
    audit: Audit | None,
) -> Swept:
    def mixed(node: Node, above: Node | None) -> None:
        if not setting.exact and setting.sides.is_data(node):
            blamed = node if above is None else above
            raise interaction(
                blamed.name(), setting.module_of(blamed._sequence_nr()), "" if above is None else node.name()
            )

    def keep(node: Node) -> bool:
        """Where a parameter may be met: not between data and data, unless samples may mix there."""
        return setting.exact or any(is_leaf(c) or not setting.sides.is_data(c) for _, c, _ in below(node))

    def seen(node: Node, owners: Owners, grads: Grads) -> None:
        if only is None and not setting.exact and any(is_leaf(child) for _, child, _ in below(node)):
            _compare_rows(node, owners, setting.rows)
        if audit is not None:
            audit(node, owners, grads)

    return sweep(
        cut.model, cut.starts, n,
        only=only, known=known, keep=keep, mixed=mixed, seen=seen, is_data=setting.sides.may_be_data,
    )  # fmt: skip


def _compare_rows(node: Node, owners: Owners, rows: Rows) -> None:
    """Sizes may coincide: where a node has saved rows of an input, these say whose they are."""
    if len(owners) != 1 or owners[0] is None:
        return
    said = rows.owners(node, owners[0].shape)
    if said is not None and not same(owners[0], said):
        raise SamplesError(
            f"at {node.name()} the samples of the loss are not those of the input's rows: some dimension that is no "
            "sample has the same size.\n  samples=unsum.dim(k), or unsum.mark_samples(losses), says which it is"
        )


def _plan(
    cut: Cut, swept: Swept, n: int, nodes: Sequence[Node], setting: Setting, audit: Audit | None, *, lasting: bool
) -> Plan:
    place = {node: k for k, node in enumerate(nodes)}
    mixed: set[Node] = set()  # those that lead to a parameter

    def is_wanted(child: Node) -> bool:
        return id(child.variable) in setting.wanted if is_leaf(child) else child in mixed

    def leads_to_one(node: Node) -> bool:
        return any(is_wanted(child) for _, child, _ in below(node))

    for node in reversed(nodes):
        if swept.owners.get(node, ()) is None and leads_to_one(node):
            mixed.add(node)
    owned = {place[node]: owners for node, owners in swept.owners.items() if owners is not None and leads_to_one(node)}
    beside = [node for node in cut.loss if (node not in cut.on_data or is_penalty(node)) and leads_to_one(node)]
    holds = find_lasting(nodes, swept, n, place, mixed) if lasting and not swept.hidden else None
    modules = {place: setting.module_of(nodes[place]._sequence_nr()) for place in owned}
    ruled = {} if audit is None else rule_routes(audit, place, owned, modules, mixed, n, setting.names)
    ways = routes(nodes, swept, mixed, beside, setting.names, audit)
    alone = {name for name, times in ways["expected"].items() if times == 1 and name not in ways["late"]}
    return Plan(
        n=n,
        owned=owned,
        edges={k: tuple(edge for edge, child, _ in below(nodes[k]) if is_wanted(child)) for k in owned},
        mixed=frozenset(place[node] for node in mixed),
        modules=modules,
        cut=tuple((place[node], output) for node, output in cut.starts),
        layouts=tuple(cut.starts.values()),
        nobodys=tuple(place[node] for node in beside),
        hidden={place[node]: owners for node, owners in swept.hidden.items()},
        routes=ruled,
        together=teams(nodes, ruled, mixed, alone),
        **ways,
        rounding=max([1e-9, *(_rounding(node) for node in cut.model if not is_leaf(node))]),
        has_doubts=any(isinstance(layout, Mapped) and layout.has_unseen for each in owned.values() for layout in each),
        lasting=holds is not None,
        indices=() if holds is None else holds[0],
        moves=None if holds is None else holds[1],
    )


def inside(roots: Sequence[Any], nodes: Sequence[Node], owners: Owners, n: int, setting: Setting) -> Plan:
    """A plan for a backward that a node runs by itself, from roots whose owners the sweep has told."""
    known = {}
    for root, layout in zip(roots, owners, strict=True):
        if layout is not None and root.grad_fn is not None:
            known[root.grad_fn, root.output_nr] = layout
    cut = find_cut(roots, known, setting.sides.is_data)
    audit = Audit(n, setting.sides.is_data, strict=setting.strict) if setting.rules else None
    return _plan(cut, _sweep(cut, n, known, None, setting, audit), n, nodes, setting, audit, lasting=False)


def _rounding(node: Node) -> float:
    """How far sums may be off where this node computes, relative to the largest gradient."""
    precise = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}
    return max(
        (precise.get(meta.dtype, 5e-2) for meta in node._input_metadata if meta.dtype.is_floating_point), default=0
    )


def interaction(operation: str, module: str, below: str = "") -> InteractionError:
    """The error for samples that interact."""
    where = (f" in module {module!r}" if module else "") + (
        f" (what it hands to {below} belongs to no sample)" if below else ""
    )
    return InteractionError(
        f"samples interact at {operation}{where}: a gradient per sample is not what the sample alone would give.\n"
        '  interacting="exact" gives the derivative of each sample\'s part of the loss all the same'
    )


def number_of_samples(starts: Mapping[Edge, Layout]) -> int:
    """How many samples there are, by the sizes at the cut."""
    sizes = {layout.n if isinstance(layout, Regular) else int(layout.map.max()) + 1 for layout in starts.values()}
    if len(sizes) > 1:
        raise SamplesError(f"one backward crosses forwards with different numbers of samples: {sorted(sizes)}")
    return sizes.pop()
