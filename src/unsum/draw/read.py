"""Reading a graph: everything that is known of it, and the scene that follows."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from unsum.draw.acts import acted_by, cut_of, sites_of
from unsum.draw.entering import FROZEN, Named, find
from unsum.draw.flowing import differs, flows_of, size_of
from unsum.draw.names import called
from unsum.draw.scene import Facts, Role, Scene, build
from unsum.graph.nodes import Edge, Node, below, is_leaf, ordered, place
from unsum.seams.tensors import hooks_on
from unsum.sites import Names

_DIFFERS = (
    "What is stored is not what flows here: .grad holds the sum of several backwards, or hooks have changed it. Sizes "
    "at stored gradients are those of .grad, the others those of one backward without hooks"
)


@dataclass(frozen=True)
class _Leaves:
    """The parameters of the model, each under all its names."""

    names: dict[int, list[str]]
    owners: dict[str, str]
    tensors: dict[int, nn.Parameter]


def _leaves(names: Names | None) -> _Leaves:
    found = _Leaves({}, {} if names is None else names.owners, {})
    for name, parameter in ({} if names is None else names.parameters).items():
        found.names.setdefault(id(parameter), []).append(name)
        found.tensors[id(parameter)] = parameter
    return found


def read(
    loss: Tensor,
    names: Names | None,
    data: Mapping[str, Tensor],
    *,
    views: bool,
    flow: bool | None,
    show: Iterable[Any],
) -> tuple[Scene, dict[str, list[str]]]:
    """The scene of a loss, and for each parameter's box the modules that hold it."""
    nodes = ordered([loss.grad_fn])
    known = _leaves(names)
    reached = {id(node.variable): node.variable for node in nodes if is_leaf(node)}
    roles = _roles(reached, known, data)
    retained = _retained(nodes)
    is_after = any(leaf.grad is not None for leaf in (*reached.values(), *retained.values()))
    named = [Named(name, t, "data") for name, t in data.items() if not t.requires_grad and id(t) not in known.tensors]
    entries, notes = find(nodes, [*named, *_frozen(known)])
    acted = acted_by(show)
    sites, leaf_sites = sites_of(acted, nodes, [*reached.values(), *data.values()], known.names)
    cut, meetings = cut_of(acted, nodes, known.names)
    flowing = flows_of(loss, nodes, _changed(nodes, sites), asked=flow, is_after=is_after)
    facts = Facts(
        loss=place(loss), leaves=roles, named=_named(data), retained=retained, entries=entries, flowing=flowing,
        custom=_custom(nodes), sites=sites, leaf_sites=leaf_sites, cut=cut, meetings=meetings, show_views=views,
    )  # fmt: skip
    scene = called(build(nodes, facts))
    by_name = {all_names[0]: all_names for all_names in known.names.values()}
    owners = {
        key: [known.owners[name] for name in by_name[box.name]]
        for key, box in scene.boxes.items()
        if box.role == "parameter" and box.name in by_name
    }
    largest = max(map(size_of, flowing.arrived.values()), default=0.0)
    if any(differs(reached[key], value, largest) for key, value in flowing.arrived.items()):
        notes.append(_DIFFERS)
    return replace(scene, notes=[*_notes(reached, known, data, nodes, names), *_short(notes)]), owners


def _roles(reached: Mapping[int, Tensor], known: _Leaves, data: Mapping[str, Tensor]) -> dict[int, tuple[Role, str]]:
    by_id = {id(tensor): name for name, tensor in data.items()}
    roles: dict[int, tuple[Role, str]] = {}
    for key, tensor in reached.items():
        if key in known.names:
            roles[key] = ("parameter", known.names[key][0])
        elif key in by_id:
            roles[key] = ("parameter" if isinstance(tensor, nn.Parameter) else "data", by_id[key])
        else:
            roles[key] = ("parameter", f"leaf {sum(1 for r in roles if r not in by_id and r not in known.names)}")
    return roles


def _named(data: Mapping[str, Tensor]) -> dict[Edge, str]:
    return {place(tensor): name for name, tensor in data.items() if tensor.grad_fn is not None}


def _retained(nodes: Sequence[Node]) -> dict[Edge, Tensor]:
    """The intermediate tensors that keep their gradient. Nodes do not say it; the tensors do, as long as somebody can
    read them."""
    inside = set(nodes)
    found: dict[Edge, Tensor] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _retains(thing) and thing.grad_fn in inside:
            found[place(thing)] = thing
    return found


def _hooked(nodes: Sequence[Node]) -> set[Edge]:
    """The intermediate tensors whose gradient a hook of the user's may replace, of those that somebody can read."""
    inside = set(nodes)
    found: set[Edge] = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _has_hooks(thing) and thing.grad_fn in inside:
            found.add(place(thing))
    return found


def _has_hooks(tensor: Tensor) -> bool:
    try:
        hooks = hooks_on(tensor)
    except (RuntimeError, ReferenceError, NotImplementedError):
        return False
    return any(not type(hook).__module__.startswith("unsum.") for hook in hooks)


def _changed(nodes: Sequence[Node], sites: Mapping[Edge, Sequence[tuple[str, str]]]) -> set[Edge]:
    """The intermediate tensors whose gradient an edit or a hook may replace."""
    edited = {e for e, marks in sites.items() if any(h == "edited" and ":grad" in site for h, site in marks)}
    return edited | _hooked(nodes)


def _custom(nodes: Sequence[Node]) -> set[int]:
    """The leaves that only custom functions use."""
    users: dict[int, list[bool]] = {}
    for node in nodes:
        for _, child, _ in below(node):
            if is_leaf(child):
                users.setdefault(id(child.variable), []).append(isinstance(node, BackwardCFunction))
    return {key for key, kinds in users.items() if all(kinds)}


def _retains(tensor: Tensor) -> bool:
    try:
        return bool(tensor.retains_grad)
    except (RuntimeError, ReferenceError, NotImplementedError):  # a subclass that is no longer whole
        return False


def _frozen(known: _Leaves) -> list[Named]:
    siblings: dict[str, set[int]] = {}
    for key, all_names in known.names.items():
        for name in all_names:
            siblings.setdefault(known.owners[name], set()).add(key)
    return [
        Named(known.names[key][0], p, "parameter", frozenset(siblings[known.owners[known.names[key][0]]] - {key}))
        for key, p in known.tensors.items()
        if not p.requires_grad
    ]


def _notes(
    reached: Mapping[int, Tensor],
    known: _Leaves,
    data: Mapping[str, Tensor],
    nodes: Sequence[Node],
    names: Names | None,
) -> list[str]:
    notes = []
    if any("CompiledFunction" in node.name() for node in nodes):
        notes.append("A compiled model is one opaque operation: what happens in it is not in the graph")
    inner = any("CheckpointFunction" in node.name() for node in nodes)
    if inner:
        notes.append("A reentrant checkpoint is one opaque operation: what happens in it is not in the graph")
    missed = [known.names[key][0] for key, p in known.tensors.items() if p.requires_grad and key not in reached]
    if missed and not any("CompiledFunction" in node.name() for node in nodes):
        hides = "not in the graph; the checkpoint may use them" if inner else "not reached from the loss"
        notes.append(f"Trainable, but {hides}: {_listed(missed)}")
    inside = set(nodes)
    for name, tensor in data.items():
        if tensor.requires_grad and place(tensor)[0] not in inside:
            notes.append(f"{name} requires a gradient, but the loss does not depend on it")
    if names is None and any(id(leaf) not in {id(t) for t in data.values()} for leaf in reached.values()):
        notes.append("model= would give the parameters their names")
    return notes


def _short(notes: list[str]) -> list[str]:
    frozen = [note.partition(":")[0] for note in notes if note.endswith(FROZEN)]
    if len(frozen) < 2:
        return notes
    return [note for note in notes if not note.endswith(FROZEN)] + [
        f"{FROZEN[0].upper()}{FROZEN[1:]}: {_listed(frozen)}"
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
