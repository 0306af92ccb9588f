"""Learning: from the graph that is about to be walked to a plan of where parameters meet data, and whose it is."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unsum.errors import InteractionError, UnsupportedError
from unsum.graph.layout import Layout
from unsum.graph.nodes import Edge, Node, below, is_leaf
from unsum.graph.owners import Owners, Swept, all_are_seen, sweep
from unsum.graph.replay import Grads, flow, nested, remembers_memory
from unsum.graph.rounded import rounding_of, rounding_of_sums
from unsum.learn.additive import refuse_nonlinear
from unsum.learn.audit import Audit
from unsum.learn.cut import Cut, find_cut, is_penalty, parameters_met_outside
from unsum.learn.evidence import (
    agreeing,
    contradicts,
    refuse_contradiction,
    refuse_other_rows,
    walk_by_evidence,
    with_rows,
)
from unsum.learn.refusals import interaction, met_outside, one_scale, unknown_samples
from unsum.learn.routes import routes, rule_routes
from unsum.learn.setting import Setting
from unsum.plan.plan import Plan, has_doubts
from unsum.plan.signature import plain
from unsum.plan.structure import Constants, Judged, constants_among
from unsum.plan.teams import teams
from unsum.seams.nodes import number_of, outputs_of
from unsum.travel.climb import climb
from unsum.travel.trail import trail
from unsum.travel.values import Claims
from unsum.travel.walk import Walked, is_alone

log = logging.getLogger("unsum")


def learn(
    roots: Sequence[Any],
    grads: Grads,
    nodes: Sequence[Node],
    known: Mapping[Edge, Layout],
    setting: Setting,
    n: int,
    calls: Collection[int],
    *,
    marked: bool,
) -> tuple[Plan, Judged | None]:
    """Find the cut, walk from there by the table, compare it with values, and say where to wait; and what may be
    remembered of it, if anything. Refuses by raising, before anything of the user's has run."""
    for node in nodes:
        if not is_leaf(node) and any(meta.is_nested_tensor for meta in outputs_of(node)):
            raise nested(node.name())
    if n == 0:
        return _plan(find_cut(roots, known, setting.is_data), Walked(), n, nodes, setting, None), None
    for operation, module, call in setting.sides.mixing:
        if call in calls and not setting.exact:
            raise interaction(operation, module)
    returned = known
    cut, known = _cut(roots, nodes, known, n, setting, marked=marked)
    is_told = not marked and any(edge not in returned for edge in cut.starts)  # by rows of inputs, somewhere
    cut, walked, audit = _judged(cut, n, setting, marked=marked)
    if setting.exact or not walked.mixing:
        place = {node: k for k, node in enumerate(nodes)}
        plan = _plan(cut, walked, n, nodes, setting, audit)
        is_lasting = not walked.hidden and (audit is None or audit.is_complete)
        if not is_lasting:
            return plan, None
        rows = [] if marked else [node for node, _, _ in with_rows(walked, setting) if place[node] in plan.owned]
        given = [node for node in rows if setting.rows.are_given_to(node)]
        by_values = any(map(setting.rows.went_by_values, rows))
        by_copies = by_values or (is_told and len(given) < len(rows))
        shown = {place[node] for node in (rows if is_told or by_values else given)}
        copies = {place[node] for node in rows} - shown
        beside = [k for node, k in place.items() if _is_beside(node, walked, cut)]
        constants = constants_among(nodes, beside)
        return plan, _remembered(walked, place, nodes, setting, shown, copies, constants, by_copies)
    _refuse_named(walked, setting)
    return _by_values(roots, grads, nodes, cut, walked.mixing, n, setting, marked=marked), None


def _is_beside(node: Node, walked: Walked, cut: Cut) -> bool:
    """Whether nothing of a sample flows through this node, on its way from a parameter to the loss."""
    return not is_leaf(node) and walked.owners.get(node) is None and node not in cut.on_data


def _judged(cut: Cut, n: int, setting: Setting, *, marked: bool) -> tuple[Cut, Walked, Audit | None]:
    """The owners of all nodes, and the rules that hold there."""
    silent: dict[Node, None] = {}
    cut = cut if marked else agreeing(cut, n, setting)
    alone = is_alone(cut.starts.values(), n)
    while True:
        walked = walk_by_evidence(cut, cut.starts, n, setting, silent)
        claims = Claims(n)
        audit = Audit(n, setting.may_be_data, strict=setting.strict) if setting.rules else None
        for node, owners in walked.owners.items():
            if owners is None:
                continue
            said = walked.said.get(node, {}) if not alone else {}
            if said and (remembers_memory(node) or not claims.is_new(_geometry(node, owners, said))):
                said = {}
            has_rules = audit is not None and audit.candidates(node, owners)
            if said or has_rules:
                given, sent = claims.compare(node, owners, said)
                if audit is not None and has_rules:
                    audit.add(node, owners, given, sent, claims)
        wrong = claims.contradicted()
        if not wrong:
            if silent and not marked and n > 1:
                refuse_contradiction(walked, setting)
            if audit is not None:
                audit.finish(walked.owners)
            if not alone:
                refuse_nonlinear(cut.model, walked, audit, setting)
            return cut, walked, audit
        names = ", ".join(sorted({node.name() for node in wrong}))
        if setting.strict:
            raise UnsupportedError(
                f"unsum's table of how operations move samples is wrong at {names}.",
                write="with unsum.gradients(model) as g: ...  # without strict=True, values decide there",
            )
        log.warning("unsum: the table of how samples travel is wrong at %s: values decide there", names)
        silent |= wrong


def _geometry(node: Node, owners: Owners, said: Mapping[int, Layout]) -> Hashable:
    """All that the table goes by. (Layouts that are not regular are equal to themselves alone.)"""
    kinds = tuple(meta.dtype for meta in outputs_of(node))
    return plain(node), kinds, tuple(owners), tuple(said.items()), tuple(c is None for c, _ in node.next_functions)


def _refuse_named(walked: Walked, setting: Setting) -> None:
    """What mixes samples whatever the numbers are."""
    for node, above in walked.mixing.items():
        if node is above:
            name = node.name()
            if rounding_of(node):
                raise one_scale(name, setting.module_of(number_of(node)))
            if name.startswith("Embedding"):
                bag = "embedding_bag" if name.startswith("EmbeddingBag") else "embedding"
                name = f"{bag} with scale_grad_by_freq"
            what = "batch_norm in training" if "BatchNorm" in name else name
            raise interaction(what, setting.module_of(number_of(node)))


def _by_values(
    roots: Sequence[Any],
    grads: Grads,
    nodes: Sequence[Node],
    cut: Cut,
    suspects: Collection[Node],
    n: int,
    setting: Setting,
    *,
    marked: bool,
) -> Plan:
    """By what nodes are made of, samples interact somewhere. Zeros may keep them apart all the same (a mask, routing by
    products), or the loss may not look there: values decide for the whole graph, in every batch."""
    try:
        swept = _sweep(cut, n, suspects, None, setting, marked=marked)
    except InteractionError:
        # Perhaps only where the loss does not look: a loss on the diagonal of n × n similarities, say.
        looked_at = {edge: grad != 0 for edge, grad in flow(roots, grads, cut.starts).items() if edge in cut.starts}
        if not all_are_seen(cut.starts, looked_at, n):
            raise
        swept = _sweep(cut, n, suspects, looked_at, setting, marked=marked)
    audit = Audit(n, setting.may_be_data, strict=setting.strict) if setting.rules else None
    if audit is not None:
        claims = Claims(n)
        for node, owners in swept.owners.items():
            if owners is not None and audit.candidates(node, owners):
                audit.add(node, owners, *claims.compare(node, owners, {}), claims)
        audit.finish(swept.owners)
    return _plan(cut, swept, n, nodes, setting, audit)


def _cut(
    roots: Sequence[Any], nodes: Sequence[Node], known: Mapping[Edge, Layout], n: int, setting: Setting, *, marked: bool
) -> tuple[Cut, Mapping[Edge, Layout]]:
    """The cut, at the outputs of the model or at what the user has marked. Where these do not lie on the loss's way, or
    a parameter meets data beyond them: as far up as samples can be followed, from them and from the rows of inputs."""
    # Where the user has marked the losses, what is beside them is nobody's: a penalty with tensors of its own.
    is_data = lambda node: not marked and (setting.is_data(node) or setting.rows.are_saved_by(node))
    cut, was_known = find_cut(roots, known, is_data), bool(known)
    lists = any(map(setting.may_be_one, cut.starts))
    if not marked and n > 1 and (len(cut.starts) > 1 or lists) and setting.rows:  # sizes may coincide: rows say it
        wrong = [edge for edge, owners in cut.starts.items() if contradicts(cut, edge, owners, n, setting)]
        if 0 < len(wrong) < len(cut.starts) or (wrong and all(map(setting.may_be_one, wrong))):
            known = {edge: owners for edge, owners in known.items() if edge not in wrong}
            cut = find_cut(roots, known, is_data)
    is_weight = lambda node: marked or setting.is_weight(node) or setting.sides.is_shared(node)
    met = parameters_met_outside(cut, setting.names, is_weight)
    if cut.starts and not met:
        return cut, known
    if not marked:
        told = climb(nodes, setting.seeds(nodes), n)
        known = climb(nodes, {**known, **told}, n)
        cut = find_cut(roots, known, is_data)
        met = parameters_met_outside(cut, setting.names, setting.is_weight)
    if not cut.starts:
        raise unknown_samples(setting.mismatch())
    if not was_known and not setting.exact:
        _refuse_meeting(cut, known, setting)
    if met:
        node, name = met[0]
        raise met_outside(name, node.name(), tuple(outputs_of(node)[0].shape), n)
    return cut, known


def _refuse_meeting(cut: Cut, known: Mapping[Edge, Layout], setting: Setting) -> None:
    """Inside a model that returns its loss alone: raise where tensors that both have samples meet, and what comes of it
    has them no more."""
    for node in cut.loss:
        both = [edge for edge in dict.fromkeys((child, output) for _, child, output in below(node)) if edge in known]
        outputs: Any = () if is_leaf(node) else outputs_of(node)
        if len(both) > 1 and len(outputs) == 1 and len(outputs[0].shape) and (node, 0) not in known:
            raise interaction(node.name(), setting.module_of(number_of(node)))


def _sweep(
    cut: Cut,
    n: int,
    suspects: Collection[Node],
    only: Mapping[Edge, Tensor] | None,
    setting: Setting,
    *,
    marked: bool,
) -> Swept:
    def mixed(node: Node, above: Node | None) -> None:
        if setting.is_data(node) or node in suspects:
            blamed = node if above is None else above
            raise interaction(blamed.name(), setting.module_of(number_of(blamed)), "" if above is None else node.name())

    def keep(node: Node) -> bool:
        """Where a parameter may be met: not between data and data."""
        return any(is_leaf(c) or not setting.is_data(c) for _, c, _ in below(node))

    def seen(node: Node, owners: Owners, grads: Grads) -> None:
        if only is None and not marked and any(is_leaf(child) for _, child, _ in below(node)):
            refuse_other_rows(node, owners, setting.rows)

    return sweep(cut.model, cut.starts, n, only=only, keep=keep, mixed=mixed, seen=seen, is_data=setting.may_be_data)


def _remembered(
    walked: Walked,
    place: Mapping[Node, int],
    nodes: Sequence[Node],
    setting: Setting,
    rows: Collection[int],
    copies: Collection[int],
    constants: Constants,
    by_copies: bool,
) -> Judged:
    return Judged(
        by_copies=by_copies,
        constants=constants,
        trail=None if setting.exact else trail(walked, place, nodes),
        rows=frozenset(rows),
        copies=frozenset(copies),
        weights=frozenset(place[node] for node in walked.owners if not setting.may_be_data(node)),
        silent=frozenset(place[node] for node in walked.asked),
        moved={(place[node], edge): form for (node, edge), form in walked.moved.items()},
        nobodys=frozenset(place[node] for node, owners in walked.owners.items() if owners is None),
    )


def _plan(
    cut: Cut, swept: Swept | Walked, n: int, nodes: Sequence[Node], setting: Setting, audit: Audit | None
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
    modules = {place: setting.module_of(number_of(nodes[place])) for place in owned}
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
        has_doubts=has_doubts(owned),
    )


def inside(roots: Sequence[Any], nodes: Sequence[Node], owners: Owners, n: int, setting: Setting) -> Plan:
    """A plan for a backward that a node runs by itself, from roots whose owners the sweep has told."""
    known = {}
    for root, layout in zip(roots, owners, strict=True):
        if layout is not None and root.grad_fn is not None:
            known[root.grad_fn, root.output_nr] = layout
    cut = find_cut(roots, known, setting.is_data)
    cut, walked, audit = _judged(cut, n, setting, marked=True)
    if walked.mixing and not setting.exact:
        _refuse_named(walked, setting)
        return _by_values(roots, [None] * len(roots), nodes, cut, walked.mixing, n, setting, marked=True)
    return _plan(cut, walked, n, nodes, setting, audit)


def _rounding(node: Node) -> float:
    """How far sums may be off where this node computes, relative to the largest gradient."""
    dtypes = [meta.dtype for meta in outputs_of(node) if meta.dtype.is_floating_point or meta.dtype.is_complex]
    return max([rounding_of(node), *map(rounding_of_sums, dtypes)])
