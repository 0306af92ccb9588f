"""Where blocks of `capture`, `edit` and `gradients` acted in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unsum import seams
from unsum.acted import Acted
from unsum.errors import OptionError
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered
from unsum.seams.nodes import number_of, outputs_of


def acted_by(blocks: Iterable[Any]) -> list[Acted]:
    """The records of the blocks given, and of those that are open."""
    given = list(blocks) if isinstance(blocks, list | tuple | set | frozenset) else [blocks]
    found = [block.acted for block in seams.here() if hasattr(block, "acted")]
    for block in given:
        acted = getattr(block, "acted", None)
        if not isinstance(acted, Acted):
            raise OptionError(
                f"draw(show=): expected what a block gives, as `got` in `with unsum.capture(...) as got`; got a "
                f"{type(block).__name__}"
            )
        found.append(acted)
    return list(dict.fromkeys(found))


_Sites = dict[Edge, list[tuple[str, str]]]


def sites_of(
    acted: Sequence[Acted], nodes: Sequence[Node], leaves: Sequence[Tensor], names: Mapping[int, Sequence[str]]
) -> tuple[_Sites, dict[int, list[tuple[str, str]]]]:
    """The sites that were captured or edited: on what nodes have made, and on leaves (by the tensor's id)."""
    found: _Sites = {}
    at_leaves: dict[int, list[tuple[str, str]]] = {}
    by_name = {name: key for key, all_names in names.items() for name in all_names}
    numbered: dict[tuple[int, type], list[Node]] = {}
    for node in nodes:
        numbered.setdefault((number_of(node), type(node)), []).append(node)
    for block in acted:
        for site, keys in block.sites.items():
            for number, kind, output, shape in dict.fromkeys(keys):
                for node in numbered.get((number, kind), ()):
                    if output < len(outputs_of(node)) and tuple(outputs_of(node)[output].shape) == shape:
                        found.setdefault((node, output), []).append((block.how, site))
        for site, refs in block.loose.items():
            for tensor in [tensor for ref in refs if (tensor := ref()) is not None]:
                for leaf in leaves:
                    if tensor is leaf or _is_alike(tensor, leaf):
                        _add(at_leaves, id(leaf), (block.how, site))
        for name, site in block.leaves.items():
            if name in by_name:
                _add(at_leaves, by_name[name], (block.how, site))
    return found, at_leaves


def _add(found: dict[int, list[tuple[str, str]]], key: int, mark: tuple[str, str]) -> None:
    if mark not in found.setdefault(key, []):
        found[key].append(mark)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    try:
        return one.data_ptr() == other.data_ptr() != 0 and one.shape == other.shape
    except (RuntimeError, NotImplementedError):
        return False


def cut_of(
    acted: Sequence[Acted], nodes: Sequence[Node], names: Mapping[int, Sequence[str]]
) -> tuple[list[Edge], dict[Node, list[str]]]:
    """Where blocks of `gradients` have cut this graph, and where parameters met data."""
    cut: list[Edge] = []
    meetings: dict[Node, list[str]] = {}
    for block in acted:
        plan = block.plan_of(nodes[0], len(nodes))
        if plan is None:
            continue
        cut += [(nodes[place_], output) for place_, output in plan.cut]
        mixed = {nodes[k] for k in plan.mixed}
        for k in plan.owned:
            node = nodes[k]
            ways = [child for _, child, _ in below(node) if is_leaf(child) or child in mixed]
            leaves = [leaf for leaf in ordered(ways, stop=_outside(mixed)) if is_leaf(leaf)]
            meetings[node] = [names.get(id(leaf.variable), ["a leaf"])[0] for leaf in leaves]
    return cut, meetings


def _outside(mixed: set[Node]) -> Callable[[Node], bool]:
    return lambda node: node not in mixed
