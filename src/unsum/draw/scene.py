"""What is in the picture: tensors with their roles, operations, and arrows. From the autograd graph, nothing else."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from unsum.draw.entering import Entrance
from unsum.draw.flowing import FREED, Flowing, Slot, size_of
from unsum.draw.openings import operation_name
from unsum.graph.nodes import Edge, Node, below, is_leaf
from unsum.seams.nodes import number_of, outputs_of
from unsum.seams.tensors import has_late_hooks
from unsum.svg import by

Role = Literal["data", "parameter", "intermediate"]
Gradient = Literal["stored", "thrown-away", "none"]

# These only look at the same numbers in another way; unless something else is to be seen there, they are drawn as part
# of the arrow.
_VIEWS = {
    *("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("ReshapeAliasBackward0", "ViewAsBackward0", "AliasBackward0", "ToCopyBackward0", "CloneBackward0"),
    *("ExpandBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
}
_BY_SHAPE = (
    ". Found by its shape alone, in the one place where it fits: nothing is kept there (any more) that could prove it"
)
_SUMS = ("ExpandBackward0", "ToCopyBackward0")  # these change the norm of what comes back


@dataclass(frozen=True)
class Box:
    """A tensor."""

    key: str
    role: Role
    name: str  # empty for an intermediate one that nobody has named
    shape: tuple[int, ...]
    gradient: Gradient
    why: str  # in words, for the gradient
    norms: tuple[float, ...] = ()  # of the stored gradient; one for each block drawn here
    sites: tuple[tuple[str, str], ...] = ()  # captured or edited, site
    is_cut: bool = False
    is_loss: bool = False
    said: str = ""  # what readers call it, where it has no name
    shown: tuple[int, ...] | None = None  # the shape that readers know, if it is another


@dataclass(frozen=True)
class Operation:
    """A node of the graph, and the tensors that it made."""

    key: str
    name: str
    node: str  # as torch calls it
    number: int  # when it was recorded
    makes: tuple[str, ...]  # boxes
    meets: tuple[str, ...] = ()  # parameters that meet data here
    is_meeting: bool = False
    is_open: bool = False  # takes something that has no edge in the graph: data perhaps, or a number
    said: str = ""  # what readers call it


@dataclass(frozen=True)
class Arrow:
    """A tensor goes into an operation, and perhaps a gradient comes back."""

    source: str  # box
    target: str  # operation
    gradient: Gradient
    why: str
    through: tuple[str, ...] = ()  # views on the way
    norms: tuple[float, ...] = ()  # of what comes back along this arrow
    is_sum: bool = False  # the norm is that of all that comes back to the tensor
    shape: tuple[int, ...] | None = None  # as the layer returns it, if that is not the tensor's own
    slot: int = 0  # which of the operation's arguments it is


@dataclass(frozen=True)
class Scene:
    """Everything that is drawn, before it is folded."""

    boxes: dict[str, Box]
    operations: dict[str, Operation]
    arrows: list[Arrow]
    notes: list[str] = field(default_factory=list)

    def arrows_into(self, keys: Container[str]) -> Iterator[Arrow]:
        """Those whose operation is among these."""
        return (arrow for arrow in self.arrows if arrow.target in keys)


@dataclass(frozen=True)
class Facts:
    """What is known of the graph beside its nodes."""

    loss: Edge
    leaves: Mapping[int, tuple[Role, str]]  # role and name of a leaf, by the id of the tensor
    named: Mapping[Edge, str]  # intermediate tensors that the user has named
    retained: Mapping[Edge, Tensor]  # intermediate tensors that keep their gradient
    entries: Sequence[Entrance]  # tensors without a gradient, and where they enter
    flowing: Flowing
    custom: Container[int]  # leaves that only custom functions use, by the id of the tensor
    sites: Mapping[Edge, Sequence[tuple[str, str]]]
    leaf_sites: Mapping[int, Sequence[tuple[str, str]]]  # by the id of the tensor
    cut: Iterable[Edge]
    meetings: Mapping[Node, Sequence[str]]
    show_views: bool


def build(nodes: Sequence[Node], facts: Facts) -> Scene:
    """The scene of a graph whose nodes are in order."""
    used: dict[Edge, int] = {facts.loss: 0}
    for node in nodes:
        for _, child, output in below(node):
            used[child, output] = used.get((child, output), 0) + 1
    number = {node: k for k, node in enumerate(nodes)}
    cut = set(facts.cut)
    passed = set() if facts.show_views else {n for n in nodes if _is_passed(n, facts, cut)}
    boxes: dict[str, Box] = {}
    operations: dict[str, Operation] = {}
    for node in reversed(nodes):  # in the order of the forward
        if node in passed:
            continue
        k = number[node]
        if is_leaf(node):
            boxes[f"t{k}.0"] = _leaf(f"t{k}.0", node.variable, facts)
            continue
        made = [output for output in range(len(outputs_of(node))) if (node, output) in used]
        for output in made:
            boxes[f"t{k}.{output}"] = _made(f"t{k}.{output}", node, output, facts, cut)
        operations[f"o{k}"] = Operation(
            f"o{k}", operation_name(node), node.name(), number_of(node), tuple(f"t{k}.{o}" for o in made),
            tuple(facts.meetings.get(node, ())), node in facts.meetings,
            any(child is None for child, _ in node.next_functions),
        )  # fmt: skip
    arrows = [arrow for node in reversed(nodes) for arrow in _arrows(node, number, passed, used, boxes, facts)]
    arrows += _entering(number, passed, boxes, nodes, facts)
    return Scene(boxes, operations, _with_sums(arrows, boxes))


def _is_passed(node: Node, facts: Facts, cut: set[Edge]) -> bool:
    """Whether a node is drawn as part of an arrow."""
    edge = (node, 0)
    if is_leaf(node) or node.name() not in _VIEWS or len(below(node)) != 1:
        return False
    seen = edge in cut or edge in facts.sites or edge in facts.named or edge in facts.retained
    return not (seen or edge == facts.loss or node in facts.meetings)


def _leaf(key: str, tensor: Tensor, facts: Facts) -> Box:
    role, name = facts.leaves[id(tensor)]
    norms = () if tensor.grad is None else (size_of(tensor.grad),)
    return Box(
        key, role, name, tuple(tensor.shape), "stored", _stored(tensor, norms, facts), norms,
        tuple(facts.leaf_sites.get(id(tensor), ())),
    )  # fmt: skip


def _stored(leaf: Tensor, norms: tuple[float, ...], facts: Facts) -> str:
    """Where the gradient of a leaf goes, in words."""
    if norms:
        return f"its gradient is stored: .grad holds it, norm {norms[0]:.4g}"
    if facts.flowing.silence == FREED:
        return "its gradient goes to .grad, which is empty: it was cleared, or none was given"
    doubts = ["unless the custom function that uses it gives none"] if id(leaf) in facts.custom else []
    if has_late_hooks(leaf):
        doubts.append("unless a hook that runs right after clears it")
    return ", ".join(["its gradient is stored: .grad will hold it after backward", *doubts])


def _made(key: str, node: Node, output: int, facts: Facts, cut: set[Edge]) -> Box:
    edge = (node, output)
    kept = facts.retained.get(edge)
    gradient: Gradient = "thrown-away" if kept is None else "stored"
    why = "its gradient is computed and thrown away: retain_grad() would keep it"
    norms: tuple[float, ...] = ()
    if kept is not None:
        norms = () if kept.grad is None else (size_of(kept.grad),)
        why = "its gradient is stored: retain_grad() was called"
    is_loss = edge == facts.loss
    name = facts.named.get(edge, "loss" if is_loss else "")
    shape = tuple(outputs_of(node)[output].shape)
    return Box(
        key, "intermediate", name, shape, gradient, why, norms, tuple(facts.sites.get(edge, ())),
        edge in cut, is_loss,
    )  # fmt: skip


def _arrows(
    node: Node,
    number: Mapping[Node, int],
    passed: set[Node],
    used: Mapping[Edge, int],
    boxes: Mapping[str, Box],
    facts: Facts,
) -> list[Arrow]:
    if node in passed or is_leaf(node):
        return []
    found = []
    for slot, child, output in below(node):
        way = []
        while child in passed:
            ((deeper, inner, output),) = below(child)
            way.append((child, deeper))
            child = inner
        box = boxes[f"t{number[child]}.{output}"]
        size, quiet = _sent((node, slot), way, used, facts.flowing)
        why = box.why if size is not None or box.norms or not quiet else f"{box.why}. {quiet}"
        through = tuple(_through(view) for view, _ in way)
        norms = () if size is None else (size,)
        returned = _returned(child, way)
        found.append(Arrow(box.key, f"o{number[node]}", box.gradient, why, through, norms, False, returned, slot))
    return found


def _sent(first: Slot, way: Sequence[Slot], used: Mapping[Edge, int], flowing: Flowing) -> tuple[float | None, str]:
    """The norm of what comes back along an arrow, or why it is not known. A view on the way that others use too hands
    on the sum of all: then what was given to it tells, if it only puts the same numbers in other places."""
    at = first
    for k, (view, slot) in enumerate(way):
        if used[view, 0] > 1:
            if any(later.name() in _SUMS for later, _ in way[k:]):
                return None, "Its size is not known: it is added to others in a view that is not drawn"
            break
        at = (view, slot)
    return flowing.sizes.get(at), flowing.quiet.get(at, flowing.silence)


def _returned(maker: Node, way: Sequence[Slot]) -> tuple[int, ...] | None:
    """A linear layer makes rows of its input, and a view puts its result back into shape; so does a transpose after it
    where time comes before the batch."""
    if not way or is_leaf(maker) or maker.name() not in ("MmBackward0", "AddmmBackward0"):
        return None
    rows = tuple(outputs_of(maker)[0].shape)
    shapes = [(node.name(), tuple(outputs_of(node)[0].shape)) for node, _ in reversed(way)]
    first, shape = shapes[0]
    if first not in ("ViewBackward0", "UnsafeViewBackward0") or len(shape) < 3 or shape[-1] != rows[-1]:
        return None
    for name, after in shapes[1:]:
        if name != "TransposeBackward0" or after[-1] != rows[-1]:
            break
        shape = after
    return shape


def _through(node: Node) -> str:
    return f"{operation_name(node)} ({by(tuple(outputs_of(node)[0].shape))})"


def _entering(
    number: Mapping[Node, int], passed: set[Node], boxes: dict[str, Box], nodes: Sequence[Node], facts: Facts
) -> list[Arrow]:
    """Boxes and arrows of what has no edge in the graph because it needs no gradient."""
    above: dict[Node, Node] = {child: node for node in nodes for _, child, _ in below(node)}
    arrows: dict[tuple[str, str], Arrow] = {}
    for entry in facts.entries:
        node = entry.node
        while node in passed:
            node = above[node]
        key = f"e{entry.role}.{entry.name}"  # data may be called as a parameter is
        what = "a frozen parameter" if entry.role == "parameter" else "data"
        why = f"{what} (requires_grad=False): autograd computes no gradient for it"
        boxes.setdefault(key, Box(key, entry.role, entry.name, tuple(entry.tensor.shape), "none", why))
        seen = "" if entry.how == "saved" else _BY_SHAPE
        arrows.setdefault((key, f"o{number[node]}"), Arrow(key, f"o{number[node]}", "none", why + seen))
        sites = tuple(facts.leaf_sites.get(id(entry.tensor), ()))
        boxes[key] = replace(boxes[key], sites=sites)
    return list(arrows.values())


def _with_sums(arrows: list[Arrow], boxes: Mapping[str, Box]) -> list[Arrow]:
    """Where a gradient is stored, its norm is known even if what came along each arrow is not."""
    several: dict[str, int] = {}
    for arrow in arrows:
        several[arrow.source] = several.get(arrow.source, 0) + 1
    done, told = [], set()
    for arrow in arrows:
        box = boxes[arrow.source]
        if box.norms and several[arrow.source] == 1:
            arrow = replace(arrow, norms=box.norms)
        elif box.norms and not arrow.norms and arrow.source not in told:
            arrow = replace(arrow, norms=box.norms, is_sum=True, why=f"{arrow.why} (the sum over all uses)")
            told.add(arrow.source)
        done.append(arrow)
    return done
