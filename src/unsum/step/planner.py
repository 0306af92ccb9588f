"""The plan of a graph that is about to be walked: remembered for its sizes, derived from its structure, or learnt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from unsum import seams
from unsum.errors import WrongCount
from unsum.graph.layout import Layout, Regular
from unsum.graph.nodes import Edge, Node, ordered, place
from unsum.graph.owners import Owners
from unsum.graph.saved import Saved
from unsum.learn.learn import inside, learn
from unsum.learn.refusals import MARK, unknown_samples
from unsum.learn.setting import Setting
from unsum.learn.sides import Sides
from unsum.learn.state import buffers_aside
from unsum.plan.memory import Structure, forget_structure, recall, remember, watch_again
from unsum.plan.plan import Plan
from unsum.plan.signature import Sizes, Survey
from unsum.plan.structure import Judged, RuleFails, agree, derived, starts_of
from unsum.seams.modes import without_functions
from unsum.seams.sharding import on_any_rank, whole
from unsum.step.forward import Forward

log = logging.getLogger("unsum")


@dataclass(frozen=True)
class Planned:
    """A plan, for one graph."""

    plan: Plan
    nodes: Sequence[Node]  # of the graph, in the plan's order
    calls: frozenset[int]  # the outermost calls whose samples these are
    is_checked: bool  # whether what is found is to be compared with what torch brings
    unproven: Hashable = None  # the key of a structure that was learnt for it


class Planner:
    """Finds plans for the graphs of one block."""

    def __init__(
        self, model: nn.Module, forward: Forward, sides: Sides, saved: Saved, setting: Setting, ids: Tensor | None
    ) -> None:
        self._model, self._forward, self._sides, self._saved = model, forward, sides, saved
        self._setting, self._ids = setting, ids
        self.is_learning = False  # whether nodes are called by hand now
        self._gathered: contextlib.ExitStack | None = None  # while parameters are whole that processes share

    def plan(
        self, call: seams.Backward, seen: Survey, known: Mapping[Edge, Layout], crossed: frozenset[int]
    ) -> Planned:
        """The plan of the graph that `call` is about to walk, of which the samples are `known` at some places, made by
        the calls that it has `crossed`. Refuses by raising."""
        try:
            return self._plan(call, seen, known, crossed)
        finally:
            gathered, self._gathered = self._gathered, None
            if gathered is not None:
                gathered.close()

    def _plan(
        self, call: seams.Backward, seen: Survey, known: Mapping[Edge, Layout], crossed: frozenset[int]
    ) -> Planned:
        forward, setting = self._forward, self._setting
        pending = forward.calls.pending()
        inside = frozenset() if crossed else forward.calls.have_made(seen.nodes) & pending
        calls = crossed or inside or pending
        made = frozenset(each for each in calls if each in forward.calls.made) or pending
        n = number_of_samples(known) if self._ids is None and known else forward.calls.number_of_samples(calls)
        if n is None:
            raise unknown_samples(forward.mismatch())
        if not forward.is_marked:
            forward.inputs.refuse_lists(made, n, known, forward.in_lists)
        forward.calls.had_backward(made)
        forward.inputs.rows.asked = made
        key = self._key(call, seen, known, n)
        structure = recall(self._model, key) if setting.rules and n else None
        if structure is not None and not self._are_constant(structure, seen, made):
            forget_structure(self._model, key)  # nor may it be had again, with what is now data
            structure = None
        if structure is not None and not (structure.is_blind and forward.watching.saw(made)):
            nodes = structure.plan.in_order(seen.nodes)
            shown = structure.judged.shown(watched=forward.watching.saw(made))
            plan = self._derive(structure, seen, nodes, known, n, shown)
            if plan is not None:
                if self._gathered is None and on_any_rank(self._model, False):
                    self._gather()  # another rank learns
                self._told(key, made, structure.judged)
                return Planned(plan, nodes, calls, is_checked=not setting.rules)
        if structure is not None or not forward.watching.saw(made):  # whatever comes of it
            forward.watching.always(made)
        nodes = ordered(roots_of(call))
        plan, judged = self._learn(call, nodes, known, n, made)
        if not known:
            forward.inputs.refuse_other_dimensions(plan.owned, nodes, n)
        if judged is not None and not judged.constants.are_the_models(nodes, setting):
            forward.watching.always(made)
        if structure is not None and structure.is_outgrown:
            structure = None
        is_new = judged is not None and setting.rules and (structure is None or structure.is_blind)
        if judged is not None and setting.rules:
            order = tuple(seen.at[node] for node in nodes)
            plan = replace(plan, order=order, lasting=True, is_dynamic=judged.is_dynamic or judged.by_copies)
            if structure is None or is_new:
                structure = Structure(plan, judged, self._sides.is_blind)
                remember(self._model, key, structure)
            if not judged.is_dynamic and structure.is_blind == self._sides.is_blind:
                structure.keep(Sizes(seen.signature, (n, *known.values())), plan)
        self._told(key if plan.lasting else None, made, judged)
        return Planned(plan, nodes, calls, is_checked=True, unproven=key if is_new else None)

    def _are_constant(self, structure: Structure, seen: Survey, made: frozenset[int]) -> bool:
        """Whether what belonged to nobody when a structure was learnt does so now. Where it changes, such calls are
        watched from now on."""
        nodes, constants = structure.plan.in_order(seen.nodes), structure.judged.constants
        watched = self._forward.watching.saw(made)
        held = constants.hold(nodes, self._setting, watched=watched)
        if not held or (watched and not constants.are_the_same(nodes, self._setting)):
            self._forward.watching.always(made)
        return held

    def _told(self, key: Hashable | None, made: frozenset[int], judged: Judged | None) -> None:
        """The graph of these calls has this structure."""
        if judged is not None and judged.by_copies:
            self._forward.watching.always(made)
        self._forward.watching.led_to(None if self._saved.is_needed else key, made)

    def _learn(
        self, call: seams.Backward, nodes: Sequence[Node], known: Mapping[Edge, Layout], n: int, made: frozenset[int]
    ) -> tuple[Plan, Judged | None]:
        forward = self._forward
        self._sides.is_blind = not forward.watching.saw(made)
        if self._sides.is_blind:
            watch_again(self._model)
            known = known if forward.is_marked else forward.by_evidence(nodes) or known
        with self.learning():
            plan, judged = learn(call.roots, call.grads, nodes, known, self._setting, n, made, marked=forward.is_marked)
        by_rule = sum(map(len, plan.routes.values()))
        how = "to be learnt each time" if judged is None else "remembered"
        told = len(nodes), len(plan.owned), by_rule, how
        log.info("unsum: learnt a graph of %d nodes: %d meetings, %d by rule; %s", *told)
        return plan, judged

    def _key(self, call: seams.Backward, seen: Survey, known: Mapping[Edge, Layout], n: int) -> Hashable:
        """What a structure is remembered by. One sample is a case of its own: then all data is its."""
        cut = tuple([
            (seen.at[node], output, owners.dim if isinstance(owners, Regular) else None)
            for (node, output), owners in known.items()
        ])  # fmt: skip
        roots = tuple([(seen.at.get(node), output) for node, output in map(place, call.roots)])
        how = self._setting.exact, self._setting.is_said, self._forward.is_marked
        return seen.signature[0], seen.names, cut, roots, n == 1, *how

    def _derive(
        self,
        structure: Structure,
        seen: Survey,
        nodes: Sequence[Node],
        known: Mapping[Edge, Layout],
        n: int,
        shown: Collection[int],
    ) -> Plan | None:
        """The plan of a graph whose structure is known; None if it does not follow from that."""
        sizes = Sizes(seen.signature, (n, *known.values()))
        plan = structure.sized.get(sizes)
        judged, rows = structure.judged, self._forward.inputs.rows
        if plan is not None and not judged.is_dynamic:
            return plan if agree(shown, plan.owned, nodes, rows) else None
        starts = starts_of(structure.plan, nodes, known, n)
        if starts is None:
            return None
        frame = None if plan is not None else structure.frame(seen.signature, starts, nodes)
        in_frame = None if frame is None else frame.plan
        # Ranks may meet new sizes at different times: only where values are asked are whole parameters gathered.
        by_values = bool(judged.silent)
        with self.learning(gathers=by_values) if by_values or self._saved.is_needed else contextlib.nullcontext():
            names = self._setting.names
            try:
                found = derived(structure.plan, judged, nodes, starts, n, names, rows, plan, in_frame, shown)
            except RuleFails:
                structure.is_outgrown = True
                return None
        if found is None or (in_frame is not None and found.followed is in_frame.followed):
            return found
        structure.keep(sizes, found)
        if plan is None:
            structure.keep_frame(found, seen.signature, starts, nodes)
        return found

    def inside(self, call: seams.Backward, owners: Owners, n: int) -> tuple[Plan, Sequence[Node]]:
        """The plan of a backward that a node runs by itself, from roots with these owners."""
        nodes = ordered(roots_of(call))
        with self.learning(gathers=False):
            return inside(call.roots, nodes, owners, n, self._setting), nodes

    def forget(self, planned: Planned | None) -> None:
        """A backward has failed: what was learnt in it is not proven, and what was known of its forward may hold no
        longer (a checkpoint was put around a part, say)."""
        if planned is not None and planned.unproven is not None:
            forget_structure(self._model, planned.unproven)
        watch_again(self._model)

    def _gather(self) -> None:
        """Make parameters whole that are spread over processes (FSDP2), until the plan is there. All ranks do so at the
        same time: `on_any_rank` has told them."""
        self._gathered = contextlib.ExitStack()
        self._gathered.enter_context(whole(self._model))

    @contextlib.contextmanager
    def learning(self, *, gathers: bool = True) -> Iterator[None]:
        """Within this, nodes are called by hand, and nothing of the model's is changed. With `gathers`, parameters that
        are spread over processes are whole."""
        self.is_learning = True
        try:
            if gathers and self._gathered is None:
                on_any_rank(self._model, True)
                self._gather()
            with without_functions(), self._saved.once(keep=len(seams.here()) == 1), buffers_aside(self._model):
                yield
        finally:
            self.is_learning = False


def roots_of(call: seams.Backward) -> list[Node]:
    """The nodes from which a backward starts."""
    return [node for node, _ in map(place, call.roots) if node is not None]


def number_of_samples(starts: Mapping[Edge, Layout]) -> int:
    """How many samples there are, by the sizes at the cut."""
    sizes = {layout.n if isinstance(layout, Regular) else int(layout.map.max()) + 1 for layout in starts.values()}
    if len(sizes) > 1:
        raise WrongCount(
            f"one backward crosses forwards with different numbers of samples: {sorted(sizes)}.",
            write=["for x, y in batches: loss_fn(model(x), y).backward()  # a backward for each batch", MARK],
        )
    return sizes.pop()
